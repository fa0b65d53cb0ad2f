"""Offsets are not numbers of rows: reads that end at one, over offsets that were lost (G3)."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from fastapi import Request

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid
from tidewater_worker.api.routes import _proxied, check_one_start
from tidewater_worker.api.socket_messages import Read
from tidewater_worker.api.socket_reading import Chunk, Following
from tidewater_worker.flight.server import _note, _with_gaps
from tidewater_worker.partition import OFFSET_MAX, Partition
from tidewater_worker.ports import PartitionState
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.streaming import PartitionStream, gaps_header, parse_gaps, rows_below

SPEC = TopicSpec()
SCHEMA = table_arrow_schema(SPEC)


def rows(offsets: Any) -> pa.RecordBatch:
    found = [{"tw_partition": 0, "tw_offset": o, "tw_time": 0, "value": b"x"} for o in offsets]
    return pa.RecordBatch.from_pylist(found, SCHEMA)


class Link:
    """A table process that has all that it is asked for."""

    async def frontier_at(
        self, _topic: str, _snapshot_id: int | None, tag: str | None
    ) -> dict[int, int]:
        return {0: 1_001} if tag == "month-close" else {}

    async def bounds(self, _topic: str) -> dict[int, PartitionState]:
        return {}

    async def history(
        self, _topic: str, _number: int, start: int, end: int, limit: int, _columns: Any
    ) -> AsyncIterator[pa.RecordBatch]:
        yield rows(range(start, min(end, start + limit)))


class Tail:
    """A log in memory."""

    start = 1_000

    def read(self, offset: int, end: int, _nbytes: int) -> list[Any]:
        return [SimpleNamespace(base_offset=offset, rows=end - offset, batch=rows(range(end)))]


def stream_of(folder: Path, *, is_committed: bool) -> PartitionStream:
    """0 and 1 are in the table, up to 999 is lost, 1000 is committed, up to 1004 in the log."""
    table = PartitionState(next=1_001, gaps=((2, 1_000),))
    partition = Partition("shop/orders", 0, folder, table=table, is_open=True)
    partition.appender = SimpleNamespace(  # type: ignore[assignment]
        start=1_000, end=1_005, tail=Tail(), segments=[1]
    )
    topic: Any = SimpleNamespace(spec=SPEC, name="shop/orders", partition=lambda _: partition)
    node: Any = SimpleNamespace(link=Link(), clock=SimpleNamespace(monotonic=lambda: 0.0))
    return PartitionStream(node, topic, 0, is_committed=is_committed)


@pytest.mark.parametrize(
    ("is_committed", "limit", "end", "found"),
    [
        (True, 100, OFFSET_MAX, [0, 1, 1_000]),
        (True, 2, OFFSET_MAX, [0, 1]),
        (False, 1_002, 1_002, [0, 1, 1_000, 1_001]),
        (False, 3, 1_002, [0, 1, 1_000]),
        (False, 100, 500, [0, 1]),
        (False, 100, 1, [0]),
        (False, 100, 0, []),
    ],
)
async def test_a_read_ends_at_an_offset_whatever_was_lost_before_it(
    tmp_path: Path, is_committed: bool, limit: int, end: int, found: list[int]
) -> None:
    stream = stream_of(tmp_path, is_committed=is_committed)
    read = [o async for b in stream.batches(limit, end) for o in b["tw_offset"].to_pylist()]
    assert read == found


@pytest.mark.parametrize(("end", "found"), [(0, []), (8, [7]), (9, [7]), (10, [7, 9])])
def test_an_owners_answer_is_cut_at_the_end(end: int, found: list[int]) -> None:
    assert rows_below(rows([7, 9]), end)["tw_offset"].to_pylist() == found


async def test_what_was_lost_is_named(tmp_path: Path) -> None:
    """To a reader that passes it, whatever the door."""
    stream = stream_of(tmp_path, is_committed=False)
    await stream.begin(0, None)
    named = {"start": 2, "end": 1_000}
    assert [stream.lost(*span) for span in ((0, 2), (0, 3), (1_000, 1_005))] == [[], [named], []]
    assert gaps_header(stream.lost(0)) == {"tidewater-gaps": "2-1000"}
    assert parse_gaps(b"2-1000") == ((2, 1_000),)
    assert (gaps_header(stream.lost(1_000)), parse_gaps(b"")) == ({}, ())
    batches = [batch async for batch in stream.batches(100)]
    plain, after = _with_gaps(stream, 0, batches)
    assert isinstance(plain, pa.RecordBatch)
    assert msgspec.json.decode(after[1].to_pybytes()) == {"gaps": [named]}
    note = msgspec.json.decode(_note(stream, 1_005, 2).to_pybytes())
    assert note == {"next_offset": 1_005, "end_offset": 1_005, "gaps": [named]}
    assert "gaps" not in msgspec.json.decode(_note(stream).to_pybytes())


async def test_a_socket_names_what_was_lost(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, is_committed=False)
    await stream.begin(0, None)
    sent: list[bytes] = []
    client: Any = SimpleNamespace(send=sent.append)
    none: Any = None
    following = Following(none, none, none, client, Read(1))
    following._send(Chunk(1, b"[]"), 1_000, 1_001, stream)
    following._send(Chunk(3, b"[]"), 0, 1_001, stream)
    first, second = (json.loads(frame[frame.index(b"{") :])["messages"] for frame in sent)
    assert "gaps" not in first
    assert second["gaps"] == [{"start": 2, "end": 1_000}]


async def test_a_read_begins_where_a_snapshot_ended(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, is_committed=False)
    for tag, offset in (("month-close", 1_001), ("before-it", 0)):
        await stream.begin_at(None, tag)
        assert stream.offset == offset
    check_one_start(None, None, "month-close")
    with pytest.raises(Invalid, match="one of offset"):
        check_one_start(None, 0, "month-close")


async def test_what_was_lost_is_named_by_a_worker_that_asks_the_owner() -> None:
    """The headers of a read that is passed on say what the owner's say (G7)."""
    said = {"content-type": "x/y", "tidewater-end-offset": "9", "tidewater-gaps": "2-5,7-8"}

    async def chunks() -> AsyncIterator[bytes]:
        yield b"rows"

    async def proxy(*_: Any) -> Any:
        headers = [(name.encode(), value.encode()) for name, value in said.items()]
        return SimpleNamespace(status=200, headers=headers, chunks=chunks)

    node: Any = SimpleNamespace(forwarding=SimpleNamespace(proxy=proxy))
    scope = {"type": "http", "method": "GET", "path": "/v1", "query_string": b"", "headers": []}
    answer = await _proxied(node, "http://b", Request(scope), 0.0)
    assert dict(answer.headers) == said
