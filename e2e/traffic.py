"""Bounded load from outside the cluster, through a Service and a forwarded port.

The senders are those of the attack tests (`tidewater_testing.traffic`): each waits for the outcome
of a request before the next, and sends the same request again when it does not know it. Here they
run in a thread of their own, so that a test reads as a list of what happens to the cluster.
"""

import asyncio
import threading
import time
from dataclasses import dataclass

from e2e.web import Door
from tidewater_testing.traffic import Load, Record, Traffic

STOP_S_MAX = 120.0


def gentle(
    door: Door, topic: str, partitions: int, *, prefix: str = "s", pause_s: float = 0.05
) -> Load:
    """Return a load that two shared cores can carry beside a whole cluster: some 100 requests/s."""
    return Load(
        address=door.address,
        token=door.token,
        topic=topic,
        partitions=partitions,
        senders=6,
        pause_s=pause_s,
        prefix=prefix,
        give_up_s=240.0,
    )


@dataclass
class _Outcome:
    error: BaseException | None = None


class BackgroundTraffic:
    """Senders in a thread; use as `with`. Leaving it waits for every outcome."""

    def __init__(self, load: Load) -> None:
        self._traffic = Traffic(load)
        self._stop = threading.Event()
        self._outcome = _Outcome()
        self._thread = threading.Thread(target=self._run, name="traffic")

    @property
    def record(self) -> Record:
        """What was promised so far."""
        return self._traffic.record

    def _run(self) -> None:
        try:
            asyncio.run(self._send())
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self._outcome.error = error

    async def _send(self) -> None:
        async with self._traffic:
            while not self._stop.is_set() and not self._traffic.failed():
                await asyncio.sleep(0.05)

    def __enter__(self) -> "BackgroundTraffic":
        """Start sending."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, wait for the outcomes that are open, and raise what a sender ran into."""
        self._stop.set()
        self._thread.join(STOP_S_MAX + self._traffic.load.give_up_s)
        if self._outcome.error is not None:
            raise self._outcome.error
        assert not self._thread.is_alive(), "the senders did not stop"

    def wait_for_more(self, messages: int, timeout_s: float) -> int:
        """Wait until this many further messages are acknowledged; return the total."""
        goal = self.record.messages + messages
        deadline = time.monotonic() + timeout_s
        while self.record.messages < goal:
            if self._outcome.error is not None:
                raise self._outcome.error
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.record.messages} of {goal} messages acknowledged in {timeout_s:g} s; "
                    f"refused: {self.record.refused}, no answer: {self.record.unknown}"
                )
            time.sleep(0.05)
        return self.record.messages
