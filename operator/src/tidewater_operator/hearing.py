"""What the watches have told, to tell silence from deafness. Pure.

A watch that hangs looks like a quiet cluster. So what a listing shows is compared with what was
heard: an object (or a change of its spec) that is old and was never heard of means that the watch
is deaf.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from tidewater_operator.model.names import Manifest
from tidewater_operator.times import parse_time

PATIENCE_S: Final = 45.0
ROUNDS_MAX: Final = 2
"""Listings in a row that show what was not heard."""


class Hearing:
    """Remembers what was heard of each object."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[int, str]] = {}
        self._missed: dict[str, int] = {}
        self._rounds = 0

    def hear(self, kind: str, meta: dict[str, Any], *, gone: bool) -> bool:
        """Note an event; tell whether more than the status may have changed."""
        uid = str(meta.get("uid", ""))
        if gone:
            self._heard.pop(uid, None)
            return True
        gist = (
            int(meta.get("generation") or 0),
            repr(
                (
                    sorted((meta.get("annotations") or {}).items()),
                    sorted((meta.get("labels") or {}).items()),
                    meta.get("deletionTimestamp"),
                )
            ),
        )
        before = self._heard.get(uid)
        self._heard[uid] = gist
        return before != gist

    def compare(self, listed: Iterable[Manifest], now: datetime) -> int:
        """Note a listing; return how many objects in it were missed twice in a row."""
        missed: dict[str, int] = {}
        for item in listed:
            meta = item["metadata"]
            uid, generation = str(meta.get("uid", "")), int(meta.get("generation") or 0)
            made = parse_time(meta.get("creationTimestamp"))
            if made is not None and (now - made).total_seconds() < PATIENCE_S:
                continue
            heard = self._heard.get(uid)
            if heard is None or heard[0] < generation:
                missed[uid] = generation
        again = [uid for uid, generation in missed.items() if self._missed.get(uid) == generation]
        self._missed = missed
        self._rounds = self._rounds + 1 if again else 0
        return len(again)

    @property
    def is_deaf(self) -> bool:
        """Tell whether watches have missed things for several listings."""
        return self._rounds >= ROUNDS_MAX
