"""import: sends the rows of files, or of another table, to a topic.

Every file is one stream, read by one task from its beginning: what was sent is the same on every
run, so a run that died goes on where it stopped, and a second run of the same id stores nothing.
The rows get their offsets from the worker that owns the topic: the frontier has one writer.

A table that is read goes on changing: compaction moves rows to other files. So the first run writes
down which snapshot it reads, in a property of the topic's own table, and every later run of that id
reads the same one; when it is through it says so, and nothing is ever sent again.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from tidewater_core.errors import Corrupt, Invalid
from tidewater_pipeline.deliver import (
    Batch,
    Sent,
    Target,
    cut_in_order,
    finish,
    message_of,
    run_id_of,
    send_all,
)
from tidewater_pipeline.jobs.replay import totals
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import Session, TopicTable, named_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PIN_PREFIX: Final = "tidewater.import."
FORMATS: Final = ("parquet", "json", "csv", "table")
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


def plan_import(options: ImportOptions, topic: str, columns: list[str]) -> Target:
    """Check the options against the source's columns and name the run."""
    if options.format not in FORMATS:
        raise Invalid("InvalidFormat", f"{options.format!r} is not one of {', '.join(FORMATS)}")
    for column in filter(None, (options.key, options.value)):
        if column not in columns:
            raise Invalid("NoColumn", f"the source has no column {column!r}: {', '.join(columns)}")
    run_id = options.run_id or run_id_of(
        "import", topic, options.source, options.key, options.value, options.batch_rows
    )
    return Target(options.url, topic, options.batch_rows, f"import-{run_id}")


@dataclass(frozen=True, slots=True)
class Pinned:
    """The version of a table that an import reads, as it is written down."""

    source: str
    snapshot: int
    done: bool = False

    def to_json(self) -> str:
        """Write the property."""
        return json.dumps(asdict(self), separators=(",", ":"))


def pin_property(run_id: str) -> str:
    """Key of the table property that remembers an import from a table."""
    return f"{PIN_PREFIX}{run_id}"


def plan_pin(stored: str | None, source: str, current: int) -> Pinned:
    """Go on with the version that the first run has read; begin with the current one."""
    if stored is None:
        return Pinned(source, current)
    try:
        found = json.loads(stored)
        known = Pinned(found["source"], int(found["snapshot"]), bool(found["done"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt("ImportDamaged", f"the record of an import is {stored[:80]!r}") from error
    if known.source != source:
        raise Invalid("IdTaken", f"this id has imported {known.source}: choose another --id")
    return known


def run(session: Session, table: TopicTable, options: ImportOptions) -> Report:
    """Send every file, one task each."""
    report = Report("import", str(table.topic))
    for setting in ("maxPartitionBytes", "openCostInBytes"):
        session.spark.conf.set(f"spark.sql.files.{setting}", WHOLE_FILE)
    pinned: Pinned | None = None
    with named_errors(f"read {options.source}"):
        source = _source(session, options, None)
        target = plan_import(options, str(table.topic), source.columns)
        if options.format == "table":
            pinned = _pin(session, table, options, target.run_id)
            if pinned.done:
                report.outcome, report.message = Outcome.NOTHING, "done by an earlier run"
                report.details = totals([], target)
                return report
            source = _source(session, options, pinned.snapshot)
        rows = source.selectExpr(*_expressions(options, source.columns))
        if options.format == "table":
            rows = rows.repartition("stream").sortWithinPartitions("stream", "pos")
        session.progress.say(f"{table.topic}: importing {options.source}")

        def task(part: Iterable[Any]) -> Iterator[Sent]:
            yield send_all(target, batches(part, target.batch_rows))

        done = finish(target, rows.rdd.mapPartitions(task).collect())
    if pinned is not None:
        finished = replace(pinned, done=True)
        table.set_properties({pin_property(target.run_id): finished.to_json()})
    report.details = totals(done, target)
    return report


def _pin(session: Session, table: TopicTable, options: ImportOptions, run_id: str) -> Pinned:
    """Find or write down the snapshot to read."""
    head = session.sql(f"SELECT snapshot_id AS id FROM {options.source}.refs WHERE name = 'main'")  # noqa: S608
    if not head:
        raise Invalid("EmptySource", f"{options.source} has no snapshot: nothing to import")
    stored = table.load().properties.get(pin_property(run_id))
    pinned = plan_pin(stored, options.source, int(head[0]["id"]))
    if stored is None:
        table.set_properties({pin_property(run_id): pinned.to_json()})
    return pinned


def _source(session: Session, options: ImportOptions, snapshot: int | None) -> "DataFrame":
    reader = session.spark.read
    if options.format == "table":
        if snapshot is not None:
            reader = reader.option("versionAsOf", str(snapshot))
        return reader.table(options.source)
    if options.format == "csv":
        reader = reader.option("header", "true").option("inferSchema", "true")
    return reader.format(options.format).load(options.source)


def _expressions(options: ImportOptions, columns: list[str]) -> list[str]:
    stream, position = (
        ("_file", "_pos") if options.format == "table" else ("_metadata.file_path", "0L")
    )
    own = ", ".join(f"`{name}`" for name in columns if not name.startswith("tw_"))
    value = f"CAST(`{options.value}` AS BINARY)" if options.value else f"to_json(struct({own}))"
    key = (
        f"CAST(CAST(`{options.key}` AS STRING) AS BINARY)"
        if options.key
        else "CAST(NULL AS BINARY)"
    )
    return [f"{stream} AS stream", f"{position} AS pos", f"{key} AS k", f"{value} AS v"]


def batches(rows: Iterable[Any], batch_rows: int) -> Iterator[Batch]:
    """Cut the rows of a task: a stream after the other, each from its beginning."""
    for stream, group in groupby(rows, key=lambda row: row["stream"]):
        yield from cut_in_order(stream, map(_message, group), batch_rows)


def _message(row: Any) -> dict[str, Any]:
    value = row["v"]
    return message_of(row["k"], {}, json.loads(value) if isinstance(value, str) else value)
