"""`tidewater dev` where it must not start: on data or an address that is in use."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewater_core.settings import embedded
from tidewater_testing import web
from tidewater_testing.process import ManagedProcess, free_ports

BIN = Path(sys.executable).parent
START_S = 60.0


def _command(data: Path, port: int, *more: str) -> list[str]:
    listen = f"127.0.0.1:{port}"
    return [str(BIN / "tidewater"), "dev", "--data", str(data), "--listen", listen, *more]


def _run(data: Path, port: int, *more: str) -> tuple[int, str]:
    command = _command(data, port, *more)
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    return done.returncode, done.stderr


def _is_ready(port: int) -> bool:
    try:
        return web.request(f"127.0.0.1:{port}", "GET", "/readyz").status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, int]]:
    """Run one; gives its data, port and pid."""
    directory = tmp_path_factory.mktemp("dev")
    (port,) = free_ports(1)
    command = _command(directory / "data", port)
    with ManagedProcess(command, log_file=directory / "dev.log", directory=directory) as process:
        process.wait_ready(lambda: _is_ready(port), START_S, "tidewater dev")
        yield directory / "data", port, process.pid


def test_data_that_is_in_use_is_left_alone(running: tuple[Path, int, int]) -> None:
    """G1, G6: a second one took the first one apart: its settings, address and pid files."""
    data, port, pid = running
    run_dir = embedded(data, "127.0.0.1:0").run_dir
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    (other,) = free_ports(1)
    code, said = _run(data, other)
    assert code == 1
    assert said == f"tidewater: DataInUse: another worker (pid {pid}) uses {run_dir}\n"
    assert {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before
    assert _is_ready(port)


def test_only_the_supervisor_holds_the_data(running: tuple[Path, int, int]) -> None:
    """What outlives it by a moment must not keep the next one out."""
    data, _, pid = running
    run_dir = embedded(data, "127.0.0.1:0").run_dir
    holders = [
        process
        for process in (pid, *(int((run_dir / f"{r}.pid").read_text()) for r in ("edge", "table")))
        for descriptor in Path(f"/proc/{process}/fd").iterdir()
        if os.path.realpath(descriptor) == os.path.realpath(run_dir / "lock")
    ]
    assert holders == [pid]


def test_data_is_free_again_after_a_kill(tmp_path: Path) -> None:
    """Nobody has to remove a file."""
    for attempt in range(2):
        (port,) = free_ports(1)
        log = tmp_path / f"{attempt}.log"
        with ManagedProcess(_command(tmp_path / "data", port), log_file=log) as process:
            process.wait_ready(lambda port=port: _is_ready(port), START_S, "tidewater dev")  # type: ignore[misc]
            process.kill()


def test_an_address_that_is_taken(tmp_path: Path) -> None:
    """It ends at once and says what to do, for either door."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = _run(tmp_path / "a", port)
        assert (code, said) == (
            1,
            f"tidewater: AddressInUse: 127.0.0.1:{port} is taken; choose another with --listen\n",
        )
        (free,) = free_ports(1)
        code, said = _run(tmp_path / "b", free, "--flight", str(port))
        assert code == 1
        assert said.endswith(f":{port} is taken; choose another with --flight\n")


def test_an_edge_without_an_address_says_so_in_a_line(tmp_path: Path) -> None:
    """It is started again for ever: its log must be readable."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = tmp_path / "settings.json"
        settings.write_text(embedded(tmp_path / "data", f"127.0.0.1:{port}").to_json())
        command = [sys.executable, "-m", "tidewater_worker.edge", str(settings)]
        edge = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            _, said = edge.communicate(timeout=START_S)
        finally:
            edge.kill()
        assert edge.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use\n" in said
        assert "Traceback" not in said
