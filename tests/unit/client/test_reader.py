import json
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pytest

from scripted_http import HANG_UP, Handler, Request, Server, answer
from tidewater import wire
from tidewater.admin import Admin, Bounds, Flushed, TopicInfo
from tidewater.reader import AsyncReader, Reader
from tidewater.retry import RetryPolicy
from tidewater.transport import Transport
from tidewater.transport_async import AsyncTransport
from tidewater.wire import Gap
from tidewater_core.errors import NotFound

Serve = Callable[[Handler], Server]
FAST = RetryPolicy(attempts_max=3, wait_ms_min=1, wait_ms_max=1)
END = 25


def partition(request: Request) -> bytes:
    """Answer like a partition with `END` messages, at most 10 at a time."""
    query = {name: values[0] for name, values in parse_qs(urlsplit(request.target).query).items()}
    if query["partition"] != "0":
        body = {"error": {"reason": "UnknownPartition", "message": "m"}}
        return answer(json.dumps(body).encode(), 404)
    start = int(query.get("offset", "20"))
    stop = min(END, start + min(10, int(query["limit"])))
    if request.headers["accept"] == wire.ARROW:
        rows = range(start, stop)
        batch = pa.record_batch(
            {"tw_offset": pa.array(rows, pa.int64()), "value": [b"%d" % i for i in rows]}
        )
        body_bytes = wire.arrow_body(batch)
        half = len(body_bytes) // 2
        chunks = (body_bytes[:half], body_bytes[half:])
        return (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks)
            + b"0\r\n\r\n"
        )
    messages = [{"partition": 0, "offset": i, "value": str(i)} for i in range(start, stop)]
    page = {"messages": messages, "next_offset": stop, "end_offset": END}
    return answer(json.dumps(page).encode())


def test_pages_lead_to_the_end(serve: Serve) -> None:
    with Transport(serve(partition).origin) as transport:
        reader = Reader(transport, "a/b")
        page = reader.page(0, 3, limit=2)
        assert ([m.offset for m in page.messages], page.next_offset) == ([3, 4], 5)
        assert page.end_offset == END
        assert [m.value for m in reader.messages(0)] == [b"%d" % i for i in range(END)]
        assert [m.offset for m in reader.messages(0, 8, 13)] == [8, 9, 10, 11, 12]


def test_a_read_from_a_time_on(serve: Serve) -> None:
    server = serve(partition)
    with Transport(server.origin) as transport:
        page = Reader(transport, "a/b").page(0, datetime(2026, 1, 31, tzinfo=UTC), wait_ms=5)
    assert page.messages[0].offset == 20
    query = parse_qs(urlsplit(server.requests[0].target).query)
    assert query["timestamp"] == ["2026-01-31T00:00:00+00:00"]
    assert query["wait_ms"] == ["5"]


def test_arrow_is_read_to_the_end_over_one_connection(serve: Serve) -> None:
    server = serve(partition)
    with Transport(server.origin) as transport:
        reader = Reader(transport, "a/b")
        offsets = [
            offset
            for batch in reader.arrow_range(0, 2, 1000)
            for offset in batch.column("tw_offset").to_pylist()
        ]
        assert offsets == list(range(2, END))
        with pytest.raises(NotFound, match="UnknownPartition"):
            list(reader.arrow(1, 0))
    assert server.connections == 1


def test_reads_are_tried_again(serve: Serve) -> None:
    replies = [HANG_UP, answer(b"", 503)]
    server = serve(lambda request: replies.pop(0) if replies else partition(request))
    with Transport(server.origin) as transport:
        assert Reader(transport, "a/b", retry=FAST).page(0, 0).next_offset == 10


async def test_async_pages(serve: Serve) -> None:
    replies = [HANG_UP, answer(b"", 503)]
    server = serve(lambda request: replies.pop(0) if replies else partition(request))
    async with AsyncTransport(server.origin, pipeline_max=1) as transport:
        reader = AsyncReader(transport, "a/b", retry=FAST)
        assert (await reader.page(0, 20)).next_offset == END
        with pytest.raises(NotFound):
            await reader.page(1, 0)


def test_admin_calls(serve: Serve) -> None:
    replies = {
        "GET /v1/topics": {"topics": [{"namespace": "a", "name": "b", "partitions": 3, "x": 1}]},
        "GET /v1/a/b": {
            "partitions": [
                {"partition": 0, "start": 3, "frontier": 9, "log_start": 7, "end": 12},
                {"partition": 1, "start": 0, "frontier": 0, "log_start": 0, "end": 0},
                {"partition": 2, "start": 2, "frontier": 5, "state": "opening"},
            ]
        },
        "GET /v1/a/b/stats": {"rows": 1},
        "POST /v1/a/b/flush": {"snapshot_id": 5, "frontier": {"0": 7, "1": 0}},
    }
    server = serve(lambda r: answer(json.dumps(replies[f"{r.method} {r.target}"]).encode()))
    with Transport(server.origin) as transport:
        admin = Admin(transport)
        assert admin.topics() == [TopicInfo("a", "b", 3)]
        assert admin.bounds("a/b") == {0: Bounds(3, 12), 1: Bounds(0, 0), 2: Bounds(2, 5)}
        assert admin.stats("a/b") == {"rows": 1}
        assert admin.flush("a/b") == Flushed(5, {0: 7, 1: 0})


GAPS = [Gap(3, 5), Gap(9, 10)]
SAID = [{"start": gap.start, "end": gap.end} for gap in GAPS]


def with_gaps(request: Request) -> bytes:
    """Answer like a partition that lost a volume twice."""
    said = "3-5,9-10"
    if request.headers["accept"] == wire.ARROW:
        body = wire.arrow_body(pa.record_batch({"tw_offset": [0, 1, 2, 5]}))
        return answer(body).replace(b"\r\n", f"\r\nTidewater-Gaps: {said}\r\n".encode(), 1)
    page = {"messages": [], "next_offset": 10, "end_offset": 10, "gaps": SAID}
    return answer(json.dumps(page).encode())


def test_what_was_lost_is_named(serve: Serve) -> None:
    with Transport(serve(with_gaps).origin) as transport:
        reader = Reader(transport, "a/b")
        assert reader.gaps == {}
        assert reader.page(1, 0).gaps == GAPS
        assert reader.page(1, 0).gaps == GAPS
        assert reader.gaps == {1: GAPS}
        assert len(list(reader.arrow(2, 0))) == 1
        assert reader.gaps == {1: GAPS, 2: GAPS}
        reader.response(3, 0, accept=wire.ARROW)
        assert reader.gaps[3] == GAPS


async def test_what_was_lost_is_named_with_asyncio(serve: Serve) -> None:
    async with AsyncTransport(serve(with_gaps).origin, pipeline_max=1) as transport:
        reader = AsyncReader(transport, "a/b")
        assert (await reader.page(1, 0)).gaps == GAPS
        await reader.response(2, 0, accept=wire.ARROW)
        assert reader.gaps == {1: GAPS, 2: GAPS}


def test_pages_without_gaps(serve: Serve) -> None:
    with Transport(serve(partition).origin) as transport:
        reader = Reader(transport, "a/b")
        assert reader.page(0, 0).gaps == []
        assert reader.gaps == {}
