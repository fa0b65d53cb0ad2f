"""What the documentation shows works: every example is applied, the walk-through is walked."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from e2e.install import System, create_namespace
from e2e.tenant import wait_ready

pytestmark = pytest.mark.timeout(600)
DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"```(sh|text)([^\n]*)\n(.*?)```", re.DOTALL)
STEP_S_MAX = 240.0


def test_examples_become_ready(system: System) -> None:
    texts = [path.read_text() for path in sorted((DOCS / "examples").rglob("*.yaml"))]
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each]
    # Those of the namespace `default` stay there when this one goes.
    shop = create_namespace(system.kubectl, "shop")
    mine = [each for each in objects if each["metadata"]["namespace"] == "shop"]
    assert len(mine) > 10
    try:
        shop.apply(mine)
        ours = [e for e in mine if e["apiVersion"].startswith("tidewater.dev/")]
        wait_ready(shop, *(f"{e['kind'].lower()}/{e['metadata']['name']}" for e in ours))
    finally:
        shop("delete", "namespace", "shop", "--timeout=150s", timeout_s=170)


def test_walkthrough(system: System, tmp_path: Path) -> None:
    """Each `sh` block runs in one directory; the lines of a `text` block are what it must say."""
    steps = BLOCK.findall((DOCS / "walkthrough.md").read_text())
    said = ""
    try:
        for kind, mark, block in steps:
            if kind == "sh" and "install" not in mark:
                said = _run(block, system, tmp_path)
            elif kind == "text":
                for line in block.strip().splitlines():
                    assert " ".join(line.split()) in said, f"{line!r} is not in:\n{said}"
    finally:
        _run("kill $(cat forward.pid) 2>/dev/null || true", system, tmp_path)
        system.kubectl("delete", "namespace", "market", "--ignore-not-found", "--timeout=150s")


def _run(block: str, system: System, directory: Path) -> str:
    """Run a block of the page; what it keeps, it keeps in files."""
    environment = {**os.environ, "KUBECONFIG": str(system.kubectl.kubeconfig)}
    done = subprocess.run(
        ["bash", "-c", f"set -eu\n{block}"],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_S_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}"
    return " ".join(done.stdout.split())
