"""Reading by offset, without a subscription: pages of messages, or Arrow batches as they arrive."""

import asyncio
import io
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from tidewater import wire
from tidewater.admin import Admin
from tidewater.http1 import Response, request_bytes
from tidewater.retry import RetryPolicy
from tidewater.transport import BodyReader, Transport
from tidewater.transport_async import AsyncTransport
from tidewater.wire import Gap, Page, Received
from tidewater_core import names
from tidewater_core.clock import IdSource, SystemIds
from tidewater_core.errors import NotFound, TidewaterError
from tidewater_core.names import TopicName

if TYPE_CHECKING:
    import pyarrow as pa

LIMIT: Final = 1_000
"""Messages of one page, unless told."""
ARROW_LIMIT: Final = 100_000
"""Rows of one Arrow answer, unless told."""


def read_target(
    topic: TopicName,
    partition: int,
    position: int | datetime,
    limit: int,
    wait_ms: int = 0,
) -> str:
    """Return the request target of a read from an offset, or from a time on."""
    query: dict[str, int | str] = {"partition": partition}
    if isinstance(position, datetime):
        query["timestamp"] = position.isoformat()
    else:
        query["offset"] = position
    query["limit"] = limit
    if wait_ms:
        query["wait_ms"] = wait_ms
    return f"/v1/{topic}/messages?{urlencode(query)}"


class Lost:
    """What reads were told of offsets that were lost with volumes (G7)."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.gaps: dict[int, list[Gap]] = {}
        """By partition, each gap once."""

    def note(self, partition: int, gaps: Iterable[Gap]) -> None:
        """Take what an answer says."""
        for gap in gaps:
            known = self.gaps.setdefault(partition, [])
            if gap not in known:
                known.append(gap)


class Reader:
    """A blocking reader of one topic."""

    def __init__(
        self,
        transport: Transport,
        topic: TopicName | str,
        *,
        retry: RetryPolicy | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """Make a reader; nothing is sent yet."""
        self._transport = transport
        self._topic = topic if isinstance(topic, TopicName) else TopicName.parse(topic)
        self._retry = retry or RetryPolicy()
        self._ids = ids or SystemIds()
        self._lost = Lost()

    @property
    def gaps(self) -> dict[int, list[Gap]]:
        """What this reader's answers named as lost with a volume so far, by partition."""
        return self._lost.gaps

    def page(
        self, partition: int, position: int | datetime, *, limit: int = LIMIT, wait_ms: int = 0
    ) -> Page:
        """Read up to `limit` messages; an empty page is awaited for up to `wait_ms`."""
        page = wire.decode_page(self.response(partition, position, limit=limit, wait_ms=wait_ms))
        self._lost.note(partition, page.gaps)
        return page

    def response(
        self,
        partition: int,
        position: int | datetime,
        *,
        limit: int = LIMIT,
        wait_ms: int = 0,
        accept: str = wire.JSON,
    ) -> Response:
        """Read and return the answer as it came, for those who pass it on."""
        target = read_target(self._topic, partition, position, limit, wait_ms)
        request = request_bytes(self._transport.origin.head("GET", target, Accept=accept))
        for attempt in itertools.count(1):
            try:
                response = self._transport.send(request)
                wire.check(response)
            except TidewaterError as error:
                wait_s = self._retry.wait_s(error, attempt, self._ids.jitter(), repeatable=True)
                if wait_s is None:
                    raise
            else:
                self._lost.note(partition, wire.gaps_of(response.head))
                return response
            time.sleep(wait_s)
        raise AssertionError

    def messages(
        self, partition: int, start: int = 0, stop: int | None = None
    ) -> Iterator[Received]:
        """Read from `start` to `stop`, or to where the partition ends once it is reached."""
        offset = start
        while stop is None or offset < stop:
            page = self.page(partition, offset)
            for message in page.messages:
                if stop is not None and message.offset >= stop:
                    return
                yield message
            if not page.messages:
                return
            offset = page.next_offset

    def arrow(
        self,
        partition: int,
        position: int | datetime,
        *,
        limit: int = ARROW_LIMIT,
        wait_ms: int = 0,
    ) -> Iterator["pa.RecordBatch"]:
        """Read up to `limit` rows as Arrow batches, each as soon as it has arrived."""
        import pyarrow as pa

        target = read_target(self._topic, partition, position, limit, wait_ms)
        request = request_bytes(self._transport.origin.head("GET", target, Accept=wire.ARROW))
        with self._transport.stream(request) as (head, body):
            if head.status >= 300:
                raise wire.error_of(Response(head, _rest(body)))
            self._lost.note(partition, wire.gaps_of(head))
            with closing(io.BufferedReader(body)) as file, pa.ipc.open_stream(file) as batches:
                yield from batches
                # The end of the HTTP body stands behind the end of the Arrow stream.
                file.read()

    def arrow_range(
        self, partition: int, start: int, stop: int, *, limit: int = ARROW_LIMIT
    ) -> Iterator["pa.RecordBatch"]:
        """Read the rows of [start, stop) as Arrow batches, in as many requests as it takes."""
        offset = start
        while offset < stop:
            before = offset
            for batch in self.arrow(partition, offset, limit=min(limit, stop - offset)):
                if batch.num_rows:
                    offset = batch.column(names.TW_OFFSET)[-1].as_py() + 1
                    yield batch
            if offset == before:
                return

    def read_batches(
        self, partition: int | None = None, start: int | None = None, stop: int | None = None
    ) -> "pa.RecordBatchReader":
        """Read what is there now as a stream of Arrow batches, partition after partition.

        One partition or all; from `start` (the first that is kept) to `stop` (where it ends now).
        The stream goes to polars, DuckDB or pandas as it is, and is read as they ask for it.
        """
        import pyarrow as pa

        bounds = Admin(self._transport).bounds(self._topic)
        if partition is not None:
            if partition not in bounds:
                raise NotFound("UnknownPartition", f"{self._topic} has no partition {partition}")
            bounds = {partition: bounds[partition]}
        ranges = [
            (number, kept.start if start is None else max(start, kept.start),
             kept.end if stop is None else min(stop, kept.end))
            for number, kept in sorted(bounds.items())
        ]  # fmt: skip
        # An empty answer has the schema all the same.
        number, first, _ = ranges[0]
        schema = self._schema(number, first)
        return pa.RecordBatchReader.from_batches(
            schema,
            (
                batch
                for number, begin, end in ranges
                for batch in self.arrow_range(number, begin, end)
            ),
        )

    def read_table(
        self, partition: int | None = None, start: int | None = None, stop: int | None = None
    ) -> "pa.Table":
        """Read what is there now as one Arrow table; it must fit into memory."""
        return self.read_batches(partition, start, stop).read_all()

    def _schema(self, partition: int, offset: int) -> "pa.Schema":
        import pyarrow as pa

        body = self.response(partition, offset, limit=1, accept=wire.ARROW).body
        with pa.ipc.open_stream(body) as stream:
            return stream.schema


class AsyncReader:
    """An asyncio reader of one topic; its transport should not pipeline (`pipeline_max=1`)."""

    def __init__(
        self,
        transport: AsyncTransport,
        topic: TopicName | str,
        *,
        retry: RetryPolicy | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """Make a reader; nothing is sent yet."""
        self._transport = transport
        self._topic = topic if isinstance(topic, TopicName) else TopicName.parse(topic)
        self._retry = retry or RetryPolicy()
        self._ids = ids or SystemIds()
        self._lost = Lost()

    @property
    def gaps(self) -> dict[int, list[Gap]]:
        """What this reader's answers named as lost with a volume so far, by partition."""
        return self._lost.gaps

    async def page(
        self, partition: int, position: int | datetime, *, limit: int = LIMIT, wait_ms: int = 0
    ) -> Page:
        """Read up to `limit` messages; an empty page is awaited for up to `wait_ms`."""
        page = wire.decode_page(
            await self.response(partition, position, limit=limit, wait_ms=wait_ms)
        )
        self._lost.note(partition, page.gaps)
        return page

    async def response(
        self,
        partition: int,
        position: int | datetime,
        *,
        limit: int = LIMIT,
        wait_ms: int = 0,
        accept: str = wire.JSON,
    ) -> Response:
        """Read and return the answer as it came, for those who pass it on."""
        target = read_target(self._topic, partition, position, limit, wait_ms)
        request = request_bytes(self._transport.origin.head("GET", target, Accept=accept))
        for attempt in itertools.count(1):
            try:
                response = await self._transport.send(request)
                wire.check(response)
            except TidewaterError as error:
                wait_s = self._retry.wait_s(error, attempt, self._ids.jitter(), repeatable=True)
                if wait_s is None:
                    raise
            else:
                self._lost.note(partition, wire.gaps_of(response.head))
                return response
            await asyncio.sleep(wait_s)
        raise AssertionError


def _rest(body: BodyReader) -> bytes:
    pieces = []
    while piece := body.piece():
        pieces.append(piece)
    return b"".join(pieces)
