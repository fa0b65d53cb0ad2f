"""Leader election by a Lease: of two operators one acts, the other waits.

A lease that another holds runs out when it has not changed for its time by *our* monotonic clock:
clocks of two machines are not compared. Who leads stops to write (`is_ours` is asked before every
change) when a fifth of that time is left. A process that was stopped just between the two could
still write once; that does no harm, since every write is applied to what is there.
"""

import asyncio
import logging
from typing import Final

from tidewater_core.clock import Clock
from tidewater_core.errors import TidewaterError
from tidewater_operator.cluster.api import LEASE, Api
from tidewater_operator.model.names import Manifest
from tidewater_operator.times import format_micro_time, from_us

NAME: Final = "tidewater-operator"
log = logging.getLogger(__name__)


class Leadership:
    """Takes and keeps the lease in the background."""

    def __init__(
        self, api: Api, clock: Clock, namespace: str, identity: str, lease_s: float
    ) -> None:
        self._api, self._clock = api, clock
        self._namespace, self._identity, self._lease_s = namespace, identity, lease_s
        api.lease_paths = frozenset({LEASE.path(namespace), LEASE.path(namespace, NAME)})
        self._seen = ""
        self._seen_at = 0.0
        self._renewed_at = -lease_s
        self._running: asyncio.Task[None] | None = None
        self.leader = ""
        """Who leads, as far as we know."""
        self.asked_at = clock.monotonic()
        """When the API server last answered about it."""
        self.gained = asyncio.Event()
        """Set while we lead."""
        self.term = ""
        """Differs when another operator may have led meanwhile: what was seen before is old."""

    @property
    def is_ours(self) -> bool:
        """Tell whether we lead, with a share of the time left for what is under way."""
        return self._clock.monotonic() - self._renewed_at < self._lease_s * 0.8

    async def run(self) -> None:
        """Try until the lease is given away."""
        self._running = asyncio.current_task()
        while True:
            try:
                await self._round()
            except TidewaterError as error:
                log.warning("the lease could not be renewed: %s", error)
            if self.is_ours:
                self.gained.set()
            elif self.gained.is_set():
                log.warning("another operator leads from now on")
                self.gained.clear()
            await asyncio.sleep(self._lease_s / 5)

    async def release(self) -> None:
        """Let another lead at once; what would renew the lease meanwhile is ended."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        if not self.is_ours:
            return
        self._renewed_at = -self._lease_s
        found = await self._api.get(LEASE, self._namespace, NAME)
        if found is not None and _said(found).get("holderIdentity") == self._identity:
            found["spec"]["holderIdentity"] = ""
            await self._api.replace(LEASE, self._namespace, found)

    async def _round(self) -> None:
        began = self._clock.monotonic()
        found = await self._api.get(LEASE, self._namespace, NAME)
        self.asked_at = self._clock.monotonic()
        if found is None:
            manifest = {
                "apiVersion": LEASE.api,
                "kind": LEASE.name,
                "metadata": {"name": NAME, "namespace": self._namespace},
                "spec": self._spec({}),
            }
            self._took(began, await self._api.create(LEASE, self._namespace, manifest))
            return
        holder = str(_said(found).get("holderIdentity") or "")
        version = str(found["metadata"].get("resourceVersion", ""))
        if version != self._seen:
            self._seen, self._seen_at = version, began
        is_stale = began - self._seen_at >= self._lease_s
        if holder not in ("", self._identity) and not is_stale:
            self.leader = holder
            return
        found["spec"] = self._spec(_said(found))
        changed = await self._api.replace(LEASE, self._namespace, found)
        self._seen = str(changed["metadata"].get("resourceVersion", ""))
        self._seen_at = began
        self._took(began, changed)

    def _took(self, began: float, lease: Manifest) -> None:
        if self.leader != self._identity:
            log.info("%s leads", self._identity)
        self.leader, self._renewed_at = self._identity, began
        self.term = f"{lease['metadata'].get('uid')}/{_said(lease).get('leaseTransitions')}"

    def _spec(self, before: Manifest) -> Manifest:
        now = format_micro_time(from_us(self._clock.now_us()))
        same = before.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._lease_s),
            "renewTime": now,
            "acquireTime": before.get("acquireTime", now) if same else now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (0 if same else 1),
        }


def _said(lease: Manifest) -> Manifest:
    """Return what a lease says; one that somebody else has made may say nothing."""
    return lease.get("spec") or {}
