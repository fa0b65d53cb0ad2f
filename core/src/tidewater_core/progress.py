"""How far a topic's partitions are in its table: properties that worker and jobs read alike. Pure.

    tidewater.partition.<p> = {"next": N, "epoch": E}           -- its owner's alone
    tidewater.start.<p>     = N                                 -- retention's alone
    tidewater.gap.<p>       = [{"start": N, "end": N}, …]       -- lost with volumes given up

A value that nobody can read stops the topic, or the job (G7).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidewater_core import names
from tidewater_core.errors import Corrupt

Gaps = tuple[tuple[int, int], ...]
"""Offsets [start, end) in order."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """How far a partition is in the table, and who wrote it last."""

    next: int = 0
    epoch: int = 0

    def to_property(self) -> str:
        """Write the property's value."""
        return json.dumps({"next": self.next, "epoch": self.epoch}, separators=(",", ":"))


def parse_frontiers(properties: Mapping[str, str]) -> dict[int, Frontier]:
    """Read the frontiers of all partitions."""
    found: dict[int, Frontier] = {}
    for key, text in properties.items():
        partition = names.partition_of_frontier(key)
        if partition is not None:
            found[partition] = _frontier(key, text)
    return found


def _frontier(key: str, text: str) -> Frontier:
    try:
        value = json.loads(text)
        numbers = (value["next"], value["epoch"])
    except (ValueError, KeyError, TypeError):
        numbers = (None, None)
    if not all(_is_offset(number) for number in numbers):
        raise Corrupt("FrontierDamaged", f"table property {key} is {text[:80]!r}, not a frontier")
    return Frontier(*numbers)


def parse_starts(properties: Mapping[str, str]) -> dict[int, int]:
    """Read the first kept offset of the partitions that retention has cut."""
    starts: dict[int, int] = {}
    for key, text in properties.items():
        partition = names.partition_of_start(key)
        if partition is None:
            continue
        if not (text.isascii() and text.isdigit()):
            raise Corrupt("StartDamaged", f"table property {key} is {text[:80]!r}, not an offset")
        starts[partition] = int(text)
    return starts


def parse_gaps(properties: Mapping[str, str]) -> dict[int, Gaps]:
    """Read the offsets that were lost with volumes that a person gave up."""
    gaps: dict[int, Gaps] = {}
    for key, text in properties.items():
        partition = names.partition_of_gap(key)
        if partition is None:
            continue
        try:
            found = [(gap["start"], gap["end"]) for gap in json.loads(text)]
        except (ValueError, KeyError, TypeError):
            found = [(None, None)]
        if not all(_is_offset(a) and _is_offset(b) and a <= b for a, b in found):
            raise Corrupt(
                "GapDamaged", f"table property {key} is {text[:80]!r}, not a list of gaps"
            )
        gaps[partition] = tuple(sorted(found))
    return gaps


def gap_value(gaps: Gaps) -> str:
    """Write the property of a partition's gaps."""
    return json.dumps([{"start": a, "end": b} for a, b in gaps], separators=(",", ":"))


def _is_offset(value: Any) -> bool:
    return type(value) is int and value >= 0
