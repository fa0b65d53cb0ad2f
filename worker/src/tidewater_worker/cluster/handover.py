"""What a new owner must know of a drained partition besides its rows.

The rows are in the table. Which requests of idempotent producers they came with is not (G8), nor
is the time of the last one, which the next must not fall behind. The old owner keeps both beside
its drained log and the new one fetches them.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

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
from tidewater_worker.volume import Drained, read_drained, write_drained, write_note

RECEIVED_FILE: Final = "received.json"


class Handover(msgspec.Struct, frozen=True):
    """What is handed over."""

    end: int
    last_time_us: int
    producers: bytes


class Received(msgspec.Struct, frozen=True):
    """What was received and is in no segment yet, besides the producers."""

    end: int
    last_time_us: int


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


def receive(directory: Path, end: int, handover: Handover | None) -> Recovered:
    """Begin an empty log at `end` with what the last owner left, and keep that for a restart."""
    recovered = Recovered()
    if handover is not None:
        recovered.producers = Producers.from_bytes(handover.producers)
        recovered.last_time_us = handover.last_time_us
        save_producers(directory, handover.end, recovered.producers)
    note = Received(end, recovered.last_time_us)
    write_note(directory / RECEIVED_FILE, msgspec.json.encode(note))
    return recovered


def begins_at(directory: Path) -> int:
    """Return the offset before which an empty log must not begin: others had those before it."""
    received, drained = _received(directory), read_drained(directory)
    return max(received.end, 0 if drained is None else drained.end)


def resume(directory: Path, recovered: Recovered) -> Recovered:
    """Give a log what it received and never wrote into a segment.

    One without messages may have a segment all the same: its times begin where the others end.
    """
    if not recovered.segments:
        ends = [int(path.stem) for path in directory.glob(f"*{PRODUCERS_SUFFIX}")]
        saved = load_producers(directory, max(ends)) if ends else None
        if saved is not None:
            recovered.producers = saved
    drained = read_drained(directory)
    recovered.last_time_us = max(
        recovered.last_time_us,
        _received(directory).last_time_us,
        0 if drained is None else drained.last_time_us,
    )
    return recovered


def _received(directory: Path) -> Received:
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode((directory / RECEIVED_FILE).read_bytes(), type=Received)
    return Received(0, 0)


def discard(directory: Path, recovered: Recovered) -> None:
    """Delete a drained log whose rows are in the table."""
    for segment in recovered.segments:
        remove_segment(directory, segment.base_offset)
