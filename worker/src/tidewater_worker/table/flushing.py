"""When a flush is done, and what keeps it from getting there. Pure."""

from collections.abc import Mapping

from tidewater_core.errors import Fenced, NotFound, Retryable, TidewaterError
from tidewater_worker.ports import FlushResult, Phase, TopicState


def flush_problem(state: TopicState, upto: Mapping[int, int]) -> TidewaterError | None:
    """Return why rows up to these offsets cannot reach the table; None if they still can."""
    for number, end in upto.items():
        part = state.partitions.get(number)
        if part is None:
            return NotFound(
                "UnknownPartition", f"{state.topic} has no partition {number} on this worker"
            )
        if part.next >= end or part.state is not Phase.STOPPED:
            continue
        kind = Fenced if part.reason == "Fenced" else Retryable
        return kind(part.reason, f"{state.topic} partition {number}: {part.message}")
    return None


def flush_result(state: TopicState, upto: Mapping[int, int]) -> FlushResult | None:
    """Return the result once all of `upto` is in the table; raise if it cannot get there."""
    problem = flush_problem(state, upto)
    if problem is not None:
        raise problem
    frontier = {number: part.next for number, part in state.partitions.items()}
    if any(frontier[number] < end for number, end in upto.items()):
        return None
    return FlushResult(snapshot_id=state.snapshot_id, frontier=frontier)


def flush_timeout(state: TopicState, upto: Mapping[int, int]) -> TidewaterError:
    """Say what a flush was still waiting for when its time was up."""
    for number, end in upto.items():
        part = state.partitions[number]
        if part.next < end:
            why = f" ({part.reason}: {part.message})" if part.reason else ""
            return Retryable(
                "FlushTimeout",
                f"{state.topic} partition {number}: rows up to {end - 1} are in the log, "
                f"up to {part.next - 1} in the table{why}",
            )
    return Retryable("FlushTimeout", f"{state.topic}: not flushed in time")
