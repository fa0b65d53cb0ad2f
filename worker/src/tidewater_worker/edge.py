"""The edge process: log and HTTP. `python -m tidewater_worker.edge SETTINGS.json`."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pyarrow as pa
import uvicorn
import uvloop

from tidewater_coordination import connect_as
from tidewater_core.clock import SystemClock
from tidewater_core.settings import WorkerSettings
from tidewater_worker import memory
from tidewater_worker.api.cluster import add_cluster
from tidewater_worker.api.commits import add_commits
from tidewater_worker.api.door import Door
from tidewater_worker.api.produce import Producing
from tidewater_worker.api.protocol import EdgeProtocol
from tidewater_worker.api.routes import make_app
from tidewater_worker.api.socket import add_socket
from tidewater_worker.api.socket_session import Sockets
from tidewater_worker.api.subscriptions import add_subscriptions
from tidewater_worker.api.subscriptions_between import add_between
from tidewater_worker.auth.guard import Guard
from tidewater_worker.auth.reviews import KubernetesReviews
from tidewater_worker.auth.tokens import TokenFile
from tidewater_worker.dispatch.manager import Dispatch
from tidewater_worker.node import Node
from tidewater_worker.open_files import allow_open_files
from tidewater_worker.tls import Tls

if TYPE_CHECKING:
    from tidewater_worker.flight.door import FlightDoor

KEEP_ALIVE_S: Final = 75
HEAPS_MAX: Final = 4
SWITCH_INTERVAL_S: Final = 0.0002
"""A sync thread that comes back from fdatasync waits this long at most for a busy event loop to
let it report; Python's default of 5 ms would be the ack latency under load."""
STALLED_TICKS: Final = 20
GC_THRESHOLDS: Final = (50_000, 20, 20)
"""Requests make no cycles; Python's default of 700 would look for them a hundred times a second."""
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
log = logging.getLogger(__name__)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        log.error("cannot listen on %s:%d: %s", host, port, error.strerror)
        raise SystemExit(1) from None
    return listener


def _url(settings: WorkerSettings, address: tuple[str, int]) -> str:
    """Return how other workers reach this one."""
    host = socket.gethostname() if address[0] in ("0.0.0.0", "::") else address[0]  # noqa: S104
    host = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.tls is None else "https"
    return settings.advertise_url or f"{scheme}://{host}:{address[1]}"


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the node drains between the two halves of a stop."""

    def install_signal_handlers(self) -> None:
        """Leave signals to `serve`."""

    async def on_tick(self, counter: int) -> bool:
        """Look after connections now and then; uvicorn calls this ten times a second."""
        if counter % STALLED_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, EdgeProtocol):
                    connection.close_if_stalled(now)
        return await super().on_tick(counter)


def _start_flight(
    node: Node, producing: Producing, guard: Guard | None, tls: Tls | None
) -> "FlightDoor | None":
    settings = node.settings
    if settings.flight_port is None:
        return None
    # Only here: it costs memory that a worker without Flight need not have.
    from tidewater_worker.flight.door import FlightDoor

    material = None if tls is None else tls.material
    door = FlightDoor(node, producing, guard, settings.flight_port, material)
    if tls is not None:
        tls.changed.append(door.renew)
    address = f"{settings.listen_host}:{door.port}"
    (settings.run_dir / "flight.addr").write_text(f"{address}\n")
    log.info("listening on %s://%s", "grpc" if tls is None else "grpc+tls", address)
    return door


def _guard(node: Node) -> Guard | None:
    """Return who judges requests; from then on calls to other workers say who asks."""
    auth = node.settings.auth
    if auth.mode == "none":
        if node.settings.listen_host not in LOOPBACK:
            log.warning("nobody is asked who they are: whoever reaches this worker may do anything")
        return None
    node.forwarding.token = TokenFile(auth.peer_token_path or auth.token_path, node.clock)
    guard = Guard(auth, KubernetesReviews(auth, node.clock), node.clock)
    node.review_counts = guard.counts
    return guard


def _config(app: Any, http: Any, settings: WorkerSettings, tls: Tls | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=http,
        loop="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, settings.shutdown_deadline.ms // 2000),
        ws="none",
        ssl_context_factory=None if tls is None else lambda _config, _default: tls.server,
    )


def _flight_url(settings: WorkerSettings, address: tuple[str, int]) -> str:
    """Return how clients reach Flight on this worker: at the host of its other address."""
    if settings.flight_port is None:
        return ""
    host = urlsplit(_url(settings, address)).hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{'grpc' if settings.tls is None else 'grpc+tls'}://{host}:{settings.flight_port}"


def _choose_flight_port(settings: WorkerSettings) -> WorkerSettings:
    """Choose one before the others are told where Flight is."""
    if settings.flight_port != 0:
        return settings
    with _bind(settings.listen_host, 0) as free:
        return replace(settings, flight_port=free.getsockname()[1])


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do something to its end, or up to the word to stop; tell which."""
    doing, waiting = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({doing, waiting}, return_when="FIRST_COMPLETED")
    waiting.cancel()
    if doing.done():
        await doing  # raises what it raised
        return True
    doing.cancel()
    with suppress(asyncio.CancelledError):
        await doing
    return False


async def serve(settings: WorkerSettings) -> None:
    """Serve until SIGTERM; then drain."""
    settings = _choose_flight_port(settings)
    coordination = connect_as(settings)
    node = Node(settings, coordination, SystemClock())
    tls = None if settings.tls is None else Tls(settings.tls)
    if tls is not None:
        node.forwarding.peers.tls = tls.client
    guard = _guard(node)
    producing = Producing(node)
    dispatch = Dispatch(node, coordination)
    app = make_app(node, producing)
    add_subscriptions(app, node, dispatch)
    add_between(app, node, dispatch)
    add_cluster(app, node, coordination)
    add_commits(app, node)
    add_socket(app)
    sockets = Sockets(node, producing, dispatch, guard)
    door: Any = app if guard is None else Door(app, guard, node, settings.auth.namespace())
    # uvicorn only calls it: a function that makes connections serves as a class.
    http = partial(EdgeProtocol, node, producing, sockets, guard)
    server = _Server(_config(door, http, settings, tls))
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    listener = _bind(settings.listen_host, settings.listen_port)
    address = listener.getsockname()
    starting = node.start(_url(settings, address), _flight_url(settings, address))
    if not await _unless(stopping, starting):
        await node.stop()  # it waited for the coordination store
        return
    await dispatch.start()
    if tls is not None:
        node.spawn(tls.watch())
    listener.listen(1024)  # now, not before: who connects gets an answer
    (settings.run_dir / "edge.addr").write_text(f"{address[0]}:{address[1]}\n")
    log.info("listening on %s://%s:%s", "https" if tls else "http", address[0], address[1])
    flight = _start_flight(node, producing, guard, tls)
    serving = asyncio.create_task(server._serve([listener]))
    await asyncio.wait(
        {serving, asyncio.create_task(stopping.wait())}, return_when="FIRST_COMPLETED"
    )
    log.info("draining")
    node.is_draining = True
    server.should_exit = True
    cut_off = flight is not None and not await asyncio.to_thread(flight.stop)
    await dispatch.close()
    await serving
    async with asyncio.timeout(settings.shutdown_deadline.seconds):
        await node.stop()
    if cut_off:
        # At the end of the process Flight's library waits for idle clients, for ever. All that
        # was taken is stored, and everything is closed.
        logging.shutdown()
        os._exit(0)


def main() -> None:
    """Run the edge with the settings file that the first argument names."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s edge %(levelname)s %(message)s"
    )
    memory.set_up(HEAPS_MAX)
    allow_open_files()
    settings = WorkerSettings.from_json(Path(sys.argv[1]).read_text())
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    pa.array([None])  # imports pandas, if there is one: seconds that no message shall wait for
    gc.freeze()  # what the imports made stays anyway
    gc.set_threshold(*GC_THRESHOLDS)
    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
