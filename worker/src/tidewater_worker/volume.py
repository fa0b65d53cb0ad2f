"""What a disk says about itself: which volume it is, and which of its logs are drained.

A partition's messages are on one volume until they are in the table, so ownership goes by volume
and not by a worker's name: a worker that comes back under its old name with an empty disk has
nothing to come back to (G5).

Logs of topics that are gone are deleted if they are drained, or empty. One that is neither has
messages that are nowhere else: it stays as evidence, and is named (G7).
"""

import os
import shutil
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

from tidewater_core.clock import IdSource
from tidewater_core.errors import Corrupt
from tidewater_worker.log.frame import SCHEMA_BYTES_MAX, decode_header
from tidewater_worker.log.reader import list_segments, segment_name
from tidewater_worker.log.recover import BROKEN_SUFFIX
from tidewater_worker.log.segment import fsync_directory, make_directory

VOLUME_FILE: Final = "volume-id"
DRAINED_FILE: Final = "drained.json"
LOCK_FILE: Final = "lock"
EPOCH_FILE: Final = "epoch"
EARLIER_SUFFIX: Final = ".earlier"
"""Of what recovery took out of a log in an earlier life of its topic."""


class Drained(msgspec.Struct, frozen=True):
    """Everything in this log is in the table, and another worker may have the partition."""

    end: int
    """The offset after the log's last message."""
    epoch: int
    """The epoch that drained it."""
    last_time_us: int = 0
    """The time of its last message."""
    topic_uuid: str = ""
    """Which topic's log it is; one that is made again under the same name has another."""


class Leftover(msgspec.Struct, frozen=True):
    """A log of a topic that is gone, with messages that may not be in a table."""

    topic: str
    partition: int
    segments: int
    bytes: int
    directory: str


def volume_id(log_root: Path, ids: IdSource) -> str:
    """Return the identity of the volume; a new one gets its own."""
    path = log_root / VOLUME_FILE
    with suppress(FileNotFoundError):
        return path.read_text().strip()
    make_directory(log_root, log_root.parent)
    write_note(path, f"{ids.uuid()}\n".encode())
    return path.read_text().strip()


def read_drained(directory: Path) -> Drained | None:
    """Return the note that a log is drained, if it has one that can be read."""
    try:
        return msgspec.json.decode((directory / DRAINED_FILE).read_bytes(), type=Drained)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def write_drained(directory: Path, drained: Drained) -> None:
    """Note durably that a log is drained."""
    write_note(directory / DRAINED_FILE, msgspec.json.encode(drained))


def clear_drained(directory: Path) -> None:
    """Remove the note, before a message is added."""
    with suppress(FileNotFoundError):
        (directory / DRAINED_FILE).unlink()
        fsync_directory(directory)


def read_epoch(directory: Path) -> int:
    """Return the epoch that this volume last had a partition with; 0 if it is not known."""
    try:
        return int((directory / EPOCH_FILE).read_bytes())
    except (OSError, ValueError):
        return 0


def note_epoch(directory: Path, epoch: int) -> None:
    """Note the epoch of a partition, for the day when the registry knows an earlier one.

    Not fsynced, and not worth an error: a registry that is as it should be knows it.
    """
    with suppress(OSError):
        (directory / EPOCH_FILE).write_bytes(b"%d" % epoch)


def clear_earlier_life(directory: Path, topic_uuid: UUID, *, is_first: bool) -> None:
    """Delete what a topic of the same name left here, if it is drained.

    What is not drained stays: opening the log refuses it then (`ForeignLog`). So does what recovery
    took out of a log: nobody but a person can tell what it is worth (G7). Producers of an
    earlier life must not be remembered: their first messages to this one would be taken for copies.
    `is_first`: nobody has had the partition in this life.
    """
    bases, drained = list_segments(directory), read_drained(directory)
    if bases:
        if drained is None or _uuid_of(directory / segment_name(bases[-1])) in (None, topic_uuid):
            return
    elif not is_first and (drained is None or drained.topic_uuid in ("", str(topic_uuid))):
        return
    for path in _note_last(directory):
        if BROKEN_SUFFIX in path.suffixes:
            _keep_as_earlier(path)
        elif path.name != LOCK_FILE:
            path.unlink()
    fsync_directory(directory)


def _note_last(directory: Path) -> list[Path]:
    """List a directory in the order in which it is emptied.

    As long as a segment is there it must be told to be drained: who is killed in between would
    leave messages that look as if they were nowhere else.
    """
    return sorted(directory.iterdir(), key=lambda path: path.name == DRAINED_FILE)


def _remove_log(directory: Path) -> None:
    for path in _note_last(directory):
        if path.is_file():
            path.unlink()
    shutil.rmtree(directory)


def _keep_as_earlier(path: Path) -> None:
    """Give evidence a name that the end of the life to come does not touch."""
    if path.suffix == EARLIER_SUFFIX:
        return
    kept, number = path.with_name(path.name + EARLIER_SUFFIX), 0
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.{number}{EARLIER_SUFFIX}")
    path.rename(kept)


def _uuid_of(path: Path) -> UUID | None:
    with path.open("rb") as file, suppress(Corrupt):
        return decode_header(file.read(SCHEMA_BYTES_MAX), path.name).topic_uuid
    return None


def is_disposable(directory: Path) -> bool:
    """Tell whether a log that nobody has open holds nothing that is not in a table."""
    if read_drained(directory) is not None:
        return not list(directory.glob(f"*{EARLIER_SUFFIX}"))
    return not list_segments(directory) and not list(directory.glob(f"*{BROKEN_SUFFIX}*"))


def topics_on(log_root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the topics that have a directory here."""
    for namespace in sorted(path for path in log_root.iterdir() if path.is_dir()):
        for directory in sorted(path for path in namespace.iterdir() if path.is_dir()):
            yield f"{namespace.name}/{directory.name}", directory


def sweep(log_root: Path, known: Container[str]) -> list[Leftover]:
    """Delete the logs of topics that are not known, but for those that are not drained."""
    kept: list[Leftover] = []
    for topic, directory in topics_on(log_root):
        if topic not in known:
            kept += sweep_topic(topic, directory)
    return kept


def sweep_topic(topic: str, directory: Path) -> list[Leftover]:
    """Delete a gone topic's logs; return those that stay."""
    kept: list[Leftover] = []
    numbers = [path for path in directory.iterdir() if path.is_dir() and path.name.isdigit()]
    for path in sorted(numbers, key=lambda path: int(path.name)):
        if is_disposable(path):
            _remove_log(path)
            continue
        bases = list_segments(path)
        size = sum((path / segment_name(base)).stat().st_size for base in bases)
        kept.append(Leftover(topic, int(path.name), len(bases), size, str(path)))
    if not kept:
        shutil.rmtree(directory)  # with the note which table it had
        with suppress(OSError):  # other topics of the namespace are there
            directory.parent.rmdir()
    return kept


def write_note(path: Path, data: bytes) -> None:
    """Write a small file durably, all of it or nothing."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    fsync_directory(path.parent)
