"""Flight's listener over time: a new certificate needs a new server.

The old one stops to listen, the new one takes the port: for some milliseconds a new connection is
refused. Streams that are open on the old one go on with it until they end.
"""

import asyncio
import logging
import threading
import time
from typing import Any, Final

import pyarrow as pa

from tidewater_worker.api.produce import Producing
from tidewater_worker.auth.guard import Guard
from tidewater_worker.flight.server import FlightServer
from tidewater_worker.node import Node
from tidewater_worker.tls import Material

BIND_ATTEMPTS: Final = 100
BIND_RETRY_S: Final = 0.02
log = logging.getLogger(__name__)


def flight_tls(material: Material) -> dict[str, Any]:
    """Return how Flight's library wants it."""
    tls: dict[str, Any] = {"tls_certificates": [(material.cert, material.key)]}
    if material.client_ca is not None:
        tls |= {"verify_client": True, "root_certificates": material.client_ca}
    return tls


class FlightDoor:
    """Serves Flight on one port."""

    def __init__(
        self,
        node: Node,
        producing: Producing,
        guard: Guard | None,
        port: int,
        material: Material | None,
    ) -> None:
        self._node, self._producing, self._guard = node, producing, guard
        self._loop = asyncio.get_running_loop()
        self._server = self._make(port, material)
        self._retired: list[tuple[FlightServer, threading.Thread]] = []
        self.port: int = self._server.port

    def _make(self, port: int, material: Material | None) -> FlightServer:
        tls = None if material is None else flight_tls(material)
        return FlightServer(self._node, self._producing, self._loop, port, self._guard, tls)

    def renew(self, material: Material) -> None:
        """Serve with other certificates."""
        old = self._server
        if old not in (server for server, _ in self._retired):
            ending = threading.Thread(target=old.shutdown, name="flight-renew", daemon=True)
            ending.start()
            alive = [each for each in self._retired if each[1].is_alive()]
            self._retired = [*alive, (old, ending)]
        for _ in range(BIND_ATTEMPTS - 1):
            try:
                self._server = self._make(self.port, material)
                break
            except pa.ArrowException:  # the port is not free yet
                time.sleep(BIND_RETRY_S)
        else:
            self._server = self._make(self.port, material)
        log.info("Flight serves with new certificates")

    def stop(self) -> bool:
        """End all streams; False if some did not in time."""
        done = [server.stop() for server, thread in self._retired if thread.is_alive()]
        return all([*done, self._server.stop()])
