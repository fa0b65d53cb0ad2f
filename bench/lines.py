"""One line of the result: a measurement beside its peers, and what it is held against. Pure."""

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["PASS", "MISS", ""]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a line's value, or on its ratio to NATS."""

    of: Literal["value", "ratio"]
    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float, ratio: float | None) -> bool | None:
        """Tell whether the bound holds; None if there is nothing to compare with."""
        found = value if self.of == "value" else ratio
        if found is None:
            return None
        if self.at_most is not None and found > self.at_most:
            return False
        return not (self.at_least is not None and found < self.at_least)

    def text(self) -> str:
        """Return the bound for people."""
        sign, bound = ("≤", self.at_most) if self.at_most is not None else ("≥", self.at_least)
        assert bound is not None
        return f"{sign} {number(bound)}" + (" × NATS" if self.of == "ratio" else "")


@dataclass(frozen=True, slots=True)
class Line:
    """A measurement of Tidewater, with what its peers did in the same run."""

    group: str
    name: str
    unit: str
    tidewater: float | None = None
    floor: float | None = None
    nats: float | None = None
    target: Target | None = None

    @property
    def ratio(self) -> float | None:
        """Tidewater's value over NATS's."""
        return self.tidewater / self.nats if self.tidewater is not None and self.nats else None

    @property
    def verdict(self) -> Verdict:
        """Whether the target is met."""
        if self.target is None or self.tidewater is None:
            return ""
        met = self.target.met(self.tidewater, self.ratio)
        return "" if met is None else ("PASS" if met else "MISS")


@dataclass(slots=True)
class Result:
    """What one scenario found."""

    lines: list[Line] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    """Everything worth keeping, for the JSON file and the plot."""


def number(value: float) -> str:
    """Write a number with as many digits as it deserves."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"
