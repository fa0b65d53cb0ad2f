"""Amounts that people write with a unit: `Duration` ("500ms", "30d") and `ByteSize` ("64Mi").

    duration := (digits unit)+      unit := "ms" | "s" | "m" | "h" | "d"
    size     := digits [unit]       unit := "k" | "M" | "G" | "T" | "Ki" | "Mi" | "Gi" | "Ti"

Both are plain integers (milliseconds, bytes) that remember how to write themselves, so that
arithmetic is exact and a value read from a manifest goes back into one unchanged. A bare number
is refused for a duration: whether `5` means seconds or milliseconds is the reader's guess.
"""

import re
from abc import ABC, abstractmethod
from typing import Any, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_DURATION_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_DURATION_PART = re.compile(r"([0-9]{1,15})(ms|s|m|h|d)")
_DURATION_PATTERN = r"^([0-9]{1,15}(ms|s|m|h|d))+$"

_SIZE_UNITS = {
    "Ti": 1 << 40,
    "T": 10**12,
    "Gi": 1 << 30,
    "G": 10**9,
    "Mi": 1 << 20,
    "M": 10**6,
    "Ki": 1 << 10,
    "k": 10**3,
}
_SIZE_PATTERN = r"^[0-9]{1,15}(k|M|G|T|Ki|Mi|Gi|Ti)?$"
_SIZE = re.compile(_SIZE_PATTERN)

AMOUNT_CHARS_MAX = 32
"""Longest text of an amount. Kubernetes needs a bound to price the rules that parse it."""


class _Amount(int, ABC):
    """An integer with a text form; the base of the two units."""

    _pattern = ""
    _hint = ""

    def __new__(cls, value: int | str = 0) -> Self:
        """Take an integer in the base unit, or text with a unit."""
        amount = cls._read(value) if isinstance(value, str) else int(value)
        if amount < 0:
            raise ValueError(f"{amount} is negative; write {cls._hint}")
        return super().__new__(cls, amount)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read text with a unit; raise ValueError with a message for a person."""
        return cls(text)

    @classmethod
    @abstractmethod
    def _read(cls, text: str) -> int:
        """Read text with a unit, in the base unit."""

    @classmethod
    def _validate(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        raise ValueError(f"{value!r} is not text with a unit; write {cls._hint}")

    def __repr__(self) -> str:
        """Show the type and the text form."""
        return f"{type(self).__name__}({str(self)!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate from text and write back as text."""
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe the text form."""
        return {"type": "string", "pattern": cls._pattern, "maxLength": AMOUNT_CHARS_MAX}


class Duration(_Amount):
    """A span of time, in whole milliseconds."""

    _pattern = _DURATION_PATTERN
    _hint = "a number and a unit (ms, s, m, h, d), such as 500ms, 30s, 1h30m or 30d"

    @classmethod
    def _read(cls, text: str) -> int:
        if len(text) > AMOUNT_CHARS_MAX or re.fullmatch(_DURATION_PATTERN, text) is None:
            raise ValueError(f"{text[:AMOUNT_CHARS_MAX]!r} is not a duration; write {cls._hint}")
        return sum(
            int(digits) * _DURATION_UNITS_MS[unit] for digits, unit in _DURATION_PART.findall(text)
        )

    @property
    def ms(self) -> int:
        """Milliseconds."""
        return int(self)

    @property
    def us(self) -> int:
        """Microseconds."""
        return int(self) * 1_000

    @property
    def seconds(self) -> float:
        """Seconds, as the standard library's waits take them."""
        return int(self) / 1_000

    def __str__(self) -> str:
        """Write it in the largest unit that loses nothing."""
        if self == 0:
            return "0s"
        unit = next(u for u, ms in _DURATION_UNITS_MS.items() if self % ms == 0)
        return f"{self // _DURATION_UNITS_MS[unit]}{unit}"


class ByteSize(_Amount):
    """A number of bytes."""

    _pattern = _SIZE_PATTERN
    _hint = "a whole number and a unit (Ki, Mi, Gi, Ti or k, M, G, T) as text, such as 64Mi or 100k"

    @classmethod
    def _read(cls, text: str) -> int:
        if len(text) > AMOUNT_CHARS_MAX or _SIZE.fullmatch(text) is None:
            raise ValueError(f"{text[:AMOUNT_CHARS_MAX]!r} is not a size; write {cls._hint}")
        digits = text.rstrip("kKMGTi")
        return int(digits) * _SIZE_UNITS.get(text[len(digits) :], 1)

    @property
    def bytes(self) -> int:
        """Bytes."""
        return int(self)

    def __str__(self) -> str:
        """Write it in the largest unit that loses nothing."""
        if self == 0:
            return "0"
        for unit, size in _SIZE_UNITS.items():
            if self % size == 0:
                return f"{self // size}{unit}"
        return f"{int(self)}"
