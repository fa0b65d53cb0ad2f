"""The catalog: made from settings, called with its errors named by what to do next.

    certainly not done            Retryable (CommitRefused when another commit was first)
    perhaps done                  OutcomeUnknown
    table or namespace not there  NotFound
    settings are wrong            Invalid

At commit time an error counts as "certainly not done" only if the catalog said so in a way that
cannot be a lost answer; everything else is OutcomeUnknown, and the table is read back.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pyiceberg import exceptions as ice
from pyiceberg.catalog import Catalog
from pyiceberg.catalog import load_catalog as load_pyiceberg_catalog
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import TableRequirement, TableUpdate

from tidewater_core.errors import Invalid, NotFound, OutcomeUnknown, Retryable, TidewaterError
from tidewater_core.settings import CatalogSettings

log = logging.getLogger(__name__)

Identifier = tuple[str, ...]
_T = TypeVar("_T")

DURABLE_IO: Final = "tidewater_worker.table.local_io.DurableFileIO"
LAKE_IO: Final = "tidewater_worker.table.lake_io.LakeFileIO"
MESSAGE_CHARS_MAX: Final = 500


class CommitRefused(Retryable):
    """The catalog did not carry out the commit: the table is not as we required."""


_REFUSED: Final = (ice.CommitFailedException, ice.NoSuchTableError)
_REJECTED: Final = (
    ice.BadRequestError,
    ice.ForbiddenError,
    ice.UnauthorizedError,
    ice.AuthorizationExpiredError,
    ice.TooManyRequestsError,
    ice.OAuthError,
)
_NOT_CONNECTED: Final = frozenset(
    {"ConnectTimeout", "NewConnectionError", "ConnectTimeoutError", "EndpointConnectionError"}
)
_MISSING: Final = (ice.NoSuchTableError, ice.NoSuchNamespaceError, ice.NoSuchIdentifierError)


class TableCatalog:
    """What the table process asks of a catalog; every error is a TidewaterError."""

    def __init__(
        self,
        catalog: Catalog,
        guard: AbstractContextManager[Any] | None = None,
        *,
        purges: bool = False,
    ) -> None:
        self._catalog = catalog
        self._guard = guard or nullcontext()
        self._purges = purges
        """The server removes the files of a dropped table itself."""

    def load(self, identifier: Identifier) -> Table:
        """Load a table; NotFound if there is none."""
        return self._ask(f"load {'.'.join(identifier)}", self._catalog.load_table, identifier)

    def create(
        self,
        identifier: Identifier,
        schema: Schema,
        spec: PartitionSpec,
        order: SortOrder,
        properties: dict[str, str],
    ) -> Table:
        """Make a table, and its namespace if need be; Retryable if one is there already."""
        try:
            with self._guard:
                self._catalog.create_namespace_if_not_exists(identifier[:-1])
        except Exception as error:  # noqa: BLE001  (it may be there, and not ours to make)
            log.debug("making namespace %s failed: %s", identifier[:-1], _text(error))
        return self._ask(
            f"make table {'.'.join(identifier)}",
            lambda: self._catalog.create_table(
                identifier,
                schema,
                partition_spec=spec,
                sort_order=order,
                properties=properties,
            ),
        )

    def commit(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        """Send one commit, once: the caller reads back and decides before it tries again."""
        name = ".".join(table.name())
        try:
            with self._guard:
                return self._catalog.commit_table(table, requirements, updates)
        except Exception as error:
            raise commit_error(name, error) from error

    def drop(self, identifier: Identifier) -> None:
        """Drop a table; NotFound if there is none."""
        drop = self._catalog.purge_table if self._purges else self._catalog.drop_table
        self._ask(f"drop table {'.'.join(identifier)}", drop, identifier)

    def close(self) -> None:
        """Let go of connections."""
        self._catalog.close()

    def _ask(self, what: str, call: Callable[..., _T], *args: Any) -> _T:
        try:
            with self._guard:
                return call(*args)
        except Exception as error:
            raise read_error(what, error) from error


def commit_error(name: str, error: Exception) -> TidewaterError:
    """Name an error of a commit call by what to do next."""
    if isinstance(error, TidewaterError):
        return error
    if isinstance(error, _REFUSED):
        return CommitRefused("CommitRefused", f"{name}: {_text(error)}")
    if isinstance(error, _REJECTED) or _aws_says_no(error):
        return Retryable("CatalogRejected", f"{name}: {_text(error)}")
    if _never_sent(error):
        return Retryable("CatalogUnreachable", f"{name}: {_text(error)}")
    return OutcomeUnknown("CommitOutcomeUnknown", f"{name}: {_text(error)}")


def read_error(what: str, error: Exception) -> TidewaterError:
    """Name an error of any other call."""
    if isinstance(error, TidewaterError):
        return error
    if isinstance(error, _MISSING):
        return NotFound("TableMissing", f"{what}: {_text(error)}")
    if isinstance(error, ice.TableAlreadyExistsError):
        return Retryable("TableExists", f"{what}: {_text(error)}")
    if isinstance(error, _REJECTED) or _aws_says_no(error):
        return Retryable("CatalogRejected", f"{what}: {_text(error)}")
    return Retryable("CatalogUnreachable", f"{what}: {_text(error)}")


def _aws_says_no(error: Exception) -> bool:
    """Say if AWS answered that it did not do it: no right, too many requests, no such thing."""
    answer = getattr(error, "response", None)
    if not isinstance(answer, dict):
        return False
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return 400 <= int(status) < 500


def _never_sent(error: BaseException) -> bool:
    """Say if the connection was never made, so that nothing can have been done."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return False
        if type(seen).__name__ in _NOT_CONNECTED:
            return True
        reason = getattr(seen, "reason", None)
        nested = seen.args[0] if seen.args and isinstance(seen.args[0], BaseException) else None
        seen = reason if isinstance(reason, BaseException) else nested
    return False


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:MESSAGE_CHARS_MAX]


def open_catalog(settings: CatalogSettings) -> TableCatalog:
    """Make the catalog that the settings describe; it may call the catalog server."""
    properties = dict(settings.properties)
    kind = properties.get("type", "").lower() or _infer_type(properties)
    properties["type"] = kind
    properties.setdefault("py-io-impl", _file_io(properties))
    try:
        if kind == "rest":
            from tidewater_worker.table.rest import PatientRestCatalog

            rest = {key: value for key, value in properties.items() if key != "type"}
            return TableCatalog(PatientRestCatalog(settings.name, **rest), purges=True)
        if kind == "sql":
            from tidewater_worker.table.sql import open_sql

            return TableCatalog(open_sql(settings.name, properties))
        if kind == "glue":
            from tidewater_worker.table.glue import open_glue

            return TableCatalog(open_glue(settings.name, properties))
        if kind == "in-memory":
            from tidewater_worker.table.sql import open_in_memory

            return TableCatalog(open_in_memory(settings.name, properties), threading.RLock())
        return TableCatalog(load_pyiceberg_catalog(settings.name, **properties))
    except (ice.NotInstalledError, ImportError) as error:
        raise Invalid("CatalogNotInstalled", _text(error)) from error
    except ValidationError as error:
        # An answer that is no catalog's, a proxy's for one: a ValueError, but not of the settings.
        raise read_error(f"open catalog {settings.name}", error) from error
    except (ValueError, KeyError, TypeError, ice.NoSuchPropertyException) as error:
        raise Invalid("InvalidCatalog", f"catalog {settings.name}: {_text(error)}") from error
    except Exception as error:
        raise read_error(f"open catalog {settings.name}", error) from error


def _infer_type(properties: dict[str, str]) -> str:
    uri = properties.get("uri", "")
    if uri.startswith("http"):
        return "rest"
    if uri.startswith(("sqlite", "postgresql")):
        return "sql"
    raise Invalid("InvalidCatalog", "the catalog needs a `type`: rest, sql, glue or in-memory")


def _file_io(properties: dict[str, str]) -> str:
    """Choose the FileIO: durable on a local disk, pyarrow's for every object store."""
    warehouse = properties.get("warehouse", "file:")
    local = warehouse.startswith(("file:", "/"))
    return DURABLE_IO if local else LAKE_IO
