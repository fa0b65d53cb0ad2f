"""What a failed test leaves for a person to read: logs, events and resources in one folder."""

import subprocess
from pathlib import Path

from e2e.kubectl import CommandError, Kubectl

RESOURCES = (
    "topics,subscriptions,pools,pods,statefulsets,deployments,jobs,services,endpointslices,"
    "configmaps,persistentvolumeclaims"
)
LOG_LINES_MAX = 5_000
CLUSTERS_OWN = {"default", "kube-node-lease", "kube-public", "kube-system", "local-path-storage"}
"""Namespaces that are there in every cluster."""


def collect(kubectl: Kubectl, folder: Path, report: str) -> None:
    """Write everything about the release, the tests' namespaces and the nodes into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(report)
    _keep(folder / "nodes.txt", kubectl, "describe", "nodes")
    for name in sorted(set(_names(kubectl, "namespaces")) - CLUSTERS_OWN):
        within = kubectl.within(name)
        _keep(folder / f"{name}.events.txt", within, "get", "events", "--sort-by=.lastTimestamp")
        _keep(folder / f"{name}.resources.yaml", within, "get", RESOURCES, "--output=yaml")
        _keep(folder / f"{name}.pods.txt", within, "describe", "pods")
        for pod in _names(within, "pods"):
            logs = ("logs", pod, "--all-containers", "--timestamps", f"--tail={LOG_LINES_MAX}")
            _keep(folder / f"{name}.{pod}.log", within, *logs)
            _keep(folder / f"{name}.{pod}.previous.log", within, *logs, "--previous")


def _names(kubectl: Kubectl, kind: str) -> list[str]:
    try:
        return [each["metadata"]["name"] for each in kubectl.get(kind)["items"]]
    except (CommandError, OSError, subprocess.TimeoutExpired):
        return []


def _keep(path: Path, kubectl: Kubectl, *args: str) -> None:
    """Write what a command says; a command that fails is a finding too."""
    try:
        path.write_text(kubectl(*args, timeout_s=30))
    except (CommandError, OSError, subprocess.TimeoutExpired) as error:
        path.write_text(f"{error}\n")
