"""What a producer calls itself goes from worker to worker: it stays one header of one request."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tidewater_coordination.port import Ownership
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid, OutcomeUnknown, Retryable, TidewaterError
from tidewater_core.names import TopicName
from tidewater_worker.api import produce as door
from tidewater_worker.cluster import forwarding as forwarding_module
from tidewater_worker.cluster.forwarding import Forwarding
from tidewater_worker.log.group import Rows
from tidewater_worker.log.producers import Request, Stored
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Topic

ROWS = Rows([None], [None], [b"v"])
ACK = b'{"acks":[{"partition":0,"offset":7,"count":1}]}'
SMUGGLED = "p\r\n\r\nPOST /v1/a/b/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nz"


class Owner:
    """A worker that keeps what it was sent, and answers each with the same."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.answer = ACK
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer until the other side hangs up."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
                await reader.readexactly(int(length))
                answer = (len(self.answer), self.answer)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % answer)
        except asyncio.IncompleteReadError:
            writer.close()


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    owner = Owner()
    server = await asyncio.start_server(owner.serve, "127.0.0.1", 0)
    owner.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield owner
    server.close()


async def _forward(owner: Owner, request: Request | None) -> Stored | TidewaterError:
    topic = Topic(TopicName.parse("a/b"), UUID(int=1), TopicSpec(), "", {})
    partition = Partition("a/b", 0, Path("/nowhere"))
    partition.is_elsewhere = True
    partition.owner = Ownership(0, "other", 1, is_live=True, url=owner.url)
    tasks: list[asyncio.Task[Any]] = []
    forwarding = Forwarding("me", lambda work: tasks.append(asyncio.ensure_future(work)))
    said: list[Stored | TidewaterError] = []
    forwarding.produce(topic, partition, ROWS, request, said.append)
    await asyncio.gather(*tasks)
    await forwarding.close()
    (one,) = said
    return one


async def test_any_text_gets_there_as_it_is(owner: Owner) -> None:
    """Ids beyond latin-1 were never answered, and their bytes counted as in flight for ever."""
    assert await _forward(owner, Request("bestellung-€", 3)) == Stored(7, 1)
    assert "\r\ntidewater-producer: bestellung-€\r\n".encode() in owner.heads[0]
    sent = {b"tidewater-producer": "bestellung-€".encode(), b"tidewater-sequence": b"3"}
    assert door._request(sent) == Request("bestellung-€", 3), "and it is read as it was written"
    with pytest.raises(Invalid, match="UTF-8"):
        door._request(sent | {b"tidewater-producer": b"\xff"})


async def test_no_id_is_two_requests(owner: Owner) -> None:
    """G1: the answer to a smuggled request was taken for the next caller's."""
    with pytest.raises(Invalid, match="InvalidProducer"):
        Request(SMUGGLED, 1)
    logged = Request.decode(f"{SMUGGLED}/1")  # however it came about
    refused = await _forward(owner, logged)
    assert isinstance(refused, Invalid)
    assert owner.heads == []
    assert await _forward(owner, None) == Stored(7, 1)


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b'{"acks":[]}', b'{"acks":[1]}'])
async def test_an_answer_of_another_kind_says_nothing(owner: Owner, answer: bytes) -> None:
    owner.answer = answer
    assert isinstance(await _forward(owner, None), OutcomeUnknown)


async def test_whatever_goes_wrong_is_answered(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_payload: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(forwarding_module, "_encode", broken)
    said = await _forward(owner, None)
    assert isinstance(said, Retryable)
    assert said.reason == "ForwardingFailed"
    assert owner.heads == []
