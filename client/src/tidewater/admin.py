"""Topics, their state, and flushing."""

from typing import Any

import msgspec

from tidewater import wire
from tidewater.transport import Transport
from tidewater_core.names import TopicName


class TopicInfo(msgspec.Struct, frozen=True):
    """A topic as the list of topics shows it."""

    namespace: str
    name: str
    partitions: int


class Bounds(msgspec.Struct, frozen=True):
    """Which offsets of a partition can be read."""

    start: int
    """The first offset that is kept."""
    end: int
    """The offset that the next message gets."""


class Flushed(msgspec.Struct, frozen=True):
    """What a flush made visible in the table."""

    snapshot_id: int | None
    frontier: dict[int, int]
    """Per partition: every offset below this is in the table."""


class Admin:
    """The calls that manage topics rather than move messages."""

    def __init__(self, transport: Transport) -> None:
        """Use the connections of `transport`."""
        self._transport = transport

    def topics(self) -> list[TopicInfo]:
        """List the topics."""
        found = wire.decode_object(self._transport.request("GET", "/v1/topics"))
        return msgspec.convert(found.get("topics", []), list[TopicInfo])

    def topic(self, topic: TopicName | str) -> dict[str, Any]:
        """Return a topic's description: partitions, offsets, owners, frontier."""
        return wire.decode_object(self._transport.request("GET", f"/v1/{_name(topic)}"))

    def bounds(self, topic: TopicName | str) -> dict[int, Bounds]:
        """Return the readable offsets of each partition."""
        return {p["partition"]: _bounds(p) for p in self.topic(topic)["partitions"]}

    def stats(self, topic: TopicName | str) -> dict[str, Any]:
        """Return a topic's measurements."""
        return wire.decode_object(self._transport.request("GET", f"/v1/{_name(topic)}/stats"))

    def flush(self, topic: TopicName | str) -> Flushed:
        """Make everything acknowledged so far visible in the table, and wait for it."""
        answer = wire.decode_object(self._transport.request("POST", f"/v1/{_name(topic)}/flush"))
        return msgspec.convert(answer, Flushed, strict=False)


def _name(topic: TopicName | str) -> TopicName:
    return topic if isinstance(topic, TopicName) else TopicName.parse(topic)


def _bounds(partition: dict[str, Any]) -> Bounds:
    """Join what the table and the log hold; the log is missing while a partition opens."""
    table_start, frontier = partition["start"], partition["frontier"]
    start = min(table_start, partition.get("log_start", table_start))
    return Bounds(start, max(frontier, partition.get("end", frontier)))
