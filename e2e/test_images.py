"""The images themselves: small, nonroot, labelled, and without what builds or installs."""

import json
from typing import Any

import pytest

from e2e.kind import COMPONENTS, container_cli
from e2e.kubectl import run

MEGABYTES_MAX = {"operator": 250, "worker": 600, "pipeline": 850}
FORBIDDEN = ("pip", "apt-get", "gcc", "ld", "make", "perl", "javac", "git", "curl")
WHICH = """
import shutil, sys
print(" ".join(name for name in sys.argv[1:] if shutil.which(name)))
"""


@pytest.fixture(params=COMPONENTS)
def image(request: pytest.FixtureRequest, tag: str) -> str:
    """Return the name of each image in turn."""
    return f"tidewater-{request.param}:{tag}"


def _inspect(image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run([container_cli(), "image", "inspect", image]))[0]
    return found


def test_size(image: str) -> None:
    component = image.partition(":")[0].removeprefix("tidewater-")
    megabytes = _inspect(image)["Size"] / 1_000_000
    assert megabytes <= MEGABYTES_MAX[component]


def test_user_and_labels(image: str, tag: str) -> None:
    config = _inspect(image)["Config"]
    assert config["User"] == "65532:65532"
    assert "PYTHONSAFEPATH=1" in config["Env"]
    prefix = "org.opencontainers.image."
    labels = {k.removeprefix(prefix): v for k, v in config["Labels"].items()}
    assert labels["title"] == image.partition(":")[0]
    assert labels["version"] == tag
    assert labels["licenses"] == "Apache-2.0"
    assert labels["revision"]


def test_nothing_that_builds_or_installs(image: str) -> None:
    command = [container_cli(), "run", "--rm", "--read-only", "--network=none"]
    found = run([*command, "--entrypoint=python", image, "-c", WHICH, *FORBIDDEN], timeout_s=180)
    assert not found.split()
