"""`filter.where`: a condition on the columns of a typed topic, in the words of SQL.

    or       := and (OR and)*          and := not (AND not)*          not := NOT not | test
    test     := "(" or ")" | column ("=" | "!=" | "<>" | "<" | "<=" | ">" | ">=") literal
              | column [NOT] IN "(" literal ("," literal)* ")" | column IS [NOT] NULL
    literal  := number | 'text' | TRUE | FALSE
    column   := name | "name"

Text stands for dates, times, decimals and UUIDs too. Null is neither true nor false.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from tidewater_core.errors import Invalid

Condition = Callable[[pa.RecordBatch], pa.Array]
DEPTH_MAX: Final = 50
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)|'(?P<text>(?:[^']|'')*)'"
    r'|"(?P<quoted>[^"]+)"|(?P<word>[A-Za-z_]\w*)|(?P<sign><=|>=|<>|!=|[=<>(),]))'
)
_COMPARE: Final[dict[str, Callable[..., pa.Array]]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
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
        return self._chain(self._and, "OR", pc.or_kleene)

    def _and(self) -> Condition:
        return self._chain(self._not, "AND", pc.and_kleene)

    def _chain(
        self, part: Callable[[], Condition], word: str, join: Callable[..., pa.Array]
    ) -> Condition:
        parts = [part()]
        while self._word(word):
            parts.append(part())
        if len(parts) == 1:
            return parts[0]

        def joined(batch: pa.RecordBatch) -> pa.Array:
            found = parts[0](batch)
            for other in parts[1:]:
                found = join(found, other(batch))
            return found

        return joined

    def _not(self) -> Condition:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise _invalid(f"is nested more than {DEPTH_MAX} deep")
        try:
            if self._word("NOT"):
                inner = self._not()
                return lambda batch: pc.invert(inner(batch))
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
            check = pc.is_valid if is_not else pc.is_null
            return lambda batch: check(batch.column(name))
        is_not = self._word("NOT")
        if self._word("IN"):
            return self._in(name, kind, is_not)
        sign = None if is_not else self._sign(*_COMPARE)
        if sign is None:
            raise _invalid(f"expected a comparison after {name!r}")
        compare, value = _COMPARE[sign], self._literal(name, kind)
        return lambda batch: compare(batch.column(name), value)

    def _in(self, name: str, kind: pa.DataType, is_not: bool) -> Condition:
        self._need("(")
        values = [self._literal(name, kind)]
        while self._sign(","):
            values.append(self._literal(name, kind))
        self._need(")")

        def is_in(batch: pa.RecordBatch) -> pa.Array:
            found = pc.equal(batch.column(name), values[0])
            for value in values[1:]:
                found = pc.or_kleene(found, pc.equal(batch.column(name), value))
            return pc.invert(found) if is_not else found

        return is_in

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

    def _literal(self, name: str, kind: pa.DataType) -> pa.Scalar:
        if self._at >= len(self._tokens):
            raise _invalid("ends where a value is expected")
        what, text = self._tokens[self._at]
        self._at += 1
        try:
            return _scalar(what, text, kind)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise _invalid(f"{text!r} cannot be compared with {name!r} ({kind})") from error


def _scalar(what: str, text: str, kind: pa.DataType) -> pa.Scalar:
    value: Any
    if what == "number" and not pa.types.is_boolean(kind):
        # A fraction stays one: an integer column is compared with it as it is.
        is_whole = text.lstrip("-").isdigit()
        if pa.types.is_integer(kind):
            return pa.scalar(int(text), pa.int64()) if is_whole else pa.scalar(float(text))
        if pa.types.is_floating(kind):
            return pa.scalar(float(text), pa.float64())
        if pa.types.is_decimal(kind):
            return pa.scalar(text).cast(kind)
    elif what == "text":
        value = text.replace("''", "'")
        if pa.types.is_fixed_size_binary(kind):
            return pa.scalar(UUID(value).bytes, kind)
        if pa.types.is_binary(kind):
            return pa.scalar(value.encode(), kind)
        return pa.scalar(value).cast(kind)
    elif what == "word" and text.upper() in ("TRUE", "FALSE") and pa.types.is_boolean(kind):
        return pa.scalar(text.upper() == "TRUE")
    raise TypeError(f"{what} for {kind}")
