"""orphans: removes files under a table's location that no version of it names.

A file is removed only if it is older than the grace *and* two looks, some time apart, both find
that nothing names it. The time between is longer than a writer waits between two attempts: a file
that waits for a commit while the catalog was away is committed by then. The files of a commit with
an unknown outcome are old only when that commit has long been decided.

Nothing is removed where another table has files, too: it names them, but nobody here knows of it.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tidewater_core.errors import Conflict, Invalid, Retryable, TidewaterError
from tidewater_core.metadata_file import is_metadata_file, other_table
from tidewater_core.names import TOPIC
from tidewater_core.units import Duration
from tidewater_pipeline.calendar_time import sql_time
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import Session, TopicTable, named_errors
from tidewater_pipeline.state import TableState, sql_text

PROCEDURE_GRACE_MIN: Final = Duration("1d")
"""Iceberg's procedure lists files itself only with a grace above this."""
GRACE: Final = Duration("3d")
SETTLE: Final = Duration("2m")
GRACE_MIN: Final = Duration("1m")
SETTLE_MIN: Final = Duration("1s")
"""With less, files of a commit that is under way would be removed."""
SHOWN_MAX: Final = 20
VIEW: Final = "tidewater_listed_files"
LISTED: Final = "file_path string, at bigint"


@dataclass(frozen=True, kw_only=True, slots=True)
class OrphanOptions:
    """What a person can choose."""

    grace: Duration = GRACE
    """Younger files stay."""
    settle: Duration = SETTLE
    """Time between the two looks."""
    delete: bool = False
    """Without it: only say what would be removed."""
    force: bool = False
    """Also where another table has files: a person knows that it is gone."""


def checked(options: OrphanOptions, force: bool) -> OrphanOptions:
    """Refuse to remove what may be of a commit that is under way, unless forced."""
    if options.delete and not force:
        for name, given, least in (
            ("grace", options.grace, GRACE_MIN),
            ("settle", options.settle, SETTLE_MIN),
        ):
            if given < least:
                raise Invalid(
                    "InvalidArgument",
                    f"--{name} {given} is too short to remove anything: at least {least}; files "
                    "of a commit that is under way would go (--force removes them all the same)",
                )
    return options


def plan_orphans(first: Iterable[str], second: Iterable[str]) -> list[str]:
    """Choose the files that both looks found."""
    return sorted(set(first) & set(second))


def list_local(location: str, older_us: int) -> list[str]:
    """List old files below a local directory, spelled like the location.

    Hadoop's listing runs a program for every file and fails when one vanishes meanwhile, and
    Iceberg takes only paths that begin with the location, letter by letter.
    """
    root = _local_path(location)
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


def _local_path(location: str) -> str:
    return "/" + location.removeprefix("file:").lstrip("/")


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
        left = remove(session, table, removed)
        removed = [path for path in removed if path not in left]
        if left:
            report.retry = True
            report.message = f"{len(left)} files could not be removed, such as {min(left)}"
    report.after = table.load().size
    report.outcome = Outcome.DONE if found else Outcome.NOTHING
    if report.retry:
        report.outcome = Outcome.FAILED
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
        found = listed_files(table, state, state.location, older_us)
        frame = session.spark.createDataFrame([(path, 0) for path in found], LISTED)
        dated = frame.selectExpr("file_path", "timestamp_micros(at) AS last_modified")
        dated.createOrReplaceTempView(VIEW)
        arguments.append(f"file_list_view => {sql_text(VIEW)}")
    call = f"CALL {session.procedure('remove_orphan_files')}({', '.join(arguments)})"
    found = [str(row["orphan_file_location"]) for row in session.sql(call)]
    if found and not options.force:
        check_alone(session, table, state, found)
    return found


def listed_files(table: TopicTable, state: TableState, location: str, older_us: int) -> list[str]:
    """List old files below a location, wherever it is."""
    if state.is_local:
        return list_local(location, older_us)
    return list_store(table, location, older_us)


def list_store(table: TopicTable, location: str, older_us: int) -> list[str]:
    """List old files below a location of an object store.

    A store lists by how keys begin: `orders` would also list `orders-dead/…`, and Iceberg lets pass
    what begins with the location.
    """
    listed: list[str] = []
    below = location.rstrip("/") + "/"
    with named_errors(f"list {below}"):
        infos = table.java().io().listPrefix(below).iterator()
        while infos.hasNext():
            info = infos.next()
            path = str(info.location())
            if path.startswith(below) and int(info.createdAtMillis()) * 1000 < older_us:
                listed.append(path)
    return listed


def check_alone(
    session: Session, table: TopicTable, state: TableState, found: Iterable[str]
) -> None:
    """Refuse to go on if another table lives here, too.

    Of whatever age its metadata is: it is written anew with each commit, and what it names is old.
    """
    inside = f"{state.location.rstrip('/')}/metadata"
    listed = listed_files(table, state, inside, sys.maxsize)
    for path in sorted({*listed, *found} - state.metadata_files):
        if not is_metadata_file(path):
            continue
        made_for = state.properties.get(TOPIC, "")
        other = other_table(_read(session, table, state, path), state.uuid, made_for)
        if other is not None:
            raise Conflict(
                "SharedLocation",
                f"{path} is of another table ({other}), which shares the location of {table.name}: "
                "nothing is removed; if that table is gone, orphans --force removes its files, too",
            )


def _read(session: Session, table: TopicTable, state: TableState, path: str) -> bytes:
    if state.is_local:
        try:
            return Path(_local_path(path)).read_bytes()
        except FileNotFoundError:
            return b""  # it went meanwhile
    streams = session.jvm.org.apache.iceberg.relocated.com.google.common.io.ByteStreams
    file = table.java().io().newInputFile(path)
    try:
        with named_errors(f"read {path}"):
            stream = file.newStream()
            try:
                return bytes(streams.toByteArray(stream))
            finally:
                stream.close()
    except TidewaterError:
        with named_errors(f"look for {path}"):
            if file.exists():
                raise
        return b""  # here, too: a writer lets its old versions go


def remove(session: Session, table: TopicTable, paths: list[str]) -> set[str]:
    """Remove files; return those that are still there.

    Iceberg's own helper says nothing of what it could not remove.
    """
    names: Any = session.jvm.java.util.ArrayList()
    for path in paths:
        names.add(path)
    io = table.java().io()
    try:
        with named_errors("remove files"):
            io.deleteFiles(names)
    except Retryable as error:
        session.progress.say(f"{table.topic}: {error.message}")
        with named_errors("look for files"):
            return {path for path in paths if io.newInputFile(path).exists()}
    return set()
