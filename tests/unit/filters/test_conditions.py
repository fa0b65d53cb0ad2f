"""What bounds rule out, and what they must not: anything unknown may be a wanted row."""

import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.filters.conditions import (
    ALL_NULL,
    HEADER_KEY,
    HEADER_VALUE,
    UNKNOWN,
    Facts,
    Outcomes,
)
from tidewater_worker.filters.wanted import Wanted, make_filter
from tidewater_worker.filters.where import parse_where

KINDS = {
    "n": pa.int64(),
    "x": pa.float64(),
    "s": pa.string(),
    "d": pa.decimal128(10, 2),
    "ok": pa.bool_(),
}


def between(low: Any, high: Any, kind: pa.DataType, may_null: bool = False) -> Facts:
    least, most = (None if bound is None else pa.scalar(bound, kind) for bound in (low, high))
    return Facts(least, most, may_null)


def outcomes(text: str, facts: Facts) -> Outcomes:
    return parse_where(text, KINDS).outcomes(lambda _: facts)


@pytest.mark.parametrize(
    ("text", "true", "false"),
    [
        ("n = 4", False, True),
        ("n = 5", True, True),
        ("n != 5", True, True),
        ("n < 5", False, True),
        ("n <= 5", True, True),
        ("n > 9", False, True),
        ("n >= 9", True, True),
        ("n >= 5", True, False),
        ("n < 9.5", True, False),
        ("n > 9.5", False, True),
        ("n = 7.5", False, True),
        ("n < 1e99", True, False),
        ("n IN (1, 2, 10)", False, True),
        ("n IN (1, 7)", True, True),
        ("n NOT IN (1, 2)", True, False),
        ("NOT n >= 5", False, True),
        ("n < 5 OR n > 9", False, True),
        ("n > 4 AND n < 6", True, True),
        ("n > 4 AND n < 5", False, True),
        ("n IS NULL", False, True),
        ("n IS NOT NULL", True, False),
    ],
)
def test_bounds_of_integers(text: str, true: bool, false: bool) -> None:
    facts = between(5, 9, pa.int64())
    assert outcomes(text, facts) == Outcomes(true, false, False)


def test_one_value_is_known_for_good() -> None:
    same = between("eu", "eu", pa.string())
    assert outcomes("s != 'eu'", same) == Outcomes(False, True, False)
    assert outcomes("s = 'eu'", same) == Outcomes(True, False, False)
    assert outcomes("NOT s = 'eu'", same).true is False


def test_nulls_are_neither_true_nor_false() -> None:
    facts = between(5, 9, pa.int64(), may_null=True)
    assert outcomes("n = 4", facts) == Outcomes(False, True, True)
    assert outcomes("NOT n = 4", facts) == Outcomes(True, False, True)
    assert outcomes("n IS NULL", facts) == Outcomes(True, True, False)
    assert outcomes("n = 4 OR n IS NULL", facts).true is True
    for text in ("n = 4", "n != 4", "n < 4", "n < 1e99", "NOT n = 4", "n IS NOT NULL"):
        assert outcomes(text, ALL_NULL).true is False, f"{text}: there are only nulls"
    assert outcomes("n IS NULL", ALL_NULL).true is True


def test_nan_is_outside_of_all_bounds() -> None:
    facts = between(1.0, 2.0, pa.float64())
    assert outcomes("x < 5", facts) == Outcomes(True, True, False), "NaN is not less"
    assert outcomes("NOT x < 5", facts).true is True
    assert outcomes("x = 5", facts).true is False
    assert outcomes("x > 5", facts).true is False
    same = between(5.0, 5.0, pa.float64())
    assert outcomes("x != 5", same).true is True, "NaN is not 5"
    assert outcomes("x = 'nan'", facts).true is False, "nothing equals NaN"
    assert outcomes("x != 'nan'", facts).true is True


def test_a_bound_that_is_nan_bounds_nothing() -> None:
    for low, high in ((math.nan, 2.0), (math.nan, math.nan)):
        facts = between(low, high, pa.float64())
        assert outcomes("x = 1", facts).true is True
        assert outcomes("x < 1", facts).true is True
    assert outcomes("x > 5", between(1.0, math.nan, pa.float64())).true is True
    assert outcomes("x = 0", between(-0.0, 0.0, pa.float64())).true is True


@pytest.mark.parametrize("text", ["n = 1", "n != 1", "s > 'a'", "x < 1", "d = 1", "ok = TRUE"])
def test_nothing_is_ruled_out_without_bounds(text: str) -> None:
    assert outcomes(text, UNKNOWN) == Outcomes(True, True, True)


def test_one_bound_is_better_than_none() -> None:
    assert outcomes("n < 5", between(5, None, pa.int64())).true is False
    assert outcomes("n > 5", between(5, None, pa.int64())).true is True
    assert outcomes("n > 5", between(None, 5, pa.int64())).true is False
    assert outcomes("n = 5", between(None, 4, pa.int64())).true is False
    assert outcomes("n != 5", between(5, None, pa.int64())).true is True


def test_a_bound_that_cannot_be_compared_rules_nothing_out() -> None:
    assert outcomes("n = 5", between("a", "b", pa.string())) == Outcomes(True, True, False)
    wide = between(Decimal("1.25"), Decimal("2.25"), pa.decimal128(38, 2))
    assert outcomes("d = 3", wide).true is False


def wanted(**spec: Any) -> Wanted:
    made = make_filter(FilterSpec.model_validate(spec), TopicSpec())
    assert made is not None
    return made


def key_facts(low: bytes | None, high: bytes | None) -> Any:
    facts = between(low, high, pa.binary())
    return lambda name: facts if name == "tw_key" else UNKNOWN


A16 = b"a" * 16


@pytest.mark.parametrize(
    ("low", "high", "prefix", "may"),
    [
        (b"ab1", b"ab9", "ab", True),
        (b"ab1", b"ab9", "a", True),
        (b"ab1", b"ab9", "ab5555", True),
        (b"ab1", b"ab9", "ac", False),
        (b"ab1", b"ab9", "aa", False),
        (b"ab1", b"ab9", "ab90", False),
        (b"ab1", b"ab9", "ab0", False),
        # Manifests have the first 16 bytes alone, the upper bound one more than they are.
        (A16, b"a" * 15 + b"b", "a" * 20, True),
        (A16, b"a" * 15 + b"b", "a" * 16 + "z", True),
        (A16, b"a" * 15 + b"b", "a" * 15 + "c", False),
        (A16, None, "b", True),
        (b"b", None, "a", False),
        (None, None, "x", True),
    ],
)
def test_prefixes(low: bytes | None, high: bytes | None, prefix: str, may: bool) -> None:
    assert wanted(keyPrefix=prefix).may_match(key_facts(low, high)) is may


def test_keys_longer_than_their_bounds() -> None:
    bounds = key_facts(A16, b"a" * 15 + b"b")
    for key in ("a" * 16, "a" * 17, "a" * 16 + "zzz"):
        assert wanted(key=key).may_match(bounds) is True
    assert wanted(key="a" * 15).may_match(bounds) is False
    assert wanted(key="a" * 15 + "bb").may_match(bounds) is False


def test_headers_by_names_and_values() -> None:
    known = {
        HEADER_KEY: between("kind", "zone", pa.string()),
        HEADER_VALUE: between("a", "paid", pa.string()),
    }

    def facts(name: str) -> Facts:
        return known.get(name, UNKNOWN)

    assert wanted(headers={"kind": "paid"}).may_match(facts) is True
    assert wanted(headers={"area": "paid"}).may_match(facts) is False
    assert wanted(headers={"kind": "sent"}).may_match(facts) is False
    assert wanted(headers={"kind": "paid", "area": "eu"}).may_match(facts) is False
    assert wanted(headers={"area": "sent"}).may_match(lambda _: UNKNOWN) is True
    assert wanted(headers={"kind": "paid"}).may_match(lambda _: ALL_NULL) is False


def test_what_decides_is_known() -> None:
    made = wanted(key="a", headers={"b": "c"})
    assert made.columns == {"tw_key", "tw_headers"}
    assert make_filter(FilterSpec(), TopicSpec()) is None
    assert make_filter(None, TopicSpec()) is None
