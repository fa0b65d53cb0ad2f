"""One topic: what it flushes when, and what stops it (G7)."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.refs import MAIN_BRANCH

from table_bench import Bench
from table_fakes import TIME_US, HandLog, assignment, message_batch, random_batch
from table_faults import FaultyCatalog
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Retryable
from tidewater_worker.log.reader import LogReader, segment_name
from tidewater_worker.ports import Phase
from tidewater_worker.table import snapshot as snapshot_module
from tidewater_worker.table import topic as topic_module
from tidewater_worker.table.catalog import TableCatalog
from tidewater_worker.table.committer import Committer
from tidewater_worker.table.topic import RELOAD_S, TopicRun
from tidewater_worker.table.topic_base import RECHECK_S

RAW = TopicSpec()


def part(run: TopicRun, number: int = 0) -> tuple[Phase, str]:
    found = run.state.partitions[number]
    return found.state, found.reason


def fill(bench: Bench, *logs: HandLog, commits: int = 1, spec: TopicSpec = RAW) -> TopicRun:
    run = bench.topic(spec, *logs)
    for _ in range(commits):
        for log in logs:
            log.append(message_batch(spec, [b"x"] * 3, time_us=bench.clock.now_us()))
        bench.flush(run, *logs)
    return run


def rows(bench: Bench) -> list[tuple[int, int]]:
    found = bench.table().scan().to_arrow()
    columns = (found[c].to_pylist() for c in ("tw_partition", "tw_offset"))
    return sorted(zip(*columns, strict=True))


def test_a_flush_waits_for_age_and_takes_all(bench: Bench) -> None:
    log = bench.log()
    run = bench.topic(RAW, log)
    again: float | None = None
    for _ in range(3):
        log.append(message_batch(RAW, [b"x"]))
        run.inbox.durable({0: log.end})
        again = run.step()
        assert run.state.partitions[0].next == 0
        bench.clock.advance(0.3)
    assert again == pytest.approx(bench.clock.monotonic() + 0.1)
    bench.clock.advance(0.11)
    run.step()
    assert run.state.partitions[0].next == 3
    assert run.counters()["commits"] == 1


def test_many_rows_are_flushed_early_but_not_too_often(bench: Bench) -> None:
    spec = TopicSpec.model_validate({"writer": {"batchRows": 10, "flushInterval": "1s"}})
    log = bench.log()
    run = bench.topic(spec, log)
    log.append(message_batch(spec, [b"x"] * 10))
    run.inbox.durable({0: log.end})
    run.step()
    assert run.state.partitions[0].next == 10
    log.append(message_batch(spec, [b"x"] * 10))
    run.inbox.durable({0: log.end})
    assert run.step() == pytest.approx(bench.clock.monotonic() + 0.25)
    assert run.state.partitions[0].next == 10
    bench.clock.advance(0.25)
    run.step()
    assert run.state.partitions[0].next == 20


def test_a_backlog_is_drained_in_pieces_fair_to_all_partitions(bench: Bench) -> None:
    spec = TopicSpec.model_validate(
        {
            "writer": {"batchBytes": "1Mi", "maxMemory": "4Mi"},
            "maintenance": {"targetFileSize": "1Mi"},
        }
    )
    logs = [bench.log(p) for p in range(3)]
    for log in logs:
        for _ in range(30):
            log.append(random_batch(spec, 1000, 100))
    run = bench.start(assignment(spec, logs))
    run.step()
    frontiers = []
    while not run.drained:
        run.step()
        frontiers.append([p.next for p in run.state.partitions.values()])
        bench.clock.advance(0.01)
        assert len(frontiers) < 50
    assert len(frontiers) >= 9
    assert all(max(f) - min(f) <= 3_000 for f in frontiers), "one partition starves another"
    assert rows(bench) == [(p, o) for p in range(3) for o in range(30_000)]
    sizes = [task.file.file_size_in_bytes for task in bench.table().scan().plan_files()]
    assert max(sizes) < 2 * 1024 * 1024


def test_hours_are_split_into_files(bench: Bench) -> None:
    log = bench.log()
    run = bench.topic(RAW, log)
    for hour in (0, 0, 1, 5):
        log.append(message_batch(RAW, [b"x"] * 2, time_us=TIME_US + hour * 3_600_000_000))
    bench.flush(run, log)
    assert len(list(bench.table().scan().plan_files())) == 3
    assert run.counters()["commits"] == 1


def test_idle_topics_hold_no_metadata(bench: Bench) -> None:
    run = fill(bench, bench.log())
    assert run.counters()["commits"] == 1
    bench.clock.advance(60)
    assert run.step() is None
    assert (run._view, run._plan) == (None, None)


def test_a_damaged_log_stops_its_partition_only(bench: Bench) -> None:
    logs = [bench.log(0), bench.log(1)]
    run = fill(bench, *logs)
    for log in logs:
        log.append(message_batch(RAW, [b"y"] * 3))
    path = logs[1].directory / segment_name(0)
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(bytes(data))
    bench.flush(run, *logs)
    assert part(run, 1)[0] is Phase.STOPPED
    assert run.state.partitions[1].next == 3
    assert part(run, 0) == (Phase.RUNNING, "")
    assert run.state.partitions[0].next == 6


def test_a_log_that_ends_before_the_table_stops_the_partition(bench: Bench) -> None:
    log = bench.log()
    fill(bench, log, commits=2)
    path = log.directory / segment_name(0)
    path.unlink()
    shorter = HandLog(log.directory, 0)
    shorter.append(message_batch(RAW, [b"x"] * 3))
    run = bench.topic(RAW, shorter, epoch=2)
    assert part(run) == (Phase.STOPPED, "LogBehindTable")


def test_an_empty_log_begins_at_the_frontier_and_fences_first(bench: Bench) -> None:
    log = bench.log()
    old = fill(bench, log, commits=2)
    (log.directory / segment_name(0)).unlink()
    run = bench.topic(RAW, HandLog(log.directory, 0), epoch=2)
    assert part(run) == (Phase.RUNNING, "")
    assert run.state.partitions[0].next == 6
    # Before the new owner was told where to begin, its epoch was in the table.
    assert json.loads(bench.table().properties["tidewater.partition.0"])["epoch"] == 2
    assert run.counters()["epoch_commits"] == 1
    assert old.state.partitions[0].next == 6


def test_a_table_that_was_rolled_back_stops_the_topic(bench: Bench) -> None:
    log = bench.log()
    run = fill(bench, log, commits=3)
    table = bench.table()
    first = table.metadata.snapshots[0].snapshot_id
    table.manage_snapshots().rollback_to_snapshot(first).commit()
    log.append(message_batch(RAW, [b"y"]))
    bench.flush(run, log)
    assert part(run) == (Phase.STOPPED, "TableRolledBack")
    # The remedy that the message names.
    frontier = table.metadata.snapshots[0].summary.additional_properties[  # type: ignore[union-attr]
        "tidewater.partition.0"
    ]
    with bench.table().transaction() as change:
        change.set_properties({"tidewater.partition.0": frontier})
    bench.clock.advance(RECHECK_S)
    bench.settle(run)
    assert part(run) == (Phase.RUNNING, "")
    assert rows(bench) == [(0, o) for o in range(10)]


@pytest.mark.parametrize("value", ['{"next":2,"epoch":1}', None])
def test_a_damaged_frontier_doubles_no_row(bench: Bench, value: str | None) -> None:
    logs = [bench.log(0), bench.log(1)]
    fill(bench, *logs, commits=2)
    with bench.table().transaction() as change:
        if value is None:
            change.remove_properties("tidewater.partition.0")
        else:
            change.set_properties({"tidewater.partition.0": value})
    run = bench.topic(RAW, *logs, epoch=2)
    assert part(run) == (Phase.STOPPED, "FrontierDamaged")
    assert rows(bench) == [(p, o) for p in range(2) for o in range(6)]


def test_a_lost_frontier_is_noticed_even_when_the_snapshots_that_had_it_are_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As others may write them: only the frontiers that moved are in a summary.
    monkeypatch.setattr(snapshot_module, "repeated_frontiers", lambda _view: {})
    logs = [bench.log(0), bench.log(1)]
    run = fill(bench, *logs)
    # From now on only partition 1 moves, until partition 0's snapshots have expired.
    spec = TopicSpec.model_validate({"maintenance": {"keepSnapshots": 2}})
    run.inbox.assign(assignment(spec, logs))
    for _ in range(5):
        logs[1].append(message_batch(RAW, [b"x"]))
        bench.flush(run, *logs)
    with bench.table().transaction() as change:
        change.remove_properties("tidewater.partition.0")
    again = bench.topic(spec, *logs)
    assert part(again, 0) == (Phase.STOPPED, "FrontierDamaged")
    assert part(again, 1) == (Phase.RUNNING, "")
    assert len([row for row in rows(bench) if row[0] == 0]) == 3


def test_a_dropped_table_that_is_put_back_goes_on(bench: Bench) -> None:
    log = bench.log()
    run = fill(bench, log)
    location = bench.table().metadata_location
    bench.catalog._catalog.drop_table("shop.orders")
    log.append(message_batch(RAW, [b"y"]))
    bench.flush(run, log)
    assert part(run) == (Phase.STOPPED, "TableMissing")
    # Pokes do not make it look more often than it should.
    for _ in range(10):
        run.inbox.durable({0: log.end})
        run.step()
    bench.catalog._catalog.register_table("shop.orders", location)
    bench.clock.advance(RECHECK_S)
    bench.settle(run)
    assert part(run) == (Phase.RUNNING, "")
    assert rows(bench) == [(0, o) for o in range(4)]


def test_a_log_past_zero_without_a_table_is_not_begun_anew(bench: Bench) -> None:
    log = bench.log(first=100)
    log.append(message_batch(RAW, [b"x"]))
    run = bench.topic(RAW, log)
    assert part(run) == (Phase.STOPPED, "TableMissing")
    assert not bench.catalog._catalog.table_exists("shop.orders")


def test_snapshots_that_tags_and_readers_need_stay(bench: Bench) -> None:
    spec = TopicSpec.model_validate({"maintenance": {"keepSnapshots": 3}})
    log = bench.log()
    run = fill(bench, log, spec=spec)
    table = bench.table()
    tagged = table.metadata.current_snapshot_id
    assert tagged is not None
    table.manage_snapshots().create_tag(tagged, "keep").commit()
    log.append(message_batch(RAW, [b"x"]))
    bench.flush(run, log)
    reading = run.reader.read(0, 0, 4, 10)
    next(reading)
    pinned = run.state.snapshot_id
    for _ in range(8):
        log.append(message_batch(RAW, [b"x"]))
        bench.flush(run, log)
    kept = {snapshot.snapshot_id for snapshot in bench.table().metadata.snapshots}
    assert {tagged, pinned} <= kept
    assert len(kept) == 5
    assert [batch.num_rows for batch in reading]
    log.append(message_batch(RAW, [b"x"]))
    bench.flush(run, log)
    assert pinned not in {snapshot.snapshot_id for snapshot in bench.table().metadata.snapshots}


def test_the_settings_of_a_branch_survive(bench: Bench) -> None:
    log = bench.log()
    run = fill(bench, log)
    table = bench.table()
    head = table.metadata.current_snapshot_id
    assert head is not None
    table.manage_snapshots().create_branch(
        head, MAIN_BRANCH, max_snapshot_age_ms=86_400_000
    ).commit()
    bench.clock.advance(RELOAD_S)
    for _ in range(2):
        log.append(message_batch(RAW, [b"x"]))
        bench.flush(run, log)
    assert bench.table().metadata.refs[MAIN_BRANCH].max_snapshot_age_ms == 86_400_000


def test_trouble_is_told_and_taken_back(bench: Bench, tmp_path: Path) -> None:
    faulty = FaultyCatalog(bench.settings)
    bench.catalog = TableCatalog(faulty)  # type: ignore[arg-type]
    log = bench.log()
    run = bench.topic(RAW, log)
    (tmp_path / "warehouse" / "shop" / "orders" / "data").write_text("in the way")
    log.append(message_batch(RAW, [b"x"]))
    run.inbox.durable({0: log.end})
    run.step()
    bench.clock.advance(1.1)
    again = run.step()
    assert part(run) == (Phase.RETRYING, "WarehouseUnavailable")
    assert again is not None
    (tmp_path / "warehouse" / "shop" / "orders" / "data").unlink()
    bench.settle(run)
    assert part(run) == (Phase.RUNNING, "")
    assert rows(bench) == [(0, 0)]


def test_times_that_python_cannot_tell_reach_the_table(
    bench: Bench, fields: Callable[..., TopicSpec]
) -> None:
    """They were taken once; their rows must not stop the table for all that follow (G2)."""
    spec = fields(["day(at)"], at="timestamptz", day="date", n="long")
    log = bench.log()
    batch = message_batch(spec, [{"n": 1}, {"n": 2}])
    far = {
        "at": pa.array([0, 2**60]).view(pa.timestamp("us", "UTC")),
        "day": pa.array([0, 2**30], pa.int32()).view(pa.date32()),
    }
    for name, column in far.items():
        batch = batch.set_column(batch.schema.get_field_index(name), name, column)
    log.append(batch)
    run = bench.topic(spec, log)
    bench.flush(run, log)
    assert part(run) == (Phase.RUNNING, "")
    assert rows(bench) == [(0, 0), (0, 1)]
    bounds = [task.file.lower_bounds.keys() for task in bench.table().scan().plan_files()]
    (n,) = (f.field_id for f in bench.table().schema().fields if f.name == "n")
    assert all(n in found for found in bounds)


def test_a_fault_that_nobody_foresaw_is_a_visible_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = bench.log()
    run = fill(bench, log)
    log.append(message_batch(RAW, [b"x"]))
    run.inbox.durable({0: log.end})
    run.step()
    bench.clock.advance(10.0)
    with monkeypatch.context() as patch:
        patch.setattr(topic_module, "cut_batch", lambda *_, **__: [][1])
        again = run.step()
        assert part(run) == (Phase.RETRYING, "WorkerFault")
        assert "IndexError" in run.state.partitions[0].message
        assert again is not None
        assert again > bench.clock.monotonic(), "not at once"
    bench.settle(run)
    assert part(run) == (Phase.RUNNING, "")
    assert rows(bench) == [(0, n) for n in range(log.end)]


def test_a_fault_in_the_middle_of_a_commit_ends_at_the_table(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = bench.log()
    run = fill(bench, log)
    log.append(message_batch(RAW, [b"x"]))
    run.inbox.durable({0: log.end})
    run.step()
    bench.clock.advance(10.0)
    perform = Committer.perform
    asked = 0

    def fails(self: Committer, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        done = perform(self, *args)
        if asked == 1:
            raise ValueError("after it was done")
        return done

    monkeypatch.setattr(Committer, "perform", fails)
    run.step()
    assert part(run) == (Phase.RETRYING, "WorkerFault")
    bench.settle(run)
    assert part(run) == (Phase.RUNNING, "")
    assert rows(bench) == [(0, n) for n in range(log.end)]


def with_rows_missing(bench: Bench) -> tuple[TopicRun, list[HandLog], Callable[[], None]]:
    """Return a topic whose partition 0 has lost rows on their way, and how to bring them back."""
    logs = [bench.log(0), bench.log(1)]
    fill(bench, *logs, commits=2)
    for _ in range(2):
        logs[0].append(message_batch(RAW, [b"y"] * 3), new_segment=True)
    away = [logs[0].directory / segment_name(base) for base in (0, 6)]
    for path in away:
        path.rename(path.with_suffix(".away"))

    def mend() -> None:
        for path in away:
            path.with_suffix(".away").rename(path)

    run = bench.topic(RAW, *logs, epoch=2)
    assert [part(run, number)[1] for number in (0, 1)] == ["RowsLost", ""]
    return run, logs, mend


def test_what_is_mended_goes_on_beside_partitions_that_run(bench: Bench) -> None:
    """G7: a remedy had no effect until the worker was started anew, unless all had stopped."""
    run, logs, mend = with_rows_missing(bench)
    for _ in range(3):
        bench.clock.advance(RECHECK_S)
        run.step()
        assert [part(run, number)[1] for number in (0, 1)] == ["RowsLost", ""]
    mend()
    logs[1].append(message_batch(RAW, [b"y"] * 3))
    bench.flush(run, *logs)
    again = run.step()
    assert again is not None
    assert again <= bench.clock.monotonic() + RECHECK_S, "nobody has to poke it"
    bench.clock.advance(RECHECK_S)
    run.step()
    bench.settle(run)
    assert [part(run, number)[0] for number in (0, 1)] == [Phase.RUNNING, Phase.RUNNING]
    assert rows(bench) == [(0, o) for o in range(12)] + [(1, o) for o in range(9)]
    assert run.step() is not None
    bench.clock.advance(RECHECK_S)
    assert run.step() is None, "a topic of which nothing is stopped costs nothing"


def test_a_log_that_is_damaged_is_not_asked_again_beside_others(bench: Bench) -> None:
    logs = [bench.log(0), bench.log(1)]
    run = fill(bench, *logs)
    for log in logs:
        log.append(message_batch(RAW, [b"y"] * 3))
    path = logs[1].directory / segment_name(0)
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(bytes(data))
    bench.flush(run, *logs)
    bench.states.clear()
    for _ in range(3):
        bench.clock.advance(RECHECK_S)
        run.step()
    said = {state.partitions[1].state for state in bench.states}
    assert said <= {Phase.STOPPED}, "messages would be taken that cannot reach the table"


def test_a_disk_that_cannot_be_read_stops_one_partition_until_it_can(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G7: one bad sector kept the rows of all partitions from the table."""
    logs = [bench.log(0), bench.log(1)]
    run = fill(bench, *logs)
    real = LogReader.read

    def read(reader: LogReader, offset: int, end: int, max_bytes: int) -> Any:
        if reader._directory == logs[1].directory:
            raise OSError(errno.EIO, "Input/output error")
        return real(reader, offset, end, max_bytes)

    for log in logs:
        log.append(message_batch(RAW, [b"y"] * 3))
    with monkeypatch.context() as patch:
        patch.setattr(LogReader, "read", read)
        bench.flush(run, *logs)
        assert part(run, 1) == (Phase.STOPPED, "LogUnreadable")
        assert "Input/output error" in run.state.partitions[1].message
        assert part(run, 0) == (Phase.RUNNING, "")
        assert rows(bench) == [(0, o) for o in range(6)] + [(1, o) for o in range(3)]
    bench.clock.advance(RECHECK_S)
    run.step()
    bench.settle(run)
    assert part(run, 1) == (Phase.RUNNING, "")
    assert rows(bench) == [(p, o) for p in range(2) for o in range(6)]


def test_a_catalog_that_is_away_when_a_stopped_partition_is_looked_at(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beside it are not left in a trouble that has passed."""
    run, _, mend = with_rows_missing(bench)

    def away(*_: object) -> Any:
        raise Retryable("CatalogUnreachable", "by script")

    with monkeypatch.context() as patch:
        patch.setattr(topic_module, "open_table", away)
        bench.clock.advance(RECHECK_S)
        run.step()
        assert part(run, 1)[0] is Phase.RETRYING
    for _ in range(3):
        bench.clock.advance(RECHECK_S)
        run.step()
        assert [part(run, number)[1] for number in (0, 1)] == ["RowsLost", ""]
    mend()
    bench.clock.advance(RECHECK_S)
    run.step()
    bench.settle(run)
    assert [part(run, number)[0] for number in (0, 1)] == [Phase.RUNNING, Phase.RUNNING]
