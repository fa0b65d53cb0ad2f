"""What became of the ack ids of one call."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Refusal:
    """An ack id that had no effect, and why."""

    ack_id: str
    reason: str
    message: str


@dataclass(slots=True)
class Report:
    """What became of the ids of one call."""

    done: int = 0
    refused: list[Refusal] = field(default_factory=list)
