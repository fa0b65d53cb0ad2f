"""`tidewater dev`: everything in one command, nothing else needed."""

import argparse
import contextlib
import errno
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tidewater_core.errors import Invalid
from tidewater_core.settings import WorkerSettings, embedded
from tidewater_worker.cli.worker import hold, register, start, topic_names

NAME = "dev"
HELP = """\
Run a worker on this machine, with everything that it needs: SQLite catalog, local warehouse, log.

It serves without authentication, so it listens on loopback unless told otherwise. Where there is no
topic yet and none is given, it makes default/quickstart. Ctrl-C stops it; --data keeps its state.
"""
QUICKSTART = """\
apiVersion: tidewater.dev/v1alpha1
kind: Topic
metadata: {name: quickstart, namespace: default}
spec: {partitions: 1}
"""
READY_WAIT_S = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="directory of the log, the table and all state (default: ./data)",
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:8080",
        metavar="HOST:PORT",
        help="address of the HTTP API (default: 127.0.0.1:8080)",
    )
    parser.add_argument(
        "-f",
        "--filename",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="Topic and Subscription manifests, as for kubectl apply; may be repeated",
    )
    parser.add_argument(
        "--flight",
        type=int,
        nargs="?",
        const=-1,
        metavar="PORT",
        help="serve Arrow Flight too, on the port after the HTTP API's unless one is given",
    )


def run(args: argparse.Namespace) -> NoReturn:
    """Run until Ctrl-C or SIGTERM."""
    for path in args.filename:
        if not path.is_file():
            raise Invalid("NoSuchFile", f"there is no manifest {path}")
    settings = embedded(args.data, args.listen)
    if args.flight is not None:
        http = settings.listen_port
        next_port = http + 1 if http else 0
        settings = replace(settings, flight_port=next_port if args.flight < 0 else args.flight)
    lock = hold(settings.run_dir)
    _check_free(settings.listen_host, settings.listen_port, "--listen")
    _check_free(settings.listen_host, settings.flight_port or 0, "--flight")
    register(settings, args.filename)
    _ensure_a_topic(settings)
    (settings.run_dir / "edge.addr").unlink(missing_ok=True)
    if os.fork() == 0:
        os.close(lock)  # it is the worker's alone
        os._exit(_announce(settings))
    start(settings, [])


def _check_free(host: str, port: int, option: str) -> None:
    """Look if an address can be listened on: the edge would be started for ever in vain."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                said = f"{host}:{port} is taken; choose another with {option}"
                raise Invalid("AddressInUse", said) from None
            said = f"{host}:{port} cannot be listened on: {error.strerror}"
            raise Invalid("BadAddress", said) from None


def _ensure_a_topic(settings: WorkerSettings) -> None:
    if not topic_names(settings):
        manifest = settings.run_dir / "quickstart.yaml"
        manifest.write_text(QUICKSTART)
        register(settings, [manifest])


def _announce(settings: WorkerSettings) -> int:
    """Wait until the worker is ready, then say how to use it (a short-lived child's work)."""
    address = settings.run_dir / "edge.addr"
    deadline = time.monotonic() + READY_WAIT_S
    parent = os.getppid()
    while time.monotonic() < deadline and os.getppid() == parent:
        with contextlib.suppress(OSError, urllib.error.URLError):
            url = f"http://{address.read_text().strip()}"
            with urllib.request.urlopen(f"{url}/readyz", timeout=2):  # noqa: S310  (our own address)
                sys.stdout.write(_greeting(settings, url))
                sys.stdout.flush()
                return 0
        time.sleep(0.1)
    return 1


def _greeting(settings: WorkerSettings, url: str) -> str:
    topics = topic_names(settings)
    topic = "default/quickstart" if "default/quickstart" in topics else topics[0]
    data = settings.log_root.parent
    return f"""
Tidewater is ready at {url}  (topics: {", ".join(topics[:8])}{" …" if len(topics) > 8 else ""})

  produce:  curl -s {url}/v1/{topic}/messages \\
              --json '{{"messages": [{{"key": "k1", "value": "hello"}}]}}'
  read:     curl -s '{url}/v1/{topic}/messages?offset=0'
  flush:    curl -s -X POST {url}/v1/{topic}/flush

The table {topic.replace("/", ".")} is in the Iceberg catalog {data}/catalog.db. Ctrl-C stops.

"""
