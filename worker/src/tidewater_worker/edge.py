"""The edge process: log and HTTP. `python -m tidewater_worker.edge SETTINGS.json`."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn
import uvloop

from tidewater_core.clock import SystemClock
from tidewater_core.settings import WorkerSettings
from tidewater_worker.api.cluster import add_cluster
from tidewater_worker.api.produce import Producing
from tidewater_worker.api.protocol import EdgeProtocol
from tidewater_worker.api.routes import make_app
from tidewater_worker.api.socket import add_socket
from tidewater_worker.api.socket_session import Sockets
from tidewater_worker.api.subscriptions import add_subscriptions
from tidewater_worker.coordination import connect
from tidewater_worker.dispatch.manager import Dispatch
from tidewater_worker.node import Node

if TYPE_CHECKING:
    from tidewater_worker.flight.server import FlightServer

KEEP_ALIVE_S: Final = 75
SWITCH_INTERVAL_S: Final = 0.0002
"""A sync thread that comes back from fdatasync waits this long at most for a busy event loop to
let it report; Python's default of 5 ms would be the ack latency under load."""
GC_THRESHOLDS: Final = (50_000, 20, 20)
"""Requests make no cycles; Python's default of 700 would look for them a hundred times a second."""
log = logging.getLogger(__name__)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _url(settings: WorkerSettings, address: tuple[str, int]) -> str:
    """Return how other workers reach this one."""
    host = socket.gethostname() if address[0] in ("0.0.0.0", "::") else address[0]  # noqa: S104
    host = f"[{host}]" if ":" in host else host
    return settings.advertise_url or f"http://{host}:{address[1]}"


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the node drains between the two halves of a stop."""

    def install_signal_handlers(self) -> None:
        """Leave signals to `serve`."""


def _start_flight(node: Node, producing: Producing) -> "FlightServer | None":
    settings = node.settings
    if settings.flight_port is None:
        return None
    # Only here: it costs memory that a worker without Flight need not have.
    from tidewater_worker.flight.server import FlightServer

    loop = asyncio.get_running_loop()
    server = FlightServer(node, producing, loop, settings.flight_port)
    address = f"{settings.listen_host}:{server.port}"
    (settings.run_dir / "flight.addr").write_text(f"{address}\n")
    log.info("listening on grpc://%s", address)
    return server


async def serve(settings: WorkerSettings) -> None:
    """Serve until SIGTERM; then drain."""
    coordination = connect(settings)
    node = Node(settings, coordination, SystemClock())
    producing = Producing(node)
    dispatch = Dispatch(node, coordination)
    app = make_app(node, producing)
    add_subscriptions(app, node, dispatch)
    add_cluster(app, node, coordination)
    add_socket(app)
    sockets = Sockets(node, producing, dispatch)
    config = uvicorn.Config(
        app,
        # uvicorn only calls it: a function that makes connections serves as a class.
        http=partial(EdgeProtocol, node, producing, sockets),  # type: ignore[arg-type]
        loop="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, settings.shutdown_deadline.ms // 2000),
        ws="none",
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    listener = _bind(settings.listen_host, settings.listen_port)
    address = listener.getsockname()
    await node.start(_url(settings, address))
    await dispatch.start()
    listener.listen(1024)  # now, not before: who connects gets an answer
    (settings.run_dir / "edge.addr").write_text(f"{address[0]}:{address[1]}\n")
    log.info("listening on http://%s:%s", address[0], address[1])
    flight = _start_flight(node, producing)
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
    settings = WorkerSettings.from_json(Path(sys.argv[1]).read_text())
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # what the imports made stays anyway
    gc.set_threshold(*GC_THRESHOLDS)
    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
