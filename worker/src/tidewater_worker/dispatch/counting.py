"""What a subscription says of itself: from memory, nothing is read."""

from collections.abc import Iterable, Mapping
from typing import Any

from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_worker.dispatch.part import Part


def counts(
    name: str, topic: str, consumers: int, parts: Iterable[Part], now_us: int
) -> dict[str, Any]:
    """Add up the partitions that are served here, for the operator and for metrics."""
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


def described(
    name: str, spec: SubscriptionSpec, holds: Mapping[str, int], parts: Mapping[int, Part]
) -> dict[str, Any]:
    """Describe a subscription, for people: how far, who, how many wait."""
    told = [parts[number].status() for number in sorted(parts)]
    return {
        "namespace": name.partition("/")[0],
        "name": name.partition("/")[2],
        "topic": spec.topic,
        "type": spec.type.value,
        "isolation": spec.isolation.value,
        "lag": sum(int(part["lag"]) for part in told),  # type: ignore[call-overload]
        "unacked": sum(int(part["unacked"]) for part in told),  # type: ignore[call-overload]
        "consumers": [{"name": name, "unacked": count} for name, count in holds.items()],
        "partitions": told,
    }
