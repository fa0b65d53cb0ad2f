"""What a worker reports to the operator: all that it owns of a namespace, in one answer.

Everything is read from memory. A table's health is what the table process last said; it is asked
anew, in the background and a few at a time, after a table has moved on and the report was read.
"""

import asyncio
import os
from typing import Any, Final

import msgspec

from tidewater_core.errors import TidewaterError
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.stats import gaps, readiness
from tidewater_worker.topic import Topic

BREATH_TOPICS: Final = 25
"""Topics described before others have their turn."""
HEALTH_S: Final = 15.0
"""A table's health is asked for at most this often."""
HEALTH_AT_ONCE: Final = 2
HEALTH_QUEUE_MAX: Final = 10_000


class Reporter:
    """Describes what a node owns."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._health: dict[str, tuple[int | None, float, dict[str, Any]]] = {}
        """topic → snapshot, when it was asked for, what was said."""
        self._asking = asyncio.Semaphore(HEALTH_AT_ONCE)
        self._asked: set[str] = set()

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
        self._health = {name: known for name, known in self._health.items() if name in node.topics}
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
                {"topic": name, "reason": error.reason, "message": error.message}
                for name, error in owning.refused.items()
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
            "committed_at_ms": (topic.state.committed_at_us if topic.state else 0) // 1000,
            "table": self._table(topic, now),
        }

    # ---- table health

    def _table(self, topic: Topic, now: float) -> dict[str, Any]:
        name = str(topic.name)
        snapshot = topic.state.snapshot_id if topic.state else None
        known, asked_at, said = self._health.get(name, (None, -HEALTH_S, {}))
        if snapshot is not None and known != snapshot and now - asked_at >= HEALTH_S:
            self._ask(name, snapshot, now)
        return said

    def _ask(self, name: str, snapshot: int, now: float) -> None:
        if name in self._asked or len(self._asked) >= HEALTH_QUEUE_MAX:
            return
        self._asked.add(name)

        async def ask() -> None:
            try:
                async with self._asking:
                    said = await self._node.link.stats(name)
                self._health[name] = (snapshot, now, said)
            except TidewaterError:
                _, _, old = self._health.get(name, (None, 0.0, {}))
                self._health[name] = (None, now, old)
            finally:
                self._asked.discard(name)

        self._node.spawn(ask())


def _partition(partition: Partition, now: float) -> dict[str, Any]:
    table, appender = partition.table, partition.appender
    found: dict[str, Any] = {
        "partition": partition.number,
        "epoch": partition.epoch,
        "state": str(table.state) if appender is not None else "closed",
        "open": partition.is_open and partition.refusal is None,
        "start": table.start,
        "committed": table.next,
    }
    refusal = partition.refusal
    if refusal is not None:
        found |= {"reason": refusal.reason, "message": refusal.message}
    elif table.reason:
        found |= {"reason": table.reason, "message": table.message}
    if appender is not None:
        found |= {
            "end": appender.end,
            "durable_end": appender.durable_end,
            "lag": max(appender.end - table.next, 0),
            "oldest_uncommitted_ms": round(partition.pulse.oldest_s(now) * 1000),
        }
    return found | gaps(partition)


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
