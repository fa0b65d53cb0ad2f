"""G8: what a partition remembers of its producers."""

from time import process_time

import pytest

from tidewater_core.errors import Conflict, Invalid
from tidewater_worker.log import producers as p
from tidewater_worker.log.producers import Producers, Request, Stored


def test_a_new_request_is_unknown_and_a_stored_one_is_found() -> None:
    known = Producers()
    request = Request("p", 7)
    assert known.find(request, 3) is None
    known.store(request, Stored(40, 3))
    assert known.find(request, 3) == Stored(40, 3)


def test_the_same_sequence_for_other_messages_is_refused() -> None:
    known = Producers()
    known.store(Request("p", 7), Stored(40, 3))
    with pytest.raises(Conflict, match="SequenceReused"):
        known.find(Request("p", 7), 4)


def test_out_of_order_within_the_window_is_new_and_below_it_is_refused() -> None:
    known = Producers()
    for sequence in range(10, 10 + 2 * p.WINDOW, 2):
        known.store(Request("p", sequence), Stored(sequence, 1))
    assert known.find(Request("p", 11), 1) is None
    with pytest.raises(Conflict, match="SequenceTooOld"):
        known.find(Request("p", 9), 1)


def test_the_producer_that_was_silent_longest_is_forgotten() -> None:
    known = Producers(producers_max=2)
    known.store(Request("a", 1), Stored(0, 1))
    known.store(Request("b", 1), Stored(1, 1))
    known.store(Request("a", 2), Stored(2, 1))
    known.store(Request("c", 1), Stored(3, 1))
    assert len(known) == 2
    assert known.find(Request("b", 1), 1) is None
    assert known.find(Request("a", 1), 1) == Stored(0, 1)


def test_saving_and_loading_keeps_everything() -> None:
    known = Producers()
    for sequence in range(5):
        known.store(Request("ü/x", sequence), Stored(sequence * 10, 10))
    again = Producers.from_bytes(known.to_bytes())
    assert again.find(Request("ü/x", 3), 10) == Stored(30, 10)


@pytest.mark.parametrize(
    ("producer", "sequence"), [("", 1), ("x" * 129, 1), ("p", -1), ("p", 2**63)]
)
def test_what_could_not_be_found_again_is_refused(producer: str, sequence: int) -> None:
    with pytest.raises(Invalid):
        Request(producer, sequence)


@pytest.mark.parametrize(
    "producer", ["a\r\nb", "a\0", "a\tb", "a\x7f", "a\x85", "\ud800", " a", "a "]
)
def test_an_id_that_no_header_can_carry_is_refused(producer: str) -> None:
    with pytest.raises(Invalid, match="InvalidProducer"):
        Request(producer, 1)


def test_a_log_from_before_that_rule_is_read() -> None:
    known = Producers()
    known.store(Request.decode("a\r\nb/4"), Stored(2, 1))
    assert len(Producers.from_bytes(known.to_bytes())) == 1
    assert {Request.decode("a b/€/4"), Request("a b/€", 4)} == {Request("a b/€", 4)}


def test_a_producer_id_with_slashes_survives_the_log() -> None:
    request = Request("host/42/a", 9)
    assert Request.decode(request.encode()) == request


def test_what_was_saved_is_the_state_also_after_the_window_moved_on() -> None:
    """The bytes that are kept are the state: the oldest leave, their places are used again."""
    known = Producers()
    for sequence in (*range(0, 4 * p.WINDOW, 3), *range(1, 4 * p.WINDOW, 3), 7, 7):
        known.store(Request("p", sequence), Stored(sequence * 10, sequence + 1))
    data = known.to_bytes()
    assert len(data) < 100 + 24 * p.WINDOW
    again = Producers.from_bytes(data)
    assert again.to_bytes() == data
    for sequence in range(4 * p.WINDOW):
        found = []
        for each in (known, again):
            try:
                found.append(each.find(Request("p", sequence), sequence + 1))
            except Conflict as error:
                found.append(error.reason)  # type: ignore[arg-type]
        assert found[0] == found[1]
    last = 4 * p.WINDOW - 3
    assert again.find(Request("p", last), last + 1) == Stored(last * 10, last + 1)


def test_a_limit_that_was_lowered_counts_at_once_and_recency_is_kept() -> None:
    known = Producers()
    for name in "abcab":
        known.store(Request(name, 1), Stored(0, 1))
    again = Producers.from_bytes(known.to_bytes())
    assert len(again) == 3
    again.keep(2)
    assert [again.find(Request(name, 1), 1) for name in "abc"] == [Stored(0, 1)] * 2 + [None]


@pytest.mark.parametrize("cut", [0, 7, 8, 9, 11, 20, -1])
def test_what_is_no_list_of_producers_is_refused(cut: int) -> None:
    known = Producers()
    known.store(Request("producer", 1), Stored(0, 1))
    data = known.to_bytes()[:cut]
    if cut == 8:
        assert len(Producers.from_bytes(data)) == 0
        return
    with pytest.raises(ValueError, match="list of producers"):
        Producers.from_bytes(data)


def test_saving_costs_a_copy() -> None:
    """A partition takes no message meanwhile: 500 full producers took 50 ms."""
    known = Producers()
    for number in range(500):
        for sequence in range(p.WINDOW):
            known.store(Request(f"producer-{number}", sequence), Stored(sequence, 1))
    took: list[float] = []
    for _ in range(3):
        began = process_time()
        known.to_bytes()
        took.append(process_time() - began)
    assert min(took) < 0.02
