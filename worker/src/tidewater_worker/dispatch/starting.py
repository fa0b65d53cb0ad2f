"""Where a subscription begins in a partition (`startFrom`)."""

from tidewater_core.crd.subscription import StartFrom
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.reading import learn_starts, position
from tidewater_worker.topic import Topic


async def start_offsets(
    node: Node, topic: Topic, start: StartFrom, partitions: list[Partition]
) -> dict[int, int]:
    """Return the offset to begin at in each partition, within what it has."""
    await learn_starts(node, topic, partitions)
    if start.snapshot_id is not None or start.tag is not None:
        ends = await node.link.frontier_at(str(topic.name), start.snapshot_id, start.tag)
        # One that the table does not know had no rows in any snapshot: all that it has came later.
        wished = {p.number: ends.get(p.number, p.table.start) for p in partitions}
    else:
        wished = {p.number: await _wished(node, topic, start, p) for p in partitions}
    return {p.number: _within(p, wished[p.number]) for p in partitions}


async def _wished(node: Node, topic: Topic, start: StartFrom, partition: Partition) -> int:
    if start.offset is not None:
        return start.offset
    if start.position == "latest":
        return partition.readable().end
    if start.timestamp_us is None:
        return first_offset(partition)
    return await position(node, topic, partition, None, start.timestamp_us)


def _within(partition: Partition, offset: int) -> int:
    """Keep a position within the messages that are kept.

    An offset in every partition cannot fit all of them; one past the end would skip messages that
    nobody has seen yet.
    """
    return min(max(offset, first_offset(partition)), partition.readable().end)


def first_offset(partition: Partition) -> int:
    """Return the first offset that is kept."""
    return min(partition.table.start, partition.readable().start)
