"""A namespace with topics, as a team of a company has it: manifests, users, and the way in."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from e2e.history import History, gather
from e2e.kubectl import Kubectl, Object, PortForward, wait_for
from e2e.traffic import BackgroundTraffic, gentle
from e2e.web import Door, get
from tidewater_core.names import API_VERSION

MANIFESTS = Path(__file__).parent / "manifests"
WORKER_PORT = 8080
FLIGHT_PORT = 8815
POOL = "default"
WORKER = f"statefulset/tidewater-{POOL}"
WORKER_POD = f"tidewater-{POOL}-0"
RUN_DIR = "/run/tidewater"
DATA_DIR = "/data"
PARTITIONS = 3
JOB_S_MAX = 330.0
READY_S_MAX = 180.0


def manifest(kind: str, name: str, **spec: object) -> Object:
    """Return a manifest of ours; the namespace is that of the `kubectl` that applies it."""
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def topic(name: str, **spec: object) -> Object:
    """Return a Topic."""
    return manifest("Topic", name, **spec)


def pool(replicas: int, **spec: object) -> Object:
    """Return the pool that topics use unless they say otherwise."""
    return manifest("Pool", POOL, replicas=replicas, storage={"size": "1Gi"}, **spec)


def wait_ready(kubectl: Kubectl, *names: str, timeout_s: float = READY_S_MAX) -> float:
    """Wait until objects (`topic/orders`) are Ready; return the seconds that it took."""
    begin = time.monotonic()
    kubectl(
        "wait",
        *names,
        "--for=condition=Ready",
        f"--timeout={timeout_s:.0f}s",
        timeout_s=timeout_s + 20,
    )
    return time.monotonic() - begin


def conditions(kubectl: Kubectl, name: str) -> dict[str, Object]:
    """Return the conditions of an object (`topic/orders`) by type."""
    status = kubectl.get(name).get("status", {})
    return {each["type"]: each for each in status.get("conditions", ())}


def make_user(kubectl: Kubectl, name: str, role: str | None = "tidewater-admin") -> str:
    """Make a service account, give it a role in the namespace, and return a token of it."""
    objects: list[Object] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    ]
    if role is not None:
        group = "rbac.authorization.k8s.io"
        objects.append(
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": {"name": name},
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
                "subjects": [
                    {"kind": "ServiceAccount", "name": name, "namespace": kubectl.namespace}
                ],
            }
        )
    kubectl.apply(objects)
    return kubectl("create", "token", name, "--duration=3h").strip()


@dataclass(frozen=True)
class Tenant:
    """A namespace with a pool and a topic, and the way to it."""

    kubectl: Kubectl
    door: Door
    topic: str
    """`namespace/name`."""
    catalog: dict[str, str] = field(repr=False)

    def load(self, prefix: str, pause_s: float = 0.05) -> BackgroundTraffic:
        """Return senders for its topic; the prefix makes their payloads unique in the module."""
        load = gentle(self.door, self.topic, PARTITIONS, prefix=prefix, pause_s=pause_s)
        return BackgroundTraffic(load)

    def history(self, traffic: BackgroundTraffic) -> History:
        """Return what the checkers need after traffic has ended."""
        return gather(self.door, self.topic, traffic.record, self.catalog, PARTITIONS)

    def workers(self) -> list[str]:
        """Return the names of the worker pods that are there and not on their way out."""
        pods = self.kubectl.get("pods", f"--selector=tidewater.dev/pool={POOL}")["items"]
        return sorted(
            each["metadata"]["name"] for each in pods if "deletionTimestamp" not in each["metadata"]
        )


def begin_tenant(
    kubectl: Kubectl, *, replicas: int = 1, topics: Sequence[str], **spec: object
) -> None:
    """Apply a pool and topics of three partitions; may be done long before `make_tenant`."""
    kubectl.apply([pool(replicas, **spec), *(topic(n, partitions=PARTITIONS) for n in topics)])


@contextmanager
def make_tenant(
    kubectl: Kubectl,
    catalog: dict[str, str],
    *,
    replicas: int = 1,
    topics: Sequence[str] = ("orders",),
    **spec: object,
) -> Iterator[Tenant]:
    """Apply a pool and topics of three partitions, wait for them, and open a way in."""
    begin_tenant(kubectl, replicas=replicas, topics=topics, **spec)
    token = make_user(kubectl, "tester")
    wait_ready(kubectl, f"pool/{POOL}", *(f"topic/{name}" for name in topics))
    with forwarded(kubectl, token) as door:
        yield Tenant(kubectl, door, f"{kubectl.namespace}/{topics[0]}", catalog)


@contextmanager
def forwarded(kubectl: Kubectl, token: str, pool_name: str = POOL) -> Iterator[Door]:
    """Lead a local port to a worker of a pool; gives the way in once it answers."""
    with PortForward(kubectl, f"tidewater.dev/pool={pool_name}", WORKER_PORT) as forward:
        door = Door(forward.address, token)
        wait_for(lambda: is_ready(door), 60, "a worker to answer")
        yield door


def is_ready(door: Door) -> bool:
    """Tell whether the worker behind a door says that it is ready."""
    return get(door, "/readyz").status == 200


def run_job(kubectl: Kubectl, name: str, tag: str, environment: Mapping[str, str]) -> str:
    """Run the Job of a manifest to its end and return what it printed; raise if it fails."""
    objects: list[Any] = list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))
    for each in objects:
        if each["kind"] == "Job":
            _fill(each, tag, environment)
    kubectl.apply(objects)

    def ended() -> bool:
        status = kubectl.get("job", name)["status"]
        return bool(status.get("succeeded") or status.get("failed"))

    wait_for(ended, JOB_S_MAX, f"job {name} to end", interval_s=1.0)
    printed = kubectl("logs", f"job/{name}")
    assert kubectl.get("job", name)["status"].get("succeeded"), f"job {name}:\n{printed[-4000:]}"
    return printed


def _fill(job: Object, tag: str, environment: Mapping[str, str]) -> None:
    """Give the containers of a Job the tag under test, and further variables."""
    for container in job["spec"]["template"]["spec"]["containers"]:
        container["image"] = f"{container['image']}:{tag}"
        # First, since arguments may refer to what comes before them only.
        added = [{"name": key, "value": value} for key, value in environment.items()]
        container["env"] = [*added, *container.get("env", ())]
