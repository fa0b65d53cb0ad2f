"""A hold on a table's history: which snapshots stay while an upkeep job needs them. Pure.

    tidewater.hold = {"sequence": N, "until_ms": T}             -- upkeep jobs' alone

A rewrite is checked against all that came since the snapshot it began on, and fails if a link of
that chain has expired. A writer that keeps fifty snapshots of a second each would not leave a
rewrite of a minute one chance. So no snapshot with a sequence number of N or more goes until T.
A job that died holds nothing for long: what is further ahead than a job can mean counts for
nothing, and neither does what nobody can read, since nothing is lost by expiring.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from tidewater_core import names

HOLD_MS_MAX: Final = 2 * 3_600_000
"""A hold that ends later than this from now was meant by nobody."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Snapshots from a sequence number on, until a time."""

    sequence: int
    until_ms: int

    def to_property(self) -> str:
        """Write the property's value."""
        value = {"sequence": self.sequence, "until_ms": self.until_ms}
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a property's value; None: it is none."""
        try:
            value = json.loads(text)
            numbers = (value["sequence"], value["until_ms"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return cls(*numbers) if all(type(each) is int for each in numbers) else None


def held_from(properties: Mapping[str, str], now_ms: int) -> int | None:
    """Return the sequence number from which on snapshots stay now; None: nothing is held."""
    hold = Hold.parse(properties.get(names.HOLD, ""))
    if hold is None or not now_ms < hold.until_ms <= now_ms + HOLD_MS_MAX:
        return None
    return hold.sequence
