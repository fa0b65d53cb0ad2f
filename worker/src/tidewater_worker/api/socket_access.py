"""What the commands of a socket need, and those that wait until that is known."""

import re
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from tidewater_core.errors import Invalid, TidewaterError
from tidewater_worker.auth.access import CONSUME, PRODUCE, Access, subscription, topic
from tidewater_worker.auth.guard import Guard

_NAME: Final = re.compile("[a-z0-9.-]{1,253}")
Needs = tuple[Access, ...]
Payload = tuple[bytes, bool]
"""A message, and whether it is a binary one."""


def needs_of(command: Any, namespace: str, name: str) -> Needs:
    """Return what a command needs; one about a stream that is under way needs nothing more."""
    if command.produce is not None:
        return topic(PRODUCE, namespace, name)
    if command.read is not None:
        return topic(CONSUME, namespace, name)
    asked = command.subscribe or command.acknowledge or command.reject or command.extend
    if asked is None:
        return ()
    if _NAME.fullmatch(asked.subscription) is None:
        raise Invalid("InvalidName", "a subscription's name has letters, digits, '-' and '.'")
    return subscription(CONSUME, namespace, name, asked.subscription)


class Gate:
    """Judges the commands of one socket; while one has to wait, those after it do, too."""

    def __init__(
        self,
        guard: Guard,
        authorization: bytes | None,
        do: Callable[[Payload, bool], Needs | None],
        refuse: Callable[[Payload, TidewaterError], None],
        flush: Callable[[], None],
    ) -> None:
        self._guard, self._authorization = guard, authorization
        self._do, self._refuse, self._flush = do, refuse, flush
        self.waiting: deque[Payload] = deque()

    def is_known(self, needs: Needs) -> bool:
        """Tell whether all is allowed, as far as is known; raise if it is not."""
        return not needs or self._guard.quick(self._authorization, needs) is not None

    async def ask(self, needs: Needs | None) -> None:
        """Ask for the first one that waits; do it, and all after it that can be done."""
        try:
            await self._ask(needs)
        finally:
            self.waiting.clear()
            self._flush()

    async def _ask(self, needs: Needs | None) -> None:
        while needs is not None:
            first = self.waiting[0]
            try:
                await self._guard.check(self._authorization, needs)
            except TidewaterError as error:
                self._refuse(first, error)
            else:
                self._do(first, True)
            self.waiting.popleft()
            needs = None
            while needs is None and self.waiting:
                needs = self._do(self.waiting[0], False)
                if needs is None:
                    self.waiting.popleft()

    async def run(self, needs: Needs, stream: Any) -> None:
        """Run a stream as long as it is allowed."""
        await self._guard.while_allowed(self._authorization, needs, stream.run())
