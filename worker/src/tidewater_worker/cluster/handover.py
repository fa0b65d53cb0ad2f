"""What a new owner must know of a drained partition besides its rows.

The rows are in the table. Which requests of idempotent producers they came with is not (G8), nor
is the time of the last one, which the next must not fall behind. The old owner keeps both beside
its drained log and the new one fetches them.
"""

from pathlib import Path

import msgspec

from tidewater_core.errors import NotFound
from tidewater_worker.log.deleter import remove_segment
from tidewater_worker.log.producers import Producers
from tidewater_worker.log.recover import (
    PRODUCERS_SUFFIX,
    Recovered,
    load_producers,
    save_producers,
)
from tidewater_worker.volume import Drained, read_drained, write_drained


class Handover(msgspec.Struct, frozen=True):
    """What is handed over."""

    end: int
    last_time_us: int
    producers: bytes


def leave(directory: Path, drained: Drained, producers: Producers) -> None:
    """Note durably that a log is drained, with what its next owner asks for."""
    save_producers(directory, drained.end, producers)
    write_drained(directory, drained)


def left(directory: Path) -> Handover:
    """Return what was left in a drained log's directory."""
    drained = read_drained(directory)
    producers = None if drained is None else load_producers(directory, drained.end)
    if drained is None or producers is None:
        raise NotFound("NotDrained", "this worker has not drained the partition")
    return Handover(drained.end, drained.last_time_us, producers.to_bytes())


def receive(directory: Path, handover: Handover) -> Recovered:
    """Begin an empty log with what the last owner left, and keep that for a restart."""
    producers = Producers.from_bytes(handover.producers)
    save_producers(directory, handover.end, producers)
    return Recovered(producers=producers, last_time_us=handover.last_time_us)


def resume(directory: Path, recovered: Recovered) -> Recovered:
    """Give an empty log the producers that it received and never wrote into a segment."""
    if not recovered.segments:
        ends = [int(path.stem) for path in directory.glob(f"*{PRODUCERS_SUFFIX}")]
        saved = load_producers(directory, max(ends)) if ends else None
        if saved is not None:
            recovered.producers = saved
    return recovered


def discard(directory: Path, recovered: Recovered) -> None:
    """Delete a drained log whose rows are in the table."""
    for segment in recovered.segments:
        remove_segment(directory, segment.base_offset)
