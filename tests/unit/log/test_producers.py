"""G8: what a partition remembers of its producers."""

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


def test_the_producer_that_was_silent_longest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(p, "PRODUCERS_MAX", 2)
    known = Producers()
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


def test_a_producer_id_with_slashes_survives_the_log() -> None:
    request = Request("host/42/a", 9)
    assert Request.decode(request.encode()) == request
