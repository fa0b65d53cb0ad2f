"""The parts of a Topic that concern its Iceberg table: columns, layout, retention, upkeep."""

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, field_validator

from tidewater_core.crd.base import Count, Flag, Model, cel, rules, size_between, time_between
from tidewater_core.crd.columns import ColumnType, Transform, parse_transform, parse_type
from tidewater_core.crd.cron import check_schedule
from tidewater_core.names import RESERVED_PREFIX, RESERVED_PROPERTY_PREFIX
from tidewater_core.units import ByteSize, Duration

COLUMNS_MAX = 200
"""Most columns of a typed topic; keeps the API server's rules affordable."""
TABLE_PART_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_-]*"
_COLUMN = r"\s*[A-Za-z_][A-Za-z0-9_]*\s*"
TRANSFORM_PATTERN = (
    rf"^({_COLUMN}|(identity|year|month|day|hour)\({_COLUMN}\)"
    rf"|(bucket|truncate)\(\s*[0-9]{{1,6}}\s*,{_COLUMN}\))$"
)

PATH_PROPERTIES = (
    "write.data.path",
    "write.metadata.path",
    "write.object-storage.path",
    "write.folder-storage.path",
)
LOCATION_PROVIDER = "location-provider.impl"
"""End of the properties by which engines are given code that names files."""
PATHS_STAY = (
    f"files stay below the table's location: {', '.join(PATH_PROPERTIES)} "
    f"and *{LOCATION_PROVIDER} are refused"
)


class FieldSpec(Model):
    """One column of a typed topic."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.type == oldSelf.type"
                " || (oldSelf.type == 'int' && self.type == 'long')"
                " || (oldSelf.type == 'float' && self.type == 'double')",
                "a column's type may only be widened: int to long, float to double",
            ),
            cel(
                "!self.required || oldSelf.required",
                "an optional column cannot become required: older rows may lack it",
            ),
        )
    )

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            json_schema_extra={
                "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
                **rules(
                    cel(
                        "!self.lowerAscii().startsWith('tw_')",
                        "column names that begin with tw_ are reserved",
                    )
                ),
            },
        ),
    ]
    """Name of the column. Names that begin with tw_ are reserved."""
    type: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            json_schema_extra={"pattern": r"^[a-z]+([(][0-9]{1,2},\s*[0-9]{1,2}[)]|<.+>)?$"},
        ),
    ]
    """Iceberg type: boolean, int, long, float, double, decimal(P,S), date, time, timestamp,
    timestamptz, string, uuid, binary, list<TYPE> or map<string,TYPE>."""
    required: Flag = False
    """Refuse messages without this column. A column added to an existing topic cannot be."""
    doc: Annotated[str, Field(max_length=1024)] = ""
    """What the column means; becomes its comment in the table."""

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(
                f"column {name!r} must be letters, digits and '_', and not begin with a digit"
            )
        if name.lower().startswith(RESERVED_PREFIX):
            raise ValueError(
                f"column {name!r}: names that begin with {RESERVED_PREFIX} are reserved"
            )
        return name

    @field_validator("type")
    @classmethod
    def _type_is_known(cls, text: str) -> str:
        return str(parse_type(text))

    @property
    def column_type(self) -> ColumnType:
        """The type, parsed."""
        return parse_type(self.type)


class SchemaSpec(Model):
    """The columns of a typed topic."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "oldSelf.fields.all(o, self.fields.exists(n, n.name == o.name))",
                "columns cannot be removed: readers of older rows need them",
            ),
            cel(
                "self.fields.all(n, !n.required || oldSelf.fields.exists(o, o.name == n.name))",
                "a new column cannot be required: older rows lack it",
            ),
        )
    )

    fields: Annotated[
        list[FieldSpec],
        Field(
            min_length=1,
            max_length=COLUMNS_MAX,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
        ),
    ]
    """The columns, in order. They may be added and widened, never removed."""

    @field_validator("fields")
    @classmethod
    def _names_differ(cls, fields: list[FieldSpec]) -> list[FieldSpec]:
        seen: dict[str, str] = {}
        for field in fields:
            other = seen.get(field.name.lower())
            if other is not None:
                raise ValueError(
                    f"columns {other!r} and {field.name!r} differ only in case or not at all; "
                    "SQL engines could not tell them apart"
                )
            seen[field.name.lower()] = field.name
        return fields


class TableSpec(Model):
    """The Iceberg table."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "has(self.name) == has(oldSelf.name)"
                " && (!has(self.name) || self.name == oldSelf.name)",
                "the table's name cannot change: its rows are this topic's only history",
            ),
            cel(
                "self.partitionBy == oldSelf.partitionBy",
                "partitionBy is fixed when the table is made; evolve it with SQL",
            ),
        )
    )

    name: Annotated[
        str | None,
        Field(
            max_length=255,
            json_schema_extra={"pattern": rf"^{TABLE_PART_PATTERN}(\.{TABLE_PART_PATTERN})+$"},
        ),
    ] = None
    """Identifier in the catalog, NAMESPACE.TABLE; NAMESPACE.TOPIC of the Topic when left out.
    Some catalogs only take a-z, 0-9, '_' and '-'."""
    partition_by: Annotated[
        list[
            Annotated[str, Field(max_length=160, json_schema_extra={"pattern": TRANSFORM_PATTERN})]
        ],
        Field(max_length=8),
    ] = Field(default=["hour(tw_time)"])
    """Partition fields: a column, hour(c), day(c), month(c), year(c), bucket(N, c) or
    truncate(W, c). An empty list makes a table without partitions."""
    properties: Annotated[
        dict[str, str],
        Field(
            max_length=100,
            json_schema_extra=rules(
                cel(
                    f"self.all(k, !(k in {list(PATH_PROPERTIES)})"
                    f" && !k.endsWith('{LOCATION_PROVIDER}'))",
                    PATHS_STAY,
                )
            ),
        ),
    ] = Field(default={})
    """Table properties to set when the table is made, such as write.parquet.compression-level.
    None that moves files out of the table's location: other tables' may be there."""

    @field_validator("name")
    @classmethod
    def _name_has_namespace(cls, name: str | None) -> str | None:
        part = TABLE_PART_PATTERN
        if name is not None and re.fullmatch(rf"{part}(\.{part})+", name) is None:
            raise ValueError(
                f"{name!r} must be NAMESPACE.TABLE, each of letters, digits, '_' and '-'"
            )
        return name

    @field_validator("partition_by")
    @classmethod
    def _transforms_parse(cls, items: list[str]) -> list[str]:
        transforms = [parse_transform(item) for item in items]
        if len({(t.column, t.name) for t in transforms}) != len(transforms):
            raise ValueError("the same partition field is listed twice")
        return [str(t) for t in transforms]

    @field_validator("properties")
    @classmethod
    def _properties_are_free(cls, properties: dict[str, str]) -> dict[str, str]:
        for key in properties:
            if key.startswith(RESERVED_PROPERTY_PREFIX):
                raise ValueError(
                    f"property {key!r}: names that begin with {RESERVED_PROPERTY_PREFIX} "
                    "are reserved"
                )
            if key in PATH_PROPERTIES or key.endswith(LOCATION_PROVIDER):
                raise ValueError(f"property {key!r}: {PATHS_STAY}")
        return properties

    @property
    def transforms(self) -> list[Transform]:
        """The partition fields, parsed."""
        return [parse_transform(item) for item in self.partition_by]


class TableRetention(Model):
    """When rows leave the table."""

    time: Annotated[Duration, time_between("1h", "36500d")]
    """Delete rows older than this."""
    force: Flag = False
    """Delete them even where a live subscription has not read them yet."""


class SparkSpec(Model):
    """Size of the maintenance jobs."""

    executors: Annotated[Count, Field(ge=0, le=1_000)] = 2
    """Executor pods for large tables; 0 keeps all work in the driver."""
    executor_cores: Annotated[Count, Field(ge=1, le=64)] = 1
    """Cores of each executor."""
    executor_memory: Annotated[ByteSize, size_between("512Mi", "1Ti")] = ByteSize("1Gi")
    """Memory of each executor."""
    driver_memory: Annotated[ByteSize, size_between("512Mi", "1Ti")] = ByteSize("1Gi")
    """Memory of the driver."""
    local_below: Annotated[ByteSize, size_between("0", "1024Ti")] = ByteSize("1Gi")
    """Work on less data than this runs in the driver alone, without executors."""


class MaintenanceSpec(Model):
    """How the table is kept healthy."""

    schedule: Annotated[
        str,
        Field(max_length=128, json_schema_extra={"pattern": r"^[0-9*/,-]+(\s+[0-9*/,-]+){4}$"}),
        AfterValidator(check_schedule),
    ] = "*/30 * * * *"
    """Cron schedule (UTC) of the Spark jobs."""
    target_file_size: Annotated[ByteSize, size_between("1Mi", "4Gi")] = ByteSize("128Mi")
    """Size of data files that compaction aims at."""
    keep_snapshots: Annotated[Count, Field(ge=1, le=10_000)] = 50
    """Most snapshots kept; tagged ones and those that readers use are kept besides."""
    snapshot_age: Annotated[Duration, time_between("1m", "3650d")] = Duration("1d")
    """Snapshots older than this expire; the current one never does."""
    spark: SparkSpec = SparkSpec()
    """Size of the jobs."""
