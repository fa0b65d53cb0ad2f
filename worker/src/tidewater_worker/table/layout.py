"""What a topic's table looks like: schema, partitioning, order, properties; and whether one fits.

Pure: it builds and compares values of pyiceberg and calls no catalog.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    YearTransform,
)
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from tidewater_core import names
from tidewater_core.crd.columns import ColumnType
from tidewater_core.crd.columns import Transform as TransformText
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.names import TopicName
from tidewater_worker.table.frontier import Frontier

FORMAT_VERSION: Final = 2
ROW_GROUP_BYTES_MAX: Final = 8 * 1024 * 1024
"""Input bytes of a row group: what a history reader holds at once."""
METADATA_VERSIONS_MAX: Final = 20
"""Old metadata files kept beside the current one; each commit deletes the oldest."""

_PRIMITIVES: Final[dict[str, IcebergType]] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "date": DateType(),
    "time": TimeType(),
    "timestamp": TimestampType(),
    "timestamptz": TimestamptzType(),
    "string": StringType(),
    "uuid": UUIDType(),
    "binary": BinaryType(),
}


def table_identifier(topic: TopicName, spec: TopicSpec) -> tuple[str, ...]:
    """Name the topic's table."""
    if spec.table.name is not None:
        return tuple(spec.table.name.split("."))
    return topic.table_identifier


def iceberg_schema(spec: TopicSpec) -> Schema:
    """Return the schema of a topic's table. The catalog may give the columns other ids."""
    ids = itertools.count(1)
    fields = [
        NestedField(
            next(ids), names.TW_PARTITION, IntegerType(), required=True, doc="Topic partition"
        ),
        NestedField(
            next(ids),
            names.TW_OFFSET,
            LongType(),
            required=True,
            doc="Position in the partition, without gaps",
        ),
        NestedField(next(ids), names.TW_TIME, TimestamptzType(), required=True, doc="Publish time"),
        NestedField(next(ids), names.TW_KEY, BinaryType(), required=False, doc="Message key"),
    ]
    headers = NestedField(
        next(ids),
        names.TW_HEADERS,
        MapType(
            key_id=next(ids),
            key_type=StringType(),
            value_id=next(ids),
            value_type=StringType(),
            value_required=False,
        ),
        required=False,
        doc="Message headers",
    )
    return Schema(*fields, headers, *_payload_fields(spec, ids))


def _payload_fields(spec: TopicSpec, ids: Iterator[int]) -> list[NestedField]:
    if spec.schema_ is None:
        doc = "Message payload"
        return [NestedField(next(ids), names.VALUE, BinaryType(), required=False, doc=doc)]
    return [
        NestedField(
            next(ids),
            field.name,
            _iceberg_type(field.column_type, ids),
            required=field.required,
            doc=field.doc or None,
        )
        for field in spec.schema_.fields
    ]


def _iceberg_type(column: ColumnType, ids: Iterator[int]) -> IcebergType:
    if column.name == "decimal":
        return DecimalType(column.precision, column.scale)
    if column.name == "list":
        assert column.element is not None
        return ListType(
            element_id=next(ids),
            element_type=_iceberg_type(column.element, ids),
            element_required=False,
        )
    if column.name == "map":
        assert column.element is not None
        return MapType(
            key_id=next(ids),
            key_type=StringType(),
            value_id=next(ids),
            value_type=_iceberg_type(column.element, ids),
            value_required=False,
        )
    return _PRIMITIVES[column.name]


def partition_spec(spec: TopicSpec, schema: Schema) -> PartitionSpec:
    """Return the partitioning that the topic asks for."""
    return PartitionSpec(
        *(
            PartitionField(
                source_id=schema.find_field(text.column).field_id,
                field_id=1000 + position,
                transform=_transform(text),
                name=_partition_name(text),
            )
            for position, text in enumerate(spec.table.transforms)
        )
    )


def _transform(text: TransformText) -> Transform:  # type: ignore[type-arg]
    match text.name:
        case "hour":
            return HourTransform()
        case "day":
            return DayTransform()
        case "month":
            return MonthTransform()
        case "year":
            return YearTransform()
        case "bucket":
            return BucketTransform(num_buckets=text.argument or 1)
        case "truncate":
            return TruncateTransform(width=text.argument or 1)
        case _:
            return IdentityTransform()


def _partition_name(text: TransformText) -> str:
    """Name a partition field as Spark would, so that SQL shows what people expect."""
    if text.name == "identity":
        return text.column
    suffix = {"bucket": "bucket", "truncate": "trunc"}.get(text.name, text.name)
    return f"{text.column}_{suffix}"


def sort_order(schema: Schema) -> SortOrder:
    """Return the order that compaction is to restore."""
    return SortOrder(
        *(
            SortField(
                source_id=schema.find_field(column).field_id,
                transform=IdentityTransform(),
                direction=SortDirection.ASC,
                null_order=NullOrder.NULLS_FIRST,
            )
            for column in (names.TW_PARTITION, names.TW_OFFSET)
        ),
        order_id=1,
    )


def creation_properties(
    topic: TopicName, topic_uuid: str, spec: TopicSpec, epochs: Mapping[int, int]
) -> dict[str, str]:
    """Return the properties of a new table.

    It is born with our epochs: no separate commit is needed to fence older owners.
    """
    properties = {
        "format-version": str(FORMAT_VERSION),
        "write.parquet.compression-codec": "zstd",
        # A reader holds whole row groups: those of a compaction must not be ten times ours.
        "write.parquet.row-group-size-bytes": str(2 * ROW_GROUP_BYTES_MAX),
        "write.metadata.previous-versions-max": str(METADATA_VERSIONS_MAX),
        "write.metadata.delete-after-commit.enabled": "true",
        "history.expire.max-snapshot-age-ms": str(int(spec.maintenance.snapshot_age)),
        "write.target-file-size-bytes": str(int(spec.maintenance.target_file_size)),
    }
    if spec.schema_ is None:
        # Bounds of opaque bytes help no query and cost space in every manifest.
        properties[f"write.metadata.metrics.column.{names.VALUE}"] = "none"
    properties |= spec.table.properties
    properties |= {names.TOPIC: str(topic), names.TOPIC_UUID: topic_uuid}
    for partition, epoch in epochs.items():
        properties[names.frontier_property(partition)] = Frontier(0, epoch).to_property()
    return properties


@dataclass(frozen=True, slots=True)
class Fits:
    """The table can take the topic's rows as it is."""


@dataclass(frozen=True, slots=True)
class Grow:
    """The table lacks columns (or width) that the topic's schema has gained."""

    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unfit:
    """The table cannot take the topic's rows; a person must act."""

    reason: str
    message: str


def check_layout(metadata: TableMetadata, spec: TopicSpec) -> Fits | Grow | Unfit:
    """Compare a table with what the topic needs (G7: a foreign schema change is never ignored)."""
    if metadata.format_version != FORMAT_VERSION:
        return Unfit(
            "UnsupportedTable",
            f"the table has format version {metadata.format_version}; only 2 can be written",
        )
    have = {field.name: field for field in metadata.schema().fields}
    grow: list[str] = []
    for want in iceberg_schema(spec).fields:
        field = have.pop(want.name, None)
        if field is None:
            if want.required or want.name.startswith(names.RESERVED_PREFIX):
                return Unfit("SchemaChanged", f"the table has no column {want.name}")
            grow.append(want.name)
            continue
        if field.required and not want.required:
            return Unfit("SchemaChanged", f"column {want.name} is required in the table only")
        match _compare(field.field_type, want.field_type):
            case "wider":
                grow.append(want.name)
            case "other":
                return Unfit(
                    "SchemaChanged",
                    f"column {want.name} is {field.field_type} in the table "
                    f"and {want.field_type} in the topic",
                )
    foreign = [field.name for field in have.values() if field.required]
    if foreign:
        return Unfit("SchemaChanged", f"the topic has no values for required column {foreign[0]}")
    return Grow(tuple(grow)) if grow else Fits()


def _compare(have: IcebergType, want: IcebergType) -> str:
    """Say if the table's type is the `same` (or holds it), the topic's is `wider`, or `other`."""
    if isinstance(have, ListType) and isinstance(want, ListType):
        return _compare(have.element_type, want.element_type)
    if isinstance(have, MapType) and isinstance(want, MapType):
        if have.key_type != want.key_type:
            return "other"
        return _compare(have.value_type, want.value_type)
    if have == want or _promotes(want, have):
        return "same"
    return "wider" if _promotes(have, want) else "other"


def _promotes(narrow: IcebergType, wide: IcebergType) -> bool:
    """Say if Iceberg lets a column of one type become the other."""
    if isinstance(narrow, DecimalType) and isinstance(wide, DecimalType):
        return narrow.scale == wide.scale and narrow.precision <= wide.precision
    widened = (narrow, wide)
    return widened in ((IntegerType(), LongType()), (FloatType(), DoubleType()))
