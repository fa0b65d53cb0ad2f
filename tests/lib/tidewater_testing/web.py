"""HTTP for tests: plain requests, and a connection that knows when an outcome is unknown."""

import asyncio
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BODY_BYTES_MAX = 512 * 1024 * 1024


class NotSentError(ConnectionError):
    """No connection: the server has seen nothing of the request."""


class NoAnswerError(ConnectionError):
    """The connection broke after the request was begun: its outcome is unknown."""


@dataclass(frozen=True)
class Answer:
    """What a server said."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    def json(self) -> Any:
        """Decode the body."""
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        """The reason of an error answer, or an empty string."""
        if self.status < 400 or not self.body.startswith(b"{"):
            return ""
        return str(self.json().get("error", {}).get("reason", ""))

    @property
    def retry_after_s(self) -> float | None:
        """Seconds that the server asked to wait."""
        value = self.headers.get("retry-after")
        return float(value) if value is not None else None


def request(
    address: str,
    method: str,
    path: str,
    body: bytes | str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Answer:
    """Send one request to `host:port` on a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, names, answer.read())
    finally:
        connection.close()


class Connection:
    """One keep-alive connection; reconnects by itself, never sends a request twice."""

    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request and wait for the answer; see the two errors above."""
        reader, writer = await self._connect()
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        head = "\r\n".join([*lines, "", ""]).encode()
        try:
            async with asyncio.timeout(self._timeout_s):
                writer.write(head + body)
                await writer.drain()
                answer = await _read_answer(reader)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            await self.close()
            raise NoAnswerError(f"{method} {path}: {error!r}") from error
        except BaseException:
            await self.close()  # cancelled in mid-request: the connection cannot be used again
            raise
        if answer.headers.get("connection", "").lower() == "close":
            await self.close()
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None and self._streams[0].at_eof():
            await self.close()  # the server closed it while idle: nothing was sent on it
        if self._streams is None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    self._streams = await asyncio.open_connection(self._host, self._port)
            except (OSError, TimeoutError) as error:
                raise NotSentError(str(error)) from error
        return self._streams

    async def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._streams is None:
            return
        writer = self._streams[1]
        self._streams = None
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:
            return  # it was broken already


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    status_line = await reader.readline()
    if not status_line.endswith(b"\n"):
        msg = "the connection ended before an answer"
        raise EOFError(msg)
    status = int(status_line.split()[1])
    headers: dict[str, str] = {}
    while line := (await reader.readuntil(b"\n")).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Answer(status, headers, await _read_chunks(reader))
    size = int(headers.get("content-length", "0"))
    if size > BODY_BYTES_MAX:
        raise ValueError(f"an answer of {size} bytes")
    return Answer(status, headers, await reader.readexactly(size))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks: list[bytes] = []
    while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\n")
    return b"".join(chunks)
