"""Write what was found: statuses and events, and only what is new."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from tidewater_core.errors import TidewaterError
from tidewater_operator.cluster.api import Api
from tidewater_operator.cluster.events import Events
from tidewater_operator.conditions import UNKNOWN, Told, merge, transitions
from tidewater_operator.life import Refusal
from tidewater_operator.maintenance.keep import Kept
from tidewater_operator.model.names import Manifest
from tidewater_operator.observed import Observed, Snapshot, conditions_of
from tidewater_operator.other_status import pool_status, subscription_status
from tidewater_operator.plan import Plan
from tidewater_operator.registry import FOREIGN
from tidewater_operator.times import format_time
from tidewater_operator.topic_status import topic_status

AT_ONCE: Final = 8
_TOLD_OF: Final = {
    # A degraded topic is not ready, either: told once.
    "Topic": ("Ready", "Committing", "FreshnessMet", "Paused"),
    "Subscription": ("Ready", "LagBounded", "Paused"),
    "Pool": ("Ready", "Scaling", "Degraded", "VolumeGrown", "Paused"),
}
_FROM_REGISTRY: Final = {
    "Topic": ("Ready", "Assigned", "Committing", "FreshnessMet", "Degraded"),
    "Subscription": ("Ready", "Active", "LagBounded"),
    "Pool": ("Ready", "Scaling", "Degraded"),
}
"""What nobody knows without the registry: it says who is there to be asked."""
_RELIEF: Final = {"Degraded": "Recovered", "Paused": "Resumed"}
"""What the end of something bad is called, where the condition's name would mislead."""
_PLACE: Final = ("partition", "worker", "epoch", "state", "reason", "gap")
log = logging.getLogger(__name__)


def is_urgent(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Tell whether more than figures changed: those are written on a beat of their own."""

    def gist(status: Mapping[str, Any]) -> Any:
        parts = status.get("partitions")  # of a pool: their number
        maintenance = dict(status.get("maintenance") or {})
        maintenance.pop("next", None)  # moves with the clock alone
        return (
            status.get("conditions"),
            status.get("observedGeneration"),
            status.get("replicas"),
            status.get("readyReplicas"),
            status.get("acceptedLoss"),
            status.get("resetToken"),
            maintenance,
            [
                {key: part.get(key) for key in _PLACE if part.get(key)}
                for part in (parts if isinstance(parts, list) else ())
            ],
        )

    return bool(gist(before) != gist(after))


class Teller:
    """Writes statuses and posts events about what changed in them."""

    def __init__(self, api: Api, events: Events) -> None:
        self._api, self._events = api, events
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def statuses(
        self,
        seen: Observed,
        decided: Plan,
        problems: Mapping[str, Refusal],
        refused_growth: Mapping[str, str],
        kept: Kept,
        *,
        written: Collection[str],
        figures: bool,
    ) -> Snapshot:
        """Write the status of everything; return the snapshot with what was written.

        `written` are the pools whose workers were changed since they were looked at.
        """
        pairs: list[tuple[Manifest, Manifest]] = []
        for topic in decided.topics:
            status, told = kept.of(topic.name)
            pairs.append((topic.manifest, topic_status(seen, topic, status, told)))
        for subscription in decided.subscriptions:
            pairs.append((subscription.manifest, subscription_status(seen, subscription)))
        for pool in decided.pools:
            problem, is_written = problems.get(pool.name), pool.name in written
            status = pool_status(seen, pool, problem, refused_growth, is_written=is_written)
            pairs.append((pool.manifest, status))
        return await self._write_all(seen.cluster, pairs, figures=figures)

    async def registry_is_away(
        self, snapshot: Snapshot, now: datetime, error: TidewaterError
    ) -> Snapshot:
        """Say that nobody knows how things are while the registry does not answer, or is another's.

        The latter only a person can put right, who is told by an event.
        """
        reason, message = "RegistryAway", f"etcd does not answer ({error.reason})"
        if error.reason == FOREIGN:
            reason, message = error.reason, error.message
        pairs = []
        for manifest in (*snapshot.topics, *snapshot.subscriptions, *snapshot.pools):
            told = [
                Told(type_, UNKNOWN, reason, message) for type_ in _FROM_REGISTRY[manifest["kind"]]
            ]
            # Nothing was done about a newer spec: the generation that was observed stands.
            known = int((manifest.get("status") or {}).get("observedGeneration", 0))
            before = conditions_of(manifest)
            gone = merge(before, told, known, format_time(now))
            types = {one["type"] for one in gone}
            others = [one for one in before if one.get("type") not in types]
            status = {**(manifest.get("status") or {}), "conditions": [*gone, *others]}
            pairs.append((manifest, status))
            if reason == FOREIGN and reason not in {one.get("reason") for one in before}:
                await self._events.tell(manifest, reason, message, warning=True)
        return await self._write_all(snapshot, pairs, figures=False)

    async def _write_all(
        self, snapshot: Snapshot, pairs: list[tuple[Manifest, Manifest]], *, figures: bool
    ) -> Snapshot:
        written = await asyncio.gather(
            *(self._write(manifest, status, figures=figures) for manifest, status in pairs)
        )
        new = {(one["kind"], one["metadata"]["name"]): one for one in written if one is not None}

        def newest(items: tuple[Manifest, ...]) -> tuple[Manifest, ...]:
            return tuple(new.get((one["kind"], one["metadata"]["name"]), one) for one in items)

        return replace(
            snapshot,
            topics=newest(snapshot.topics),
            subscriptions=newest(snapshot.subscriptions),
            pools=newest(snapshot.pools),
        )

    async def _write(
        self, manifest: Manifest, status: Manifest, *, figures: bool
    ) -> Manifest | None:
        before = manifest.get("status") or {}
        if status == before or not (figures or is_urgent(before, status)):
            return None
        meta = manifest["metadata"]
        body = {
            "apiVersion": manifest["apiVersion"],
            "kind": manifest["kind"],
            # Of this very object: a new one of the name has a status of its own.
            "metadata": {
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "status": status,
        }
        try:
            async with self._slots:
                written = await self._api.apply(body, "status")
        except TidewaterError as error:
            log.info("status of %s %s: %s", manifest["kind"], meta["name"], error)
            return None
        told_of = _TOLD_OF[manifest["kind"]]
        for change in transitions(conditions_of(manifest), status["conditions"], told_of):
            word = (
                change.reason
                if change.is_bad or change.type == "Ready"
                else _RELIEF.get(change.type, change.type)
            )
            message = change.message or f"{change.type}: {change.reason}"
            await self._events.tell(manifest, word[:128], message, warning=change.is_bad)
        return {**written, "kind": manifest["kind"], "apiVersion": manifest["apiVersion"]}
