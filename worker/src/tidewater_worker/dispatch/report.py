"""What became of the ack ids of one call."""

from dataclasses import dataclass, field

from tidewater_core.errors import Retryable, TidewaterError
from tidewater_worker.dispatch.ackid import AckId
from tidewater_worker.dispatch.policy import Outcome


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

    def settle(self, ack_id: AckId, outcome: Outcome) -> None:
        """Note what became of one."""
        if outcome is Outcome.DONE:
            self.done += 1
        else:
            self.refused.append(
                Refusal(
                    str(ack_id), "Stale", "this delivery is over: the message was given to another "
                    "consumer, given back, or the subscription was moved",
                )
            )  # fmt: skip


def raise_why(errors: list[TidewaterError], partitions: int) -> None:
    """Say why there is nothing, unless it passes by itself and others are fine."""
    lasting = [error for error in errors if not isinstance(error, Retryable)]
    if lasting:
        raise lasting[0].with_traceback(None)
    if len(errors) == partitions:
        raise errors[0].with_traceback(None)
