"""A real worker: supervisor, edge and table process, to be used, killed, stopped and frozen."""

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidewater_core.crd.topic import Topic
from tidewater_core.settings import CatalogSettings, Limits, WorkerSettings, embedded
from tidewater_testing import web
from tidewater_testing.process import ManagedProcess, alive, free_ports, wait_until

START_TIMEOUT_S = 110.0
STOP_TIMEOUT_S = 45.0
PID_TIMEOUT_S = 20.0
FLUSH_TIMEOUT_S = 60.0


class Victim(StrEnum):
    """What a test can kill."""

    EDGE = "edge"
    TABLE = "table"
    SUPERVISOR = "supervisor"


def topic_manifest(name: str = "shop/orders", spec: Mapping[str, Any] | None = None) -> str:
    """Write the manifest of a topic; JSON is YAML."""
    namespace, _, short = name.partition("/")
    topic = Topic.model_validate(
        {
            "apiVersion": "tidewater.dev/v1alpha1",
            "kind": "Topic",
            "metadata": {"name": short, "namespace": namespace},
            "spec": dict(spec or {}),
        }
    )
    return topic.model_dump_json(by_alias=True, exclude_unset=True)


@dataclass
class Worker:
    """A worker with its state below `directory`; as a context manager it is gone at the end."""

    directory: Path
    manifests: Iterable[str] = ()
    catalog: Mapping[str, str] | None = None
    """pyiceberg's properties; None: the embedded SQLite catalog and file warehouse."""
    limits: Limits | None = None
    log_root: Path | None = None
    coordination: Path | str | None = None
    """Shared by workers that know of each other: a file, or etcd's addresses; None: one of its
    own."""
    session_ttl: str = "10s"
    worker_id: str = "worker-0"
    shutdown_deadline: str = "30s"
    command_prefix: tuple[str, ...] = ()
    """Runs the worker inside something, for example a mount namespace."""
    settings: WorkerSettings = field(init=False)
    process: ManagedProcess = field(init=False)

    def __post_init__(self) -> None:
        """Choose a port and write the settings."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        base = embedded(self.directory, f"127.0.0.1:{port}")
        self.settings = replace(
            base,
            worker_id=self.worker_id,
            log_root=self.log_root or base.log_root,
            coordination=str(self.coordination or base.coordination),
            catalog=base.catalog
            if self.catalog is None
            else CatalogSettings(properties=dict(self.catalog)),
            session_ttl=type(base.session_ttl)(self.session_ttl),
            shutdown_deadline=type(base.shutdown_deadline)(self.shutdown_deadline),
            limits=self.limits or Limits(),
        )
        settings_file = self.directory / "settings.json"
        settings_file.write_text(self.settings.to_json())
        files: list[str] = []
        for number, text in enumerate(self.manifests):
            manifest = self.directory / f"manifest-{number}.yaml"
            manifest.write_text(text)
            files += ["-f", str(manifest)]
        self.process = ManagedProcess(
            [
                *self.command_prefix,
                str(Path(sys.executable).with_name("tidewater")),
                "worker",
                f"--settings={settings_file}",
                *files,
            ],
            log_file=self.directory / "worker.log",
            directory=self.directory,
            stop_timeout_s=STOP_TIMEOUT_S,
        )

    @property
    def address(self) -> str:
        """`host:port` of the edge."""
        return f"{self.settings.listen_host}:{self.settings.listen_port}"

    @property
    def catalog_properties(self) -> dict[str, str]:
        """How to open the worker's tables without it."""
        return dict(self.settings.catalog.properties)

    def start(self, *, wait: bool = True) -> Self:
        """Start the three processes; `wait` until every topic takes messages."""
        self.process.start()
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the edge says that it is ready."""
        self.process.wait_ready(self._ready, timeout_s, f"worker {self.worker_id} to be ready")

    def answers(self) -> bool:
        """Tell whether the edge listens, ready or not."""
        try:
            return web.request(self.address, "GET", "/healthz", timeout_s=2).status == 200
        except OSError:
            return False

    def _ready(self) -> bool:
        try:
            return web.request(self.address, "GET", "/readyz", timeout_s=5).status == 200
        except OSError:
            return False

    def pid(self, victim: Victim) -> int:
        """Return a process id, waiting for a process that is being started."""
        pids: list[int] = []
        path = self.settings.run_dir / f"{victim}.pid"

        def found() -> bool:
            text = path.read_text().strip() if path.exists() else ""
            pids[:] = [int(text)] if text.isdigit() and alive(int(text)) else []
            return bool(pids)

        wait_until(found, PID_TIMEOUT_S, f"the {victim} process of {self.worker_id}", 0.01)
        return pids[0]

    def kill(self, *victims: Victim) -> None:
        """Kill -9 processes, all at once, and see them gone; the supervisor starts them again."""
        pids = [self.pid(victim) for victim in victims]
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        for pid in pids:
            wait_until(lambda pid=pid: not alive(pid), 10, f"process {pid} to die")  # type: ignore[misc]
        if Victim.SUPERVISOR in victims:
            self.process.kill()

    def freeze(self, victim: Victim) -> int:
        """Stop a process as if its machine hung; returns its pid for `thaw`."""
        pid = self.pid(victim)
        os.kill(pid, signal.SIGSTOP)
        return pid

    def thaw(self, pid: int) -> None:
        """Let a frozen process go on."""
        _signal(pid, signal.SIGCONT)

    def stop(self) -> int:
        """Stop the worker with SIGTERM and return its exit code."""
        return self.process.stop()

    def get(self, path: str, timeout_s: float = 60.0) -> web.Answer:
        """GET a path of the edge."""
        return web.request(self.address, "GET", path, timeout_s=timeout_s)

    def post(
        self,
        path: str,
        body: bytes | str = b"",
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 90.0,
    ) -> web.Answer:
        """POST to a path of the edge."""
        every = {"Content-Type": content_type, **(headers or {})}
        return web.request(self.address, "POST", path, body, every, timeout_s)

    def flush(self, topic: str, timeout_s: float = FLUSH_TIMEOUT_S) -> dict[str, Any]:
        """Make everything acknowledged visible in the table; a 503 is asked again."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self.post(f"/v1/{topic}/flush")
            if answer.status == 200:
                result: dict[str, Any] = answer.json()
                return result
            said = f"flush: {answer.status} {answer.body!r}\n{self.process.log_tail()}"
            assert answer.status == 503, said
            assert time.monotonic() < deadline, said
            time.sleep(min(answer.retry_after_s or 0.0, 0.2))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()  # its children die with it


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it was faster
