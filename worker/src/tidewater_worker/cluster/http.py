"""HTTP/1.1 from worker to worker: pooled keep-alive connections, every wait bounded."""

import asyncio
import re
import ssl
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Final
from urllib.parse import urlsplit

import httptools

from tidewater_core.errors import Invalid, OutcomeUnknown, Retryable

CONNECT_S: Final = 2.0
IDLE_S_MAX: Final = 30.0
"""A connection that was idle longer is not used again: the other side may be closing it."""
IDLE_MAX: Final = 32
"""Connections kept per worker."""
BODY_S: Final = 30.0
"""How long an answer that is read whole may take behind its head."""
READ_BYTES: Final = 256 * 1024
RETRY_MS: Final = 500
RawHeaders = Sequence[tuple[bytes, bytes]]
_ENDS_TARGET: Final = re.compile(r"[\0-\x20\x7f]")
_ENDS_HEADER: Final = re.compile(rb"[\r\n\0]")
"""What would make one request two, and give a later caller this one's answer."""


class _Connection:
    """One connection; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.idle_since = 0.0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.keep_alive = True
        self.has_head = self.is_complete = False
        self._chunks: deque[bytes] = deque()
        self._parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the status."""
        self.status, self.has_head = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        """Note the end."""
        self.keep_alive = self._parser.should_keep_alive()
        self.is_complete = True

    async def send(self, head: bytes, body: bytes) -> None:
        """Send a request and read the head of its answer."""
        self.headers, self.has_head, self.is_complete = [], False, False
        self._chunks.clear()  # of an answer that nobody read to its end
        self._parser = httptools.HttpResponseParser(self)
        self.writer.writelines((head, body))
        await self.writer.drain()
        while not self.has_head:
            await self._read()

    async def _read(self) -> None:
        data = await self.reader.read(READ_BYTES)
        if not data:
            raise ConnectionResetError("the other worker hung up")
        self._parser.feed_data(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self.is_complete:
                return
            await self._read()


class Reply:
    """An answer; its body is read once, by `read` or `chunks`."""

    def __init__(self, peers: "Peers", url: str, connection: _Connection) -> None:
        self.status, self.headers = connection.status, connection.headers
        self._peers, self._url, self._connection = peers, url, connection

    async def read(self) -> bytes:
        """Return the whole body; `OutcomeUnknown` if it does not come to its end in time."""
        try:
            async with asyncio.timeout(BODY_S), aclosing(self.chunks()) as chunks:
                return b"".join([chunk async for chunk in chunks])
        except TimeoutError:
            said = f"{self._url}: an answer without an end"
            raise OutcomeUnknown("OwnerSilent", said, RETRY_MS) from None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes."""
        try:
            async for chunk in self._connection.chunks():
                yield chunk
        except (OSError, httptools.HttpParserError) as error:
            raise OutcomeUnknown("OwnerSilent", f"{self._url}: {error}", RETRY_MS) from error
        finally:
            self._peers.give_back(self._url, self._connection)


class Peers:
    """Connections to other workers."""

    def __init__(self, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        self.tls = tls or ssl.create_default_context
        """What a new connection to an `https://` address is checked with."""
        self._idle: dict[str, deque[_Connection]] = defaultdict(deque)
        self._swept_at = 0.0

    async def request(
        self,
        url: str,
        method: str,
        target: str,
        headers: RawHeaders = (),
        body: bytes = b"",
        timeout_s: float = 30.0,
    ) -> Reply:
        """Ask another worker; `Retryable` if it was not reached, `OutcomeUnknown` if it is silent.

        The time limit is for the head of the answer.
        """
        head = _head(url, method, target, headers, body)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect(url)
                try:
                    await connection.send(head, body)
                except BaseException:
                    connection.writer.close()
                    raise
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            said = str(error) or type(error).__name__
            raise OutcomeUnknown("OwnerSilent", f"no answer from {url}: {said}", RETRY_MS) from None
        return Reply(self, url, connection)

    async def _connect(self, url: str) -> _Connection:
        idle = self._idle[url]
        while idle:
            connection = idle.pop()
            fresh = time.monotonic() - connection.idle_since < IDLE_S_MAX
            if fresh and not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        address = urlsplit(url)
        tls = self.tls() if address.scheme == "https" else None
        port = address.port or (443 if tls else 80)
        try:
            async with asyncio.timeout(CONNECT_S):
                pair = await asyncio.open_connection(
                    address.hostname, port, limit=4 * READ_BYTES, ssl=tls
                )
        except (OSError, TimeoutError) as error:
            said = str(error) or type(error).__name__
            raise Retryable("OwnerUnreachable", f"{url}: {said}", RETRY_MS) from None
        return _Connection(*pair)

    def give_back(self, url: str, connection: _Connection) -> None:
        """Keep a connection whose answer was read whole; close any other."""
        self._sweep(time.monotonic())
        idle = self._idle[url]
        if connection.is_complete and connection.keep_alive and len(idle) < IDLE_MAX:
            connection.idle_since = time.monotonic()
            idle.append(connection)
        else:
            connection.writer.close()

    def _sweep(self, now: float) -> None:
        """Close what nobody will use again: the worker may be gone, and is never asked again."""
        if now - self._swept_at < IDLE_S_MAX:
            return
        self._swept_at = now
        for url, idle in list(self._idle.items()):
            while idle and now - idle[0].idle_since >= IDLE_S_MAX:
                idle.popleft().writer.close()
            if not idle:
                del self._idle[url]

    async def close(self) -> None:
        """Close all idle connections."""
        for idle in self._idle.values():
            for connection in idle:
                connection.writer.close()
                with suppress(OSError):
                    await connection.writer.wait_closed()
        self._idle.clear()


def _head(url: str, method: str, target: str, headers: RawHeaders, body: bytes) -> bytes:
    """Write the head of a request; refuse what would not be read as what it is."""
    if _ENDS_TARGET.search(target):
        raise Invalid("InvalidTarget", f"{target[:100]!r} cannot be asked for")
    lines = [f"{method} {target} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n".encode()]
    for name, value in headers:
        if _ENDS_HEADER.search(name) or _ENDS_HEADER.search(value):
            raise Invalid("InvalidHeader", f"header {name[:40]!r} has a line end or a NUL")
        lines.append(b"%b: %b\r\n" % (name, value))
    if body or method == "POST":
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*lines, b"\r\n"])
