"""Events: what happened, for people who look with `kubectl describe`."""

import logging
from typing import Final

from tidewater_core.clock import Clock, IdSource
from tidewater_core.errors import TidewaterError
from tidewater_operator.cluster.api import EVENT, Api
from tidewater_operator.model.names import MANAGER, Manifest
from tidewater_operator.times import format_time, from_us

AGAIN_S: Final = 600.0
"""The same event of the same object is told again after this time at the earliest."""
REMEMBERED_MAX: Final = 10_000
MESSAGE_CHARS_MAX: Final = 1_000
log = logging.getLogger(__name__)


class Events:
    """Tells people what happened, each thing once."""

    def __init__(self, api: Api, clock: Clock, ids: IdSource, pod: str) -> None:
        self._api, self._clock, self._ids, self._pod = api, clock, ids, pod
        self._told: dict[tuple[str, str, str], float] = {}

    async def tell(
        self, about: Manifest, reason: str, message: str, *, warning: bool = False
    ) -> None:
        """Post an event; that it cannot be posted stops nothing."""
        meta = about["metadata"]
        key = (str(meta.get("uid", "")), reason, message)
        now = self._clock.monotonic()
        if now - self._told.get(key, -AGAIN_S) < AGAIN_S:
            return
        if len(self._told) >= REMEMBERED_MAX:
            self._told.clear()
        self._told[key] = now
        name, namespace = meta["name"], meta.get("namespace", "default")
        log.info("%s %s/%s: %s: %s", about["kind"], namespace, name, reason, message)
        time = format_time(from_us(self._clock.now_us()))
        event: Manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{name[:200]}.{self._ids.uuid().hex[:16]}",
                "namespace": namespace,
            },
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": name,
                "namespace": namespace,
                "uid": meta.get("uid", ""),
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:MESSAGE_CHARS_MAX],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._pod,
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }
        try:
            await self._api.create(EVENT, namespace, event)
        except TidewaterError as error:
            log.debug("the event was not taken: %s", error)
