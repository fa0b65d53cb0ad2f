"""A Subscription's `filter`: which messages it wants, decided for a whole batch at once. Pure."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from tidewater_core import names
from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid
from tidewater_worker.filters.conditions import (
    Both,
    Compare,
    Condition,
    FactsOf,
    HeaderIs,
    KeyBegins,
)
from tidewater_worker.filters.where import parse_where
from tidewater_worker.schema import payload_fields


@dataclass(frozen=True, slots=True)
class Wanted:
    """The messages that a filter lets through."""

    spec: FilterSpec
    """As it was written: what the table process is told."""
    condition: Condition

    @property
    def columns(self) -> frozenset[str]:
        """The columns that decide."""
        return self.condition.columns

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Tell which rows of a batch in the table's columns are wanted."""
        # What is neither true nor false is not wanted, as in SQL.
        return pc.fill_null(self.condition.mask(batch), False)

    def keep(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the wanted rows of a batch."""
        return batch.filter(self.mask(batch))

    def may_match(self, facts: FactsOf) -> bool:
        """Say if a row is possible that is wanted, by what is known about some rows."""
        return self.condition.outcomes(facts).true


def make_filter(spec: FilterSpec | None, topic: TopicSpec) -> Wanted | None:
    """Read a filter on a topic's messages; None: all are wanted."""
    if spec is None:
        return None
    tests: list[Condition] = []
    if spec.key is not None:
        tests.append(Compare(names.TW_KEY, "=", pa.scalar(spec.key.encode(), pa.binary())))
    if spec.key_prefix is not None:
        tests.append(KeyBegins(spec.key_prefix.encode()))
    tests.extend(HeaderIs(name, value) for name, value in spec.headers.items())
    if spec.where is not None:
        if topic.schema_ is None:
            raise Invalid(
                "InvalidFilter", "filter.where needs a typed topic: a raw one has no columns"
            )
        fields = {field.name: field.type for field in payload_fields(topic)}
        tests.append(parse_where(spec.where, fields))
    if not tests:
        return None
    return Wanted(spec, tests[0] if len(tests) == 1 else Both(tuple(tests)))
