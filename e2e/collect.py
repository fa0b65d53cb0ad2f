"""What a failed test leaves for a person to read: logs, events and resources in one folder."""

from pathlib import Path

from e2e.install import SYSTEM
from e2e.kubectl import CommandError, Kubectl

RESOURCES = (
    "topics,subscriptions,pools,pods,statefulsets,deployments,jobs,services,endpointslices,"
    "configmaps,persistentvolumeclaims"
)
LOG_LINES_MAX = 5_000


def collect(kubectl: Kubectl, namespace: str | None, folder: Path, report: str) -> None:
    """Write everything about a namespace, the release and the nodes into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(report)
    _keep(folder / "nodes.txt", kubectl, "describe", "nodes")
    for name in (namespace, SYSTEM):
        if name is None:
            continue
        within = kubectl.within(name)
        _keep(folder / f"{name}.events.txt", within, "get", "events", "--sort-by=.lastTimestamp")
        _keep(folder / f"{name}.resources.yaml", within, "get", RESOURCES, "--output=yaml")
        _keep(folder / f"{name}.pods.txt", within, "describe", "pods")
        for pod in _pods(within):
            logs = ("logs", pod, "--all-containers", "--timestamps", f"--tail={LOG_LINES_MAX}")
            _keep(folder / f"{name}.{pod}.log", within, *logs)
            _keep(folder / f"{name}.{pod}.previous.log", within, *logs, "--previous")


def _pods(kubectl: Kubectl) -> list[str]:
    try:
        return [each["metadata"]["name"] for each in kubectl.get("pods")["items"]]
    except CommandError:
        return []


def _keep(path: Path, kubectl: Kubectl, *args: str) -> None:
    """Write what a command says; a command that fails is a finding too."""
    try:
        path.write_text(kubectl(*args, timeout_s=30))
    except (CommandError, OSError) as error:
        path.write_text(f"{error}\n")
