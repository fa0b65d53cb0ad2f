"""The epochs that a table carries already, for partitions that nobody has had in this life.

A topic that is made again on a table that was kept, or a registry that was begun anew, counts
from 1; the table refuses what is below its own. Asked once per topic, not per partition.
"""

import asyncio
from typing import Final

from tidewater_core.errors import NotFound, Retryable
from tidewater_worker.link.client import TableLink

CONNECT_S: Final = 10.0
CONNECT_POLL_S: Final = 0.02


class TableEpochs:
    """Asks the table process for the epochs of a topic's table."""

    def __init__(self, link: TableLink) -> None:
        self._link = link
        self._asking: dict[str, asyncio.Task[dict[int, int]]] = {}

    async def of(self, topic: str, partition: int) -> int:
        """Return the epoch of a partition in the table; 0 if there is none yet."""
        asking = self._asking.get(topic)
        if asking is None:
            asking = asyncio.create_task(self._ask(topic))
            self._asking[topic] = asking
            asking.add_done_callback(lambda _: self._asking.pop(topic, None))
        return (await asyncio.shield(asking)).get(partition, 0)

    async def _ask(self, topic: str) -> dict[int, int]:
        await self._connected()
        try:
            bounds = await self._link.bounds(topic)
        except NotFound as error:
            if error.reason == "UnknownTopic":
                raise Retryable("TableProcessBehind", error.message, 200) from error
            return {}
        return {number: found.epoch for number, found in bounds.items()}

    async def _connected(self) -> None:
        """Wait for the table process, which starts beside this one."""
        waited_s = 0.0
        while not self._link.is_connected and waited_s < CONNECT_S:
            await asyncio.sleep(CONNECT_POLL_S)
            waited_s += CONNECT_POLL_S
