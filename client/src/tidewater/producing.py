"""What blocking and asyncio producers share: how requests are numbered, encoded and routed."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from tidewater import wire
from tidewater.http1 import request_bytes
from tidewater.origin import Origin
from tidewater.routing import Routes
from tidewater.wire import Message
from tidewater_core.names import TopicName

AckLevel = Literal["log", "table"]
"""When a message counts as stored: fsynced in the worker's log, or a row of the table."""
HEADS_MAX: Final = 256
"""Remembered beginnings of requests: workers × content types."""


class Requests:
    """Builds the requests of one producer, for whichever worker they go to."""

    def __init__(
        self,
        topic: TopicName,
        *,
        ack: AckLevel,
        partition: int | None,
        producer_id: str | None,
    ) -> None:
        """Begin with number 0; without an id requests are not numbered."""
        query = "&".join(
            part
            for part in (
                "ack=table" if ack == "table" else "",
                f"partition={partition}" if partition is not None else "",
            )
            if part
        )
        self._target = f"/v1/{topic}/messages" + (f"?{query}" if query else "")
        self._partition = partition
        self._producer_id = producer_id
        self._heads: dict[tuple[Origin, str], tuple[str | None, bytes]] = {}
        self._sequence = itertools.count()

    def number(self) -> int | None:
        """Return the number of the next batch; it is sent under it however often."""
        return next(self._sequence) if self._producer_id is not None else None

    def request(self, origin: Origin, body: bytes, content_type: str, number: int | None) -> bytes:
        """Return the bytes that ask a worker to store a batch."""
        token = origin.bearer
        known, head = self._heads.get((origin, content_type), (None, b""))
        if not head or known != token:
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            head = origin.head(
                "POST", self._target, Content_Type=content_type,
                Tidewater_Producer=self._producer_id,
            )  # fmt: skip
            self._heads[origin, content_type] = token, head
        if number is None:
            return request_bytes(head, body)
        return request_bytes(head, body, b"Tidewater-Sequence: %d\r\n" % number)

    def partition_of(self, routes: Routes, keys: Iterable[bytes | str | None]) -> int | None:
        """Return the one partition that messages go to; None: several, or the worker's choice."""
        if self._partition is not None:
            return self._partition
        if not routes.partitions:
            return None
        found: int | None = None
        for key in keys:
            chosen = self._of_key(routes, key)
            if chosen is None or (found is not None and found != chosen):
                return None
            found = chosen
        return found

    def _of_key(self, routes: Routes, key: bytes | str | None) -> int | None:
        if key is not None:
            return routes.partition_of(key.encode() if isinstance(key, str) else key)
        if self._producer_id is not None:
            # A re-sent request must find its first copy: a producer's go one way.
            return routes.partition_of(self._producer_id.encode())
        return None


def encode_one(
    value: Any, key: bytes | str | None, headers: Mapping[str, str] | None
) -> tuple[bytes, str]:
    """Return body and content type of a single message: bare bytes cost least."""
    if key is None and not headers:
        if isinstance(value, bytes):
            return value, wire.RAW
        if isinstance(value, str):
            return value.encode(), wire.RAW
    return wire.encode_json((Message(value, key, headers),)), wire.JSON
