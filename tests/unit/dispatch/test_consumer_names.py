"""Consumers without a name: each has one of its own, on whatever worker (G4)."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from tidewater_core.clock import SystemClock, SystemIds
from tidewater_core.errors import Conflict, Retryable
from tidewater_core.names import TopicName
from tidewater_core.settings import Limits
from tidewater_worker.api.socket_messages import Subscribe
from tidewater_worker.api.socket_subscribing import Subscribing
from tidewater_worker.api.subscriptions import add_subscriptions
from tidewater_worker.dispatch.manager import Dispatch

PATH = "/v1/{namespace}/{name}/subscriptions/{subscription}"


class Exclusive:
    """A subscription of one consumer, by name."""

    name = "shop/mail"

    def __init__(self) -> None:
        self.holder = ""
        self.touched: list[str] = []
        self.left: list[str] = []

    async def pull(self, consumer: str, *_: Any) -> list[Any]:
        self.holder = self.holder or consumer
        if self.holder != consumer:
            raise Conflict("ExclusiveTaken", f"{self.holder} has it")
        return []

    def touch(self, consumer: str) -> None:
        self.touched.append(consumer)

    def leave(self, consumer: str) -> None:
        self.left.append(consumer)
        if self.holder == consumer:
            self.holder = ""

    async def ack(self, _: Any) -> Any:
        return SimpleNamespace(done=0, refused=[])


class Worker:
    """One of several that serve the subscription."""

    def __init__(self, name: str, found: Exclusive) -> None:
        settings = SimpleNamespace(worker_id=name, limits=Limits())
        node: Any = SimpleNamespace(
            clock=SystemClock(), ids=SystemIds(), settings=settings, inflight_bytes=0
        )
        self.dispatch = Dispatch(node, None)  # type: ignore[arg-type]
        self.dispatch.find = lambda *_: found  # type: ignore[method-assign,assignment]
        self._app = FastAPI()
        self._app.state.node = node
        add_subscriptions(self._app, node, self.dispatch)

    async def call(self, verb: str, body: bytes = b"{}", **query: Any) -> Any:
        routes = {route.path: route for route in self._app.routes}  # type: ignore[attr-defined]
        endpoint = routes[f"{PATH}/{verb}"].endpoint  # type: ignore[attr-defined]

        async def stream() -> Any:
            yield body

        request = SimpleNamespace(
            app=self._app, headers={}, stream=stream, receive=asyncio.Event().wait
        )
        return await endpoint(request, "shop", "orders", "mail", **query)

    async def stream(self, consumer: str | None = None) -> Any:
        response = await self.call("stream", consumer=consumer, max_batch=1)
        body = response.body_iterator
        await anext(body)
        return body

    def socket(self, consumer: str | None = None) -> Subscribing:
        topic: Any = SimpleNamespace(name=TopicName("shop", "orders"))
        command = Subscribe(id=1, subscription="mail", consumer=consumer)
        return Subscribing(self.dispatch, topic, None, command)  # type: ignore[arg-type]


@pytest.fixture
def found() -> Exclusive:
    return Exclusive()


@pytest.mark.parametrize("name", [None, ""])
async def test_a_stream_without_a_name(found: Exclusive, name: str | None) -> None:
    first = await Worker("a", found).stream(name)
    holder = found.holder
    assert holder.startswith("stream-a-")
    for other in ("a", "b"):  # after a restart, and beside it
        with pytest.raises(Conflict, match="ExclusiveTaken"):
            await Worker(other, found).stream(name)
    await anext(first)  # it goes on: nobody has given back what it holds
    assert holder not in found.left
    await first.aclose()
    assert found.left[-1] == holder


async def test_a_named_stream_stays_when_its_connection_closes(found: Exclusive) -> None:
    await (await Worker("a", found).stream("c1")).aclose()
    assert (found.holder, found.left) == ("c1", [])


async def test_a_stream_that_is_refused_leaves(found: Exclusive) -> None:
    pull = found.pull

    async def opening(consumer: str, *_: Any) -> list[Any]:
        await pull(consumer)
        raise Retryable("PartitionOpening", "in a moment")

    found.pull = opening  # type: ignore[method-assign]
    with pytest.raises(Retryable):
        await Worker("a", found).stream()
    found.pull = pull  # type: ignore[method-assign]
    await Worker("a", found).stream()  # and is not told that somebody has it


@pytest.mark.parametrize("name", [None, ""])
def test_a_socket_without_a_name(found: Exclusive, name: str | None) -> None:
    sockets = [Worker(worker, found).socket(name) for worker in "aab"]
    assert len({socket._consumer for socket in sockets}) == len(sockets)
    assert not any(socket._is_named for socket in sockets)


async def test_an_empty_name_is_none(found: Exclusive) -> None:
    worker = Worker("a", found)
    await worker.call("pull", b'{"consumer":""}')
    assert found.holder == "anonymous"
    await worker.call("ack", b'{"ack_ids":[],"consumer":""}')
    assert not found.touched
    await worker.call("leave", b'{"consumer":""}')
    assert found.left == ["anonymous"]
