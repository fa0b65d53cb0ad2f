"""What a worker tells about its topics."""

from typing import Any, Final

from tidewater_core.errors import Conflict, Corrupt, NotFound, TidewaterError
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Topic

START_S_MAX: Final = 60.0
"""After this a worker is ready whatever still waits: it must not keep others from their turn."""


def readiness(node: Node) -> tuple[bool, list[dict[str, Any]]]:
    """Tell whether requests should come here, and which partitions take no messages, and why.

    A worker becomes ready when all that is its own is open, so that an update goes on to the next
    one only then. It stays ready: a topic that comes or stops later is that topic's matter, and no
    reason to keep requests for all others away. What waits for a person is not waited for.
    """
    waiting = not_ready(node)
    if not node.is_started:
        past_s = node.clock.monotonic() - node.started_at
        node.is_started = past_s > START_S_MAX or all(one["stopped"] for one in waiting)
    return node.is_started and not node.is_draining, waiting


def not_ready(node: Node) -> list[dict[str, Any]]:
    """Name the partitions that take no messages, and why."""
    waiting = []
    for topic in node.topics.values():
        if topic.is_deleting:
            continue
        for partition in topic.partitions.values():
            if partition.is_elsewhere:
                continue  # its owner says whether it is ready
            try:
                partition.ready()
            except TidewaterError as error:
                waiting.append(
                    {"topic": str(topic.name), "partition": partition.number,
                     "reason": error.reason, "message": error.message,
                     "stopped": isinstance(error, (Conflict, Corrupt, NotFound))}
                )  # fmt: skip
    return waiting


def summary(topic: Topic) -> dict[str, Any]:
    """Describe a topic in a line."""
    return {
        "namespace": topic.name.namespace,
        "name": topic.name.name,
        "partitions": topic.spec.partitions,
        "typed": topic.spec.schema_ is not None,
        "messages": topic.counters["messages"],
    }


def _elsewhere(partition: Partition) -> dict[str, Any]:
    """Describe a partition of another worker by what the registry says."""
    owner = partition.owner
    found: dict[str, Any] = {
        "partition": partition.number,
        "owner": owner.worker_id if owner is not None else None,
        "url": partition.remote_url,
        "epoch": owner.epoch if owner is not None else 0,
        "state": "elsewhere" if partition.remote_url else "away",
    }
    if not partition.remote_url and partition.refusal is not None:
        found |= {"reason": partition.refusal.reason, "message": partition.refusal.message}
    return found | gaps(partition)


def gaps(partition: Partition) -> dict[str, Any]:
    """Name what was lost with a volume: all gaps from the table, the newest with its reason."""
    owner = partition.owner
    found: dict[str, Any] = {}
    if partition.table.gaps:
        found["gaps"] = [{"start": start, "end": end} for start, end in partition.table.gaps]
    if owner is not None and owner.gap is not None:
        gap = owner.gap
        found["gap"] = {
            "start": gap.start, "end": gap.end, "worker": gap.worker_id, "reason": gap.reason,
        }  # fmt: skip
    return found


def _partition(node: Node, partition: Partition) -> dict[str, Any]:
    if partition.is_elsewhere:
        return _elsewhere(partition)
    table = partition.table
    found: dict[str, Any] = {
        "partition": partition.number,
        "owner": node.settings.worker_id,
        "url": node.owning.me.url,
        "epoch": partition.epoch,
        "state": str(table.state),
        "frontier": table.next,
        "start": table.start,
    }
    if table.reason:
        found |= {"reason": table.reason, "message": table.message}
    if (refused := partition.refused) is not None:
        found |= {"reason": refused.reason, "message": refused.message}
    if partition.appender is not None:
        appender = partition.appender
        found |= {
            "log_start": appender.start,
            "end": appender.end,
            "durable_end": appender.durable_end,
            "lag": max(appender.end - table.next, 0),
        }
    return found | gaps(partition)


def metadata(node: Node, topic: Topic) -> dict[str, Any]:
    """Describe a topic, its partitions and their owners."""
    return {
        **summary(topic),
        "uuid": str(topic.uuid),
        "partitions": [_partition(node, p) for _, p in sorted(topic.partitions.items())],
        "snapshot_id": topic.state.snapshot_id if topic.state else None,
    }


async def full(node: Node, topic: Topic) -> dict[str, Any]:
    """Describe everything that is measured."""
    log = {}
    for number, partition in sorted(topic.partitions.items()):
        if (appender := partition.appender) is None:
            continue
        log[str(number)] = {
            "sync": str(appender.options.sync),
            "sync_ms": appender.latencies.quantiles_ms(),
            "segments": len(appender.segments),
            "bytes": sum(segment.index.size for segment in appender.segments),
            "tail_bytes": appender.tail.nbytes,
            "pending_bytes": appender.pending_bytes,
            "producers": len(appender.producers),
        }
    try:
        table = await node.link.stats(str(topic.name))
    except TidewaterError as error:
        table = error.to_body()
    committed_at_us = topic.state.committed_at_us if topic.state else 0
    return {
        **metadata(node, topic),
        "counters": dict(topic.counters),
        "log": log,
        "table": table,
        "committed_at_ms": committed_at_us // 1000,
    }
