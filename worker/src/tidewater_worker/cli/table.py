"""`tidewater table`: bring existing data into a topic's table."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tidewater_coordination import connect_as
from tidewater_core.clock import SystemClock, SystemIds
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Conflict, Invalid, NotFound
from tidewater_core.names import TopicName, log_path, topic_path
from tidewater_core.settings import WorkerSettings, embedded
from tidewater_worker.log.deleter import remove_segment
from tidewater_worker.log.inspect import inspect_partition
from tidewater_worker.log.segment import fsync_directory
from tidewater_worker.partition import DirectoryLock

if TYPE_CHECKING:
    from tidewater_worker.table.opening import TopicTable

NAME = "table"
HELP = "Import Parquet files into a topic's table."
_IMPORT = """\
Add the rows of Parquet files to a topic, in the order given, in one atomic commit. The files have
the topic's own columns (`value`, or those of its schema) and may have tw_key, tw_headers, tw_time.
The worker must not be running: stop it first, so that all messages are in the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    action = actions.add_parser("import", help="import Parquet files", description=_IMPORT)
    action.add_argument("topic", metavar="NS/NAME", help="the topic")
    action.add_argument("files", nargs="+", help="Parquet files: paths, or s3:// and the like")
    action.add_argument("--partition", type=int, default=0, help="which one (default: 0)")
    action.add_argument(
        "--data",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="directory of `tidewater dev` (default: ./data)",
    )
    action.add_argument(
        "--settings", type=Path, metavar="FILE", help="a worker's settings file, instead of --data"
    )


def run(args: argparse.Namespace) -> int:
    """Import, and say what was done."""
    logging.getLogger("pyiceberg").setLevel(logging.ERROR)
    topic = TopicName.parse(args.topic)
    settings = _settings(args)
    where = _find(settings, topic, args.partition)
    directory = log_path(settings.log_root, topic, args.partition)
    lock = DirectoryLock(directory)
    try:
        return _import(settings, where, args.partition, args.files, directory)
    finally:
        lock.release()


def _settings(args: argparse.Namespace) -> WorkerSettings:
    if args.settings is not None:
        return WorkerSettings.from_json(args.settings.read_text())
    if not (args.data / "coordination.db").exists():
        raise NotFound("NoData", f"{args.data} is not a data directory of `tidewater dev`")
    return embedded(args.data)


def _find(settings: WorkerSettings, topic: TopicName, partition: int) -> "TopicTable":
    from tidewater_worker.table.opening import TopicTable

    async def ask() -> tuple[str, TopicSpec]:
        registry = connect_as(settings)
        await registry.start()
        try:
            for found in await registry.topics():
                if found.topic == str(topic):
                    return found.uuid, TopicSpec.from_json(found.spec)
        finally:
            await registry.close()
        raise NotFound("UnknownTopic", f"there is no topic {topic}")

    uuid, spec = asyncio.run(ask())
    if not 0 <= partition < spec.partitions:
        raise Invalid(
            "UnknownPartition",
            f"{topic} has partitions 0 to {spec.partitions - 1}, not {partition}",
        )
    return TopicTable(topic, uuid, spec, topic_path(settings.log_root, topic))


def _import(
    settings: WorkerSettings,
    where: "TopicTable",
    partition: int,
    files: list[str],
    directory: Path,
) -> int:
    from tidewater_worker.table.catalog import open_catalog
    from tidewater_worker.table.importer import Tools, import_files, table_next

    catalog = open_catalog(settings.catalog)
    try:
        committed = table_next(catalog, where, partition)
        _check_drained(directory, committed)
        tools = Tools(
            catalog,
            SystemClock(),
            SystemIds(),
            progress=_progress,
            before_commit=lambda: _empty_log(directory),
        )
        done = import_files(tools, where, partition, [_location(file) for file in files])
    finally:
        catalog.close()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(
        f"{done.end - done.first} rows of {len(files)} files are now offsets {done.first} to "
        f"{done.end - 1} of {where.topic} partition {partition} (snapshot {done.snapshot_id})"
    )
    return 0


def _location(file: str) -> str:
    """Return an absolute location: relative paths are the caller's."""
    return file if "://" in file else str(Path(file).absolute())


def _check_drained(directory: Path, committed: int) -> None:
    """Make sure that all messages of the log are in the table."""
    reports = list(inspect_partition(directory))
    for report in reports:
        if report.problem and not report.is_torn:
            raise Conflict("LogDamaged", f"{report.path}: {report.problem}")
    end = max((report.end_offset for report in reports), default=0)
    if end > committed:
        raise Conflict(
            "LogNotDrained",
            f"messages {committed} to {end - 1} are in the log but not in the table yet; "
            "start the worker, let it flush, and stop it",
        )


def _empty_log(directory: Path) -> None:
    """Remove a log whose messages are all in the table: the next one begins after the import."""
    for report in inspect_partition(directory):
        remove_segment(directory, report.base_offset)
    fsync_directory(directory)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} rows", end="", file=sys.stderr, flush=True)
