"""The README's quick start, run as it stands: its commands, its curl lines, its query.

The only change is the port, so that the test does not depend on 8080 being free.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewater_testing import web
from tidewater_testing.process import ManagedProcess, free_ports

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BIN = Path(sys.executable).parent
START_TIMEOUT_S = 60.0
PORT = "8080"

pytestmark = pytest.mark.timeout(180)


def _blocks(language: str) -> list[str]:
    """Return the README's code blocks of a language, in order."""
    found = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    return list(found)


def _commands(block: str) -> list[str]:
    """Split a shell block into its commands: a command may go on over lines."""
    commands: list[str] = []
    for line in block.splitlines():
        if commands and (commands[-1].endswith("\\") or commands[-1].count("'") % 2):
            commands[-1] += "\n" + line
        elif line.strip() and not line.lstrip().startswith("#"):
            commands.append(line)
    return commands


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Run what `make run` runs, in a directory of its own; gives that directory and the port."""
    directory = tmp_path_factory.mktemp("quickstart")
    (port,) = free_ports(1)
    command = [str(BIN / "tidewater"), "dev", "--data", "data", "--listen", f"127.0.0.1:{port}"]
    with ManagedProcess(command, log_file=directory / "dev.log", directory=directory) as process:

        def ready() -> bool:
            try:
                return web.request(f"127.0.0.1:{port}", "GET", "/readyz").status == 200
            except OSError:
                return False

        process.wait_ready(ready, START_TIMEOUT_S, "tidewater dev")
        yield directory, str(port)


def _run(command: str, directory: Path, port: str) -> str:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.replace(PORT, port)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_curl_lines_produce_read_and_flush(quickstart: tuple[Path, str]) -> None:
    """Every curl line of the README answers, without an error, what it promises."""
    directory, port = quickstart
    lines = [line for block in _blocks("sh") for line in _commands(block) if "curl" in line]
    assert len(lines) >= 3, "the README shows how to produce, read and flush"
    answers = [_run(line, directory, port) for line in lines]
    for line, answer in zip(lines, answers, strict=True):
        assert answer.strip(), line
        assert '"error"' not in answer, (line, answer)
    text = "".join(answers)
    assert json.loads(answers[0])["acks"][0]["count"] >= 1
    assert '"messages"' in text
    assert '"snapshot_id"' in text


def test_the_command_lines_produce_and_consume(
    quickstart: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's lines with the `tidewater` command send two messages and print them."""
    directory, port = quickstart
    monkeypatch.setenv("TIDEWATER_URL", f"http://127.0.0.1:{port}")
    lines = [
        line for block in _blocks("sh") for line in _commands(block) if "bin/tidewater " in line
    ]
    assert len(lines) >= 2, "the README shows the command"
    said = [_run(line.replace(".venv/bin/", f"{BIN}/"), directory, port) for line in lines]
    assert '"hello"' in said[-1]
    assert '"world"' in said[-1]


def test_the_query_finds_the_messages(quickstart: tuple[Path, str]) -> None:
    """The README's query reads the table from another process."""
    directory, port = quickstart
    worker = f"127.0.0.1:{port}"
    body = json.dumps({"messages": [{"value": "for the query"}]})
    path = "/v1/default/quickstart/messages?ack=table"
    assert web.request(worker, "POST", path, body).status == 200
    queries = [line for block in _blocks("sh") for line in _commands(block) if "catalog.db" in line]
    assert queries, "the README shows how to query the table"
    for query in queries:
        said = _run(query.replace(".venv/bin/", f"{BIN}/"), directory, port)
        assert "tw_offset" in said, said


def test_dev_says_how_to_try_it(quickstart: tuple[Path, str]) -> None:
    """The command prints the address and the lines to try."""
    directory, port = quickstart
    said = (directory / "dev.log").read_text()
    assert f"http://127.0.0.1:{port}" in said
    assert "curl" in said
