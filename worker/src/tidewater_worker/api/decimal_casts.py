"""Casts that Arrow gets wrong, or that end the process: of decimals, and of texts that are one.

Looked at before the cast, since there is no error to catch. Pure.
"""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tidewater_worker.api.cells import leaf_type
from tidewater_worker.api.sizes import lengths
from tidewater_worker.decimals import POWERS_256_MAX, POWERS_MAX

TEXT_BYTES_MAX: Final = 128
"""More than any number of 38 digits is written with."""
_NUMBER: Final = r"^[-+]?[0-9]*\.?[0-9]*([eE][-+]?[0-9]+)?$"
_NEAR: Final = r"^[-+]?[0-9]*\.?([0-9]{0,38}([eE]\+?[0-9]{1,3})?|[0-9]{0,19}[eE]-0*1?[0-9])$"
"""At most 38 places behind the point: within reach of every scale."""


def decimal_problem(given: pa.Array, kind: pa.DataType) -> str | None:
    """Return why a column must not be cast to a type of a topic; None: Arrow may try."""
    if isinstance(given, pa.ExtensionArray):
        given = given.storage
    shape, wanted = given.type, leaf_type(kind)
    if pa.types.is_map(shape):
        return decimal_problem(given.items, wanted)
    if _is_list(shape):
        return decimal_problem(given.values, wanted)
    while pa.types.is_dictionary(shape):
        shape = shape.value_type
    if pa.types.is_decimal(shape):
        return _scale_problem(shape, wanted)
    if pa.types.is_decimal(wanted) and _is_text(shape):
        return _text_problem(given)
    return None


def _scale_problem(given: pa.DataType, wanted: pa.DataType) -> str | None:
    most = POWERS_256_MAX if pa.types.is_decimal256(given) else POWERS_MAX
    scale = wanted.scale if pa.types.is_decimal(wanted) else 0
    if max(abs(given.scale), abs(given.scale - scale)) <= most:
        return None
    return f"{given} cannot be taken as {wanted}"


def _is_list(kind: pa.DataType) -> bool:
    every = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_one(kind) for is_one in every)


def _is_text(kind: pa.DataType) -> bool:
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    bytes_ = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(is_one(kind) for is_one in texts + bytes_)


def _text_problem(texts: pa.Array) -> str | None:
    # First: a dictionary or a view names a long text as often as it likes.
    longest = pc.max(lengths(texts)).as_py() or 0
    if longest > TEXT_BYTES_MAX:
        return f"a text of {longest} bytes is no decimal"
    while pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    texts = texts.cast(pa.binary())
    is_number = pc.match_substring_regex(texts, _NUMBER)
    is_far = pc.and_not(is_number, pc.match_substring_regex(texts, _NEAR))
    at = pc.index(is_far, True).as_py()
    if at < 0:
        return None
    return f"the number in row {at} has too many places behind the point"
