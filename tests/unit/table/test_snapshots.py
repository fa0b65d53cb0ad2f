"""How far each partition was in a named snapshot: told by it, whatever has expired before it."""

from functools import partial

import pytest

from table_bench import Bench
from table_fakes import HandLog, assignment, message_batch
from table_faults import compact
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import NotFound
from tidewater_core.hold import Hold
from tidewater_core.names import HOLD
from tidewater_worker.table import snapshot as snapshot_module
from tidewater_worker.table.frontier import Frontier, parse_frontiers
from tidewater_worker.table.snapshots import frontier_at
from tidewater_worker.table.topic import TopicRun

KEEP = TopicSpec.model_validate({"maintenance": {"keepSnapshots": 2}})


def at(run: TopicRun, tag: str) -> dict[int, int]:
    view = run.reader.view(newest=True)
    return frontier_at(view, None, tag, partial(run.reader.rows_end, view))


def add(bench: Bench, run: TopicRun, log: HandLog, rows: int) -> None:
    log.append(message_batch(KEEP, [b"x"] * rows))
    bench.flush(run, log)


def tag(bench: Bench, name: str) -> None:
    table = bench.table()
    head = table.current_snapshot()
    assert head is not None
    table.manage_snapshots().create_tag(head.snapshot_id, name).commit()


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("compacted", [True, False])
def test_a_tag_keeps_every_partitions_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, repeats: bool, compacted: bool
) -> None:
    """Also on tables of before, whose summaries have only what moved, and after compaction."""
    if not repeats:
        monkeypatch.setattr(snapshot_module, "repeated_frontiers", lambda _view: {})
    logs = [bench.log(0), bench.log(1), bench.log(2)]
    run = bench.topic(KEEP, *logs)
    add(bench, run, logs[1], 5)
    add(bench, run, logs[0], 2)
    if compacted:
        compact(bench.table())
    tag(bench, "month-close")
    assert at(run, "month-close") == {0: 2, 1: 5, 2: 0}
    for _ in range(8):
        add(bench, run, logs[0], 1)
    view = run.reader.view(newest=True)
    named = view.metadata.refs["month-close"].snapshot_id
    parent = view.metadata.snapshot_by_id(named).parent_snapshot_id  # type: ignore[union-attr]
    assert view.metadata.snapshot_by_id(parent or 0) is None, "what was before it has expired"
    assert at(run, "month-close") == {0: 2, 1: 5, 2: 0}
    with pytest.raises(NotFound, match="no-such"):
        at(run, "no-such")


def test_what_a_job_holds_stays_in_the_table_until_its_time(bench: Bench) -> None:
    """A rewrite is checked against all that came since it began: none of that may expire."""
    log = bench.log()
    run = bench.topic(KEEP, log)
    add(bench, run, log, 1)
    begun = bench.table().current_snapshot()
    assert begun is not None
    hold = Hold(begun.sequence_number or 0, bench.clock.now_us() // 1000 + 60_000)
    with bench.table().transaction() as change:
        change.set_properties({HOLD: hold.to_property()})
    for _ in range(6):
        add(bench, run, log, 1)
    there = [each.snapshot_id for each in bench.table().metadata.snapshots]
    assert begun.snapshot_id in there
    assert len(there) >= 7
    bench.clock.advance(60)
    add(bench, run, log, 1)
    assert len(bench.table().metadata.snapshots) == 2, "a job that died holds nothing for long"


def test_every_summary_has_all_frontiers(bench: Bench) -> None:
    """Whoever commits: rows of one partition, or the epoch of a new owner."""
    logs = [bench.log(0), bench.log(1)]
    run = bench.topic(KEEP, *logs)
    add(bench, run, logs[1], 5)
    add(bench, run, logs[0], 2)
    next_owner = bench.start(assignment(KEEP, [logs[0]], epoch=2))
    bench.settle(next_owner)
    add(bench, next_owner, logs[0], 1)
    raised, moved = bench.table().metadata.snapshots[-2:]
    for snapshot, ours in (raised, (2, 2)), (moved, (3, 2)):
        assert snapshot.summary is not None
        carried = parse_frontiers(snapshot.summary.additional_properties)
        assert carried == {0: Frontier(*ours), 1: Frontier(5, 1)}


def test_a_rollback_is_not_hidden_by_what_is_repeated(bench: Bench) -> None:
    """Others go on; the snapshots that they make do not say that the lost rows are there."""
    logs = [bench.log(0), bench.log(1)]
    run = bench.topic(KEEP, *logs)
    add(bench, run, logs[1], 5)
    back_to = bench.table().current_snapshot()
    assert back_to is not None
    add(bench, run, logs[0], 2)
    bench.table().manage_snapshots().rollback_to_snapshot(back_to.snapshot_id).commit()
    alone = bench.start(assignment(KEEP, [logs[1]], epoch=1))
    bench.settle(alone)
    add(bench, alone, logs[1], 1)
    tag(bench, "after")
    assert at(run, "after") == {0: 0, 1: 6}
