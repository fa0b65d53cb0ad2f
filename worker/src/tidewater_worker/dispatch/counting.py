"""What a subscription counts, for the operator and for metrics: from memory, nothing is read."""

from collections.abc import Iterable
from typing import Any

from tidewater_worker.dispatch.part import Part


def counts(
    name: str, topic: str, consumers: int, parts: Iterable[Part], now_us: int
) -> dict[str, Any]:
    """Add up the partitions that are served here."""
    here = [part for part in parts if part.is_current]
    oldest_us = [time for part in here if (time := part.oldest_us()) is not None]
    return {
        "namespace": name.partition("/")[0],
        "name": name.partition("/")[2],
        "topic": topic,
        "consumers": consumers,
        "backlog": sum(part.delivery.cursor.count_open(part.window.end) for part in here),
        "unacked": sum(sum(part.delivery.out_by.values()) for part in here),
        "oldest_unacked_ms": (now_us - min(oldest_us)) // 1000 if oldest_us else 0,
        "redeliveries": sum(part.delivery.redeliveries for part in here),
        "dead_lettered": sum(part.dead_lettered for part in here),
    }
