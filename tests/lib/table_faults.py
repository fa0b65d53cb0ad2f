"""A catalog that fails by a script, around a real one."""

import sqlite3
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, UnauthorizedError
from pyiceberg.table import CommitTableResponse, Table

from tidewater_core.settings import WorkerSettings
from tidewater_worker.table.files import FileSet, plan_files
from tidewater_worker.table.row_groups import conform


class Fault(StrEnum):
    """What becomes of one commit call."""

    OK = "ok"
    REFUSED = "refused"
    """Not carried out, and says so."""
    LOST = "no answer, lost"
    LANDED = "no answer, landed"
    LATE = "no answer, lands later"
    """Not carried out now; carried out just before a later call, if its requirements hold then."""
    TOKEN = "expired token"
    FORGETS = "forgets"
    """Carried out and acknowledged; gone at the next call."""
    COMPACTED = "compacted"
    """Another engine rewrites all files first, in another order."""
    INTERLOPED = "interloped"
    """Another process that believes to own the same partitions is first."""
    UNREACHABLE = "unreachable"
    """This commit and the next load fail."""
    DROPPED = "dropped"
    REPLACED = "replaced"


_REFUSALS: dict[Fault, Exception] = {
    Fault.REFUSED: CommitFailedException("somebody was first"),
    Fault.TOKEN: UnauthorizedError("token expired"),
}


class FaultyCatalog:
    """Passes calls on to an SqlCatalog and fails commits by its script; then all goes well."""

    def __init__(self, settings: WorkerSettings) -> None:
        properties = dict(settings.catalog.properties)
        properties["py-io-impl"] = "pyiceberg.io.pyarrow.PyArrowFileIO"
        self.real = SqlCatalog(settings.catalog.name, **properties)
        self._database = Path(properties["uri"].removeprefix("sqlite:///"))
        self.script: list[Fault] = []
        self.gone = False
        """The table was dropped or replaced by the script."""
        self.commits = 0
        self.met: set[Fault] = set()
        """Faults that came to pass, of those that let the commit through."""
        self.interloper: Callable[[], None] | None = None
        self._late: list[Callable[[], object]] = []
        self._forget = False
        self._unreachable = False

    def load_table(self, identifier: tuple[str, ...]) -> Table:
        self._before()
        if self._unreachable:
            self._unreachable = False
            raise ConnectionError("connection reset by peer")
        return self.real.load_table(identifier)

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        self._before()
        fault = self.script.pop(0) if self.script else Fault.OK

        def apply() -> CommitTableResponse:
            self.commits += 1
            return self.real.commit_table(table, requirements, updates)

        if fault in _REFUSALS:
            raise _REFUSALS[fault]
        if fault is Fault.LATE:
            self._late.append(apply)
        if fault is Fault.UNREACHABLE:
            self._unreachable = True
        if fault in (Fault.LOST, Fault.LATE, Fault.UNREACHABLE):
            raise TimeoutError("no answer")
        self._prepare(fault, table)
        self.met.add(fault)
        answer = apply()
        if fault is Fault.LANDED:
            raise TimeoutError("no answer")
        self._forget = fault is Fault.FORGETS
        return answer

    def _prepare(self, fault: Fault, table: Table) -> None:
        """Do what comes before the commit reaches the catalog."""
        if fault is Fault.COMPACTED:
            compact(self.real.load_table(table.name()))
        if fault is Fault.INTERLOPED and self.interloper is not None:
            interloper, self.interloper = self.interloper, None
            interloper()
            self.interloper = interloper
        if fault in (Fault.DROPPED, Fault.REPLACED):
            self.gone = True
            self.real.drop_table(table.name())
        if fault is Fault.REPLACED:
            self.real.create_table(table.name(), table.schema())

    def _before(self) -> None:
        """Do what earlier faults left for later."""
        late, self._late = self._late, []
        for apply in late:
            try:
                apply()
            except (CommitFailedException, NoSuchTableError, ValueError):
                continue
        if self._forget:
            self._forget = False
            with sqlite3.connect(self._database, timeout=30) as connection:
                connection.execute(
                    "UPDATE iceberg_tables SET metadata_location = previous_metadata_location"
                    " WHERE previous_metadata_location IS NOT NULL"
                )
            connection.close()

    def create_namespace_if_not_exists(self, namespace: tuple[str, ...]) -> None:
        self.real.create_namespace_if_not_exists(namespace)

    def create_table(self, *args: Any, **kwargs: Any) -> Table:
        return self.real.create_table(*args, **kwargs)

    def close(self) -> None:
        self.real.close()


def compact(table: Table) -> None:
    """Rewrite a table as another engine might: fewer files, rows in another order."""
    rows = table.scan().to_arrow()
    if rows.num_rows:
        rewrite(table, rows.sort_by([("tw_offset", "descending"), ("tw_partition", "ascending")]))


def rewrite(table: Table, rows: pa.Table) -> None:
    """Replace all rows of a table."""
    plan = plan_files(table)
    files = FileSet(plan, uuid4(), 1 << 30)
    files.add(-1, conform(rows, {name: name for name in rows.column_names}, plan.shape.arrow), 1)
    with table.transaction() as change, change.update_snapshot().overwrite() as overwrite:
        for task in table.scan().plan_files():
            overwrite.delete_data_file(task.file)
        for file in files.finish():
            overwrite.append_data_file(file)
