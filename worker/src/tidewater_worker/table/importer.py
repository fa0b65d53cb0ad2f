"""Bringing existing Parquet files into a topic's table: all of them in one commit, once.

The rows get offsets from the partition's frontier on, as if they had been published now, and the
same commit writes down what was imported: doing it again is refused. The caller holds the lock of
the partition's log and has made sure that nothing in it waits for the table.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from tidewater_core import names
from tidewater_core.clock import Clock, IdSource
from tidewater_core.errors import Conflict, Fenced, Invalid, NotFound, TidewaterError
from tidewater_worker.table.catalog import CommitRefused, TableCatalog
from tidewater_worker.table.commit import (
    Halted,
    Identity,
    Outcome,
    Reply,
    Wait,
    check_head,
    check_identity,
    run_commit,
)
from tidewater_worker.table.committer import Committer
from tidewater_worker.table.files import FilePlan, FileSet, plan_files
from tidewater_worker.table.frontier import UNWRITTEN, Claim, Landed, Span
from tidewater_worker.table.frontier import Fenced as FencedVerdict
from tidewater_worker.table.history import HistoryReader
from tidewater_worker.table.import_source import (
    ImportSource,
    check_source,
    check_times,
    digest_of,
    read_source,
)
from tidewater_worker.table.opening import TopicTable, bind_table, bound_table, open_table
from tidewater_worker.table.pace import pause_s
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.shape import number_rows
from tidewater_worker.table.snapshot import Prepared
from tidewater_worker.table.view import TableView, view_of

log = logging.getLogger(__name__)

ATTEMPTS_MAX: Final = 20
Progress = Callable[[int, int], None]
"""Called with the rows done and all rows."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import has done."""

    partition: int
    first: int
    end: int
    files: int
    snapshot_id: int


@dataclass(frozen=True, slots=True)
class Tools:
    """What an import works with."""

    catalog: TableCatalog
    clock: Clock
    ids: IdSource
    progress: Progress = lambda _done, _all: None
    before_commit: Callable[[], None] = lambda: None
    """Called when all files are written and only the commit is left."""
    sleep: Callable[[float], None] = time.sleep


def import_files(
    tools: Tools, where: TopicTable, partition: int, paths: Sequence[str], epoch: int | None = None
) -> Imported:
    """Add the rows of Parquet files to a partition of a topic's table, in the order given.

    `epoch` is the caller's ownership epoch; None stands for the one that the table has.
    """
    if not paths:
        raise Invalid("NoFiles", "there is nothing to import")
    view = open_table(tools.catalog, where, {} if epoch is None else {partition: epoch}, None)
    identity = Identity(str(where.topic), where.uuid, bound_table(where))
    _check_ours(view, identity, partition)
    bind_table(where, view)
    frontier = view.frontiers.get(partition, UNWRITTEN)
    if epoch is not None and frontier.epoch > epoch:
        raise Fenced("Fenced", f"the table carries epoch {frontier.epoch}, ours is {epoch}")
    plan = plan_files(view.table)
    sources = [check_source(plan.io, path, plan.shape) for path in paths]
    key = names.IMPORT_PREFIX + digest_of(plan.io, paths)
    if key in view.metadata.properties:
        raise Conflict(
            "AlreadyImported",
            f"these files were imported before: {view.metadata.properties[key]}",
        )
    last_us = _last_time(tools, where, view, partition, frontier.next)
    prepared = _write(tools, plan, where, partition, frontier.next, sources, last_us)
    span = prepared.spans[partition]
    note = {"partition": partition, "first": span.first, "end": span.end, "files": len(paths)}
    prepared.properties = {key: json.dumps(note)}
    claims = {partition: Claim(frontier.epoch if epoch is None else epoch, frontier.next)}
    tools.before_commit()
    after = _commit(tools, where, identity, claims, prepared, view)
    if key not in after.metadata.properties:
        raise Conflict("FrontierMoved", "somebody else has written to the partition meanwhile")
    assert after.snapshot_id is not None
    log.info("imported topic=%s partition=%d rows=%d", where.topic, partition, prepared.rows)
    return Imported(partition, span.first, span.end, len(prepared.files), after.snapshot_id)


def _check_ours(view: TableView, identity: Identity, partition: int) -> None:
    ours = check_identity(view, identity)
    if ours is True:
        raise Conflict("TableNotOurs", "the table is a retained one; start the topic first")
    problem = ours if isinstance(ours, Halted) else check_head(view, [partition])
    if problem is not None:
        raise Conflict(problem.reason, problem.message)


def _last_time(
    tools: Tools, where: TopicTable, view: TableView, partition: int, following: int
) -> int:
    """Return the time of the partition's last row in the table; 0 if it has none."""
    if following <= view.starts.get(partition, 0):
        return 0
    reader = HistoryReader(
        lambda: where,
        lambda: tools.catalog,
        lambda: view,
        lambda _snapshot, _count: None,
        RangeIndex(),
    )
    (row,) = reader.read(partition, following - 1, following, 1)
    return int(row.column(names.TW_TIME).cast(pa.int64())[0].as_py())


def _write(
    tools: Tools,
    plan: FilePlan,
    where: TopicTable,
    partition: int,
    first: int,
    sources: Sequence[ImportSource],
    last_us: int,
) -> Prepared:
    """Write all rows into data files."""
    total = sum(source.rows for source in sources)
    commit_id = tools.ids.uuid()
    files = FileSet(
        plan,
        commit_id,
        int(where.spec.writer.max_memory),
        int(where.spec.maintenance.target_file_size),
    )
    offset = first
    now_us = max(tools.clock.now_us(), last_us)
    try:
        for source in sources:
            row_bytes = source.nbytes / max(1, source.rows)
            for rows in read_source(plan.io, source, plan.shape):
                if source.has_time:
                    last_us = check_times(source.path, rows.column(names.TW_TIME), last_us)
                else:
                    last_us = now_us
                    rows = rows.append_column(names.TW_TIME, _times(now_us, rows.num_rows))
                numbered = number_rows(plan.shape, partition, offset, rows)
                files.add(partition, numbered, int(row_bytes * rows.num_rows) + 1)
                offset += rows.num_rows
                tools.progress(offset - first, total)
        if offset == first:
            raise Invalid("NoRows", "the files have no rows")
        data_files = files.finish()
    except BaseException:
        files.abandon()
        raise
    return Prepared(
        snapshot_id=tools.ids.snapshot_id(),
        commit_id=commit_id,
        spans={partition: Span(first, offset)},
        files=data_files,
        spec=plan.spec,
    )


def _times(time_us: int, count: int) -> pa.Array:
    return pa.array(np.full(count, time_us, dtype=np.int64)).cast(pa.timestamp("us", "UTC"))


def _commit(
    tools: Tools,
    where: TopicTable,
    identity: Identity,
    claims: dict[int, Claim],
    prepared: Prepared,
    view: TableView,
) -> TableView:
    committer = Committer(tools.catalog, where, tools.clock, tools.ids, frozenset)
    protocol = run_commit(identity, claims, prepared.spans, view)
    reply: Reply = None
    while True:
        try:
            step = protocol.send(reply)
        except StopIteration as done:
            return _landed(done.value)
        reply = None
        if isinstance(step, Wait):
            _pause(tools, step.failures, step.error)
        else:
            reply = committer.perform(step, claims, prepared)


def _pause(tools: Tools, failures: int, error: TidewaterError) -> None:
    if failures >= ATTEMPTS_MAX:
        raise error
    refused = isinstance(error, CommitRefused)
    tools.sleep(pause_s(failures, refused=refused, jitter=tools.ids.jitter()))


def _landed(outcome: Outcome) -> TableView:
    match outcome.verdict:
        case Landed():
            assert outcome.view is not None
            return outcome.view
        case Halted(reason, message):
            raise Conflict(reason, message)
        case FencedVerdict():
            raise Fenced("Fenced", "another owner has taken the partition")
    raise Conflict(
        "FrontierMoved", "somebody else has written to the partition; nothing was imported"
    )


def table_next(catalog: TableCatalog, where: TopicTable, partition: int) -> int:
    """Return a partition's frontier; 0 if the topic has no table yet."""
    try:
        view = view_of(catalog.load(where.identifier))
    except NotFound:
        return 0
    return view.frontiers.get(partition, UNWRITTEN).next
