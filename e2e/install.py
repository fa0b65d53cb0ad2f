"""What stands in the cluster before a test begins: third-party parts, and a worker to attack."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from e2e.kubectl import CommandError, Kubectl, Object, wait_for

MANIFESTS = Path(__file__).parent / "manifests"
PARTS_NAMESPACE = "tidewater-parts"
CATALOG_URI = f"http://seaweedfs.{PARTS_NAMESPACE}.svc:8181"
S3_URI = f"http://seaweedfs.{PARTS_NAMESPACE}.svc:8333"
WORKER = "statefulset/worker"
WORKER_POD = "worker-0"
WORKER_PORT = 8080
RUN_DIR = "/run/tidewater"
DATA_DIR = "/data"
JOB_S_MAX = 330.0

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
        return _catalog(CATALOG_URI, S3_URI, "${CATALOG_ACCESS_KEY}", "${CATALOG_SECRET_KEY}")

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


def set_tag(workload: Object, tag: str, environment: Mapping[str, str] | None = None) -> None:
    """Give the containers of a workload the tag under test, and further variables."""
    template = workload.get("spec", {}).get("template", {})
    for container in template.get("spec", {}).get("containers", ()):
        container["image"] = f"{container['image']}:{tag}"
        # First, since arguments may refer to what comes before them only.
        added = [{"name": name, "value": value} for name, value in (environment or {}).items()]
        container["env"] = [*added, *container.get("env", ())]


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


def worker_settings(parts: Parts, limits: dict[str, str] | None = None) -> str:
    """Return the settings of the only worker of a namespace; what is not named has a default."""
    return json.dumps(
        {
            "worker_id": WORKER_POD,
            "log_root": f"{DATA_DIR}/log",
            "run_dir": RUN_DIR,
            "coordination": f"{DATA_DIR}/coordination.db",
            "catalog": {"properties": parts.catalog_in_cluster},
            "listen_host": "0.0.0.0",
            "listen_port": WORKER_PORT,
            "shutdown_deadline": "30s",
            "limits": limits or {},
        },
        indent=2,
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
    limits: dict[str, str] | None = None,
    change: Change | None = None,
) -> None:
    """Install one worker with a volume and these topics, and wait until it is ready."""
    config = {
        "settings.json": worker_settings(parts, limits),
        "topics.yaml": yaml.safe_dump_all(topics, sort_keys=False),
    }
    objects = [
        _secret("catalog", {"access-key": parts.access_key, "secret-key": parts.secret_key}),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "worker"}, "data": config},
        *load("worker.yaml"),
    ]
    for each in objects:
        set_tag(each, tag)
        if each["kind"] == "StatefulSet" and change is not None:
            change(each)
    kubectl.apply(objects)
    kubectl.wait_ready(WORKER)


def run_job(kubectl: Kubectl, manifest: str, tag: str, environment: Mapping[str, str]) -> str:
    """Run the Job of a manifest to its end and return what it printed; raise if it fails."""
    objects = load(manifest)
    name = ""
    for each in objects:
        set_tag(each, tag, environment)
        if each["kind"] == "Job":
            name = each["metadata"]["name"]
    kubectl.apply(objects)

    def ended() -> bool:
        status = kubectl.get("job", name)["status"]
        return bool(status.get("succeeded") or status.get("failed"))

    wait_for(ended, JOB_S_MAX, f"job {name} to end", interval_s=1.0)
    printed = kubectl("logs", f"job/{name}")
    assert kubectl.get("job", name)["status"].get("succeeded"), f"job {name}:\n{printed[-4000:]}"
    return printed
