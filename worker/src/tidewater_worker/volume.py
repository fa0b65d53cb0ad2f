"""What a disk says about itself: which volume it is, and which of its logs are drained.

A partition's messages are on one volume until they are in the table, so ownership goes by volume
and not by a worker's name: a worker that comes back under its old name with an empty disk has
nothing to come back to (G5).
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from tidewater_core.clock import IdSource
from tidewater_worker.log.segment import fsync_directory

VOLUME_FILE: Final = "volume-id"
DRAINED_FILE: Final = "drained.json"


class Drained(msgspec.Struct, frozen=True):
    """Everything in this log is in the table, and another worker may have the partition."""

    end: int
    """The offset after the log's last message."""
    epoch: int
    """The epoch that drained it."""
    last_time_us: int = 0
    """The time of its last message."""


def volume_id(log_root: Path, ids: IdSource) -> str:
    """Return the identity of the volume; a new one gets its own."""
    path = log_root / VOLUME_FILE
    with suppress(FileNotFoundError):
        return path.read_text().strip()
    log_root.mkdir(parents=True, exist_ok=True)
    _write(path, f"{ids.uuid()}\n".encode())
    return path.read_text().strip()


def read_drained(directory: Path) -> Drained | None:
    """Return the note that a log is drained, if it has one that can be read."""
    try:
        return msgspec.json.decode((directory / DRAINED_FILE).read_bytes(), type=Drained)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def write_drained(directory: Path, drained: Drained) -> None:
    """Note durably that a log is drained."""
    _write(directory / DRAINED_FILE, msgspec.json.encode(drained))


def clear_drained(directory: Path) -> None:
    """Remove the note, before a message is added."""
    with suppress(FileNotFoundError):
        (directory / DRAINED_FILE).unlink()
        fsync_directory(directory)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    fsync_directory(path.parent)
