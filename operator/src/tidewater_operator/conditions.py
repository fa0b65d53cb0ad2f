"""Conditions: what holds, why, since when. Pure; the clock is an input.

A condition's time changes only with its status, so that an unchanged object is written no more
than once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MESSAGE_CHARS_MAX: Final = 1_000
"""Longest message; `kubectl describe` is read by people."""

TRUE: Final = "True"
FALSE: Final = "False"
UNKNOWN: Final = "Unknown"


@dataclass(frozen=True)
class Told:
    """One condition as it is now."""

    type: str
    status: str
    reason: str
    message: str = ""


def holds(type_: str, reason: str, message: str = "") -> Told:
    """Say that something holds."""
    return Told(type_, TRUE, reason, message)


def fails(type_: str, reason: str, message: str = "") -> Told:
    """Say that something does not hold."""
    return Told(type_, FALSE, reason, message)


def unknown(type_: str, reason: str, message: str = "") -> Told:
    """Say that nobody knows."""
    return Told(type_, UNKNOWN, reason, message)


def merge(
    before: Sequence[Mapping[str, Any]], now: Iterable[Told], generation: int, time: str
) -> list[dict[str, Any]]:
    """Return the conditions to write; `before` are those that stand there."""
    old = {item.get("type"): item for item in before}
    merged = []
    for told in now:
        known = old.get(told.type)
        same = known is not None and known.get("status") == told.status
        merged.append(
            {
                "type": told.type,
                "status": told.status,
                "reason": told.reason or "Unknown",
                "message": told.message[:MESSAGE_CHARS_MAX],
                "lastTransitionTime": known["lastTransitionTime"] if same and known else time,
                "observedGeneration": generation,
            }
        )
    return merged


@dataclass(frozen=True)
class Transition:
    """A condition that changed, as people are told of it."""

    type: str
    is_bad: bool
    reason: str
    message: str


_GOOD_WHEN_FALSE: Final = frozenset({"Degraded", "Paused", "Scaling"})
_PASSING: Final = frozenset(
    {"Registering", "NotAssigned", "Opening", "Starting", "Scaling", "Growing", "NotServed"}
)
"""Reasons of things that have only begun: conditions show them, and nobody needs to be told."""


def transitions(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], types: Iterable[str]
) -> list[Transition]:
    """Return which of some conditions changed: their status, or why they do not hold."""
    old = {item.get("type"): item for item in before}
    wanted = set(types)
    found = []
    for item in after:
        if item["type"] not in wanted:
            continue
        bad_status = TRUE if item["type"] in _GOOD_WHEN_FALSE else FALSE
        is_bad = item["status"] == bad_status
        known = old.get(item["type"])
        was_unknown = known is None or known.get("status") == UNKNOWN
        if was_unknown and not is_bad and item["type"] != "Ready":
            continue  # that what nobody knew of is not broken is no news
        if (
            known is not None
            and known.get("status") == item["status"]
            and (not is_bad or known.get("reason") == item["reason"])
        ):
            continue
        if item["status"] == UNKNOWN or item["reason"] in _PASSING:
            continue
        if item["type"] == "Scaling" and not is_bad:
            continue
        found.append(Transition(item["type"], is_bad, item["reason"], item["message"]))
    return found


def status_of(conditions: Iterable[Mapping[str, Any]], type_: str) -> str:
    """Return the status of a condition, Unknown if it is not there."""
    return next((c["status"] for c in conditions if c.get("type") == type_), UNKNOWN)
