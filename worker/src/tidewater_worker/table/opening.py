"""Finding or making a topic's table, and making sure that it fits."""

import logging
from dataclasses import dataclass
from pathlib import Path

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Conflict, NotFound, Retryable, TidewaterError
from tidewater_core.names import TopicName
from tidewater_worker.ports import TopicAssignment
from tidewater_worker.table import layout
from tidewater_worker.table.catalog import TableCatalog, commit_error
from tidewater_worker.table.marker import Marker, read_marker, write_marker
from tidewater_worker.table.view import TableView, view_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TopicTable:
    """A topic and where its table is to be found."""

    topic: TopicName
    uuid: str
    spec: TopicSpec
    directory: Path
    """The topic's directory in the log: its marker is there."""

    @property
    def identifier(self) -> tuple[str, ...]:
        """The table's name in the catalog."""
        return layout.table_identifier(self.topic, self.spec)


def topic_table(assignment: TopicAssignment) -> TopicTable:
    """Read what an assignment says of the topic and its table."""
    first = next(iter(assignment.partitions.values()))
    return TopicTable(
        topic=TopicName.parse(assignment.topic),
        uuid=assignment.uuid,
        spec=TopicSpec.from_json(assignment.spec),
        directory=Path(first.directory).parent,
    )


def bound_table(where: TopicTable) -> str | None:
    """Return the uuid of the table that this topic is bound to, if it is."""
    marker = read_marker(where.directory)
    return marker.table_uuid if marker is not None and marker.topic_uuid == where.uuid else None


def bind_table(where: TopicTable, view: TableView) -> None:
    """Remember the topic's table."""
    marker = Marker(where.uuid, view.table_uuid)
    if read_marker(where.directory) != marker:
        write_marker(where.directory, marker)


def load_fitting(catalog: TableCatalog, where: TopicTable) -> TableView:
    """Load the table and check that it can take the topic's rows; add columns that it lacks."""
    view = view_of(catalog.load(where.identifier))
    fit = layout.check_layout(view.metadata, where.spec)
    if isinstance(fit, layout.Unfit):
        raise Conflict(fit.reason, fit.message)
    if isinstance(fit, layout.Grow):
        _grow(view, where, fit.columns)
        view = view_of(catalog.load(where.identifier))
        if not isinstance(layout.check_layout(view.metadata, where.spec), layout.Fits):
            raise Retryable("SchemaChanging", "the table's schema is being changed")
    return view


def _grow(view: TableView, where: TopicTable, columns: tuple[str, ...]) -> None:
    """Add columns that the topic's schema has gained. A refusal is met by loading again."""
    name = ".".join(where.identifier)
    log.info("table gains columns table=%s columns=%s", name, ",".join(columns))
    try:
        with view.table.update_schema() as update:
            update.union_by_name(layout.iceberg_schema(where.spec))
    except Exception as error:
        named = commit_error(name, error)
        raise Retryable(named.reason, named.message) from error


def open_table(
    catalog: TableCatalog, where: TopicTable, epochs: dict[int, int], log_start: int | None
) -> TableView:
    """Load the topic's table; make it if the topic never had one.

    `log_start` is the highest first offset among the topic's logs: one above 0 means that rows
    have left the log for a table, so a missing table is a lost one.
    """
    try:
        return load_fitting(catalog, where)
    except NotFound as missing:
        name = ".".join(where.identifier)
        bound = bound_table(where)
        if bound is not None:
            raise NotFound(
                "TableMissing", f"{name} ({bound}) was dropped; it is not made again"
            ) from missing
        if log_start:
            raise NotFound(
                "TableMissing",
                f"{name} does not exist, but the log begins at offset {log_start}: "
                "older rows were in a table that is gone",
            ) from missing
    _create(catalog, where, epochs)
    return load_fitting(catalog, where)


def _create(catalog: TableCatalog, where: TopicTable, epochs: dict[int, int]) -> None:
    schema = layout.iceberg_schema(where.spec)
    try:
        catalog.create(
            where.identifier,
            schema,
            layout.partition_spec(where.spec, schema),
            layout.sort_order(schema),
            layout.creation_properties(where.topic, where.uuid, where.spec, epochs),
        )
    except TidewaterError as error:
        if error.reason != "TableExists":
            raise
    else:
        log.info("table made table=%s topic=%s", ".".join(where.identifier), where.topic)
