"""What the documentation shows works: every example is applied, the walk-through is walked."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from e2e.install import System, create_namespace
from e2e.kubectl import Object, wait_for
from e2e.registry import Registry
from e2e.tenant import wait_ready

pytestmark = pytest.mark.timeout(600)
DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"```(sh|text)([^\n]*)\n(.*?)```", re.DOTALL)
STEP_S_MAX = 240.0
WALKED = "market"
"""The namespace of the walk-through."""
OURS_ALL = ("subscriptions,topics", "--all")
"""What users make, but for pools; in `default` the examples are alone."""


def _examples() -> dict[str, list[Object]]:
    """Return what the examples make, by namespace."""
    texts = [path.read_text() for path in sorted((DOCS / "examples").rglob("*.yaml"))]
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each]
    assert len(objects) > 15
    by_namespace: dict[str, list[Object]] = {}
    for each in objects:
        by_namespace.setdefault(each["metadata"]["namespace"], []).append(each)
    return by_namespace


def test_examples_become_ready(system: System) -> None:
    by_namespace = _examples()
    try:
        for namespace, mine in by_namespace.items():
            within = system.kubectl.within(namespace)
            if namespace != "default":
                create_namespace(system.kubectl, namespace)
            within.apply(mine)
        for namespace, mine in by_namespace.items():
            ours = [e for e in mine if e["apiVersion"].startswith("tidewater.dev/")]
            names = [f"{e['kind'].lower()}/{e['metadata']['name']}" for e in ours]
            wait_ready(system.kubectl.within(namespace), *names)
    finally:
        others = sorted(by_namespace.keys() - {"default"})
        system.kubectl("delete", "namespace", *others, "--ignore-not-found", "--wait=false")
        system.kubectl.within("default")("delete", *OURS_ALL, "--wait=false")


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
        system.kubectl("delete", "namespace", WALKED, "--ignore-not-found", "--wait=false")


def test_namespaces_of_examples_go(system: System, registry: Registry) -> None:
    """Deleted as a whole, with all that was in them, while the walk-through was walked."""
    for namespace in sorted(_examples().keys() - {"default"}):
        system.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout=150s")
    left = system.kubectl.within("default")
    left("delete", *OURS_ALL, "--timeout=150s", timeout_s=170)
    # A pool without which a topic cannot be drained is made again.
    wait_for(lambda: not registry.topics("default"), 150, "the registry to forget", 1.0)

    def gone() -> bool:
        left("delete", "pools", "--all", "--timeout=60s")
        return not left.get("pods", "--selector=tidewater.dev/pool")["items"]

    wait_for(gone, 150, "the workers to go", 1.0)
    system.kubectl("delete", "namespace", WALKED, "--ignore-not-found", "--timeout=150s")


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
