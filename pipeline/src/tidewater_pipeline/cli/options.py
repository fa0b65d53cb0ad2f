"""The command line of `tidewater-pipeline`: arguments, and from arguments to options. Pure."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tidewater_core.errors import Invalid
from tidewater_core.names import TopicName
from tidewater_core.settings import CatalogSettings, embedded
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.executors import MASTER, ExecutorOptions, executor_conf, spark_memory
from tidewater_pipeline.jobs.compact import CompactOptions
from tidewater_pipeline.jobs.ingest import ImportOptions
from tidewater_pipeline.jobs.replay import ReplayOptions
from tidewater_pipeline.jobs.retention import RetentionOptions
from tidewater_pipeline.places import Places, StoreSettings, read_places
from tidewater_pipeline.settings import SparkSettings
from tidewater_pipeline.subscribers import Cursor
from tidewater_pipeline.upkeep import STEPS

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
    expire.add_argument("--retain-last", type=int, default=1, metavar="N")
    expire.add_argument(
        "--pin", type=int, action="append", default=[], metavar="ID", help="a reader uses it"
    )
    orphans = parser.add_argument_group("orphans")
    orphans.add_argument("--grace", type=Duration, default=Duration("3d"), help="younger ones stay")
    orphans.add_argument("--settle", type=Duration, default=Duration("2m"))
    orphans.add_argument("--delete", action="store_true", help="remove them, after a second look")
    parser.add_argument_group("manifests").add_argument(
        "--min-manifests", type=int, default=10, metavar="N"
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
    retention.add_argument("--force", action="store_true", help="remove it all the same")
    maintain = parser.add_argument_group("maintain")
    maintain.add_argument("--skip", action="append", default=[], choices=STEPS, help="leave out")
    maintain.add_argument(
        "--orphans-every", type=Duration, default=Duration("6h"), help="not at each run"
    )
    maintain.add_argument(
        "--termination-log", type=Path, help="where the container leaves its last message"
    )


def add_compact_arguments(group: "argparse._ActionsContainer") -> None:
    """Declare what `tidewater compact` takes, too."""
    group.add_argument("--target-size", type=ByteSize, help="of the files (the table says)")
    group.add_argument("--min-files", type=int, default=5, metavar="N")
    group.add_argument("--lateness", type=Duration, default=Duration("10m"))
    group.add_argument("--open", action="store_true", help="the partition in use, too")


def _add_deliveries(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("import and replay")
    group.add_argument("--url", default="http://127.0.0.1:8080", help="a worker (%(default)s)")
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
    if not subscription or not partition.isdigit() or not offset.isdigit():
        raise Invalid(
            "InvalidArgument", f"--cursor {text!r} must be written SUBSCRIPTION:PARTITION=OFFSET"
        )
    return Cursor(subscription, int(partition), int(offset))


def places(args: argparse.Namespace, environment: Mapping[str, str]) -> Places:
    """Find the catalog and the coordination store that the arguments name."""
    base: Places | None = None
    if args.settings is not None:
        try:
            text = args.settings.read_text()
        except OSError as error:
            raise Invalid("InvalidSettings", f"{args.settings}: {error.strerror}") from error
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
    args: argparse.Namespace, environment: Mapping[str, str], template: str = ""
) -> SparkSettings:
    """Return how Spark runs; `template` is the pod template of executors, if there are any."""
    conf = parse_pairs(args.conf, "--conf")
    # `1Gi` as Kubernetes writes it, `1g` as Spark does.
    memory = spark_memory(ByteSize(args.memory)) if args.memory.endswith("i") else args.memory
    if not args.executors:
        return SparkSettings(master=args.master, driver_memory=memory, conf=conf)
    chosen = ExecutorOptions(
        count=args.executors, cores=args.executor_cores, memory=args.executor_memory
    )
    master = args.master if args.master.startswith("k8s:") else MASTER
    pods = executor_conf(chosen, environment, template)
    return SparkSettings(master=master, driver_memory=memory, conf=pods | conf)


def compact_options(args: argparse.Namespace) -> CompactOptions:
    """Return the options of compact."""
    return CompactOptions(
        target=args.target_size,
        files_min=args.min_files,
        lateness=args.lateness,
        include_open=args.open,
    )


def retention_options(args: argparse.Namespace) -> RetentionOptions:
    """Return the options of retention."""
    if args.keep is None:
        raise Invalid("InvalidArgument", "retention needs --keep, such as --keep 30d")
    cursors = tuple(parse_cursor(text) for text in args.cursor)
    return RetentionOptions(keep=args.keep, cursors=cursors, force=args.force)


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
        run_id=args.id,
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
        run_id=args.id,
    )
