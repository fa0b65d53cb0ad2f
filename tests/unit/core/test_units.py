"""Amounts with units: what is read is what is written, and errors help."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tidewater_core.units import ByteSize, Duration


@pytest.mark.parametrize(
    ("text", "ms", "canonical"),
    [
        ("0ms", 0, "0s"),
        ("500ms", 500, "500ms"),
        ("1s", 1_000, "1s"),
        ("90s", 90_000, "90s"),
        ("5m", 300_000, "5m"),
        ("1h", 3_600_000, "1h"),
        ("1h30m", 5_400_000, "90m"),
        ("24h", 86_400_000, "1d"),
        ("30d", 2_592_000_000, "30d"),
    ],
)
def test_duration_reads_and_writes(text: str, ms: int, canonical: str) -> None:
    duration = Duration.parse(text)
    assert duration == ms == duration.ms
    assert str(duration) == canonical
    assert duration.seconds == ms / 1000
    assert duration.us == ms * 1000


@pytest.mark.parametrize(
    ("text", "size", "canonical"),
    [
        ("0", 0, "0"),
        ("17", 17, "17"),
        ("1024", 1024, "1Ki"),
        ("100k", 100_000, "100k"),
        ("1M", 1_000_000, "1M"),
        ("64Mi", 64 << 20, "64Mi"),
        ("20Gi", 20 << 30, "20Gi"),
        ("1Ti", 1 << 40, "1Ti"),
        ("2T", 2 * 10**12, "2T"),
    ],
)
def test_size_reads_and_writes(text: str, size: int, canonical: str) -> None:
    parsed = ByteSize.parse(text)
    assert parsed == size == parsed.bytes
    assert ByteSize(str(parsed)) == parsed
    assert str(parsed) == canonical


@pytest.mark.parametrize(
    "text", ["", "5", "s", "5 s", "-5s", "1.5s", "5S", "5sec", "s5", "5s ", "٣s", "1s" * 40]
)
def test_bad_duration_says_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="such as 500ms, 30s"):
        Duration.parse(text)


@pytest.mark.parametrize("text", ["", "Mi", "64 Mi", "-1", "1.5Gi", "64MB", "64mi", "1K", "٣", "i"])
def test_bad_size_says_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="such as 64Mi"):
        ByteSize.parse(text)


@given(st.integers(min_value=0, max_value=10**14))
def test_what_is_written_is_read_back(number: int) -> None:
    assert Duration(str(Duration(number))) == number
    assert ByteSize(str(ByteSize(number))) == number


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for unit in (Duration, ByteSize):
        try:
            amount = unit(text)
        except ValueError:
            continue
        assert unit(str(amount)) == amount


@pytest.mark.parametrize("unit", [Duration, ByteSize])
def test_negative_and_bare_numbers_are_refused(unit: type[Duration] | type[ByteSize]) -> None:
    with pytest.raises(ValueError, match="negative"):
        unit(-1)
    with pytest.raises(ValidationError, match="with a unit"):
        TypeAdapter(unit).validate_python(5)


def test_travels_as_text() -> None:
    adapter = TypeAdapter(dict[str, Duration])
    assert json.loads(adapter.dump_json({"a": Duration("90m")})) == {"a": "90m"}
    assert adapter.validate_json('{"a": "1h30m"}') == {"a": Duration("90m")}
    assert adapter.json_schema()["additionalProperties"]["type"] == "string"
    assert pickle.loads(pickle.dumps(Duration("90m"))) == Duration("90m")
    assert repr(ByteSize(1 << 20)) == "ByteSize('1Mi')"
