"""Every example of the client's documentation, run as it stands against a real worker."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewater_testing.parts.worker import Worker
from tidewater_testing.process import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "python"
PAGE = ROOT / "docs" / "client.md"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    manifests = [(EXAMPLES / "manifests.yaml").read_text()]
    with Worker(tmp_path_factory.mktemp("examples"), manifests) as part:
        yield part


def run(worker: Worker, name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), f"http://{worker.address}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_orders_are_sent_billed_and_shipped(worker: Worker, tmp_path: Path) -> None:
    said = run(worker, "produce.py")
    assert "stored 2 in one request" in said
    assert "posted 500" in said
    assert "billed 503 orders" in run(worker, "consume.py")
    assert "billed 0 orders" in run(worker, "consume.py"), "G4: none comes again"
    output = tmp_path / "service.out"
    with output.open("wb") as file:
        service = subprocess.Popen(
            [sys.executable, str(EXAMPLES / "service.py"), f"http://{worker.address}"], stdout=file
        )
    try:
        wait_until(lambda: output.read_text().count("shipped") >= 100, 30, "orders to be shipped")
        service.send_signal(signal.SIGTERM)
        assert service.wait(20) == 0
    finally:
        service.kill()
        service.wait()
    shipped = output.read_text()
    (done,) = re.findall(r"^(\d+) orders are done$", shipped, re.MULTILINE)
    assert int(done) == shipped.count("shipped"), "what was shipped is acknowledged"


def test_tables_go_in_and_come_out(worker: Worker) -> None:
    said = run(worker, "tables.py").splitlines()
    assert said == ["stored 1000 rows", "read 1000 rows, mean 499.5", "took 1000 rows"]


def test_the_page_shows_what_runs(worker: Worker) -> None:
    """The snippets of the page are run one after the other, in one program."""
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert snippets
    program = "\n".join(snippets).replace("http://127.0.0.1:8080", f"http://{worker.address}")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
