"""One Spark session that serves many topics, and a topic's table in it.

The only module that knows pyspark. A session costs half a minute and most of a gigabyte: jobs share
it. Whatever Spark raises becomes an error of ours, named by what to do next.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tidewater_core.clock import Clock, SystemClock
from tidewater_core.errors import Invalid, NotFound, OutcomeUnknown, Retryable
from tidewater_core.names import TW_TIME, TopicName
from tidewater_core.settings import CatalogSettings
from tidewater_pipeline.jars import find_jars
from tidewater_pipeline.java import find_java
from tidewater_pipeline.report import Progress
from tidewater_pipeline.settings import SparkSettings, spark_conf
from tidewater_pipeline.state import FileInfo, Size, SnapshotInfo, TableState, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

MESSAGE_CHARS_MAX: Final = 600
_UNKNOWN: Final = "CommitStateUnknownException"
_CONFLICTS: Final = ("CommitFailedException", "ValidationException")
_MISSING: Final = ("TABLE_OR_VIEW_NOT_FOUND", "NoSuchTableException", "SCHEMA_NOT_FOUND")


class ConflictError(Retryable):
    """Another commit was first each time; nothing was changed."""


@contextmanager
def named_errors(what: str) -> "Iterator[None]":
    """Turn what Spark and the JVM raise into our errors."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        text = str(error)
        said = text.partition("\tat ")[0]  # the rest is where in Spark it was raised
        short = f"{what}: {said.strip()[:MESSAGE_CHARS_MAX]}"
        if any(name in text for name in _MISSING):
            raise NotFound("TableMissing", short) from error
        if _UNKNOWN in text:
            raise OutcomeUnknown("CommitOutcomeUnknown", short) from error
        if any(name in text for name in _CONFLICTS):
            raise ConflictError("CommitConflict", short) from error
        raise Retryable("SparkFailed", short) from error


@dataclass
class Session:
    """Spark with the catalog that holds the topics' tables."""

    catalog: CatalogSettings
    spark_settings: SparkSettings = field(default_factory=SparkSettings)
    progress: Progress = field(default_factory=Progress)
    clock: Clock = field(default_factory=SystemClock)
    sleep: Callable[[float], None] = time.sleep
    cache: Path | None = None
    """Where fetched jars are kept; None: the user's cache directory."""
    start_seconds: float = 0.0
    _spark: "SparkSession | None" = None

    def start(self) -> Self:
        """Start the JVM; it takes 10 seconds and more."""
        began = time.monotonic()
        java = find_java(os.environ)
        if Path(java).is_absolute():
            os.environ["JAVA_HOME"] = str(Path(java).parents[1])
        import pyspark
        from pyspark.sql import SparkSession

        # Tasks of import and replay are Python: the same one, with the same packages.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        logging.getLogger("py4j").setLevel(logging.ERROR)
        cache = self.cache or default_cache(os.environ)
        jars = find_jars(Path(pyspark.__file__).parent / "jars", cache, self.progress.say)
        self.progress.say(f"starting Spark ({self.spark_settings.master})")
        builder = SparkSession.builder
        conf = spark_conf(self.catalog, self.spark_settings, jars.classpath)
        if jars.packages:
            conf["spark.jars.packages"] = ",".join(jars.packages)
        for key, value in conf.items():
            builder = builder.config(key, value)
        self._spark = builder.getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")
        self.start_seconds = time.monotonic() - began
        return self

    def with_catalog(self, catalog: CatalogSettings) -> "Session":
        """Return a session on another catalog in the same JVM; its name must be new there."""
        for key, value in spark_conf(catalog, self.spark_settings, ()).items():
            if key.startswith("spark.sql.catalog."):
                self.spark.conf.set(key, value)
        return replace(self, catalog=catalog)

    def stop(self) -> None:
        """End the JVM's work."""
        if self._spark is not None:
            self._spark.stop()
            self._spark = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def spark(self) -> "SparkSession":
        """The session itself."""
        assert self._spark is not None, "the session was not started"
        return self._spark

    @property
    def jvm(self) -> Any:
        """Java's classes, for what SQL cannot say."""
        return self.spark._jvm

    def sql(self, text: str) -> list[dict[str, Any]]:
        """Run a statement and return its rows, which must be few."""
        with named_errors(text.split("(", 1)[0]):
            return [row.asDict() for row in self.spark.sql(text).collect()]

    def frame(self, text: str) -> "DataFrame":
        """Prepare a query."""
        with named_errors("query"):
            return self.spark.sql(text)

    def procedure(self, name: str) -> str:
        """Return the full name of one of Iceberg's procedures."""
        return f"`{self.catalog.name}`.system.{name}"

    def table(self, topic: TopicName, name: str | None = None) -> "TopicTable":
        """Return a topic's table; `name` where the topic names another."""
        identifier = tuple(name.split(".")) if name else topic.table_identifier
        if len(identifier) < 2:
            raise Invalid("InvalidTable", f"table {name!r} must be written namespace.name")
        return TopicTable(self, topic, identifier)

    def settle(self, state: TableState) -> None:
        """Bring what Spark wrote to a local disk before anything it replaced is removed.

        Spark does not sync its files; object stores need no such thing.
        """
        if state.location.startswith(("file:", "/")):
            os.sync()


def default_cache(environment: Mapping[str, str]) -> Path:
    """Return where fetched jars are kept between runs."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tidewater"


@dataclass(frozen=True)
class TopicTable:
    """A topic's table: reads its metadata as values, changes its properties."""

    session: Session
    topic: TopicName
    identifier: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name within the catalog, for procedures."""
        return quoted(self.identifier)

    @property
    def full_name(self) -> str:
        """The name for SQL."""
        return quoted((self.session.catalog.name, *self.identifier))

    def java(self) -> Any:
        """Load Iceberg's own table object, as it is now."""
        with named_errors(f"load {self.name}"):
            return self.session.jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(
                self.session.spark._jsparkSession, self.full_name
            )

    def load(self) -> TableState:
        """Read one version of the metadata."""
        table = self.java()
        with named_errors(f"read {self.name}"):
            current = table.currentSnapshot()
            return TableState(
                identifier=self.identifier,
                location=str(table.location()),
                snapshot_id=None if current is None else int(current.snapshotId()),
                properties={str(k): str(v) for k, v in dict(table.properties()).items()},
                time_unit=_time_unit(table),
                snapshots=tuple(
                    SnapshotInfo(int(s.snapshotId()), int(s.timestampMillis()))
                    for s in table.snapshots()
                ),
                refs={str(k): int(v.snapshotId()) for k, v in dict(table.refs()).items()},
            )

    def files(self, state: TableState) -> list[FileInfo]:
        """List the data files of the state's snapshot, from its manifests."""
        rows = self._metadata(
            state,
            "files",
            "file_path, CAST(partition AS STRING) AS grp, file_size_in_bytes AS nbytes, "
            "record_count AS n, unix_micros(readable_metrics.tw_time.lower_bound) AS low, "
            "unix_micros(readable_metrics.tw_time.upper_bound) AS high",
            "content = 0",
        )
        return [
            FileInfo(r["file_path"], r["grp"], r["nbytes"], r["n"], r["low"] or 0, r["high"] or 0)
            for r in rows
        ]

    def size(self, state: TableState) -> Size:
        """Count what a report compares."""
        (files,) = self._metadata(
            state,
            "files",
            "count(*) AS files, coalesce(sum(file_size_in_bytes), 0) AS nbytes, "
            "coalesce(sum(record_count), 0) AS n",
        ) or [{"files": 0, "nbytes": 0, "n": 0}]
        (manifests,) = self._metadata(state, "manifests", "count(*) AS n") or [{"n": 0}]
        return Size(
            files=files["files"],
            nbytes=files["nbytes"],
            rows=files["n"],
            snapshots=len(state.snapshots),
            manifests=manifests["n"],
        )

    def rows(self, state: TableState) -> "DataFrame":
        """Return the rows of the state's snapshot."""
        assert state.snapshot_id is not None
        return self.session.frame(
            f"SELECT * FROM {self.full_name} VERSION AS OF {state.snapshot_id}"  # noqa: S608 - quoted
        )

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """Set properties; never the frontier, which is its owner's alone."""
        if not properties:
            return
        update = self.java().updateProperties()
        with named_errors(f"set properties of {self.name}"):
            for key, value in properties.items():
                update.set(key, value)
            update.commit()

    def delete_files(self, state: TableState, paths: Collection[str], before_us: int) -> None:
        """Take whole data files out of the table in one commit, if all are still in it.

        `before_us` narrows the search: each file has rows with an earlier `tw_time`. The files are
        handed over as Iceberg's own objects: a path alone is looked for and not always found.
        """
        table = self.java()
        delete = table.newDelete()
        found = 0
        with named_errors(f"delete files of {self.name}"):
            earlier = self.session.jvm.org.apache.iceberg.expressions.Expressions.lessThan(
                TW_TIME, before_us
            )
            scan = table.newScan().useSnapshot(state.snapshot_id).filter(earlier)
            tasks = scan.planFiles().iterator()
            while tasks.hasNext():
                file = tasks.next().file()
                if str(file.location()) in paths:
                    delete.deleteFile(file)
                    found += 1
            if found != len(paths):
                raise ConflictError("FilesChanged", f"{found} of {len(paths)} files were found")
            delete.validateFilesExist()
            delete.commit()

    def _metadata(
        self, state: TableState, kind: str, columns: str, where: str = "true"
    ) -> list[dict[str, Any]]:
        if state.snapshot_id is None:
            return []
        return self.session.sql(
            f"SELECT {columns} FROM {self.full_name}.{kind} VERSION AS OF {state.snapshot_id} "  # noqa: S608
            f"WHERE {where}"
        )


def _time_unit(table: Any) -> str | None:
    """Name the transform of `tw_time` by which the table is partitioned."""
    schema = table.schema()
    for each in table.spec().fields():
        transform = str(each.transform())
        if schema.findColumnName(each.sourceId()) == TW_TIME and transform in _UNITS:
            return transform
    return None


_UNITS: Final = frozenset({"hour", "day", "month", "year"})
