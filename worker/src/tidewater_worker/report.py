"""What a worker reports to the operator: all that it owns of a namespace, in one answer.

Everything is read from memory.
"""

import asyncio
import os
from typing import Any, Final

import msgspec

from tidewater_core.errors import Corrupt, Retryable
from tidewater_worker.log.appender import SESSION_LOST
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.ports import Phase
from tidewater_worker.stats import gaps, readiness
from tidewater_worker.topic import Topic

BREATH_TOPICS: Final = 25
"""Topics described before others have their turn."""


class Reporter:
    """Describes what a node owns."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def of(self, namespace: str) -> dict[str, Any]:
        """Return the report on a namespace."""
        node, owning = self._node, self._node.owning
        topics = []
        found = [topic for topic in node.topics.values() if topic.name.namespace == namespace]
        for number, topic in enumerate(found):
            if number % BREATH_TOPICS == BREATH_TOPICS - 1:
                await asyncio.sleep(0)
            if (said := self._topic(topic)) is not None:
                topics.append(said)
        node.table_health.keep(node.topics)
        disk = os.statvfs(node.settings.log_root)
        left = [one for one in owning.leaving.leftovers if one.topic.startswith(f"{namespace}/")]
        return {
            "worker": node.settings.worker_id,
            "volume": owning.me.volume,
            "url": owning.me.url,
            "ready": readiness(node)[0],
            "session_left_ms": round(max(node.session_left_s, 0.0) * 1000),
            "disk": {"bytes": disk.f_blocks * disk.f_frsize, "free": disk.f_bavail * disk.f_frsize},
            "topics": topics,
            "subscriptions": [one for one in node.subscriptions() if one["namespace"] == namespace],
            "refused": [
                {kind: name, "reason": error.reason, "message": error.message}
                for kind, refused in (
                    ("topic", owning.refused),
                    ("subscription", node.refused_subscriptions),
                )
                for name, error in refused.items()
                if name.startswith(f"{namespace}/")
            ],
            "leftovers": [msgspec.to_builtins(one) for one in left],
        }

    def _topic(self, topic: Topic) -> dict[str, Any] | None:
        """Describe a topic; None if this worker has nothing of it."""
        owned = [p for _, p in sorted(topic.partitions.items()) if not p.is_elsewhere]
        if not owned:
            return None
        now = self._node.clock.monotonic()
        rates = [partition.pulse.rates(now) for partition in owned]
        return {
            "name": topic.name.name,
            "uuid": str(topic.uuid),
            "phase": str(topic.phase),
            "partitions": [_partition(partition, now) for partition in owned],
            "rate": round(sum(rate for rate, _ in rates), 3),
            "bytes_per_s": round(sum(nbytes for _, nbytes in rates), 3),
            "sync": str(topic.spec.log.sync),
            "ack_ms": _ack_ms(owned),
            "freshness_ms": round(max(p.pulse.freshness_s(now) for p in owned) * 1000),
            "freshness_known": all(p.pulse.is_known for p in owned),
            "committed_at_ms": (topic.state.committed_at_us if topic.state else 0) // 1000,
            "table": self._node.table_health.of(topic, now),
        }


def _partition(partition: Partition, now: float) -> dict[str, Any]:
    table, appender = partition.table, partition.appender
    refused = partition.refused
    if refused is None and appender is not None and not appender.may_append():
        refused = Retryable("SessionLost", SESSION_LOST)
    found: dict[str, Any] = {
        "partition": partition.number,
        "epoch": partition.epoch,
        "state": _state(partition),
        "open": partition.is_open and refused is None,
        "start": table.start,
        "committed": table.next,
    }
    if refused is not None:
        found |= {"reason": refused.reason, "message": refused.message}
    elif table.reason:
        found |= {"reason": table.reason, "message": table.message}
    if appender is not None:
        found |= {
            "end": appender.end,
            "durable_end": appender.durable_end,
            "lag": max(appender.end - table.next, 0),
            "oldest_uncommitted_ms": round(partition.pulse.oldest_s(now) * 1000)
            if partition.pulse.is_known
            else None,
        }
    return found | gaps(partition)


def _state(partition: Partition) -> str:
    """Return how its rows come to the table; `stopped` also if the log gives none (G7)."""
    if isinstance(partition.refused, Corrupt):
        return str(Phase.STOPPED)
    return str(partition.table.state) if partition.appender is not None else "closed"


def _ack_ms(owned: list[Partition]) -> dict[str, float]:
    """Return the slowest partition's quantiles: sorted anew only where something came."""
    worst: dict[str, float] = {}
    for partition in owned:
        pulse = partition.pulse
        if pulse.touched and partition.appender is not None:
            pulse.touched = False
            pulse.quantiles_ms = partition.appender.latencies.quantiles_ms()
        for name, value in pulse.quantiles_ms.items():
            worst[name] = max(worst.get(name, 0.0), value)
    return worst
