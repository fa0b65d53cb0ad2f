"""The command line of `tidewater-pipeline`: arguments, and from arguments to options. Pure."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tidewater_core.compaction import FILES_MIN
from tidewater_core.errors import Invalid
from tidewater_core.names import TopicName
from tidewater_core.settings import CatalogSettings, embedded
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.deliver import Access
from tidewater_pipeline.executors import MASTER, ExecutorOptions, executor_conf, spark_memory
from tidewater_pipeline.jobs.compact import BUDGET, LATENESS, CompactOptions
from tidewater_pipeline.jobs.expire import RETAIN_LAST
from tidewater_pipeline.jobs.ingest import ImportOptions
from tidewater_pipeline.jobs.manifests import MANIFESTS_MIN
from tidewater_pipeline.jobs.orphans import GRACE, SETTLE, OrphanOptions, checked
from tidewater_pipeline.jobs.replay import ReplayOptions
from tidewater_pipeline.jobs.retention import RetentionOptions
from tidewater_pipeline.places import Places, StoreSettings, read_places
from tidewater_pipeline.settings import SparkSettings
from tidewater_pipeline.subscribers import Cursor
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


NUMBERS_MIN: Final = {
    "batch": 1,
    "begin": 0,
    "executor_cores": 1,
    "executors": 0,
    "min_files": 1,
    "min_manifests": 1,
    "retain_last": 0,
}
"""With a batch of no rows an import ended well and had sent nothing."""


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
    parser.add_argument("--table", help="the topic's table, if it is not NS.NAME")
    add_session_arguments(parser)
    _add_executors(parser)
    _add_maintenance(parser)
    _add_deliveries(parser)
    return parser


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which catalog, and how Spark runs."""
    where = parser.add_argument_group("catalog")
    where.add_argument("--data", type=Path, help="directory of `tidewater dev`")
    where.add_argument(
        "--settings", type=Path, help="a worker's settings file; ${NAME} in it is a variable"
    )
    where.add_argument(
        "--catalog",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a property of the catalog: type, uri, warehouse, …",
    )
    where.add_argument(
        "--coordination",
        metavar="PLACE",
        help="the store of cursors, if no other is named: a file, or etcd's addresses",
    )
    where.add_argument("--coordination-prefix", metavar="PREFIX", help="of etcd's keys (tidewater)")
    how = parser.add_argument_group("spark")
    how.add_argument("--master", default="local[*]", help="where tasks run (%(default)s)")
    how.add_argument("--memory", default="1g", help="heap of the driver (%(default)s)")
    how.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE")
    how.add_argument(
        "--report",
        "--json",
        type=Path,
        metavar="FILE",
        help="write the JSON report here, not to stdout",
    )
    how.add_argument("--quiet", action="store_true", help="no lines of progress")


def _add_executors(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("spark in a pod")
    how.add_argument(
        "--executors",
        type=int,
        default=0,
        metavar="N",
        help="executor pods, at most; 0: all work in this process (%(default)s)",
    )
    how.add_argument("--executor-cores", type=int, default=1, metavar="N")
    how.add_argument("--executor-memory", type=ByteSize, default=ByteSize("1Gi"))


def _add_maintenance(parser: argparse.ArgumentParser) -> None:
    compact = parser.add_argument_group("compact")
    add_compact_arguments(compact)
    expire = parser.add_argument_group("expire")
    expire.add_argument("--older-than", type=Duration, help="1d, or what the Topic says")
    expire.add_argument("--retain-last", type=int, default=RETAIN_LAST, metavar="N")
    expire.add_argument(
        "--pin", type=int, action="append", default=[], metavar="ID", help="a reader uses it"
    )
    orphans = parser.add_argument_group("orphans")
    orphans.add_argument("--grace", type=Duration, default=GRACE, help="younger ones stay")
    orphans.add_argument("--settle", type=Duration, default=SETTLE)
    orphans.add_argument("--delete", action="store_true", help="remove them, after a second look")
    parser.add_argument_group("manifests").add_argument(
        "--min-manifests", type=int, default=MANIFESTS_MIN, metavar="N"
    )
    retention = parser.add_argument_group("retention")
    retention.add_argument("--keep", type=Duration, help="rows younger than this stay")
    retention.add_argument(
        "--cursor",
        action="append",
        default=[],
        metavar="SUBSCRIPTION:PARTITION=OFFSET",
        help="what a live subscription has not read is not removed",
    )
    retention.add_argument(
        "--force",
        action="store_true",
        help="remove it all the same; also on a topic that the store lacks",
    )
    maintain = parser.add_argument_group("maintain")
    maintain.add_argument("--skip", action="append", default=[], choices=STEPS, help="leave out")
    maintain.add_argument(
        "--orphans-every", type=Duration, default=ORPHANS_EVERY, help="not at each run"
    )
    maintain.add_argument(
        "--termination-log", type=Path, help="where the container leaves its last message"
    )


def add_compact_arguments(group: "argparse._ActionsContainer") -> None:
    """Declare what `tidewater compact` takes, too."""
    group.add_argument("--target-size", type=ByteSize, help="of the files (the table says)")
    group.add_argument("--min-files", type=int, default=FILES_MIN, metavar="N")
    group.add_argument("--lateness", type=Duration, default=LATENESS)
    group.add_argument("--budget", type=Duration, default=BUDGET, help="for compact, in all")
    group.add_argument("--open", action="store_true", help="the partition in use, too")


def _add_deliveries(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("import and replay")
    _add_worker(group)
    group.add_argument("--id", help="names the run: the same id never sends a row twice")
    group.add_argument("--batch", type=int, default=1000, metavar="ROWS", help="of a request")
    group.add_argument("--from", dest="source", help="import: path of files, or a table")
    group.add_argument("--format", choices=("parquet", "json", "csv", "table"), default="parquet")
    group.add_argument("--key", help="import: the column that becomes the key")
    group.add_argument("--value", help="import: the column that becomes the value (a raw topic)")
    group.add_argument("--to", metavar="NS/NAME", help="replay: the topic that gets the messages")
    group.add_argument("--where", help="replay: a SQL condition on the table's columns")
    group.add_argument("--begin", type=int, default=0, metavar="OFFSET")
    group.add_argument("--end", type=int, metavar="OFFSET")


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


def access(args: argparse.Namespace) -> Access:
    """Return who we are; a token on the command line wins over a file that a variable names."""
    by_variable = args.token == os.environ.get("TIDEWATER_TOKEN")
    file = args.token_file if by_variable else None
    return Access.of(None if file else args.token, file, args.ca)


def parse_jobs(text: str) -> list[str]:
    """Read the list of jobs."""
    jobs = text.split(",")
    unknown = [job for job in jobs if job not in JOBS]
    if unknown:
        raise Invalid("UnknownJob", f"no job {unknown[0]!r} (there are: {', '.join(JOBS)})")
    if MAINTAIN in jobs and len(jobs) > 1:
        raise Invalid("InvalidArgument", f"{MAINTAIN} is the whole upkeep: give it alone")
    return jobs


def parse_pairs(texts: list[str], option: str) -> dict[str, str]:
    """Read KEY=VALUE arguments."""
    pairs = [text.partition("=") for text in texts]
    for key, equals, _value in pairs:
        if not key or not equals:
            raise Invalid("InvalidArgument", f"{option} {key!r} must be written KEY=VALUE")
    return {key: value for key, _, value in pairs}


def parse_cursor(text: str) -> Cursor:
    """Read SUBSCRIPTION:PARTITION=OFFSET."""
    subscription, _, rest = text.rpartition(":")
    partition, _, offset = rest.partition("=")
    if not subscription or not partition.isdecimal() or not offset.isdecimal():
        raise Invalid(
            "InvalidArgument", f"--cursor {text!r} must be written SUBSCRIPTION:PARTITION=OFFSET"
        )
    return Cursor(subscription, int(partition), int(offset))


def places(args: argparse.Namespace, environment: Mapping[str, str]) -> Places:
    """Find the catalog and the coordination store that the arguments name."""
    base: Places | None = None
    if args.settings is not None:
        try:
            text = args.settings.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise Invalid("InvalidSettings", f"{args.settings}: {said}") from error
        base = read_places(text, environment)
    elif args.data is not None:
        if not (args.data / "catalog.db").exists():
            raise Invalid("NoData", f"{args.data} has no catalog.db: not the data of a worker")
        whole = embedded(args.data)
        known = Path(whole.coordination).exists()
        store = StoreSettings(place=whole.coordination) if known else None
        base = Places(catalog=whole.catalog, store=store)
    given = parse_pairs(args.catalog, "--catalog")
    name = given.pop("name", base.catalog.name if base else "tidewater")
    properties = {**(base.catalog.properties if base else {}), **given}
    if not properties:
        raise Invalid("NoCatalog", "name the catalog: --data, --settings or --catalog KEY=VALUE")
    store = base.store if base else None
    if args.coordination is not None:
        store = StoreSettings(place=args.coordination)
    if args.coordination_prefix is not None:
        if store is None:
            raise Invalid("InvalidArgument", "--coordination-prefix needs --coordination")
        store = replace(store, prefix=args.coordination_prefix)
    return Places(catalog=CatalogSettings(name=name, properties=properties), store=store)


def spark_settings(
    args: argparse.Namespace,
    environment: Mapping[str, str],
    template: str = "",
    pod: Mapping[str, Any] | None = None,
) -> SparkSettings:
    """Return how Spark runs; `template` is the pod template of executors, `pod` the driver's."""
    conf = parse_pairs(args.conf, "--conf")
    memory = _memory(args.memory)
    if not args.executors:
        return SparkSettings(master=args.master, driver_memory=memory, conf=conf)
    chosen = ExecutorOptions(
        count=args.executors, cores=args.executor_cores, memory=args.executor_memory
    )
    master = args.master if args.master.startswith("k8s:") else MASTER
    pods = executor_conf(chosen, environment, template, pod)
    return SparkSettings(master=master, driver_memory=memory, conf=pods | conf)


def _memory(text: str) -> str:
    """Read `1Gi` as Kubernetes writes it, `1g` as Spark does."""
    if not text.endswith("i"):
        return text
    try:
        return spark_memory(ByteSize(text))
    except ValueError as error:
        raise Invalid("InvalidArgument", f"--memory: {error}") from error


def check_report(args: argparse.Namespace) -> None:
    """Refuse a report that could not be written when everything else is done."""
    place: Path | None = args.report
    if place is None:
        return
    if place.is_dir() or not os.access(place if place.exists() else place.parent, os.W_OK):
        raise Invalid("InvalidArgument", f"--report {place} cannot be written")


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse a number that makes no sense, of whatever job."""
    for name, least in NUMBERS_MIN.items():
        number = getattr(args, name)
        if number < least:
            option = name.replace("_", "-")
            raise Invalid("InvalidArgument", f"--{option} {number} must be at least {least}")


def check_store(jobs: list[str], args: argparse.Namespace, store: StoreSettings | None) -> None:
    """Refuse to remove what readers may need while nobody can say who they are."""
    removing: list[str] = []
    if "retention" in jobs and not args.cursor:
        removing.append("retention")
    if "expire" in jobs:
        removing.append("expire")
    drops_rows = args.keep is not None and "retention" not in args.skip
    if MAINTAIN in jobs and (drops_rows or "expire" not in args.skip):
        removing.append(MAINTAIN)
    if removing and store is None and not args.force:
        raise Invalid(
            "NoStore",
            f"{', '.join(removing)}: without a coordination store nobody can say who still reads; "
            "name it (--coordination, or in the settings), or --force"
            + (", or say it by --cursor" if "retention" in removing else ""),
        )


def compact_options(args: argparse.Namespace) -> CompactOptions:
    """Return the options of compact."""
    return CompactOptions(
        target=args.target_size,
        files_min=args.min_files,
        lateness=args.lateness,
        include_open=args.open,
        budget=args.budget,
    )


def orphan_options(args: argparse.Namespace) -> OrphanOptions:
    """Return the options of orphans."""
    chosen = OrphanOptions(
        grace=args.grace, settle=args.settle, delete=args.delete, force=args.force
    )
    return checked(chosen, args.force)


def retention_options(args: argparse.Namespace) -> RetentionOptions:
    """Return the options of retention."""
    if args.keep is None:
        raise Invalid("InvalidArgument", "retention needs --keep, such as --keep 30d")
    cursors = tuple(parse_cursor(text) for text in args.cursor)
    return RetentionOptions(keep=args.keep, cursors=cursors, force=args.force)


def _run_id(text: str | None) -> str | None:
    """Check the name of a run, which is sent with each of its requests."""
    if text is None or (text and text.isascii() and text.isprintable()):
        return text
    raise Invalid("InvalidArgument", f"--id {text!r} must be printable ASCII, and not empty")


def import_options(args: argparse.Namespace) -> ImportOptions:
    """Return the options of import."""
    if args.source is None:
        raise Invalid("InvalidArgument", "import needs --from, a path of files or a table")
    return ImportOptions(
        source=args.source,
        format=args.format,
        url=args.url,
        key=args.key,
        value=args.value,
        batch_rows=args.batch,
        run_id=_run_id(args.id),
        access=access(args),
    )


def replay_options(args: argparse.Namespace) -> ReplayOptions:
    """Return the options of replay."""
    if args.to is None:
        raise Invalid("InvalidArgument", "replay needs --to, the topic that gets the messages")
    return ReplayOptions(
        to=TopicName.parse(args.to),
        url=args.url,
        begin=args.begin,
        end=args.end,
        where=args.where,
        batch_rows=args.batch,
        run_id=_run_id(args.id),
        access=access(args),
    )
