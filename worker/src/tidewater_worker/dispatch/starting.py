"""Where a subscription begins in a partition (`startFrom`)."""

from tidewater_core.crd.subscription import StartFrom
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.reading import position
from tidewater_worker.topic import Topic


async def start_offsets(
    node: Node, topic: Topic, start: StartFrom, partitions: list[Partition]
) -> dict[int, int]:
    """Return the offset to begin at in each partition, within what it has."""
    if start.snapshot_id is not None or start.tag is not None:
        ends = await node.link.frontier_at(str(topic.name), start.snapshot_id, start.tag)
        wished = {p.number: ends.get(p.number, 0) for p in partitions}
    else:
        wished = {p.number: await _wished(node, topic, start, p) for p in partitions}
    return {p.number: _within(p, wished[p.number]) for p in partitions}


async def _wished(node: Node, topic: Topic, start: StartFrom, partition: Partition) -> int:
    if start.offset is not None:
        return start.offset
    if start.position == "latest":
        return partition.readable().end
    return await position(node, topic, partition, None, start.timestamp_us)


def _within(partition: Partition, offset: int) -> int:
    """Keep a position within the messages that are kept.

    An offset in every partition cannot fit all of them; one past the end would skip messages that
    nobody has seen yet.
    """
    appender = partition.readable()
    first = min(partition.table.start, appender.start)
    return min(max(offset, first), appender.end)
