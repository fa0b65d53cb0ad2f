"""import: sends the rows of files, or of another table, to a topic.

Every file is one stream, read by one task from its beginning: what was sent is the same on every
run, so a run that died goes on where it stopped, and a second run of the same id stores nothing.
The rows get their offsets from the worker that owns the topic: the frontier has one writer.

A worker remembers so many producers and no more, and the driver holds the last batch of each task.
So files are sent some dozens at a time, in the order of their names, and how many are through is
written down in a property of the topic's table; with it stands how many partitions the topic had
when the first run began, which is what rows go by as long as the import goes on.

A table that is read goes on changing: compaction moves rows to other files. So the first run writes
down which snapshot it reads, in the same property, and every later run of that id reads the same
one; when it is through it says so, and nothing is ever sent again.

With them stands what tells the import's options from others. Cut into other requests, or with other
keys, the rows would be others to the worker, and be stored again: such a run is refused.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_type_hints

from tidewater_core.errors import Corrupt, Invalid
from tidewater_core.names import IMPORT_PREFIX
from tidewater_pipeline.deliver import (
    NOBODY,
    TASKS_AT_ONCE,
    Access,
    Batch,
    Sent,
    Target,
    cut_in_order,
    finish,
    message_of,
    route,
    run_id_of,
    send_all,
    topic_info,
)
from tidewater_pipeline.jobs.replay import id_of, json_expression, totals
from tidewater_pipeline.records import Hold, Record, unheld
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import Session, TopicTable, named_errors
from tidewater_pipeline.state import quoted, sql_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

FORMATS: Final = ("parquet", "json", "csv", "table")
READING: Final[dict[str, dict[str, str]]] = {
    # What cannot be read as it is ends the import: without FAILFAST it would be null.
    "json": {"mode": "FAILFAST"},
    "csv": {
        "mode": "FAILFAST",
        "header": "true",
        # A cell is text, or what the topic's column is: a guess makes 7 of 007.
        "inferSchema": "false",
        # Columns go by their names in each file; by their places, another order would mix them up.
        "enforceSchema": "false",
        "multiLine": "true",
        # As everybody writes a quote in a cell (RFC 4180): twice. Spark's own way is a backslash.
        "escape": '"',
    },
}
"""How text files are read: whatever is in them arrives, or the import fails."""
FILES_AT_ONCE: Final = TASKS_AT_ONCE
"""Files, each a task and a producer, until it is written down that they are through: far less than
a partition remembers (`Limits.producers_max`)."""
TABLE_STREAMS: Final = 1_000
"""Streams of a table; its files are dealt out to them."""
WHOLE_FILE: Final = str(1024**4)
"""A file is never split: its rows are one stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """What a person can choose."""

    source: str
    format: str = "parquet"
    url: str = ""
    key: str | None = None
    value: str | None = None
    """The column that becomes the payload; None: all columns, as JSON or the topic's own."""
    batch_rows: int = 1000
    run_id: str | None = None
    access: Access = NOBODY


def plan_import(
    options: ImportOptions, topic: str, columns: list[str], *, typed: bool = False
) -> Target:
    """Check the options against the source's columns and name the run."""
    if options.format not in FORMATS:
        raise Invalid("InvalidFormat", f"{options.format!r} is not one of {', '.join(FORMATS)}")
    for column in filter(None, (options.key, options.value)):
        if column not in columns:
            raise Invalid("NoColumn", f"the source has no column {column!r}: {', '.join(columns)}")
    run_id = options.run_id or run_id_of("import", topic, what_of(options))
    return Target(options.url, topic, options.batch_rows, f"import-{run_id}", options.access, typed)


def what_of(options: ImportOptions) -> str:
    """Return what tells an import from others: with anything else its requests would be others."""
    return run_id_of(options.source, options.format, options.key, options.value, options.batch_rows)


@dataclass(frozen=True, slots=True)
class Pinned:
    """The version of a table that an import reads, as it is written down."""

    source: str
    what: str
    """What tells its options from others."""
    snapshot: int
    partitions: int
    """Of the topic, when the import began."""
    done: bool = False

    def to_json(self) -> str:
        """Write the property."""
        return json.dumps(asdict(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Through:
    """How many files of an import are through, in the order of their names, and which."""

    source: str
    what: str
    """What tells its options from others."""
    partitions: int
    """Of the topic, when the import began."""
    files: int = 0
    digest: str = ""

    def to_json(self) -> str:
        """Write the property."""
        return json.dumps(asdict(self), separators=(",", ":"))


Known = TypeVar("Known", Pinned, Through)
"""What an import writes down when it begins, and keeps to when it goes on."""


def digest_of(files: Iterable[str]) -> str:
    """Return what tells one list of files from another."""
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:32]


def plan_through(stored: str | None, options: ImportOptions, partitions: int) -> Through:
    """Go on where earlier runs have come to; begin with no file."""
    if stored is None:
        return Through(options.source, what_of(options), partitions, digest=digest_of(()))
    return _known(Through, stored, options)


def _known(kind: type[Known], stored: str, options: ImportOptions) -> Known:
    """Read what an earlier run wrote down; refuse an id that another import has."""
    try:
        found = json.loads(stored)
        made = {name: read(found[name]) for name, read in get_type_hints(kind).items()}
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt("ImportDamaged", f"the record of an import is {stored[:80]!r}") from error
    known = kind(**made)
    if known.source != options.source:
        raise Invalid("IdTaken", f"this id has imported {known.source}: choose another --id")
    if known.what != what_of(options):
        raise Invalid(
            "IdTaken",
            "this id has imported this source with another --format, --key, --value or --batch, "
            "and its rows would be stored again: give those, or another --id",
        )
    return known


def plan_files(known: Through, files: list[str]) -> list[tuple[int, Through]]:
    """Return the steps that are left: their first file, and what is written down after each.

    `files` are in order.
    """
    if digest_of(files[: known.files]) != known.digest:
        raise Invalid(
            "FilesChanged",
            f"the first {known.files} files of {known.source} are not those that this id has "
            "imported: import what is new alone, with another --id",
        )
    return [
        (first, replace(known, files=end, digest=digest_of(files[:end])))
        for first in range(known.files, len(files), FILES_AT_ONCE)
        for end in (min(first + FILES_AT_ONCE, len(files)),)
    ]


def pin_property(target: Target) -> str:
    """Key of the table property that remembers an import."""
    return f"{IMPORT_PREFIX}{id_of(target)}"


def plan_pin(stored: str | None, options: ImportOptions, current: int, partitions: int) -> Pinned:
    """Go on with the version that the first run has read; begin with the current one."""
    if stored is None:
        return Pinned(options.source, what_of(options), current, partitions)
    return _known(Pinned, stored, options)


def run(
    session: Session,
    table: TopicTable,
    options: ImportOptions,
    hold: Hold = unheld,
) -> Report:
    """Send every row that no earlier run of this id has sent; one run of an id at a time."""
    topic = str(table.topic)
    report = Report("import", topic, before=table.load().size)
    for setting in ("maxPartitionBytes", "openCostInBytes"):
        session.spark.conf.set(f"spark.sql.files.{setting}", WHOLE_FILE)
    info = topic_info(options.url, topic, options.access)
    with named_errors(f"read {options.source}"):
        source = _source(session, options, None)
        target = plan_import(options, topic, source.columns, typed=info.typed)
        target = replace(target, partitions=info.partitions)
        with hold(f"import/{topic}/{id_of(target)}"):
            if options.format == "table":
                done = _from_table(session, table, options, target, source)
            else:
                if options.format in READING:
                    schema = _schema(session, table, source, options, info.typed)
                    source = _source(session, options, None, schema)
                done = _from_files(session, table, options, target, source)
    if done is None:
        report.outcome, report.message = Outcome.NOTHING, "done by an earlier run"
    report.after = table.load().size  # the worker's next commit has the rest
    report.details = totals(done or [], target)
    return report


def _from_table(
    session: Session,
    table: TopicTable,
    options: ImportOptions,
    target: Target,
    source: "DataFrame",
) -> list[Sent] | None:
    """Send one version of a table; None if that was done before."""
    source.selectExpr(*expressions(options, source.columns))  # what is refused is not written down
    record = Record(table, pin_property(target))
    current = _current(session, options)
    new = plan_pin(record.text, options, current, target.partitions)
    pinned = plan_pin(record.begin(new.to_json()), options, current, target.partitions)
    if pinned.done:
        return None
    source = _source(session, options, pinned.snapshot)
    rows = source.selectExpr(*expressions(options, source.columns))
    session.progress.say(f"{table.topic}: importing {options.source}")
    streams = rows.repartition(TASKS_AT_ONCE, "stream")
    target = replace(target, partitions=pinned.partitions)
    done = _send(target, streams.sortWithinPartitions("stream", "file", "pos"))
    record.write(replace(pinned, done=True).to_json())
    return done


def _from_files(
    session: Session,
    table: TopicTable,
    options: ImportOptions,
    target: Target,
    source: "DataFrame",
) -> list[Sent] | None:
    """Send files, one task each, some dozens at a time; None if all are through already."""
    # Spark writes the paths of local files in two ways.
    files = sorted(re.sub("^file:/+", "file:/", path) for path in source.inputFiles())
    rows = source.selectExpr(*expressions(options, source.columns))  # refused: not written down
    record = Record(table, pin_property(target))
    new = plan_through(record.text, options, target.partitions)
    known = plan_through(record.begin(new.to_json()), options, target.partitions)
    target = replace(target, partitions=known.partitions)
    steps = plan_files(known, files)
    done: list[Sent] = []
    for first, step in steps:
        low, high = files[first], files[step.files - 1]
        session.progress.say(f"{table.topic}: importing {options.source}, up to {high}")
        part = rows.where(f"stream BETWEEN {sql_text(low)} AND {sql_text(high)}")
        done += _send(target, part)
        record.write(step.to_json())
    return done if steps else None


def _send(target: Target, rows: "DataFrame") -> list[Sent]:
    def task(part: Iterable[Any]) -> Iterator[Sent]:
        yield send_all(target, batches(part, target))

    return finish(target, rows.rdd.mapPartitions(task).collect())


def _current(session: Session, options: ImportOptions) -> int:
    """Find the snapshot that a first run reads."""
    head = session.sql(f"SELECT snapshot_id AS id FROM {options.source}.refs WHERE name = 'main'")  # noqa: S608
    if not head:
        raise Invalid("EmptySource", f"{options.source} has no snapshot: nothing to import")
    return int(head[0]["id"])


def _schema(
    session: Session, table: TopicTable, names: "DataFrame", options: ImportOptions, typed: bool
) -> "StructType":
    """Give columns of text files the topic's types; the others stay what they are, cell by cell.

    A type guessed from all of JSON's values made floats of decimals, and text of numbers that had
    text beside them; `prefersDecimal` makes numbers of text.
    """
    from pyspark.sql.types import StringType, StructField, StructType, VariantType

    as_it_is = VariantType() if options.format == "json" else StringType()
    fields = session.spark.table(table.full_name).schema if typed else ()
    own = {field.name: field for field in fields}
    return StructType([own.get(name, StructField(name, as_it_is)) for name in names.columns])


def _source(
    session: Session,
    options: ImportOptions,
    snapshot: int | None,
    schema: "StructType | None" = None,
) -> "DataFrame":
    reader = session.spark.read
    if options.format == "table":
        if snapshot is not None:
            reader = reader.option("versionAsOf", str(snapshot))
        return reader.table(options.source)
    if schema is not None:
        reader = reader.schema(schema)
    reader = reader.options(**READING.get(options.format, {}))
    return reader.format(options.format).load(options.source)


def expressions(options: ImportOptions, columns: list[str]) -> list[str]:
    """Return the SQL of what a task needs of each row: its stream, place, key and payload."""
    stream, file, position = "_metadata.file_path", "''", "0L"
    if options.format == "table":
        stream = f"CAST(pmod(xxhash64(_file), {TABLE_STREAMS}) AS STRING)"
        file, position = "_file", "_pos"
    own = [name for name in columns if not name.startswith("tw_")]
    value = json_expression(own)
    if options.value:
        value = quoted([options.value])
        # What JSON holds is of no type that has bytes.
        value = f"CAST({value} AS STRING)" if options.format == "json" else value
        value = f"CAST({value} AS BINARY)"
    key = (
        f"CAST(CAST({quoted([options.key])} AS STRING) AS BINARY)"
        if options.key
        else "CAST(NULL AS BINARY)"
    )
    return [
        *(f"{stream} AS stream", f"{file} AS file", f"{position} AS pos"),
        *(f"{key} AS k", f"{value} AS v"),
    ]


def batches(rows: Iterable[Any], target: Target) -> Iterator[Batch]:
    """Cut the rows of a task: a stream after the other, each from its beginning."""
    for stream, group in groupby(rows, key=lambda row: row["stream"]):
        to = route(target, stream)
        messages = (
            (to(row["k"]), message_of(row["k"], {}, row["v"], target.typed)) for row in group
        )
        yield from cut_in_order(stream, messages, target.batch_rows)
