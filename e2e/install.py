"""What stands in the cluster before a test begins: the chart, as a user installs it."""

import base64
import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from e2e.kubectl import Kubectl, run

CHART = Path(__file__).resolve().parent.parent / "charts/tidewater"
RELEASE = "tidewater"
SYSTEM = "tidewater-system"
CATALOG_URI = f"http://tidewater-seaweedfs.{SYSTEM}.svc:8181"
S3_URI = f"http://tidewater-seaweedfs.{SYSTEM}.svc:8333"
OPERATOR = "deployment/tidewater-operator"
OPERATOR_PODS = "app.kubernetes.io/component=operator"
ETCD = "statefulset/tidewater-etcd"
SEAWEEDFS = "statefulset/tidewater-seaweedfs"
INSTALL_S_MAX = 300.0

Values = Mapping[str, Any]


@dataclass(frozen=True)
class System:
    """The installed release: operator, etcd and SeaweedFS, shared by all tests of a run."""

    kubectl: Kubectl
    tag: str
    access_key: str
    secret_key: str = field(repr=False)

    def catalog_by_forward(self, iceberg: str, s3: str) -> dict[str, str]:
        """Catalog properties for the tests themselves, through forwarded ports."""
        return {
            "type": "rest",
            "uri": f"http://{iceberg}",
            "warehouse": "s3://warehouse",
            "credential": f"{self.access_key}:{self.secret_key}",
            "oauth2-server-uri": f"http://{iceberg}/v1/oauth/tokens",
            "s3.endpoint": f"http://{s3}",
            "s3.access-key-id": self.access_key,
            "s3.secret-access-key": self.secret_key,
            "s3.region": "us-east-1",
        }


def helm(kubectl: Kubectl, *args: str, text: str | None = None, timeout_s: float = 120.0) -> str:
    """Run helm in a namespace of the cluster."""
    command = ["helm", f"--kubeconfig={kubectl.kubeconfig}", f"--namespace={kubectl.namespace}"]
    return run([*command, *args], text=text, timeout_s=timeout_s)


def values(tag: str) -> dict[str, Any]:
    """Return what differs from the chart's defaults: our tag, and two cores for a whole cluster."""
    return {
        "image": {"tag": tag},
        "operator": {"resources": {"requests": {"cpu": "20m", "memory": "128Mi"}}},
        # Operators are killed every few seconds: the next one must not wait long for the lease.
        # What only reports and Jobs tell is seen at the next beat (`status`), and `test_many` waits
        # for everything to be looked at anew (`resync`): both are waited for again and again.
        "intervals": {"lease": "5s", "status": "5s", "resync": "20s"},
        "etcd": {"storage": {"size": "1Gi"}},
        "seaweedfs": {"storage": {"size": "5Gi"}},
        "poolDefaults": {
            "storage": {"size": "1Gi"},
            "resources": {
                "requests": {"cpu": "50m", "memory": "200Mi"},
                "limits": {"memory": "1Gi"},
            },
        },
    }


def create_namespace(kubectl: Kubectl, name: str) -> Kubectl:
    """Create a namespace that admits only pods without any privilege."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": name, "labels": labels}
    kubectl.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}])
    return kubectl.within(name)


def install_chart(
    kubectl: Kubectl, tag: str, changed: Values | None = None, chart: Path = CHART
) -> System:
    """Install or upgrade the release, and wait until its pods are ready."""
    within = create_namespace(kubectl, SYSTEM)
    helm(
        within,
        "upgrade",
        RELEASE,
        str(chart),
        "--install",
        "--wait",
        f"--timeout={INSTALL_S_MAX:.0f}s",
        "--values=-",
        text=yaml.safe_dump({**values(tag), **(changed or {})}),
        timeout_s=INSTALL_S_MAX + 30,
    )
    return installed(kubectl, tag)


def installed(kubectl: Kubectl, tag: str) -> System:
    """Return the release that is there."""
    within = kubectl.within(SYSTEM)
    data = within.get("secret", "tidewater-catalog-credentials")["data"]
    access_key, secret_key = (
        base64.b64decode(data[name]).decode()
        for name in ("CATALOG_ACCESS_KEY", "CATALOG_SECRET_KEY")
    )
    return System(within, tag, access_key, secret_key)


def uninstall_chart(kubectl: Kubectl) -> None:
    """Uninstall the release as a user does."""
    helm(kubectl.within(SYSTEM), "uninstall", RELEASE, "--wait", "--timeout=180s", timeout_s=210)


def render(changed: Values | None = None, *args: str) -> list[dict[str, Any]]:
    """Render the chart without a cluster."""
    # The caller may change what it gets.
    return copy.deepcopy(_rendered(json.dumps(changed or {}, sort_keys=True), *args))


@cache
def _rendered(changed: str, *args: str) -> list[dict[str, Any]]:
    """Render once for each set of values: many tests look at the same few."""
    command = ["helm", "template", RELEASE, str(CHART), f"--namespace={SYSTEM}", "--values=-"]
    text = run([*command, "--kube-version=1.29.0", *args], text=changed)
    return [each for each in yaml.safe_load_all(text) if each]
