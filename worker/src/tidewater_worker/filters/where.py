"""`filter.where`: a condition on the columns of a typed topic, in the words of SQL.

    or       := and (OR and)*          and := not (AND not)*          not := NOT not | test
    test     := "(" or ")" | column ("=" | "!=" | "<>" | "<" | "<=" | ">" | ">=") literal
              | column [NOT] IN "(" literal ("," literal)* ")" | column IS [NOT] NULL
    literal  := number | 'text' | TRUE | FALSE
    column   := name | "name"

Text stands for dates, times, decimals and UUIDs too. Null is neither true nor false.
"""

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, DecimalException
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from tidewater_core.errors import Invalid
from tidewater_worker import decimals
from tidewater_worker.filters.conditions import (
    OPERATORS,
    Both,
    Compare,
    Condition,
    Either,
    IsNull,
    Not,
    Settled,
)

DEPTH_MAX: Final = 50
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)|'(?P<text>(?:[^']|'')*)'"
    r'|"(?P<quoted>[^"]+)"|(?P<word>[A-Za-z_]\w*)|(?P<sign><=|>=|<>|!=|[=<>(),]))'
)
_LONG_MIN: Final = -(1 << 63)
_LONG_MAX: Final = (1 << 63) - 1
_Token = tuple[str, str]


def parse_where(text: str, fields: Mapping[str, pa.DataType]) -> Condition:
    """Read a condition; raise Invalid that says where it cannot be read."""
    return _Parser(text, fields).parse()


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise _invalid(f"cannot read {text[at:].strip()[:20]!r}")
        kind = match.lastgroup
        assert kind is not None
        tokens.append((kind, match[kind]))
        at = match.end()
    return tokens


def _invalid(problem: str) -> Invalid:
    return Invalid("InvalidFilter", f"filter.where: {problem}")


class _Parser:
    def __init__(self, text: str, fields: Mapping[str, pa.DataType]) -> None:
        self._tokens = _tokens(text)
        self._fields = fields
        self._at = 0
        self._depth = 0

    def parse(self) -> Condition:
        condition = self._or()
        if self._at < len(self._tokens):
            raise _invalid(f"did not expect {self._tokens[self._at][1]!r}")
        return condition

    # ---- tokens

    def _word(self, *words: str) -> bool:
        """Take the next token if it is one of these words."""
        if self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            if kind == "word" and text.upper() in words:
                self._at += 1
                return True
        return False

    def _sign(self, *signs: str) -> str | None:
        """Take the next token if it is one of these signs."""
        if self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            if kind == "sign" and text in signs:
                self._at += 1
                return text
        return None

    def _need(self, sign: str) -> None:
        if self._sign(sign) is None:
            raise _invalid(f"expected {sign!r}{self._before()}")

    def _before(self) -> str:
        if self._at < len(self._tokens):
            return f" before {self._tokens[self._at][1]!r}"
        return " at the end"

    # ---- grammar

    def _or(self) -> Condition:
        return self._chain(self._and, "OR", Either)

    def _and(self) -> Condition:
        return self._chain(self._not, "AND", Both)

    def _chain(
        self,
        part: Callable[[], Condition],
        word: str,
        join: Callable[[tuple[Condition, ...]], Condition],
    ) -> Condition:
        parts = [part()]
        while self._word(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else join(tuple(parts))

    def _not(self) -> Condition:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise _invalid(f"is nested more than {DEPTH_MAX} deep")
        try:
            if self._word("NOT"):
                return Not(self._not())
            if self._sign("("):
                inner = self._or()
                self._need(")")
                return inner
            return self._test()
        finally:
            self._depth -= 1

    def _test(self) -> Condition:
        name, kind = self._column()
        if self._word("IS"):
            is_not = self._word("NOT")
            if not self._word("NULL"):
                raise _invalid(f"expected NULL{self._before()}")
            return Not(IsNull(name)) if is_not else IsNull(name)
        is_not = self._word("NOT")
        if self._word("IN"):
            found = self._in(name, kind)
            return Not(found) if is_not else found
        sign = None if is_not else self._sign(*OPERATORS, "<>")
        if sign is None:
            raise _invalid(f"expected a comparison after {name!r}")
        return self._compared(name, kind, "!=" if sign == "<>" else sign)

    def _in(self, name: str, kind: pa.DataType) -> Condition:
        self._need("(")
        found = [self._compared(name, kind, "=")]
        while self._sign(","):
            found.append(self._compared(name, kind, "="))
        self._need(")")
        return found[0] if len(found) == 1 else Either(tuple(found))

    def _column(self) -> tuple[str, pa.DataType]:
        if self._at >= len(self._tokens):
            raise _invalid("ends where a column is expected")
        kind, name = self._tokens[self._at]
        if kind not in ("word", "quoted"):
            raise _invalid(f"expected a column, not {name!r}")
        if name not in self._fields:
            raise _invalid(f"there is no column {name!r}; there are {', '.join(self._fields)}")
        if pa.types.is_nested(self._fields[name]):
            raise _invalid(f"column {name!r} is a list or map and cannot be compared")
        self._at += 1
        return name, self._fields[name]

    def _compared(self, name: str, kind: pa.DataType, op: str) -> Condition:
        """Read a value, and compare a column with it."""
        if self._at >= len(self._tokens):
            raise _invalid("ends where a value is expected")
        what, text = self._tokens[self._at]
        self._at += 1
        try:
            if what == "number" and pa.types.is_integer(kind):
                return _whole(name, op, Decimal(text))
            return Compare(name, op, _scalar(what, text, kind))
        except (pa.ArrowException, ValueError, TypeError, DecimalException) as error:
            raise _invalid(f"{text!r} cannot be compared with {name!r} ({kind})") from error


def _whole(name: str, op: str, number: Decimal) -> Condition:
    """Compare integers with any number, exactly: as floats the large ones could not be told apart.

    What lies between two integers compares like the lower one, but equals none.
    """
    if number != number.to_integral_value():
        if op in ("=", "!="):
            return Settled(name, op == "!=")
        op = {"<": "<=", ">=": ">"}.get(op, op)
    if not _LONG_MIN <= number <= _LONG_MAX:
        return Settled(name, op == "!=" or (op in ("<", "<=") if number > 0 else op in (">", ">=")))
    return Compare(name, op, pa.scalar(math.floor(number), pa.int64()))


def _scalar(what: str, text: str, kind: pa.DataType) -> pa.Scalar:
    value: Any
    if what == "number" and not pa.types.is_boolean(kind):
        if pa.types.is_floating(kind):
            return pa.scalar(float(text), pa.float64())
        if pa.types.is_decimal(kind):
            return pa.scalar(decimals.checked(Decimal(text), kind.scale), kind)
    elif what == "text":
        value = text.replace("''", "'")
        if pa.types.is_fixed_size_binary(kind):
            return pa.scalar(UUID(value).bytes, kind)
        if pa.types.is_binary(kind):
            return pa.scalar(value.encode(), kind)
        if pa.types.is_decimal(kind):
            return pa.scalar(decimals.checked(Decimal(value), kind.scale), kind)
        return pa.scalar(value).cast(kind)
    elif what == "word" and text.upper() in ("TRUE", "FALSE") and pa.types.is_boolean(kind):
        return pa.scalar(text.upper() == "TRUE")
    raise TypeError(f"{what} for {kind}")
