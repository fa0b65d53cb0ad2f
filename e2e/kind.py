"""Make, fill and delete a kind cluster."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from e2e.kubectl import run

CONFIG = Path(__file__).parent / "kind.yaml"
COMPONENTS = ("operator", "worker", "pipeline")
SPARK = "pipeline"
"""Its image is the largest, and what the chart and the first tests need is without it."""
CHART_VALUES = Path(__file__).resolve().parent.parent / "charts/tidewater/values.yaml"
CREATE_S_MAX = 480.0
LOAD_S_MAX = 600.0
LABEL = "io.x-k8s.kind.cluster"


def container_cli() -> str:
    """Return the command of the container engine that runs the nodes."""
    return os.environ.get("KIND_EXPERIMENTAL_PROVIDER", "docker")


def exists(name: str) -> bool:
    """Tell whether a cluster of this name is there."""
    return name in run(["kind", "get", "clusters"]).split()


def create(name: str, kubeconfig: Path | None) -> None:
    """Create the cluster and wait for its nodes; without a kubeconfig kind's own is used."""
    command = ["kind", "create", "cluster", f"--name={name}", f"--config={CONFIG}", "--wait=300s"]
    # kind's default node image is right unless this machine cannot pull it.
    if image := os.environ.get("KIND_NODE_IMAGE"):
        command.append(f"--image={image}")
    if kubeconfig is not None:
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        command.append(f"--kubeconfig={kubeconfig}")
    run(command, timeout_s=CREATE_S_MAX)


def write_kubeconfig(name: str, kubeconfig: Path) -> None:
    """Write the kubeconfig of a cluster that exists."""
    kubeconfig.parent.mkdir(parents=True, exist_ok=True)
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(run(["kind", "get", "kubeconfig", f"--name={name}"]))


def delete(name: str) -> None:
    """Delete the cluster and check that none of its containers is left."""
    run(["kind", "delete", "cluster", f"--name={name}"], timeout_s=CREATE_S_MAX)
    left = run([container_cli(), "ps", "--all", "--quiet", f"--filter=label={LABEL}={name}"])
    if left.strip():
        raise AssertionError(f"kind left containers of cluster {name} behind: {left.split()}")


def third_party_images() -> list[str]:
    """Return the images that the chart's quick-start profile runs beside ours.

    Loaded from here when this machine has them, so that nodes without a way to a registry can run
    them; pulled by the nodes otherwise.
    """
    values = yaml.safe_load(CHART_VALUES.read_text())
    return [str(values[part]["image"]) for part in ("etcd", "seaweedfs")]


def load_images(name: str, tag: str, components: Sequence[str] = COMPONENTS) -> float:
    """Load our images and what this machine has of the others into the nodes; return seconds."""
    begin = time.monotonic()
    nodes = f"--nodes={','.join(_workers(name))}"
    images = (*ours(tag, components), *others())
    run(["kind", "load", "docker-image", f"--name={name}", nodes, *images], timeout_s=LOAD_S_MAX)
    return time.monotonic() - begin


def save(archive: Path, images: Sequence[str]) -> Path:
    """Write images to a file: no cluster is needed for the slower half of loading them."""
    run([container_cli(), "save", f"--output={archive}", *images], timeout_s=LOAD_S_MAX)
    return archive


def load_archive(name: str, archive: Path) -> float:
    """Load the images of a file into the nodes, and delete it; return seconds."""
    begin = time.monotonic()
    nodes = f"--nodes={','.join(_workers(name))}"
    command = ["kind", "load", "image-archive", f"--name={name}", nodes, str(archive)]
    run(command, timeout_s=LOAD_S_MAX)
    archive.unlink()
    return time.monotonic() - begin


def ours(tag: str, components: Sequence[str]) -> list[str]:
    """Return the names of our images."""
    return [f"tidewater-{component}:{tag}" for component in components]


def others() -> list[str]:
    """Return those images of others that this machine has."""
    return [image for image in third_party_images() if _is_local(image)]


def has_image(name: str, image: str) -> bool:
    """Tell whether every node that runs pods has an image."""
    inspect = ("crictl", "inspecti", "--quiet", image)
    asked = [
        subprocess.run([container_cli(), "exec", node, *inspect], capture_output=True, check=False)
        for node in _workers(name)
    ]
    return all(done.returncode == 0 for done in asked)


def _workers(name: str) -> list[str]:
    """Return the nodes that run pods: the control plane of a cluster with workers takes none."""
    nodes = run(["kind", "get", "nodes", f"--name={name}"]).split()
    return [node for node in nodes if not node.endswith("control-plane")] or nodes


def _is_local(image: str) -> bool:
    found = subprocess.run(
        [container_cli(), "image", "inspect", image], capture_output=True, check=False
    )
    return found.returncode == 0
