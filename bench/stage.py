"""The stage of a run: the servers, the client processes, and the folder they work in."""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from bench.driver import Driver
from bench.plan import Plan
from bench.servers import (
    READY_WAIT_S,
    Nats,
    Specs,
    Tidewater,
    start_nats,
    start_tidewater,
)

S = TypeVar("S", Tidewater, Nats)

_LATER: Final[dict[str, object]] = {
    "flushInterval": "1h",
    "batchRows": 100_000_000,
    "batchBytes": "4Gi",
    "maxMemory": "4Gi",
}
"""A table writer that has nothing to do during the run."""
NO_LOG: Final[dict[str, object]] = {"retention": {"time": "0s", "size": "0"}}
"""A log that lets go of what is in the table, so that reads must come from there."""

TOPICS: Final[dict[str, dict[str, object]]] = {
    "ack": {"partitions": 1},
    "ack-quiet": {"partitions": 1, "writer": _LATER, "freshness": "1h"},
    "flight": {"partitions": 1},
    "sockets": {"partitions": 1},
    "bulk": {"partitions": 1},
    "doput": {"partitions": 1},
    "paced": {"partitions": 1},
    "flood": {"partitions": 1},
    "beside-quiet": {"partitions": 1, "writer": _LATER, "freshness": "1h"},
    "beside-commits": {"partitions": 1},
    "commits": {"partitions": 1},
    "history": {"partitions": 1, "log": NO_LOG},
    "long": {"partitions": 1, "log": NO_LOG},
    "live": {"partitions": 1},
    "live-read": {"partitions": 1},
    "fanout": {"partitions": 1},
}
"""One topic per question, so that no measurement inherits another's backlog or history. One
partition each, as a NATS stream has one log: messages over several partitions share fewer syncs,
which is not measured here. Everything that is not named is the default."""

SUBSCRIPTIONS: Final[dict[str, dict[str, object]]] = {
    "live": {"topic": "live", "startFrom": {"position": "latest"}},
}


class Stage:
    """Starts what a run needs and ends all of it."""

    def __init__(self, plan: Plan, out: Path, *, keep: bool) -> None:
        self.plan = plan
        self._keep = keep
        out.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="work-", dir=out)).resolve()
        self._ending = contextlib.ExitStack()
        self._drivers: dict[str, Driver] = {}

    def __enter__(self) -> Self:
        try:
            self.tidewater = self._server(
                start_tidewater(self.folder / "tidewater", TOPICS, SUBSCRIPTIONS)
            )
            self.nats = self._server(start_nats(self.folder / "nats"))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.close()
        if self._keep:
            sys.stderr.write(f"kept: {self.folder}\n")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _server(self, server: S) -> S:
        self._ending.callback(server.end)
        return server

    def another_tidewater(
        self,
        name: str,
        topics: Specs | None = None,
        subscriptions: Specs | None = None,
        ready_s: float = READY_WAIT_S,
        *,
        has_flight: bool = True,
    ) -> Tidewater:
        """Start a second worker, with nothing but the quickstart topic unless told."""
        folder = self.folder / name
        return self._server(
            start_tidewater(folder, topics or {}, subscriptions, ready_s, has_flight=has_flight)
        )

    def driver(self, module: str, *arguments: str, name: str = "") -> Driver:
        """Return a client process; the same one for the same name."""
        key = name or module
        if key not in self._drivers:
            self._drivers[key] = Driver(module, *arguments)
            self._ending.callback(self._drivers[key].close)
        return self._drivers[key]

    @property
    def producer(self) -> Driver:
        """Tidewater's producer."""
        return self.driver("tidewater_producer", self.tidewater.url)

    @property
    def second_producer(self) -> Driver:
        """Another one, for the load beside a measurement."""
        return self.driver("tidewater_producer", self.tidewater.url, name="second")

    @property
    def reader(self) -> Driver:
        """Tidewater's reader."""
        return self.driver("tidewater_reader", self.tidewater.url)

    @property
    def table(self) -> Driver:
        """A reader of the tables, past the worker."""
        data = self.tidewater.data
        return self.driver("table_reader", str(self.tidewater.catalog), f"file://{data}/warehouse")

    @property
    def sockets(self) -> Driver:
        """A bare client of Tidewater's WebSockets."""
        return self.driver("sockets", self.tidewater.url)

    def arrow_flight(self, role: str) -> Driver:
        """Return a client of Flight, or the server that keeps nothing."""
        return self.driver("arrow_flight", name=f"flight {role}")

    @property
    def nats_producer(self) -> Driver:
        """NATS's producer."""
        return self.driver("nats_producer", self.nats.url)

    def live(self, role: str) -> Driver:
        """Tidewater's live producer or consumer."""
        return self.driver("tidewater_live", self.tidewater.url, name=f"tidewater {role}")

    def nats_live(self, role: str) -> Driver:
        """NATS's live producer or consumer."""
        return self.driver("nats_live", self.nats.url, name=f"nats {role}")

    def say(self, text: str) -> None:
        """Tell how far the run has come."""
        sys.stderr.write(f"· {text}\n")
        sys.stderr.flush()
