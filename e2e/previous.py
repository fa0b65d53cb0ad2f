"""The release before this one, made again from git: what users upgrade from."""

import subprocess
import tarfile
from pathlib import Path

from e2e import kind
from e2e.kubectl import CommandError, Kubectl, run

VERSION = "0.1.0"
COMMIT = "220764e9a47256d3fe8d914c40cc5ad560f619c3"
"""What was released under that version."""
TAG = f"v{VERSION}"
COMPONENTS = tuple(each for each in kind.COMPONENTS if each != kind.SPARK)
ROOT = Path(__file__).resolve().parent.parent
BUILD_S_MAX = 900.0
CRDS = ("topics.tidewater.dev", "subscriptions.tidewater.dev", "pools.tidewater.dev")


def is_known() -> bool:
    """Tell whether this checkout has it; a shallow clone asks where it came from."""
    if _has_commit():
        return True
    fetch = ["git", "-C", str(ROOT), "fetch", "--quiet", "--depth=1", "origin", COMMIT]
    subprocess.run(fetch, capture_output=True, timeout=120, check=False)
    return _has_commit()


def _has_commit() -> bool:
    ask = ["git", "-C", str(ROOT), "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    return subprocess.run(ask, capture_output=True, check=False).returncode == 0


def checked_out(folder: Path) -> Path:
    """Write its files into a folder, and return the one of its chart."""
    archive = folder / "release.tar"
    run(["git", "-C", str(ROOT), "archive", f"--output={archive}", COMMIT])
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    return folder / "charts/tidewater"


def load_images(source: Path, cluster: str) -> None:
    """Build its images by its own words, and bring them to the nodes of a kind cluster."""
    names = " ".join(COMPONENTS)
    make = [
        "make", f"--directory={source}", "images",
        f"TAG={TAG}", f"REVISION={COMMIT}", f"IMAGE_NAMES={names}",
    ]  # fmt: skip
    run(make, timeout_s=BUILD_S_MAX)
    kind.load_archive(cluster, kind.save(source / "images.tar", kind.ours(TAG, COMPONENTS)))


def forget_ours(kubectl: Kubectl) -> None:
    """Take away what this version has installed and an uninstall leaves: CRDs and the registry.

    The storage stays: it holds the tables of the whole run.
    """
    for crd in CRDS:
        kubectl("delete", "crd", crd, "--ignore-not-found", "--timeout=150s")
    kubectl("delete", "pvc", "data-tidewater-etcd-0", "--ignore-not-found", "--timeout=60s")


def objects_left(kubectl: Kubectl) -> list[str]:
    """Return the objects of our kinds in all namespaces."""
    try:
        found = kubectl("get", "topics,subscriptions,pools", "--all-namespaces", "--output=name")
    except CommandError as error:
        if "doesn't have a resource type" in str(error):
            return []
        raise
    return found.split()
