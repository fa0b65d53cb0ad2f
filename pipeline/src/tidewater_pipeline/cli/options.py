"""From the arguments of `tidewater-pipeline` to the options of its jobs. Pure."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tidewater_core.errors import Invalid
from tidewater_core.names import TopicName
from tidewater_core.settings import CatalogSettings, embedded
from tidewater_core.units import ByteSize
from tidewater_pipeline.cli.arguments import JOBS, MAINTAIN
from tidewater_pipeline.deliver import Access
from tidewater_pipeline.executors import MASTER, ExecutorOptions, executor_conf, spark_memory
from tidewater_pipeline.jobs.compact import CompactOptions
from tidewater_pipeline.jobs.ingest import ImportOptions
from tidewater_pipeline.jobs.orphans import OrphanOptions, checked
from tidewater_pipeline.jobs.replay import ReplayOptions
from tidewater_pipeline.jobs.retention import RetentionOptions
from tidewater_pipeline.places import Places, StoreSettings, read_places
from tidewater_pipeline.settings import SparkSettings
from tidewater_pipeline.subscribers import Cursor

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
