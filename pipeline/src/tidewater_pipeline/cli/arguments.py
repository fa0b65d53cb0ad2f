"""The command line of `tidewater-pipeline`, as it is declared: each option with its default."""

import argparse
import os
from pathlib import Path
from typing import Final

from tidewater_core.compaction import FILES_MIN
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.jobs.compact import BUDGET, LATENESS
from tidewater_pipeline.jobs.expire import OLDER_THAN, RETAIN_LAST
from tidewater_pipeline.jobs.ingest import FORMATS
from tidewater_pipeline.jobs.manifests import MANIFESTS_MIN
from tidewater_pipeline.jobs.orphans import GRACE, SETTLE
from tidewater_pipeline.upkeep import ORPHANS_EVERY, STEPS

MAINTAIN: Final = "maintain"
JOBS: Final = {
    MAINTAIN: "retention, compact, manifests, expire, orphans: a topic's whole upkeep",
    "audit": "prove that each offset is in the table once, or name what is not",
    "compact": "join small files of closed time partitions, in order",
    "expire": "remove old snapshots and the files that only they need",
    "orphans": "remove files that nothing names (says which; --delete removes them)",
    "manifests": "join small manifests",
    "retention": "remove rows older than --keep",
    "import": "send rows of files or of another table to the topic",
    "replay": "send a range of the topic to another topic",
}
FORCE_HELP: Final = (
    "skip the safety checks: cursors, unknown topic, another topic's table, no store, short "
    "grace, shared location (default: none is skipped)"
)


def build_parser() -> argparse.ArgumentParser:
    """Declare the command line."""
    lines = "\n".join(f"  {name:<10} {text}" for name, text in JOBS.items())
    parser = argparse.ArgumentParser(
        prog="tidewater-pipeline",
        description=f"Jobs over the history of topics, on Spark.\n\njobs:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("jobs", metavar="JOB[,JOB…]", help="what to do, in this order")
    parser.add_argument(
        "--topic", action="append", required=True, metavar="NS/NAME", help="repeat for several"
    )
    parser.add_argument(
        "--table", help="the topic's table (default: as the topic's spec names it, else NS.NAME)"
    )
    add_session_arguments(parser)
    _add_executors(parser)
    _add_maintenance(parser)
    _add_deliveries(parser)
    return parser


def add_session_arguments(parser: argparse.ArgumentParser, data: str = "none") -> None:
    """Declare which catalog, and how Spark runs; `data` is the default directory."""
    where = parser.add_argument_group("catalog", "One of --data, --settings and --catalog.")
    where.add_argument(
        "--data", type=Path, metavar="DIR", help=f"directory of `tidewater dev` (default: {data})"
    )
    where.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="a worker's settings file; ${NAME} in it is a variable (default: none)",
    )
    where.add_argument(
        "--catalog",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a property of the catalog: type, uri, warehouse, … (default: those of --data or "
        "--settings)",
    )
    where.add_argument(
        "--coordination",
        metavar="PLACE",
        help="the store of cursors: a file, or etcd's addresses (default: that of --data or "
        "--settings)",
    )
    where.add_argument(
        "--coordination-prefix", metavar="PREFIX", help="of etcd's keys (default: tidewater)"
    )
    how = parser.add_argument_group("spark")
    how.add_argument("--master", default="local[*]", help="where tasks run (default: %(default)s)")
    how.add_argument("--memory", default="1g", help="heap of the driver (default: %(default)s)")
    how.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Spark's, which wins over ours; repeat for several (default: none)",
    )
    how.add_argument(
        "--report",
        "--json",
        type=Path,
        metavar="FILE",
        help="write the JSON report here (default: to stdout)",
    )
    how.add_argument(
        "--quiet", action="store_true", help="no lines of progress (default: on stderr)"
    )


def _add_executors(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("spark in a pod")
    how.add_argument(
        "--executors",
        type=int,
        default=0,
        metavar="N",
        help="executor pods, at most; 0: all work in this process (default: %(default)s)",
    )
    how.add_argument(
        "--executor-cores",
        type=int,
        default=1,
        metavar="N",
        help="cores of each, and its tasks at a time (default: %(default)s)",
    )
    how.add_argument(
        "--executor-memory",
        type=ByteSize,
        default=ByteSize("1Gi"),
        metavar="SIZE",
        help="heap of each (default: %(default)s)",
    )


def _add_maintenance(parser: argparse.ArgumentParser) -> None:
    compact = parser.add_argument_group("compact")
    add_compact_arguments(compact)
    expire = parser.add_argument_group("expire")
    expire.add_argument(
        "--older-than",
        type=Duration,
        metavar="TIME",
        help=f"younger snapshots stay (default: {OLDER_THAN}; of maintain what the Topic says)",
    )
    expire.add_argument(
        "--retain-last",
        type=int,
        default=RETAIN_LAST,
        metavar="N",
        help="so many of the newest snapshots stay, however old (default: %(default)s)",
    )
    expire.add_argument(
        "--pin",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="a snapshot that stays since a reader uses it; repeat for several (default: none)",
    )
    parser.add_argument_group("manifests").add_argument(
        "--min-manifests",
        type=int,
        default=MANIFESTS_MIN,
        metavar="N",
        help="join them when there are so many (default: %(default)s)",
    )
    _add_removing(parser)
    maintain = parser.add_argument_group("maintain")
    maintain.add_argument(
        "--skip",
        action="append",
        default=[],
        choices=STEPS,
        help="a step to leave out; repeat for several (default: none)",
    )
    maintain.add_argument(
        "--orphans-every",
        type=Duration,
        default=ORPHANS_EVERY,
        metavar="TIME",
        help="look for orphans this often, not at each run (default: %(default)s)",
    )
    maintain.add_argument(
        "--termination-log",
        type=Path,
        metavar="FILE",
        help="where the last message is left, at most 4 KiB (default: /dev/termination-log, where "
        "there is one)",
    )


def _add_removing(parser: argparse.ArgumentParser) -> None:
    """Declare how files and rows go."""
    orphans = parser.add_argument_group("orphans")
    orphans.add_argument(
        "--grace",
        type=Duration,
        default=GRACE,
        metavar="TIME",
        help="younger files stay (default: %(default)s)",
    )
    orphans.add_argument(
        "--settle",
        type=Duration,
        default=SETTLE,
        metavar="TIME",
        help="between the two looks before anything is removed (default: %(default)s)",
    )
    orphans.add_argument(
        "--delete",
        action="store_true",
        help="remove them, after a second look (default: only say which; maintain removes them)",
    )
    retention = parser.add_argument_group("retention")
    retention.add_argument(
        "--keep",
        type=Duration,
        metavar="TIME",
        help="rows younger than this stay (default: none; of maintain what the Topic says)",
    )
    retention.add_argument(
        "--cursor",
        action="append",
        default=[],
        metavar="SUBSCRIPTION:PARTITION=OFFSET",
        help="what a live subscription has not read is not removed (default: as the store of "
        "cursors says)",
    )
    parser.add_argument("--force", action="store_true", help=FORCE_HELP)


def add_compact_arguments(group: "argparse._ActionsContainer") -> None:
    """Declare what `tidewater compact` takes, too."""
    group.add_argument(
        "--target-size",
        type=ByteSize,
        metavar="SIZE",
        help="of the files that are made (default: what the table says, else 128Mi; of maintain "
        "what the Topic says)",
    )
    group.add_argument(
        "--min-files",
        type=int,
        default=FILES_MIN,
        metavar="N",
        help="a partition that closed of late needs so many small files, or enough bytes for a "
        "whole one (default: %(default)s)",
    )
    group.add_argument(
        "--lateness",
        type=Duration,
        default=LATENESS,
        metavar="TIME",
        help="a partition is closed this long after its end (default: %(default)s)",
    )
    group.add_argument(
        "--budget",
        type=Duration,
        default=BUDGET,
        metavar="TIME",
        help="no rewrite is begun after this long (default: %(default)s)",
    )
    group.add_argument(
        "--open",
        action="store_true",
        help="also the partition that is being written (default: closed ones alone)",
    )


def _add_deliveries(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("import and replay")
    _add_worker(group)
    group.add_argument(
        "--id",
        help="names the run: the same id never sends a row twice (default: made from what it does)",
    )
    group.add_argument(
        "--batch",
        type=int,
        default=1000,
        metavar="ROWS",
        help="rows of a request, at most (default: %(default)s)",
    )
    group.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="import: a path of files, or a table (default: none, it must be given)",
    )
    group.add_argument(
        "--format",
        choices=FORMATS,
        default="parquet",
        help="import: what is read (default: %(default)s)",
    )
    group.add_argument(
        "--key",
        metavar="COLUMN",
        help="import: the column that becomes the key (default: messages have none)",
    )
    group.add_argument(
        "--value",
        metavar="COLUMN",
        help="import: the column that becomes the value of a raw topic (default: all of them, as "
        "JSON)",
    )
    group.add_argument(
        "--to",
        metavar="NS/NAME",
        help="replay: the topic that gets the messages (default: none, it must be given)",
    )
    group.add_argument(
        "--where", metavar="SQL", help="replay: a condition on the table's columns (default: none)"
    )
    group.add_argument(
        "--begin",
        type=int,
        default=0,
        metavar="OFFSET",
        help="replay: of each partition, the first one (default: %(default)s)",
    )
    group.add_argument(
        "--end",
        type=int,
        metavar="OFFSET",
        help="replay: the one behind the last (default: where the table ends now)",
    )


def _add_worker(group: "argparse._ActionsContainer") -> None:
    """Declare the worker and who we are to it, by the client's names."""
    group.add_argument(
        "--url",
        default=os.environ.get("TIDEWATER_URL", "http://127.0.0.1:8080"),
        help="a worker (default: $TIDEWATER_URL or http://127.0.0.1:8080)",
    )
    group.add_argument(
        "--token",
        default=os.environ.get("TIDEWATER_TOKEN"),
        help="bearer token to send (default: $TIDEWATER_TOKEN; an argument is seen by others)",
    )
    group.add_argument(
        "--token-file",
        metavar="PATH",
        default=os.environ.get("TIDEWATER_TOKEN_FILE"),
        help="file that holds it, read again for each request (default: $TIDEWATER_TOKEN_FILE)",
    )
    group.add_argument(
        "--ca",
        metavar="PATH",
        default=os.environ.get("TIDEWATER_CA"),
        help="file of the CA that signed the worker's certificate (default: $TIDEWATER_CA)",
    )
