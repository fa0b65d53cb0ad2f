"""One Spark session that serves many topics, and a topic's table in it.

The only module that knows pyspark. A session costs half a minute and most of a gigabyte: jobs share
it. Whatever Spark raises becomes an error of ours, named by what to do next.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tidewater_core.clock import Clock, SystemClock
from tidewater_core.compaction import TIME_MAX_US, TIME_MIN_US
from tidewater_core.errors import (
    Corrupt,
    Invalid,
    NotFound,
    OutcomeUnknown,
    Retryable,
    TidewaterError,
)
from tidewater_core.names import COMMIT_ID, TW_TIME, TopicName
from tidewater_core.settings import CatalogSettings
from tidewater_pipeline.jars import find_jars
from tidewater_pipeline.java import choose_java
from tidewater_pipeline.metadata import state_of
from tidewater_pipeline.report import Progress
from tidewater_pipeline.settings import SparkSettings, catalog_settings_conf, spark_conf
from tidewater_pipeline.state import FileInfo, TableState, quoted
from tidewater_pipeline.syncing import sync_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

MESSAGE_CHARS_MAX: Final = 600
LOADS_MAX: Final = 3
"""Attempts to read the files of a snapshot before it expires."""
SPARK_GONE: Final = "SparkGone"
_UNKNOWN: Final = "CommitStateUnknownException"
_CONFLICT: Final = "CommitFailedException"
_REFUTED: Final = "ValidationException"
_EXPIRED: Final = "Cannot find snapshot with ID"
_REFUTED_BY_OTHERS: Final = (
    "conflicting",
    "Cannot commit",
    "Missing required files to delete",
    "Manifest is missing",
    "could not be found in the latest snapshot",
    "Cannot determine history between",
    "same number of active files",
)
"""What Iceberg says when another commit came between; all else that is not valid stays so."""
_NO_PLACE: Final = re.compile(
    r"UnsupportedFileSystemException|No FileSystem for scheme"
    r"|ClassNotFound\w+: (Class )?\S*FileSystem\b"
)
"""Hadoop's ways to say that it cannot read from such a place: its own classes are not ours."""
_DAMAGED: Final = (
    "ChecksumException",
    "is not a Parquet file",
    "ParquetDecodingException",
    "can not read class org.apache.iceberg.shaded.org.apache.parquet",
    "could not decompress",
)
_BAD_DATA: Final = (
    "MALFORMED_RECORD_IN_PARSING",
    "INVALID_JSON_RECORD_TYPE",
    "CSV header does not conform",
    "Number of column in CSV header",
    "CAST_INVALID_INPUT",
    "CANNOT_PARSE",
)
_TASK: Final = re.compile(r"tidewater_core\.errors\.(?!Retry|Outcome|Overloaded)\w+: (.*)")
"""An error of ours that a task has raised and no repetition changes, in the text of Spark's."""
_MISSING: Final = ("TABLE_OR_VIEW_NOT_FOUND", "NoSuchTableException", "SCHEMA_NOT_FOUND")
_REFUSED: Final = ("NotAuthorizedException", "ForbiddenException", "AccessDenied")
_TOO_SMALL: Final = ("java.lang.OutOfMemoryError", "Java heap space", "serialized results")
"""The last is what Spark says when tasks give the driver more than `spark.driver.maxResultSize`."""


class ConflictError(Retryable):
    """Another commit was first each time; nothing was changed."""


class SnapshotGoneError(Retryable):
    """The snapshot that was to be read has expired meanwhile: load the table again.

    No ConflictError: whoever was to read it, an audit or an import, has not done its work.
    """


@contextmanager
def named_errors(what: str) -> "Iterator[None]":
    """Turn what Spark and the JVM raise into our errors."""
    from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        text = str(error)
        said = text.partition("\tat ")[0]  # the rest is where in Spark it was raised
        short = f"{what}: {said.strip()[:MESSAGE_CHARS_MAX]}"
        raise _named(text, short, isinstance(error, AnalysisException)) from error
    except (Py4JError, ConnectionError) as error:
        short = f"{what}: the JVM is gone ({str(error)[:MESSAGE_CHARS_MAX]})"
        raise Retryable(SPARK_GONE, short) from error


def _named(text: str, short: str, analysis: bool) -> TidewaterError:
    """Name an error of Spark's by what to do next. Pure."""
    if any(name in text for name in _MISSING):
        return NotFound("TableMissing", short)
    if _UNKNOWN in text:
        return OutcomeUnknown("CommitOutcomeUnknown", short)
    if (task := _TASK.search(text)) is not None:
        return Invalid("TaskRefused", task[1][:MESSAGE_CHARS_MAX])
    if _CONFLICT in text:
        return ConflictError("CommitConflict", short)
    if _REFUTED in text:
        by_others = any(words in text for words in _REFUTED_BY_OTHERS)
        return ConflictError("CommitConflict", short) if by_others else Invalid("NotValid", short)
    if (unreadable := _unreadable(text, short)) is not None:
        return unreadable
    if any(name in text for name in _REFUSED):
        return Invalid("AccessRefused", short)
    if any(name in text for name in _TOO_SMALL):
        return Invalid("OutOfMemory", f"{short}: give the job more memory")
    if analysis:
        return Invalid("SparkRefused", short)
    return Retryable("SparkFailed", short)


def _unreadable(text: str, short: str) -> TidewaterError | None:
    """Name an error of reading; None: it is none. Pure."""
    if _EXPIRED in text:
        return SnapshotGoneError("SnapshotGone", short)
    if _NO_PLACE.search(text) is not None:
        return Invalid("UnsupportedSource", f"{short}: copy the files to where Spark can read them")
    if any(words in text for words in _DAMAGED):
        return Corrupt("FileDamaged", short)
    if any(name in text for name in _BAD_DATA):
        return Invalid("BadData", short)
    return None


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
        choose_java(os.environ)
        import pyspark
        from pyspark.sql import SparkSession

        # Tasks of import and replay are Python: the same one, with the same packages.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        logging.getLogger("py4j").setLevel(logging.ERROR)
        cache = self.cache or default_cache(os.environ)
        jars = find_jars(Path(pyspark.__file__).parent / "jars", cache, self.progress.say)
        self.progress.say(f"starting Spark ({self.spark_settings.master})")
        builder = SparkSession.builder
        conf = spark_conf(self.spark_settings, jars.classpath)
        if jars.packages:
            conf["spark.jars.packages"] = ",".join(jars.packages)
        for key, value in conf.items():
            builder = builder.config(key, value)
        with named_errors("start Spark"):
            self._spark = builder.getOrCreate()
            self._spark.sparkContext.setLogLevel("ERROR")
        self._open(self.catalog)
        self.start_seconds = time.monotonic() - began
        return self

    def _open(self, catalog: CatalogSettings) -> None:
        """Tell the running JVM of a catalog: its keys never stand on a command line."""
        conf = catalog_settings_conf(catalog) | dict(self.spark_settings.conf)
        for key, value in conf.items():
            if key.startswith("spark.sql.catalog."):
                self.spark.conf.set(key, value)

    def stop(self) -> None:
        """End the JVM's work."""
        if self._spark is not None:
            with suppress(Retryable), named_errors("stop"):  # a JVM that died is at its end
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
    def parallelism(self) -> int:
        """Tasks that run at a time."""
        with named_errors("start Spark"):
            return int(self.spark.sparkContext.defaultParallelism)

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

    def sync(self, state: TableState) -> None:
        """Bring everything on a local disk to rest before anything that it replaced is removed.

        Whoever rewrote the table may not have synced; object stores need no such thing.
        """
        if state.is_local:
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
        return self._state(self.java())

    def _state(self, table: Any) -> TableState:
        with named_errors(f"read {self.name}"):
            parser = self.session.jvm.org.apache.iceberg.TableMetadataParser
            metadata = parser.toJson(table.operations().current())
            current = table.currentSnapshot()
            manifests = 0 if current is None else int(current.allManifests(table.io()).size())
        return state_of(self.identifier, json.loads(metadata), manifests)

    def files(self, state: TableState) -> list[FileInfo]:
        """List the data files of the state's snapshot, from its manifests.

        Of a snapshot that has expired Spark says nothing rather than that it is gone.
        """
        # A table that never had partitions has no such column either.
        group = "CAST(partition AS STRING)" if state.is_partitioned else "''"
        # The bounds as they are stored: to make all columns readable takes longer than to plan.
        rows = self._metadata(
            state,
            "files",
            f"file_path, {group} AS grp, file_size_in_bytes AS nbytes, "
            f"record_count AS n, lower_bounds[{state.time_id}] AS low, "
            f"upper_bounds[{state.time_id}] AS high",
            "content = 0",
        )
        if not rows and state.size.files:
            raise SnapshotGoneError("SnapshotGone", f"{self.name} at {state.snapshot_id}")
        return [
            FileInfo(
                row["file_path"], row["grp"], row["nbytes"], row["n"],
                stored_long(row["low"], TIME_MIN_US), stored_long(row["high"], TIME_MAX_US),
            )
            for row in rows
        ]  # fmt: skip

    def load_files(self) -> tuple[TableState, list[FileInfo]]:
        """Load the table and list its files; again, if the snapshot expires in between."""
        for _attempt in range(LOADS_MAX):
            state = self.load()
            with suppress(SnapshotGoneError):
                return state, self.files(state)
        raise ConflictError("SnapshotGone", f"{self.name}: snapshots expire as they are read")

    def settle(self, since: TableState) -> TableState:
        """Bring what Spark has committed since to the disk: it does not sync its files.

        Object stores need no such thing. The writer has synced its own. Returns what is there now.
        """
        table = self.java()
        if since.is_local:
            self._sync_since(table, since)
        return self._state(table)

    def _sync_since(self, table: Any, since: TableState) -> None:
        known = {each.snapshot_id for each in since.snapshots}
        paths: list[str] = []
        with named_errors(f"read {self.name}"):
            snapshot = table.currentSnapshot()
            while snapshot is not None and int(snapshot.snapshotId()) not in known:
                if not snapshot.summary().containsKey(COMMIT_ID):
                    paths += _written(table, snapshot)
                parent = snapshot.parentId()
                snapshot = None if parent is None else table.snapshot(parent)
            paths.append(str(table.operations().current().metadataFileLocation()))
        sync_files(paths)

    def rows(self, state: TableState) -> "DataFrame":
        """Return the rows of the state's snapshot."""
        assert state.snapshot_id is not None
        return self.session.frame(
            f"SELECT * FROM {self.full_name} VERSION AS OF {state.snapshot_id}"  # noqa: S608 - quoted
        )

    def set_properties(self, properties: Mapping[str, str], removed: Collection[str] = ()) -> None:
        """Set and remove properties; never the frontier, which is its owner's alone."""
        if not properties and not removed:
            return
        update = self.java().updateProperties()
        with named_errors(f"set properties of {self.name}"):
            for key, value in properties.items():
                update.set(key, value)
            for key in removed:
                update.remove(key)
            update.commit()

    def delete_files(self, paths: Collection[str], before_us: int) -> None:
        """Take whole data files out of the table in one commit, if all are still in it.

        They are looked for in the newest snapshot: the one that they were chosen from may have
        expired. `before_us` narrows the search: each has rows with an earlier `tw_time`. They are
        handed over as Iceberg's own objects: a path alone is looked for and not always found.
        """
        table = self.java()
        delete = table.newDelete()
        found = 0
        with named_errors(f"delete files of {self.name}"):
            earlier = self.session.jvm.org.apache.iceberg.expressions.Expressions.lessThan(
                TW_TIME, before_us
            )
            tasks = table.newScan().filter(earlier).planFiles().iterator()
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


def stored_long(data: bytes | None, unknown: int) -> int:
    """Read a bound of a long or time column as manifests store it; `unknown` if there is none."""
    return int.from_bytes(data, "little", signed=True) if data else unknown


def _written(table: Any, snapshot: Any) -> list[str]:
    """Name the files that a snapshot has added: data, manifests, their list."""
    paths = [str(snapshot.manifestListLocation())]
    manifests = snapshot.allManifests(table.io()).iterator()
    while manifests.hasNext():
        manifest = manifests.next()
        if manifest.snapshotId() == snapshot.snapshotId():
            paths.append(str(manifest.path()))
    added = snapshot.addedDataFiles(table.io()).iterator()
    while added.hasNext():
        paths.append(str(added.next().location()))
    return paths
