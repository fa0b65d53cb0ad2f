"""Joint commits: what becomes of each owner's part, and how files travel."""

import pytest

from table_bench import Bench
from table_fakes import CountingIds, message_batch
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid, Overloaded, Retryable
from tidewater_worker.log.reader import LogReader
from tidewater_worker.ports import Haste, Offer, OfferAnswer, Offered
from tidewater_worker.table import offers as offers_module
from tidewater_worker.table.cut import Source, cut_batch
from tidewater_worker.table.descriptors import pack_files, unpack_files
from tidewater_worker.table.files import plan_files
from tidewater_worker.table.frontier import (
    Claim,
    Fenced,
    Frontier,
    Landed,
    MovedBack,
    Recut,
    Span,
)
from tidewater_worker.table.joint import Member, Superseded, plan_joint
from tidewater_worker.table.offers import ASKED_AGAIN, OfferBox, waiting_of
from tidewater_worker.table.pace import aligned_due

FOUND = {0: Frontier(10, 3), 1: Frontier(20, 5), 2: Frontier(0, 0)}


def member(
    key: str, partition: int, epoch: int, first: int, end: int, committed: int | None = None
) -> Member:
    known = first if committed is None else committed
    spans = {partition: Span(first, end)} if end > first else {}
    return Member(key, int(key[1:]), {partition: Claim(epoch, known)}, spans)


@pytest.mark.parametrize(
    ("one", "settled"),
    [
        (member("m1", 0, 3, 10, 12), None),
        (member("m1", 0, 3, 5, 10), Landed()),
        (member("m1", 0, 3, 5, 12), Recut({0: 10})),
        (member("m1", 0, 2, 10, 12), Fenced({0: 3})),
        (member("m1", 0, 3, 15, 17), MovedBack({0: (15, 10)})),
        (member("m1", 0, 3, 10, 10), Landed()),
    ],
)
def test_one_member_is_judged_as_ever_and_spoils_nothing(one: Member, settled: object) -> None:
    other = member("m2", 1, 5, 20, 25)
    plan = plan_joint(FOUND, [one, other])
    assert plan.settled.get("m1") == settled
    assert other in plan.going
    assert (one in plan.going) == (settled is None)


def test_epochs_go_first_and_only_those_that_are_low() -> None:
    low, fine = member("m1", 2, 4, 0, 5), member("m2", 0, 3, 10, 11)
    plan = plan_joint(FOUND, [low, fine])
    assert dict(plan.raising) == {2: low.claims[2]}
    assert plan.going == (fine,)
    after = {**FOUND, 2: Frontier(0, 4)}
    assert plan_joint(after, [low, fine]).going == (low, fine)


def test_of_two_that_speak_of_one_partition_one_counts() -> None:
    early, late = member("m1", 0, 3, 10, 12), member("m2", 0, 3, 10, 14)
    plan = plan_joint(FOUND, [early, late])
    assert plan.going == (late,), "the same owner has cut again since"
    assert plan.settled == {"m1": Superseded((0,))}
    owner, zombie = member("m1", 0, 4, 10, 12), member("m2", 0, 3, 10, 14)
    plan = plan_joint(FOUND, [owner, zombie])
    assert dict(plan.raising) == {0: owner.claims[0]}
    assert plan.settled == {"m2": Superseded((0,))}, "G5 One owner: the higher epoch counts"


def offer(key: str = "m1", **more: object) -> Offer:
    made = {"id": key, "topic": "shop/orders", "topic_uuid": "u", "table_uuid": "t"}
    return Offer(**{**made, "partitions": {0: Offered(1, 0)}, **more})  # type: ignore[arg-type]


def test_a_second_copy_takes_over_the_answer_and_the_haste() -> None:
    box, told = OfferBox(), list[tuple[str, OfferAnswer]]()
    box.add(waiting_of(offer(), lambda answer: told.append(("first", answer))))
    assert box.due(100.0, 99.5, 1.0) == 100.5
    hurried = offer(haste=Haste.NOW)
    box.add(waiting_of(hurried, lambda answer: told.append(("second", answer))))
    assert [(who, answer.reason) for who, answer in told] == [("first", ASKED_AGAIN)]
    assert box.due(100.0, 99.5, 1.0) == 100.0
    (taken,) = box.take()
    assert box.due(100.0, 99.5, 1.0) is None
    # A copy that comes while the commit is under way gets its answer.
    box.add(waiting_of(offer(), lambda answer: told.append(("third", answer))))
    answer = box.settled(taken.member.key)
    assert answer is not None
    answer(OfferAnswer(landed=True))
    assert [who for who, _ in told] == ["first", "second", "third"]
    assert box.settled(taken.member.key) is None


def test_the_box_is_bounded_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_module, "OFFERS_MAX", 1)
    box, told = OfferBox(), list[OfferAnswer]()
    box.add(waiting_of(offer(), told.append))
    with pytest.raises(Overloaded):
        box.add(waiting_of(offer("m2"), told.append))
    box.refuse("NotCommitter", "gone", close=True)
    assert [(answer.landed, answer.reason) for answer in told] == [(False, "NotCommitter")]
    with pytest.raises(Retryable, match="NotCommitter"):
        box.add(waiting_of(offer("m2"), told.append))


@pytest.mark.parametrize(
    ("since", "tick_at", "lead", "expected"),
    [
        (100.0, 100.8, 0.1, 100.7),
        (100.0, 90.8, 0.1, 100.7),
        (100.75, 100.8, 0.1, 101.7),
        (100.0, 101.0, 0.0, 101.0),
        (100.0, float("-inf"), 0.0, 101.0),
    ],
)
def test_batches_are_cut_just_before_the_commit(
    since: float, tick_at: float, lead: float, expected: float
) -> None:
    due = aligned_due(since, 1.0, tick_at, lead)
    assert due == pytest.approx(expected)
    assert since < due <= since + 1.0


def test_descriptors_travel_whole(bench: Bench) -> None:
    spec = TopicSpec.model_validate(
        {
            "schema": {
                "fields": [
                    {"name": "name", "type": "string"},
                    {"name": "day", "type": "date"},
                    {"name": "amount", "type": "decimal(10,2)"},
                ]
            },
            "table": {"partitionBy": ["hour(tw_time)", "name", "day", "bucket(4, amount)"]},
        }
    )
    log = bench.log()
    rows: list[bytes | dict[str, object]] = [
        {"name": "a" * i or None, "day": None, "amount": None} for i in range(4)
    ]
    log.append(message_batch(spec, rows))
    bench.topic(spec, log)
    plan = plan_files(bench.table())
    cut = cut_batch(
        plan,
        [Source(0, LogReader(log.directory), 0, 4)],
        CountingIds(9),
        bytes_max=1 << 20,
        memory_bytes_max=1 << 26,
    )
    files = list(cut.prepared.files)
    assert len(files) == 4
    data = pack_files(files, plan.spec, plan.schema)
    back = unpack_files(data, plan.spec.spec_id, {0: Span(0, 4)})
    for before, after in zip(files, back, strict=True):
        assert after.spec_id == before.spec_id
        for name in ("file_path", "file_format", "record_count", "file_size_in_bytes",
                     "lower_bounds", "upper_bounds", "null_value_counts", "split_offsets",
                     "sort_order_id", "column_sizes", "value_counts"):  # fmt: skip
            assert getattr(after, name) == getattr(before, name), name
        assert list(after.partition._data) == list(before.partition._data)
    with pytest.raises(Invalid, match="OfferOdd"):
        unpack_files(data, plan.spec.spec_id, {0: Span(0, 5)})
    with pytest.raises(Invalid, match="OfferUnreadable"):
        unpack_files(b"Obj\x01 nonsense", 0, {0: Span(0, 4)})
