"""What stands in the cluster before a test begins: third-party parts, and a worker to attack."""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from e2e.kubectl import CommandError, Kubectl, Object
from tidewater_core.settings import CatalogSettings, Limits, WorkerSettings
from tidewater_core.units import Duration

MANIFESTS = Path(__file__).parent / "manifests"
PARTS_NAMESPACE = "tidewater-parts"
WORKER = "statefulset/worker"
WORKER_POD = "worker-0"
WORKER_PORT = 8080
RUN_DIR = "/run/tidewater"
DATA_DIR = "/data"

Change = Callable[[Object], None]
"""Changes an object of a manifest in place before it is applied."""


@dataclass(frozen=True)
class Parts:
    """The third-party parts that all tests of a run share."""

    kubectl: Kubectl
    access_key: str
    secret_key: str = field(repr=False)

    @property
    def catalog_in_cluster(self) -> dict[str, str]:
        """Catalog properties for a worker; the keys are placeholders for its environment."""
        host = f"seaweedfs.{PARTS_NAMESPACE}.svc"
        return _catalog(
            f"http://{host}:8181",
            f"http://{host}:8333",
            "${CATALOG_ACCESS_KEY}",
            "${CATALOG_SECRET_KEY}",
        )

    def catalog_by_forward(self, iceberg: str, s3: str) -> dict[str, str]:
        """Catalog properties for the tests themselves, through forwarded ports."""
        return _catalog(f"http://{iceberg}", f"http://{s3}", self.access_key, self.secret_key)


def _catalog(uri: str, s3: str, access_key: str, secret_key: str) -> dict[str, str]:
    return {
        "type": "rest",
        "uri": uri,
        "warehouse": "s3://warehouse",
        "credential": f"{access_key}:{secret_key}",
        "oauth2-server-uri": f"{uri}/v1/oauth/tokens",
        "s3.endpoint": s3,
        "s3.access-key-id": access_key,
        "s3.secret-access-key": secret_key,
        "s3.region": "us-east-1",
    }


def load(name: str) -> list[Object]:
    """Read a manifest of this folder."""
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def create_namespace(kubectl: Kubectl, name: str) -> Kubectl:
    """Create a namespace that admits only pods without any privilege."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": name, "labels": labels}
    kubectl.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}])
    return kubectl.within(name)


def install_parts(kubectl: Kubectl) -> Parts:
    """Install etcd and SeaweedFS, or find them installed, and wait until they are ready."""
    within = create_namespace(kubectl, PARTS_NAMESPACE)
    access_key, secret_key = _keys(within)
    identity = {
        "name": "tidewater",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    texts = {
        "access-key": access_key,
        "secret-key": secret_key,
        "s3.json": json.dumps({"identities": [identity]}),
    }
    within.apply([_secret("seaweedfs", texts), *load("etcd.yaml"), *load("seaweedfs.yaml")])
    for part in ("statefulset/etcd", "statefulset/seaweedfs"):
        within.wait_ready(part, timeout_s=240)
    return Parts(within, access_key, secret_key)


def _keys(kubectl: Kubectl) -> tuple[str, str]:
    """Return the keys of the installed SeaweedFS, or new ones."""
    try:
        template = "--template={{index .data %s | base64decode}}"
        key, secret = (
            kubectl("get", "secret", "seaweedfs", "--output=go-template", template % f'"{name}"')
            for name in ("access-key", "secret-key")
        )
    except CommandError:
        return secrets.token_hex(8), secrets.token_hex(24)
    return key, secret


def _secret(name: str, texts: dict[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "type": "Opaque",
        "stringData": texts,
    }


def worker_settings(parts: Parts, limits: Limits | None = None) -> WorkerSettings:
    """Return the settings of the only worker of a namespace."""
    return WorkerSettings(
        worker_id=WORKER_POD,
        log_root=Path(DATA_DIR) / "log",
        run_dir=Path(RUN_DIR),
        coordination=f"{DATA_DIR}/coordination.db",
        catalog=CatalogSettings(properties=parts.catalog_in_cluster),
        listen_host="0.0.0.0",
        listen_port=WORKER_PORT,
        shutdown_deadline=Duration("30s"),
        limits=limits or Limits(),
    )


def topic(namespace: str, name: str, **spec: object) -> Object:
    """Return a Topic manifest."""
    return {
        "apiVersion": "tidewater.dev/v1alpha1",
        "kind": "Topic",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def install_worker(
    kubectl: Kubectl,
    parts: Parts,
    tag: str,
    topics: Sequence[Object],
    *,
    limits: Limits | None = None,
    change: Change | None = None,
) -> None:
    """Install one worker with a volume and these topics, and wait until it is ready."""
    config = {
        "settings.json": worker_settings(parts, limits).to_json(),
        "topics.yaml": yaml.safe_dump_all(topics, sort_keys=False),
    }
    objects = [
        _secret("catalog", {"access-key": parts.access_key, "secret-key": parts.secret_key}),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "worker"}, "data": config},
        *load("worker.yaml"),
    ]
    for each in objects:
        if each["kind"] == "StatefulSet":
            for container in each["spec"]["template"]["spec"]["containers"]:
                container["image"] = f"{container['image']}:{tag}"
            if change is not None:
                change(each)
    kubectl.apply(objects)
    kubectl.wait_ready(WORKER)
