"""What a column that came as Arrow, or was made of JSON, must not hold.

Arrow can say more than its readers: a time outside Python's years, or of no day, which its casts
make of any number; a map with a key twice. Such a cell is refused at the door; once stored it would
fail everybody who reads it. Whole columns are looked at, never single cells, until there is
something to complain about. Pure.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Problem = tuple[int, str]
"""The row, and what is wrong there."""
_Numbers = np.ndarray[Any, Any]

DAYS: Final = (-719_162, 2_932_896)
"""0001-01-01 and 9999-12-31, in days since 1970."""
MICROS: Final = (DAYS[0] * 86_400_000_000, (DAYS[1] + 1) * 86_400_000_000 - 1)
DAY_MICROS: Final = (0, 86_400_000_000 - 1)
_OUTSIDE: Final = "is outside 0001-01-01 to 9999-12-31 (UTC)"
_NO_TIME: Final = "a time of day is outside 00:00:00 to 23:59:59.999999"


def leaf_type(kind: pa.DataType) -> pa.DataType:
    """Return what lists and maps hold in the end."""
    while pa.types.is_list(kind) or pa.types.is_map(kind):
        kind = kind.item_type if pa.types.is_map(kind) else kind.value_type
    return kind


def is_doubtful(kind: pa.DataType) -> bool:
    """Say if a column of this type, given as Arrow, can hold what must be refused."""
    while pa.types.is_list(kind):
        kind = kind.value_type
    doubtful = (pa.types.is_map, pa.types.is_timestamp, pa.types.is_date32, pa.types.is_time64)
    return any(is_one(kind) for is_one in doubtful)


def problem(column: pa.Array) -> Problem | None:
    """Return the first row with a time out of range or a key twice; None if there is none."""
    kind = column.type
    if len(column) == 0:
        return None
    if pa.types.is_timestamp(kind):
        return _outside(column, np.dtype(np.int64), MICROS, f"a time {_OUTSIDE}")
    if pa.types.is_date32(kind):
        return _outside(column, np.dtype(np.int32), DAYS, f"a date {_OUTSIDE}")
    if pa.types.is_time64(kind):
        return _outside(column, np.dtype(np.int64), DAY_MICROS, _NO_TIME)
    if pa.types.is_map(kind):
        keys, rows = _inside(column, column.keys)
        return _twice(keys, rows) or _at(rows, problem(_inside(column, column.items)[0]))
    if is_doubtful(kind):
        values, rows = _inside(column, column.values)
        return _at(rows, problem(values))
    return None


def widened(kind: pa.DataType) -> pa.DataType:
    """Return the type with doubles in place of floats."""
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, widened(kind.item_type))
    return pa.list_(widened(kind.value_type)) if pa.types.is_list(kind) else pa.float64()


def overflow(narrow: pa.Array, wide: Callable[[], pa.Array]) -> Problem | None:
    """Return the first row with a finite number that a float made infinite.

    `wide` makes the same column with doubles; it is asked only if something is infinite.
    """
    infinite = np.isinf(_leaf(narrow)[0].to_numpy(zero_copy_only=False))
    if not infinite.any():
        return None
    given, rows = _leaf(wide())
    lost = infinite & np.isfinite(given.to_numpy(zero_copy_only=False))
    return (int(rows[lost.argmax()]), "a number is too large for a float") if lost.any() else None


def _leaf(column: pa.Array) -> tuple[pa.Array, _Numbers]:
    """Return what a reader sees inside of lists and maps, and the row of each."""
    rows = np.arange(len(column))
    while not pa.types.is_floating(column.type):
        inside = column.items if pa.types.is_map(column.type) else column.values
        column, own = _inside(column, inside)
        rows = rows[own]
    return column, rows


def entries(headers: pa.Array) -> _Numbers:
    """Count each message's headers."""
    counts = np.diff(_ends(headers))
    return counts if headers.null_count == 0 else np.where(_valid(headers), counts, 0)


def texts_bytes(headers: pa.Array) -> int:
    """Count the bytes of all headers: none of the messages has more."""
    return sum(int(texts.buffers()[2].size) for texts in _texts(headers) if texts.buffers()[2])


def entries_bytes(headers: pa.Array) -> _Numbers:
    """Count the bytes of each message's headers."""
    sizes = np.zeros(len(headers), np.int64)
    for texts in _texts(headers):
        inside, rows = _inside(headers, texts)
        lengths = pc.fill_null(pc.binary_length(inside), 0).to_numpy(zero_copy_only=False)
        sizes += np.bincount(rows, lengths, len(headers)).astype(np.int64)
    return sizes


def header_problem(headers: pa.Array) -> Problem | None:
    """Return the first message with a header without a value, or with one that is there twice.

    All have names: Arrow itself takes no map with a null among its keys.
    """
    keys, rows = _inside(headers, headers.keys)
    if headers.items.null_count:
        items = _inside(headers, headers.items)[0]
        if items.null_count:
            at = int(_valid(items).argmin())
            return int(rows[at]), f"the header {keys[at].as_py()[:40]!r} has no value"
    return _twice(keys, rows, "header")


def _texts(headers: pa.Array) -> tuple[pa.Array, pa.Array]:
    return headers.keys, headers.items


def _valid(column: pa.Array) -> _Numbers:
    valid: _Numbers = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _ends(column: pa.Array) -> _Numbers:
    if len(column) == 0:  # it may have no offsets at all
        return np.zeros(1, np.int32)
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)


def _inside(column: pa.Array, elements: pa.Array) -> tuple[pa.Array, _Numbers]:
    """Return the elements that a reader sees, and the row of each; nulls hide what they hold."""
    ends = _ends(column)
    rows = np.repeat(np.arange(len(column)), np.diff(ends))
    inside = elements.slice(int(ends[0]), int(ends[-1] - ends[0]))
    if column.null_count:
        seen = _valid(column)[rows]
        return inside.filter(pa.array(seen)), rows[seen]
    return inside, rows


def _at(rows: _Numbers, found: Problem | None) -> Problem | None:
    return None if found is None else (int(rows[found[0]]), found[1])


def _outside(
    column: pa.Array, width: np.dtype[Any], bounds: tuple[int, int], what: str
) -> Problem | None:
    at = width.itemsize * column.offset
    values = np.frombuffer(column.buffers()[1], width, len(column), at)
    if column.null_count:
        values = np.where(_valid(column), values, 0)
    if bounds[0] <= values.min() and values.max() <= bounds[1]:
        return None
    outside = (values < bounds[0]) | (values > bounds[1])
    return int(outside.argmax()), what


def _twice(keys: pa.Array, rows: _Numbers, what: str = "key") -> Problem | None:
    if len(rows) < 2 or not (rows[1:] == rows[:-1]).any():
        return None
    encoded = keys.dictionary_encode()
    pairs = rows * len(encoded.dictionary) + encoded.indices.to_numpy()
    in_order = np.sort(pairs)  # Arrow's count_distinct takes ten times as long for few
    if not (in_order[1:] == in_order[:-1]).any():
        return None
    _, first = np.unique(pairs, return_index=True)
    again = np.ones(len(pairs), bool)
    again[first] = False
    at = int(again.argmax())
    return int(rows[at]), f"the {what} {keys[at].as_py()[:40]!r} is there twice"
