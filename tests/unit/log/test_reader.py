"""Seeking by offset: the index leads near, and never astray."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidewater_testing import logs
from tidewater_worker.log import index as idx
from tidewater_worker.log.reader import LogReader, read_header
from tidewater_worker.log.recover import Segment

SEGMENT_BYTES = 1_000_000
BATCHES = [[f"{batch:05d}-{row}".encode().ljust(900, b"x") for row in range(4)]
           for batch in range(600)]  # fmt: skip
PAYLOADS = [payload for batch in BATCHES for payload in batch]


@pytest.fixture(scope="module")
def log() -> Iterator[Path]:
    """Several segments of several strides each; the last one is open."""
    with logs.memory_directory() as directory:
        logs.append(directory / "3", BATCHES, segment_bytes=SEGMENT_BYTES)
        yield directory / "3"


class Reads:
    """Counts what is read, and in how many steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = self.steps = 0
        real = os.pread

        def pread(fd: int, size: int, at: int) -> bytes:
            data = real(fd, size, at)
            self.bytes += len(data)
            self.steps += 1
            return data

        monkeypatch.setattr(os, "pread", pread)


def value_at(reader: LogReader, offset: int) -> Any:
    (found,) = reader.read(offset, len(PAYLOADS), 1)[:1]
    return found.batch.column("value")[offset - found.base_offset].as_py()


def segments_of(directory: Path) -> list[Segment]:
    return logs.reopen(directory).segments


def test_every_offset_is_found_with_and_without_an_index(log: Path) -> None:
    known = segments_of(log)
    assert len(known) > 2
    for segments in ((), known):
        reader = LogReader(log, segments)
        for offset in range(len(PAYLOADS) - 1, -1, -7):
            assert value_at(reader, offset) == PAYLOADS[offset], "G3 One stream"
        reader.close()


@pytest.mark.parametrize("is_open", [False, True])
def test_a_seek_reads_little(log: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    """A sealed segment has its index on the disk, the one that is written in memory."""
    known = segments_of(log)
    segment = known[-1] if is_open else known[-2]
    assert segment.index.size > 4 * idx.STRIDE_BYTES
    assert idx.load(log / f"{segment.base_offset:020d}.wal") is None or not is_open
    reads = Reads(monkeypatch)
    reader = LogReader(log, known if is_open else ())
    offset = segment.end_offset - 1
    assert value_at(reader, offset) == PAYLOADS[offset]
    assert reads.bytes < 4 * idx.STRIDE_BYTES, "the segment was walked from its beginning"
    assert reads.steps < 6, "one frame after the other"
    reader.close()


def test_an_index_of_other_bytes_is_no_help_and_no_harm(log: Path) -> None:
    known = segments_of(log)
    wrong = idx.SparseIndex()
    for entry in range(9):
        wrong.note(known[0].base_offset + entry, 1, entry * idx.STRIDE_BYTES + 8, 9, 0)
    reader = LogReader(log, [Segment(known[0].base_offset, wrong)])
    assert value_at(reader, 100) == PAYLOADS[100]
    reader.close()


async def test_a_seek_into_a_segment_that_is_being_written(tmp_path: Path) -> None:
    async with logs.appending(tmp_path, logs.reopen(tmp_path), 1 << 26) as appender:
        for number, batch in enumerate(BATCHES[:200]):
            await logs.offer(appender, logs.make_submission(number, batch))
        reader = LogReader(tmp_path, appender.segments)
        for offset in (0, 799, 400, 3):
            found = await asyncio.to_thread(reader.read, offset, appender.end, 1)
            assert found[0].base_offset == offset // 4 * 4
        reader.close()
        await appender.close()


def test_a_header_of_any_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.append(tmp_path, [[b"a"]])
    (path,) = tmp_path.glob("*.wal")
    whole = read_header(path)
    for at_once in (1, 44, 100, whole.size - 1, whole.size):
        monkeypatch.setattr("tidewater_worker.log.reader.HEADER_READ_BYTES", max(at_once, 44))
        assert read_header(path) == whole


def test_who_ends_a_reader_while_it_opens_a_segment_leaves_nothing_open(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client hangs up: what reads for it in a thread is not stopped by that."""
    reader, opening, ended = LogReader(log), threading.Event(), threading.Event()
    real = read_header

    def slow(path: Path) -> Any:
        opening.set()
        assert ended.wait(10)
        return real(path)

    monkeypatch.setattr("tidewater_worker.log.reader.read_header", slow)
    reading = threading.Thread(target=reader.read, args=(0, len(PAYLOADS), 1))
    reading.start()
    assert opening.wait(10)
    reader.end()
    ended.set()
    reading.join()
    assert reader._segment is None, "G6 Bounded: a descriptor nobody will close"
    reader.read(0, 1, 1)
    assert reader._segment is None
