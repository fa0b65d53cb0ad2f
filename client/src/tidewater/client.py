"""The front door: one object per server that hands out producers, readers and consumers."""

from types import TracebackType
from typing import Any, Self

from tidewater.admin import Admin
from tidewater.consumer import Consumer
from tidewater.consumer_async import AsyncConsumer
from tidewater.credentials import Token
from tidewater.origin import DEFAULT_URL, parse_url
from tidewater.producer import Producer
from tidewater.producer_async import AsyncProducer
from tidewater.pulling import ConsumerOptions
from tidewater.reader import AsyncReader, Reader
from tidewater.transport import TIMEOUT_S, Transport
from tidewater.transport_async import AsyncTransport
from tidewater.ways import Ways
from tidewater_core.names import TopicName


class Client:
    """A server, and the connections to it that everything made here shares."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: Token | None = None,
        ca: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Point at a server; nothing is sent yet.

        `token` is a bearer token, a Path of the file that holds it (read again when it changes;
        `SERVICE_ACCOUNT` is a pod's own), or a function that returns it. `ca` is the file of the CA
        that signed the server's certificate.
        """
        self.transport = Transport(parse_url(url, token, ca), timeout_s=timeout_s)
        self._ways = Ways(self.transport)
        self.admin = Admin(self.transport)

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        self.close()

    def producer(self, topic: TopicName | str, **options: Any) -> Producer:
        """Return a producer for a topic; the options are those of `Producer`."""
        return Producer(self.transport, topic, **{"ways": self._ways, **options})

    def reader(self, topic: TopicName | str) -> Reader:
        """Return a reader of a topic."""
        return Reader(self.transport, topic)

    def consumer(
        self, topic: TopicName | str, subscription: str, options: ConsumerOptions | None = None
    ) -> Consumer:
        """Return a consumer of a subscription."""
        return Consumer(self.transport.origin, topic, subscription, options)

    def close(self) -> None:
        """Close the connections. Producers and consumers are closed on their own."""
        self._ways.close()
        self.transport.close()


class AsyncClient:
    """A server for asyncio programs."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: Token | None = None,
        ca: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Point at a server; see `Client`."""
        self.origin = parse_url(url, token, ca)
        self._timeout_s = timeout_s
        # A long poll blocks those that are pipelined behind it.
        self.transport = AsyncTransport(self.origin, timeout_s=timeout_s, pipeline_max=1)

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self.close()

    def producer(self, topic: TopicName | str, **options: Any) -> AsyncProducer:
        """Return a producer for a topic; the options are those of `AsyncProducer`."""
        usual = {"timeout_s": self._timeout_s, "direct": True}
        return AsyncProducer(self.origin, topic, **{**usual, **options})

    def reader(self, topic: TopicName | str) -> AsyncReader:
        """Return a reader of a topic."""
        return AsyncReader(self.transport, topic)

    def consumer(
        self, topic: TopicName | str, subscription: str, options: ConsumerOptions | None = None
    ) -> AsyncConsumer:
        """Return a consumer of a subscription."""
        return AsyncConsumer(self.origin, topic, subscription, options)

    async def close(self) -> None:
        """Close the connections. Producers and consumers are closed on their own."""
        await self.transport.close()
