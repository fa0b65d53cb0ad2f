"""Which messages a subscription wants, decided for a whole batch at once."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from tidewater_core import names
from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid
from tidewater_worker.dispatch.where import Condition, parse_where
from tidewater_worker.schema import payload_fields

Mask = Callable[[pa.RecordBatch], list[bool]]


def make_filter(spec: FilterSpec | None, topic: TopicSpec) -> Mask | None:
    """Return what tells the wanted rows of a batch in the table's columns; None: all are."""
    if spec is None:
        return None
    tests: list[Condition] = []
    if spec.key is not None:
        tests.append(_key_is(spec.key.encode()))
    if spec.key_prefix is not None:
        tests.append(_key_begins(spec.key_prefix.encode()))
    tests.extend(_header_is(name, value) for name, value in spec.headers.items())
    if spec.where is not None:
        if topic.schema_ is None:
            raise Invalid(
                "InvalidFilter", "filter.where needs a typed topic: a raw one has no columns"
            )
        fields = {field.name: field.type for field in payload_fields(topic)}
        tests.append(parse_where(spec.where, fields))
    if not tests:
        return None

    def mask(batch: pa.RecordBatch) -> list[bool]:
        wanted = tests[0](batch)
        for test in tests[1:]:
            wanted = pc.and_kleene(wanted, test(batch))
        # What is neither true nor false is not wanted, as in SQL.
        found: list[bool] = pc.fill_null(wanted, False).to_pylist()
        return found

    return mask


def _key_is(key: bytes) -> Condition:
    wanted = pa.scalar(key, pa.binary())
    return lambda batch: pc.equal(batch.column(names.TW_KEY), wanted)


def _key_begins(prefix: bytes) -> Condition:
    return lambda batch: pc.starts_with(batch.column(names.TW_KEY), pattern=prefix)


def _header_is(name: str, value: str) -> Condition:
    # A name that is there twice counts with its last value, as everywhere in the API.
    return lambda batch: pc.equal(
        pc.map_lookup(batch.column(names.TW_HEADERS), query_key=name, occurrence="last"), value
    )
