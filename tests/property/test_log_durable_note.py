"""The note of what was fsynced: damage below it is never taken for a torn write.

A frame of ordinary messages has sectors of zeros by itself (no keys, no headers), which is what
a write that was cut short leaves, too.
"""

import asyncio
import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewater_core.errors import Corrupt
from tidewater_testing import logs, wal
from tidewater_worker.log import durable
from tidewater_worker.log.durable import NOTE_BYTES, durable_end, forget_durable, note_durable
from tidewater_worker.log.segment import SegmentWriter

SECTOR_BYTES = 512
ROWS = 300
STEP = 61
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def memory() -> Iterator[Path]:
    """Give a directory whose syncs cost nothing."""
    with logs.memory_directory() as directory:
        yield directory / "3"


def _write(directory: Path, count: int = 2) -> wal.Segment:
    draw = random.Random(7)
    logs.append(directory, [[draw.randbytes(20) for _ in range(ROWS)] for _ in range(count)])
    (segment,) = wal.read_log(directory)
    return segment


def _restore(path: Path, data: bytes | bytearray) -> None:
    for broken in path.parent.glob("*.broken*"):
        broken.unlink()
    path.write_bytes(data)


def test_flips_in_the_last_frame_below_the_note_are_refused(memory: Path) -> None:
    segment = _write(memory)
    whole, frame = segment.path.read_bytes(), segment.frames[-1]
    assert bytes(SECTOR_BYTES) in whole[frame.at : frame.end], "as a torn write has them"
    for at in range(frame.at, frame.end, STEP):
        data = bytearray(whole)
        data[at] ^= 4
        _restore(segment.path, data + bytes(4096))
        with pytest.raises(Corrupt, match="FrameCorrupt"):
            logs.reopen(memory)
        assert segment.path.read_bytes() == data + bytes(4096), "G7 Nothing is silently skipped"


def test_writes_above_the_note_are_torn_as_ever(memory: Path) -> None:
    segment = _write(memory)
    whole, frame = segment.path.read_bytes(), segment.frames[-1]
    first = -(-frame.at // SECTOR_BYTES) * SECTOR_BYTES
    for at in range(first, frame.end - SECTOR_BYTES, SECTOR_BYTES):
        data = bytearray(whole)
        data[at : at + SECTOR_BYTES] = bytes(SECTOR_BYTES)
        if data == whole:
            continue
        for noted in (0, frame.base_offset):
            _restore(segment.path, data)
            note_durable(segment.path, noted)
            assert logs.reopen(memory).next_offset == frame.base_offset, f"byte {at}"
        _restore(segment.path, data)
        note_durable(segment.path, frame.base_offset + 1)
        with pytest.raises(Corrupt, match="FrameCorrupt"):
            logs.reopen(memory)


def test_a_damaged_note_says_nothing(memory: Path) -> None:
    segment = _write(memory)
    note = segment.path.with_suffix(durable.SUFFIX)
    data = note.read_bytes()
    assert (len(data), durable_end(segment.path)) == (NOTE_BYTES, 2 * ROWS)
    for at in range(NOTE_BYTES):
        for bit in range(8):
            note.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            assert durable_end(segment.path) == 0, f"byte {at} bit {bit}"
        note.write_bytes(data[:at])
        assert durable_end(segment.path) == 0, f"cut at byte {at}"
    assert logs.reopen(memory).next_offset == 2 * ROWS


async def test_it_is_noted_while_the_log_is_written(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is killed closes nothing: its last frame is noted soon after it came."""
    monkeypatch.setattr(durable, "NOTE_S", 0.01)
    memory.mkdir()
    async with logs.appending(memory, logs.reopen(memory), 1 << 26) as appender:
        path = memory / f"{0:020d}.wal"
        for number in range(3):
            await logs.offer(appender, logs.make_submission(number, [b"x"] * ROWS))
            async with asyncio.timeout(30):
                while durable_end(path) < appender.durable_end:
                    await asyncio.sleep(0.01)
            assert durable_end(path) == (number + 1) * ROWS
        shutil.copytree(memory, memory.parent / "killed")
        await appender.close()
    copy = memory.parent / "killed" / path.name
    data = bytearray(copy.read_bytes())
    frame = wal.read_log(memory)[-1].frames[-1]
    data[frame.end - 9] ^= 1
    copy.write_bytes(data)
    with pytest.raises(Corrupt, match=f"below offset {3 * ROWS} were fsynced"):
        logs.reopen(copy.parent)


async def test_what_was_not_fsynced_is_not_noted(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "NOTE_S", 0.0)
    memory.mkdir()

    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with logs.appending(memory, logs.reopen(memory), 1 << 26) as appender:
        await logs.offer(appender, logs.make_submission(0, [b"x"]))
        monkeypatch.setattr(os, "fdatasync", failing)
        appender.offer(logs.make_submission(1, [b"y"]))
        await appender.settle()
        assert appender.failure is not None
        await asyncio.sleep(0.05)
        await appender.close()
    assert durable_end(memory / f"{0:020d}.wal") <= 1


def test_a_segment_begins_without_the_note_of_another(memory: Path) -> None:
    """A person moved the damaged one away, and the log went on at the same offset."""
    segment = _write(memory)
    segment.path.unlink()
    again = _write(memory, 1)
    assert again.path == segment.path
    assert durable_end(again.path) == ROWS
    again.path.unlink()
    note_durable(again.path, 2 * ROWS)
    schema = segment.header.schema
    SegmentWriter.create(memory, logs.TOPIC_UUID, logs.PARTITION, 0, schema).abandon()
    assert durable_end(again.path) == 0
    forget_durable(again.path)
    assert logs.reopen(memory).next_offset == 0
