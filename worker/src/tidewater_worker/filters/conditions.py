"""Conditions on messages: asked of rows, or of what is known about many rows at once. Pure.

Row by row (`mask`) an answer is true, false or null, as in SQL: null AND false is false, NOT null
is null. For rows that nobody has looked at (`outcomes`) it is the set of answers that their
`Facts` leave possible. It may name an answer that no row gives, and never leaves one out that a
row gives: rows may be passed over only where true is not among them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from tidewater_core import names

HEADER_KEY: Final = f"{names.TW_HEADERS}.key_value.key"
HEADER_VALUE: Final = f"{names.TW_HEADERS}.key_value.value"
"""Parquet's names of the two sides of the map of headers."""
_COMPARE: Final[dict[str, Callable[..., pa.Array]]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_OPPOSITE: Final = {"=": "!=", "!=": "=", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
OPERATORS: Final = frozenset(_COMPARE)


class Facts(NamedTuple):
    """What is known about the values of a column in some rows."""

    low: pa.Scalar | None = None
    """No value is less; a shortened one will do. None: nobody knows."""
    high: pa.Scalar | None = None
    """No value is greater."""
    may_null: bool = True
    may_value: bool = True
    """Some row may have a value."""


UNKNOWN: Final = Facts()
ALL_NULL: Final = Facts(may_value=False)
FactsOf = Callable[[str], Facts]
"""Tells the facts about a column; a side of the headers is one, too."""


class Outcomes(NamedTuple):
    """Which answers some row may give."""

    true: bool
    false: bool
    null: bool


class Condition(Protocol):
    """Something that a message meets or not."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it asks for."""

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Answer for each row: true, false or null."""

    def outcomes(self, facts: FactsOf) -> Outcomes:
        """Tell which answers are possible for rows of which these facts are known."""


@dataclass(frozen=True, slots=True)
class Compare:
    """A column against a value."""

    column: str
    op: str
    value: pa.Scalar
    """Never null."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it asks for."""
        return frozenset((self.column,))

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Answer for each row."""
        return _COMPARE[self.op](batch.column(self.column), self.value)

    def outcomes(self, facts: FactsOf) -> Outcomes:
        """Tell which answers are possible."""
        known = facts(self.column)
        if not known.may_value:
            return Outcomes(False, False, known.may_null)
        # Bounds say nothing about NaN, which is unequal to and not less than everything.
        may_nan = pa.types.is_floating(self.value.type)
        return Outcomes(
            self._may(self.op, known) or (may_nan and self.op == "!="),
            self._may(_OPPOSITE[self.op], known) or (may_nan and self.op != "!="),
            known.may_null,
        )

    def _may(self, op: str, known: Facts) -> bool:
        """Say if a value between the bounds may compare so."""
        low, high, value = _bound(known.low), _bound(known.high), self.value
        match op:
            case "=":
                return _holds("<=", low, value) and _holds(">=", high, value)
            case "!=":
                return _holds("!=", low, value) or _holds("!=", high, value)
            case "<" | "<=":
                return _holds(op, low, value)
            case _:
                return _holds(op, high, value)


def _bound(bound: pa.Scalar | None) -> pa.Scalar | None:
    """Take a bound for what it is worth: one that is NaN bounds nothing."""
    if bound is None or not bound.is_valid:
        return None
    return None if pa.types.is_floating(bound.type) and bound.as_py() != bound.as_py() else bound


def _holds(op: str, bound: pa.Scalar | None, value: pa.Scalar) -> bool:
    """Compare a bound, by the rule by which rows are compared; true if that cannot be said."""
    if bound is None:
        return True
    try:
        return _COMPARE[op](bound, value).as_py() is not False
    except pa.ArrowException:
        return True


@dataclass(frozen=True, slots=True)
class Settled:
    """A comparison whose answer is the same for every value, such as `n < 1e99` for integers."""

    column: str
    answer: bool

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it asks for."""
        return frozenset((self.column,))

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Answer for each row."""
        answers = pa.scalar(self.answer), pa.scalar(None, pa.bool_())
        return pc.if_else(pc.is_valid(batch.column(self.column)), *answers)

    def outcomes(self, facts: FactsOf) -> Outcomes:
        """Tell which answers are possible."""
        known = facts(self.column)
        return Outcomes(
            self.answer and known.may_value, not self.answer and known.may_value, known.may_null
        )


@dataclass(frozen=True, slots=True)
class IsNull:
    """A column has no value."""

    column: str

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it asks for."""
        return frozenset((self.column,))

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Answer for each row."""
        return pc.is_null(batch.column(self.column))

    def outcomes(self, facts: FactsOf) -> Outcomes:
        """Tell which answers are possible."""
        known = facts(self.column)
        return Outcomes(known.may_null, known.may_value, False)


@dataclass(frozen=True, slots=True)
class KeyBegins:
    """The key begins with these bytes."""

    prefix: bytes

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it asks for."""
        return frozenset((names.TW_KEY,))

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Answer for each row."""
        return pc.starts_with(batch.column(names.TW_KEY), pattern=self.prefix)

    def outcomes(self, facts: FactsOf) -> Outcomes:
        """Tell which answers are possible."""
        known = facts(names.TW_KEY)
        low = known.low.as_py() if known.low is not None else None
        high = known.high.as_py() if known.high is not None else None
        # Keys that begin so are not less than the prefix, and all less than what follows it.
        may = (low is None or low[: len(self.prefix)] <= self.prefix) and (
            high is None or high >= self.prefix
        )
        return Outcomes(may and known.may_value, known.may_value, known.may_null)


@dataclass(frozen=True, slots=True)
class HeaderIs:
    """A header has exactly this value."""

    name: str
    value: str

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it asks for."""
        return frozenset((names.TW_HEADERS,))

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Answer for each row."""
        # A name that is there twice counts with its last value, as everywhere in the API.
        found = pc.map_lookup(
            batch.column(names.TW_HEADERS), query_key=self.name, occurrence="last"
        )
        return pc.equal(found, self.value)

    def outcomes(self, facts: FactsOf) -> Outcomes:
        """Tell which answers are possible."""
        name = Compare(HEADER_KEY, "=", pa.scalar(self.name)).outcomes(facts)
        value = Compare(HEADER_VALUE, "=", pa.scalar(self.value)).outcomes(facts)
        return Outcomes(name.true and value.true, True, True)


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite; of null, null."""

    part: Condition

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it asks for."""
        return self.part.columns

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Answer for each row."""
        return pc.invert(self.part.mask(batch))

    def outcomes(self, facts: FactsOf) -> Outcomes:
        """Tell which answers are possible."""
        found = self.part.outcomes(facts)
        return Outcomes(found.false, found.true, found.null)


@dataclass(frozen=True, slots=True)
class Both:
    """All parts hold."""

    parts: tuple[Condition, ...]

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it asks for."""
        return frozenset().union(*(part.columns for part in self.parts))

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Answer for each row."""
        return reduce(pc.and_kleene, (part.mask(batch) for part in self.parts))

    def outcomes(self, facts: FactsOf) -> Outcomes:
        """Tell which answers are possible."""
        found = [part.outcomes(facts) for part in self.parts]
        return Outcomes(
            all(each.true for each in found),
            any(each.false for each in found),
            any(each.null for each in found) and all(each.true or each.null for each in found),
        )


@dataclass(frozen=True, slots=True)
class Either:
    """Some part holds."""

    parts: tuple[Condition, ...]

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it asks for."""
        return frozenset().union(*(part.columns for part in self.parts))

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Answer for each row."""
        return reduce(pc.or_kleene, (part.mask(batch) for part in self.parts))

    def outcomes(self, facts: FactsOf) -> Outcomes:
        """Tell which answers are possible."""
        found = [part.outcomes(facts) for part in self.parts]
        return Outcomes(
            any(each.true for each in found),
            all(each.false for each in found),
            any(each.null for each in found) and all(each.false or each.null for each in found),
        )
