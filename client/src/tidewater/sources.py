"""Where a consumer's messages come from: a WebSocket with credit, or one long poll after another.

A source delivers what the buffer has room for, and no more. Over the socket room is given as
*credit*; over HTTP each pull asks for so many. Both say the same and cost differently: a pull is
a request per answer. What became of messages is told over the socket, too, while it is open.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from tidewater import wire
from tidewater.deliveries import Pulled, Pulls
from tidewater.errors import OutcomeUnknown, TidewaterError
from tidewater.http1 import request_bytes
from tidewater.origin import Origin
from tidewater.sockets import HEARD, NoSocketError, Socket, open_socket
from tidewater.transport_async import PipelinedConnection, connect
from tidewater_core.clock import IdSource

PING_S: Final = 20.0
"""How often a worker pings that does not say."""
SILENCE_PINGS: Final = 3
"""A socket that was silent for so many pings is broken."""
STOP_S: Final = 1.0
"""How long the last messages of a socket that is to be closed are waited for."""
ID: Final = 1
COMMANDS: Final = {"ack": "acknowledge", "nack": "reject", "extend": "extend"}
"""What calls of a subscription are named on a socket."""


class Engine(Protocol):
    """What a source needs of its consumer."""

    name: str

    async def room_for(self, share: int, owed: Callable[[], int]) -> int:
        """Wait until so many more may come; `owed` tells what was asked for and has not come."""

    def take_in(self, origin: Origin, found: list[Pulled] | bytes) -> None:
        """Take messages, or an Arrow stream of them."""


class Source(Protocol):
    """Delivers messages of one worker."""

    async def take(self) -> None:
        """Wait for the worker's next word; raise what it is if it is no good one."""

    async def close(self) -> None:
        """Deliver nothing more."""


class Polling:
    """One pull after the other."""

    def __init__(
        self,
        engine: Engine,
        origin: Origin,
        path: str,
        share: int,
        *,
        arrow: bool,
        wait_s: float,
        timeout_s: float,
        connect_s: float,
    ) -> None:
        """Prepare; the first `take` connects."""
        self._engine, self._origin, self._path, self._share = engine, origin, path, share
        self._accept = wire.ARROW if arrow else wire.JSON
        self._wait_ms = round(wait_s * 1000)
        self._timeout_s, self._connect_s = wait_s + timeout_s, connect_s
        self._connection: PipelinedConnection | None = None

    async def take(self) -> None:
        """Pull once there is room."""
        limit = await self._engine.room_for(self._share, int)
        if self._connection is None or not self._connection.usable:
            self._connection = await connect(self._origin, self._timeout_s, self._connect_s)
        body = msgspec.json.encode(
            {"max": limit, "wait_ms": self._wait_ms, "consumer": self._engine.name}
        )
        head = self._origin.head(
            "POST", f"{self._path}/pull", Content_Type=wire.JSON, Accept=self._accept
        )
        response = await self._connection.send(request_bytes(head, body))
        wire.check(response)
        if wire.ARROW in (response.header("Content-Type") or ""):
            self._engine.take_in(self._origin, response.body)
            return
        try:
            found = _pulls.decode(response.body).messages
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OutcomeUnknown("BadAnswer", f"unreadable answer to a pull: {error}") from error
        self._engine.take_in(self._origin, found)

    async def close(self) -> None:
        """Hang up: the worker sees that nobody waits, and keeps what it had ready."""
        if self._connection is not None:
            await self._connection.close()


class _Batch(msgspec.Struct):
    count: int
    messages: list[Pulled] = []


class _Welcome(msgspec.Struct):
    ping_ms: int = round(PING_S * 1000)


class _Settled(msgspec.Struct):
    id: int
    refused: list[dict[str, Any]] = []


class _Said(msgspec.Struct):
    welcome: _Welcome | None = None
    messages: _Batch | None = None
    error: dict[str, Any] | None = None
    stopped: dict[str, Any] | None = None
    acknowledged: _Settled | None = None
    rejected: _Settled | None = None
    extended: _Settled | None = None


_pulls = msgspec.json.Decoder(Pulls)
_said = msgspec.json.Decoder(_Said)


class Streaming:
    """A subscription over a WebSocket: messages come as they are stored, while there is credit."""

    def __init__(
        self,
        engine: Engine,
        origin: Origin,
        target: str,
        subscription: str,
        share: int,
        *,
        arrow: bool,
        connect_s: float,
        ids: IdSource,
    ) -> None:
        """Prepare; the first `take` connects."""
        self._engine, self._origin, self._share = engine, origin, share
        self._target, self._subscription = target, subscription
        self._format = "arrow" if arrow else "json"
        self._connect_s, self._ids = connect_s, ids
        self._socket: Socket | None = None
        self._crediting: asyncio.Task[None] | None = None
        self._owed = 0
        self._silence_s = SILENCE_PINGS * PING_S
        self._last_id = ID
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """What was told over the socket and is not answered yet, by its id."""

    @property
    def can_settle(self) -> bool:
        """Tell whether `settle` has a way to the worker."""
        return self._socket is not None

    async def settle(self, verb: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Tell the worker what became of messages; return what it refuses."""
        assert self._socket is not None
        self._last_id += 1
        number = self._last_id
        said = {name: value for name, value in body.items() if name != "consumer"}
        said |= {"id": number, "subscription": self._subscription}
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._socket.send(msgspec.json.encode({COMMANDS[verb]: said}))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise OutcomeUnknown("NoAnswer", f"{self._origin} did not answer in time") from error
        finally:
            del self._asked[number]

    async def take(self) -> None:
        """Wait for the next message of the worker."""
        if self._socket is None:
            await self._open()
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._silence_s):
                word = self._hear(await self._socket.receive())
                # The welcome says nothing of the subscription yet.
                while word is not None and word.welcome is not None:
                    word = self._hear(await self._socket.receive())
        except TimeoutError as error:
            await self._break()
            raise OutcomeUnknown("NoAnswer", f"{self._origin} has gone silent") from error
        except (TidewaterError, NoSocketError):
            await self._break()
            raise

    async def _open(self) -> None:
        self._socket = await open_socket(self._origin, self._target, self._connect_s, self._ids)
        subscribe = {
            "id": ID, "subscription": self._subscription, "consumer": self._engine.name,
            "format": self._format,
        }  # fmt: skip
        self._socket.send(msgspec.json.encode({"subscribe": subscribe}))
        self._owed = 0
        self._crediting = asyncio.ensure_future(self._give_credit(self._socket))

    async def _give_credit(self, socket: Socket) -> None:
        while True:
            more = await self._engine.room_for(self._share, lambda: self._owed)
            self._owed += more
            socket.send(b'{"credit":{"id":%d,"messages":%d}}' % (ID, more))

    def _hear(self, said: bytes) -> _Said | None:
        if said == HEARD:
            return None
        stream = b""
        if not said.startswith(b"{"):
            begin = 4 + int.from_bytes(said[:4], "little")
            said, stream = said[4:begin], said[begin:]
        try:
            word = _said.decode(said)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OutcomeUnknown("BadAnswer", f"unreadable: {error}") from error
        if word.error is not None:
            cause = TidewaterError.from_json(word.error, word.error.get("status"))
            number = word.error.get("id")
            if number is None or number == ID:
                raise cause
            # Of something that was told; nobody may wait for that any more.
            answer = self._asked.get(number)
            if answer is not None and not answer.done():
                answer.set_exception(cause)
        if (settled := word.acknowledged or word.rejected or word.extended) is not None:
            answer = self._asked.get(settled.id)
            if answer is not None and not answer.done():
                answer.set_result({"refused": settled.refused})
        if word.messages is not None:
            self._owed = max(self._owed - word.messages.count, 0)
            self._engine.take_in(self._origin, stream or word.messages.messages)
        if word.welcome is not None:
            self._silence_s = SILENCE_PINGS * word.welcome.ping_ms / 1000
        return word

    async def close(self) -> None:
        """Let the worker stop first: what it has sent by then is here, and can be given back."""
        socket = self._socket
        if socket is not None:
            await self._stop_crediting()
            socket.send(b'{"stop":{"id":%d}}' % ID)
            with contextlib.suppress(TimeoutError, TidewaterError, NoSocketError):
                async with asyncio.timeout(STOP_S):
                    while True:
                        word = self._hear(await socket.receive())
                        if word is not None and word.stopped is not None:
                            break
        await self._break()

    async def _break(self) -> None:
        await self._stop_crediting()
        if self._socket is not None:
            socket, self._socket = self._socket, None
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(
                        OutcomeUnknown("ConnectionLost", f"the socket to {self._origin} is gone")
                    )
            await socket.close()

    async def _stop_crediting(self) -> None:
        if self._crediting is not None:
            task, self._crediting = self._crediting, None
            task.cancel()
            await asyncio.wait({task})
