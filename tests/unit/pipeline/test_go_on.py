"""An import or replay that goes on, whatever topic, retention and other runs have done since."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors import AnalysisException

from tidewater_core.errors import Corrupt, Invalid, NotFound, Retryable
from tidewater_core.names import TopicName
from tidewater_pipeline.deliver import (
    HELD_BYTES_MAX,
    REQUEST_BYTES_MAX,
    TASKS_AT_ONCE,
    Batch,
    Sent,
    Target,
    producer_id,
    route,
)
from tidewater_pipeline.jobs import ingest, replay
from tidewater_pipeline.jobs.replay import ReplayOptions, begin_replay, chosen_rows, go_on
from tidewater_pipeline.records import Record
from tidewater_pipeline.report import Outcome
from tidewater_pipeline.session import TopicTable, _named
from tidewater_pipeline.state import Size
from tidewater_worker.log.producers import Producers, Request, Stored
from tidewater_worker.topic import partition_of

TARGET = Target("http://x", "a/b", 1000, "import-1", partitions=3)
LAKE = ingest.ImportOptions(source="lake", batch_rows=1000)
OPTIONS = ReplayOptions(to=TopicName("a", "b"), url="http://x")


class Topic:
    """What a topic's partitions have stored, as its worker decides it."""

    def __init__(self) -> None:
        self.logs: dict[int, list[bytes]] = {}
        self.producers: dict[int, Producers] = {}

    def send(self, target: Target, batches: Iterable[Batch]) -> None:
        for batch in batches:
            request = Request(producer_id(target.run_id, batch.stream), batch.sequence)
            for partition, messages in batch.parts():
                log = self.logs.setdefault(partition, [])
                known = self.producers.setdefault(partition, Producers())
                if known.find(request, len(messages)) is None:
                    known.store(request, Stored(len(log), len(messages)))
                    log += messages

    def stored(self) -> list[bytes]:
        return [message for log in self.logs.values() for message in log]


def rows(files: int, each: int, keyed: bool) -> list[dict[str, Any]]:
    return [
        {"stream": f"f{f}", "k": b"%d" % n if keyed else None, "v": b"%d/%d" % (f, n)}
        for f in range(files)
        for n in range(each)
    ]


@pytest.mark.parametrize("keyed", [False, True])
def test_an_import_goes_on_after_the_topic_has_grown(keyed: bool) -> None:
    """Of 10,000 rows 14,320 were stored: a worker chose by the partitions that there were."""
    source = rows(1000, 10, keyed)
    pinned = ingest.plan_through(None, LAKE, 3).to_json()
    topic = Topic()
    topic.send(TARGET, ingest.batches(source[:9000], TARGET))
    known = ingest.plan_through(pinned, LAKE, 6)
    target = replace(TARGET, partitions=known.partitions)
    topic.send(target, ingest.batches(source, target))
    assert len(topic.stored()) == len(set(topic.stored())) == 10_000


def test_messages_go_where_a_worker_would_send_them() -> None:
    to = route(TARGET, "f1")
    producer = producer_id(TARGET.run_id, "f1").encode()
    assert [to(None), to(b"k"), to(b"")] == [partition_of(k, 3) for k in (producer, b"k", b"")]
    batch = Batch("f1", 0, (b"a", b"b", b"c"), (2, 0, 2))
    assert batch.parts() == [(0, [b"b"]), (2, [b"a", b"c"])]


def replayed(offset: int, key: bytes | None = None) -> dict[str, Any]:
    return {
        "tw_partition": 0,
        "tw_offset": offset,
        "tw_key": key,
        "tw_headers": None,
        "v": b"x" * 10_000,
    }


def test_a_replay_goes_on_after_either_topic_has_grown() -> None:
    """Where both had as many partitions the first time, and have not any more; and by keys."""
    source = [replayed(n, b"%d" % n) for n in range(2000)]
    for counts in ((3, 3), (2, 3)):
        new = begin_replay(OPTIONS, "a/c", counts, {}, {0: 2000})
        topic = Topic()
        cut = replay.batches(source, TARGET, "a/c", new.keeps_partition)
        topic.send(TARGET, islice(cut, 3))
        grown = begin_replay(OPTIONS, "a/c", (6, 7), {}, {0: 2000, 5: 10})
        known = go_on(new.to_json(), grown, {})
        assert known == new
        target = replace(TARGET, partitions=known.partitions)
        topic.send(target, replay.batches(source, target, "a/c", known.keeps_partition))
        assert len(topic.stored()) == len(set(topic.stored())) == 2000


def test_a_replay_whose_source_is_gone_is_refused() -> None:
    """Retention took offsets 0 to 299: 300 to 399 counted as sent, as the first request had 400."""
    new = begin_replay(OPTIONS, "a/c", (1, 1), {0: 100, 1: 7}, {0: 2000, 1: 7})
    assert new.ranges == {0: (100, 2000)}, "nothing is left of partition 1"
    stored = new.to_json()
    assert go_on(stored, new, {0: 100, 1: 90}) == new
    with pytest.raises(Invalid, match=r"SourceGone.*partition 0 begins at 300"):
        go_on(stored, new, {0: 300})
    later = begin_replay(replace(OPTIONS, begin=500), "a/c", (1, 1), {0: 100}, {0: 2000})
    assert go_on(later.to_json(), later, {0: 300}) == later, "what is gone was not asked for"
    done = replace(new, done=True)
    assert go_on(done.to_json(), new, {0: 300}).done, "nothing is missing"


def test_an_id_is_one_replay() -> None:
    new = begin_replay(OPTIONS, "a/c", (1, 1), {}, {0: 10})
    grown = begin_replay(OPTIONS, "a/c", (1, 1), {}, {0: 30})
    assert go_on(new.to_json(), grown, {}) == new, "it ends where it ended the first time"
    for other in (replace(OPTIONS, end=5), replace(OPTIONS, where="x"), replace(OPTIONS, begin=1)):
        with pytest.raises(Invalid, match="IdTaken"):
            go_on(new.to_json(), begin_replay(other, "a/c", (1, 1), {}, {0: 10}), {})
    for damaged in ("{}", "[]", '{"what":"","ranges":[]}', "no"):
        with pytest.raises(Corrupt):
            go_on(damaged, new, {})


def test_a_replay_reads_what_was_written_down() -> None:
    assert chosen_rows({1: (5, 9), 0: (0, 2)}) == (
        "(tw_partition = 0 AND tw_offset >= 0 AND tw_offset < 2) OR "
        "(tw_partition = 1 AND tw_offset >= 5 AND tw_offset < 9)"
    )


def test_the_driver_can_hold_what_its_tasks_return() -> None:
    """Each gives back its last batch: of 5,000 files that was up to 20 GB."""
    assert max(ingest.FILES_AT_ONCE, TASKS_AT_ONCE) * REQUEST_BYTES_MAX <= HELD_BYTES_MAX
    said = "Total size of serialized results of 71 tasks (1025.0 MiB) is bigger than"
    assert "OutOfMemory" in str(_named(said, said, analysis=False))


def test_rows_of_a_topic_that_is_gone_go_by_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table names no partition without rows: of 5, as many as the target has, 3 were counted."""

    def gone(*_args: object) -> None:
        raise NotFound("UnknownTopic", "it is gone")

    monkeypatch.setattr(replay, "topic_info", gone)
    table: Any = SimpleNamespace(topic="a/c")
    counts = (replay._partitions(table, OPTIONS), 3)
    assert counts == (None, 3)
    begun = begin_replay(OPTIONS, "a/c", counts, {}, {0: 10, 2: 10, 4: 10})
    assert not begun.keeps_partition
    far = {**replayed(0, b"k"), "tw_partition": 4}
    (made,) = replay.batches([far], TARGET, "a/c", begun.keeps_partition)
    assert made.partitions == (partition_of(b"k", 3),)


class Properties:
    """A table that is nothing but properties, which others write, too."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.others: dict[str, str] = {}

    def load(self) -> SimpleNamespace:
        return SimpleNamespace(properties=dict(self.held))

    def set_properties(self, properties: dict[str, str]) -> None:
        self.held |= properties | self.others
        self.others = {}


def test_two_runs_of_an_id_do_not_go_two_ways() -> None:
    """Each wrote down a snapshot of its own and read that one."""
    table = Properties()
    as_table = cast("TopicTable", table)
    one, two = Record(as_table, "k"), Record(as_table, "k")
    assert one.text is None
    table.others = {"k": "theirs"}
    assert one.begin("ours") == "theirs", "what is there counts"
    one.write("theirs, further")
    assert Record(as_table, "k").begin("new") == "theirs, further"
    assert two.begin("ours") == "ours", "the other one did not see it: its own is overwritten"
    with pytest.raises(Retryable, match="RunBusy"):
        one.write("theirs, through")
    two.write("ours, through")
    assert table.held == {"k": "ours, through"}


class Source(Properties):
    """The table of a topic with rows, or with none."""

    topic = TopicName("a", "c")

    def __init__(self, frontier: int) -> None:
        super().__init__()
        self.frontier = frontier

    def load(self) -> SimpleNamespace:
        return SimpleNamespace(
            properties=dict(self.held), size=Size(), snapshot_id=7, starts={0: 0},
            frontiers={0: self.frontier},
        )  # fmt: skip

    def rows(self, _state: object) -> "Source":
        return self

    def where(self, condition: str) -> "Source":
        if "typo" in condition:
            raise AnalysisException("UNRESOLVED_COLUMN: typo")
        return self


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the arguments of each call that sends."""
    found: list[Any] = []
    monkeypatch.setattr(replay, "topic_info", lambda *_: SimpleNamespace(partitions=1, typed=False))

    def send(*args: Any) -> list[Sent]:
        found.append(args)
        return []

    monkeypatch.setattr(replay, "_send", send)
    return found


def test_a_typo_does_not_take_an_id(sent: list[Any]) -> None:
    """It was written down before Spark had seen the condition: the right one was refused."""
    table: Any = Source(frontier=10)
    wrong = replace(OPTIONS, run_id="mine", where="typo > 3")
    with pytest.raises(Invalid, match="SparkRefused"):
        replay.run(cast("Any", None), table, wrong)
    assert (table.held, sent) == ({}, [])
    done = replay.run(cast("Any", None), table, replace(wrong, where="id > 3"))
    assert (done.outcome, len(sent)) == (Outcome.DONE, 1)


def test_an_empty_range_was_not_done_by_an_earlier_run(sent: list[Any]) -> None:
    table: Any = Source(frontier=0)
    options = replace(OPTIONS, run_id="mine")
    empty = replay.run(cast("Any", None), table, options)
    assert (empty.outcome, empty.message) == (Outcome.NOTHING, replay.EMPTY)
    assert (table.held, sent) == ({}, []), "the id is still free"
    table.frontier = 5
    assert replay.run(cast("Any", None), table, options).outcome is Outcome.DONE
    again = replay.run(cast("Any", None), table, options)
    assert (again.outcome, len(sent)) == (Outcome.NOTHING, 1)
    assert "done by an earlier run" in again.message


def test_an_import_says_how_large_the_table_was_and_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "topic_info", lambda *_: SimpleNamespace(partitions=1, typed=False))
    monkeypatch.setattr(ingest, "_source", lambda *_: SimpleNamespace(columns=["id"]))
    monkeypatch.setattr(ingest, "_from_files", lambda *_: [Sent(messages=3)])
    sizes = [Size(files=1), Size(files=2)]
    table: Any = SimpleNamespace(topic="a/b", load=lambda: SimpleNamespace(size=sizes.pop(0)))
    session: Any = SimpleNamespace(
        spark=SimpleNamespace(conf=SimpleNamespace(set=lambda *_: None)),
    )
    said = ingest.run(session, table, LAKE).to_json()
    assert (said["before"]["files"], said["after"]["files"], said["messages"]) == (1, 2, 3)
