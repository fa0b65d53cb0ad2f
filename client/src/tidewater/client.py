"""The front door: one object per server that hands out producers, readers and admin calls."""

from types import TracebackType
from typing import Any, Self

from tidewater.admin import Admin
from tidewater.origin import DEFAULT_URL, parse_url
from tidewater.producer import Producer
from tidewater.reader import Reader
from tidewater.transport import TIMEOUT_S, Transport
from tidewater_core.names import TopicName


class Client:
    """A server, and the connections to it that everything made here shares."""

    def __init__(
        self, url: str = DEFAULT_URL, *, token: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Point at a server; nothing is sent yet."""
        self.transport = Transport(parse_url(url, token), timeout_s=timeout_s)
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
        return Producer(self.transport, topic, **options)

    def reader(self, topic: TopicName | str) -> Reader:
        """Return a reader of a topic."""
        return Reader(self.transport, topic)

    def close(self) -> None:
        """Close the connections."""
        self.transport.close()
