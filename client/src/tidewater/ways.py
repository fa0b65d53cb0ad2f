"""The blocking connections of a client: to the server it was given, and to owners of partitions."""

import threading
from typing import Final

from tidewater import wire
from tidewater.errors import TidewaterError
from tidewater.origin import Origin
from tidewater.routing import CONNECT_S, Routes
from tidewater.transport import Transport
from tidewater_core.names import TopicName

WORKERS_MAX: Final = 256
"""Workers that connections are kept to."""


class Ways:
    """A pool of connections per worker, shared by everything that one client made."""

    def __init__(self, base: Transport) -> None:
        """Begin with the server that was given."""
        self.base = base
        self._direct: dict[Origin, Transport] = {}
        self._lock = threading.Lock()

    def to(self, origin: Origin) -> Transport:
        """Return the connections to a worker."""
        if origin is self.base.origin or origin == self.base.origin:
            return self.base
        found = self._direct.get(origin)
        if found is None:
            with self._lock:
                if len(self._direct) >= WORKERS_MAX:
                    self._close()
                found = self._direct.setdefault(origin, self.base.beside(origin, CONNECT_S))
        return found

    def learn(self, routes: Routes, topic: TopicName) -> None:
        """Ask who owns a topic's partitions, if it is time to."""
        if not routes.should_ask:
            return
        try:
            answer = self.base.request("GET", f"/v1/{topic}")
            routes.asked(wire.decode_object(answer))
        except TidewaterError as error:
            # Whoever asks for something hears what is wrong; this was only to save a step.
            routes.asked(None, error)

    def close(self) -> None:
        """Close the connections to owners; the base is somebody else's."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        for transport in self._direct.values():
            transport.close()
        self._direct.clear()
