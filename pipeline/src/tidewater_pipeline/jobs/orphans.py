"""orphans: removes files under a table's location that no version of it names.

A file is removed only if it is older than the grace *and* two looks, some time apart, both find
that nothing names it. The time between is longer than a writer waits between two attempts: a file
that waits for a commit while the catalog was away is committed by then. The files of a commit with
an unknown outcome are old only when that commit has long been decided.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from tidewater_core.units import Duration
from tidewater_pipeline.calendar_time import sql_time
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import Session, TopicTable, named_errors
from tidewater_pipeline.state import TableState, sql_text

PROCEDURE_GRACE_MIN: Final = Duration("1d")
"""Iceberg's procedure lists files itself only with a grace above this."""
SHOWN_MAX: Final = 20
VIEW: Final = "tidewater_listed_files"
LISTED: Final = "file_path string, at bigint"


@dataclass(frozen=True, kw_only=True, slots=True)
class OrphanOptions:
    """What a person can choose."""

    grace: Duration = Duration("3d")
    """Younger files stay."""
    settle: Duration = Duration("2m")
    """Time between the two looks."""
    delete: bool = False
    """Without it: only say what would be removed."""


def plan_orphans(first: Iterable[str], second: Iterable[str]) -> list[str]:
    """Choose the files that both looks found."""
    return sorted(set(first) & set(second))


def list_local(location: str, older_us: int) -> list[str]:
    """List old files below a local directory, spelled like the location.

    Hadoop's listing runs a program for every file and fails when one vanishes meanwhile, and
    Iceberg takes only paths that begin with the location, letter by letter.
    """
    root = "/" + location.removeprefix("file:").lstrip("/")
    scheme = location.removesuffix(root)
    listed: list[str] = []
    for folder, _folders, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            try:
                changed_us = os.stat(path).st_mtime_ns // 1000
            except FileNotFoundError:
                continue  # the writer has removed it itself
            if changed_us < older_us:
                listed.append(f"{scheme}{path}")
    return listed


def run(session: Session, table: TopicTable, options: OrphanOptions) -> Report:
    """Look, and with `delete` look again and remove."""
    state = table.load()
    report = Report("orphans", str(table.topic), before=state.size)
    older_us = session.clock.now_us() - options.grace.ms * 1000
    session.progress.say(f"{table.topic}: looking for files that nothing names")
    found = _look(session, table, state, options, older_us)
    removed: list[str] = []
    if found and options.delete:
        session.progress.say(f"{table.topic}: {len(found)} found; looking again before removing")
        session.sleep(options.settle.seconds)
        state = table.load()
        removed = plan_orphans(found, _look(session, table, state, options, older_us))
        session.sync(state)
        _remove(session, table, removed)
    report.after = table.load().size
    report.outcome = Outcome.DONE if found else Outcome.NOTHING
    report.details = {
        "found": len(found),
        "removed": len(removed),
        "files": (removed or found)[:SHOWN_MAX],
        "dry_run": not options.delete,
    }
    return report


def _look(
    session: Session, table: TopicTable, state: TableState, options: OrphanOptions, older_us: int
) -> list[str]:
    """Ask Iceberg which old files nothing names; it removes none."""
    arguments = [f"table => {sql_text(table.name)}", "dry_run => true"]
    local = state.is_local
    if options.grace > PROCEDURE_GRACE_MIN and not local:
        arguments.append(f"older_than => {sql_time(older_us)}")
        if state.location.startswith("s3"):
            arguments.append("prefix_listing => true")
    else:
        found = list_local(state.location, older_us) if local else _list(table, state, older_us)
        frame = session.spark.createDataFrame([(path, 0) for path in found], LISTED)
        dated = frame.selectExpr("file_path", "timestamp_micros(at) AS last_modified")
        dated.createOrReplaceTempView(VIEW)
        arguments.append(f"file_list_view => {sql_text(VIEW)}")
    call = f"CALL {session.procedure('remove_orphan_files')}({', '.join(arguments)})"
    return [str(row["orphan_file_location"]) for row in session.sql(call)]


def _list(table: TopicTable, state: TableState, older_us: int) -> list[str]:
    """List old files for a grace that is too short for the procedure to list them itself."""
    listed: list[str] = []
    with named_errors(f"list {state.location}"):
        infos = table.java().io().listPrefix(state.location).iterator()
        while infos.hasNext():
            info = infos.next()
            if int(info.createdAtMillis()) * 1000 < older_us:
                listed.append(str(info.location()))
    return listed


def _remove(session: Session, table: TopicTable, paths: list[str]) -> None:
    names: Any = session.jvm.java.util.ArrayList()
    for path in paths:
        names.add(path)
    with named_errors("remove files"):
        session.jvm.org.apache.iceberg.CatalogUtil.deleteFiles(
            table.java().io(), names, "orphan", True
        )
