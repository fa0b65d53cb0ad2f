"""The types of a typed topic's columns and the transforms of a table's partitioning, as text.

    type      := primitive | "decimal(" digits "," digits ")"
               | "list<" type ">" | "map<string," type ">"
    primitive := boolean int long float double date time timestamp timestamptz string uuid binary
    transform := column | ("identity" | "year" | "month" | "day" | "hour") "(" column ")"
               | ("bucket" | "truncate") "(" digits "," column ")"

Type names are Iceberg's.
"""

import re
from dataclasses import dataclass
from typing import Final

PRIMITIVES: Final = frozenset(
    [
        "boolean",
        "int",
        "long",
        "float",
        "double",
        "date",
        "time",
        "timestamp",
        "timestamptz",
        "string",
        "uuid",
        "binary",
    ]
)
DEPTH_MAX: Final = 8
"""Deepest nesting of lists and maps: more is a mistake, and readers recurse."""

_DECIMAL = re.compile(r"decimal\(([0-9]{1,2}),([0-9]{1,2})\)")
_UNARY = re.compile(r"(identity|year|month|day|hour)\(([A-Za-z_][A-Za-z0-9_]*)\)")
_SIZED = re.compile(r"(bucket|truncate)\(([0-9]{1,6}),([A-Za-z_][A-Za-z0-9_]*)\)")
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_TIMES: Final = frozenset({"timestamp", "timestamptz"})
_TRANSFORM_TAKES: Final = {
    "year": _TIMES | {"date"},
    "month": _TIMES | {"date"},
    "day": _TIMES | {"date"},
    "hour": _TIMES,
    "bucket": PRIMITIVES - {"boolean", "float", "double"} | {"decimal"},
    "truncate": frozenset({"int", "long", "string", "binary", "decimal"}),
    "identity": PRIMITIVES | {"decimal"},
}


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column's type: a primitive, or `decimal`, `list`, `map` with their parts."""

    name: str
    """`list`, `map`, `decimal` or a primitive's name."""
    element: "ColumnType | None" = None
    """What a list holds, or a map's values (its keys are strings)."""
    precision: int = 0
    """Digits of a decimal, 1 to 38."""
    scale: int = 0
    """Digits after the point, at most the precision."""

    def __str__(self) -> str:
        """Write it as it is read."""
        if self.name == "decimal":
            return f"decimal({self.precision},{self.scale})"
        if self.name == "list":
            return f"list<{self.element}>"
        if self.name == "map":
            return f"map<string,{self.element}>"
        return self.name


def parse_type(text: str) -> ColumnType:
    """Read a column type; raise ValueError with a message for a person."""
    return _parse(re.sub(r"\s+", "", text), text, 0)


def _parse(compact: str, whole: str, depth: int) -> ColumnType:
    if depth > DEPTH_MAX:
        raise ValueError(f"{whole[:80]!r} nests deeper than {DEPTH_MAX} levels")
    if compact in PRIMITIVES:
        return ColumnType(compact)
    if match := _DECIMAL.fullmatch(compact):
        precision, scale = int(match[1]), int(match[2])
        if not 1 <= precision <= 38 or scale > precision:
            raise ValueError(
                f"{whole!r}: a decimal has 1 to 38 digits, and no more after the point"
            )
        return ColumnType("decimal", precision=precision, scale=scale)
    for opening, name in (("list<", "list"), ("map<string,", "map")):
        if compact.startswith(opening) and compact.endswith(">"):
            return ColumnType(name, _parse(compact[len(opening) : -1], whole, depth + 1))
    raise ValueError(
        f"{whole[:80]!r} is not a column type; write one of {', '.join(sorted(PRIMITIVES))}, "
        "decimal(P,S), list<TYPE> or map<string,TYPE>"
    )


@dataclass(frozen=True, slots=True)
class Transform:
    """One field of a table's partitioning."""

    name: str
    """Iceberg's transform: identity, year, month, day, hour, bucket, truncate."""
    column: str
    """The column it is applied to."""
    argument: int | None = None
    """Number of buckets, or width."""

    def __str__(self) -> str:
        """Write it as it is read."""
        if self.argument is not None:
            return f"{self.name}({self.argument},{self.column})"
        return f"{self.name}({self.column})"

    def problem_on(self, type_name: str) -> str | None:
        """Say why this transform cannot be applied to a column of this type; None if it can."""
        if type_name in _TRANSFORM_TAKES[self.name]:
            return None
        return f"{self} cannot be applied to a column of type {type_name}"


def parse_transform(text: str) -> Transform:
    """Read one partition field; raise ValueError with a message for a person."""
    compact = re.sub(r"\s+", "", text)
    if match := _UNARY.fullmatch(compact):
        return Transform(match[1], match[2])
    if match := _SIZED.fullmatch(compact):
        if int(match[2]) == 0:
            raise ValueError(f"{text!r}: the number must be at least 1")
        return Transform(match[1], match[3], int(match[2]))
    if _COLUMN.fullmatch(compact):
        return Transform("identity", compact)
    raise ValueError(
        f"{text[:80]!r} is not a partition field; write a column, hour(c), day(c), month(c), "
        "year(c), bucket(N, c) or truncate(W, c)"
    )
