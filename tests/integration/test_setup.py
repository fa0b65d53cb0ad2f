"""`make` on a machine that has python3, make and git: what is not there is installed, once."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy what git has of this tree, as it stands."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def _make(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make without what this environment has of its own, uv above all."""
    own = str(ROOT / ".venv")
    places = [place for place in os.environ["PATH"].split(":") if not place.startswith(own)]
    environment = {**os.environ, "PATH": ":".join(p for p in places if not Path(p, "uv").exists())}
    environment.pop("VIRTUAL_ENV", None)
    command = ["make", "--directory", str(checkout), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_pipelines_environment_is_made_where_there_is_no_uv(checkout: Path) -> None:
    first = _make(checkout, "setup-pipeline")
    assert first.returncode == 0, first.stderr
    python = checkout / ".venv-pipeline" / "bin" / "python"
    probe = [str(python), "-c", "import pyspark, tidewater_pipeline.cli.main"]
    subprocess.run(probe, check=True, timeout=120)
    again = _make(checkout, "setup-pipeline")
    assert (again.returncode, again.stderr) == (0, ""), "twice does nothing"
    told = subprocess.run(
        [checkout / ".venv" / "bin" / "tidewater", "compact", "--help"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "default/" in told.stdout
