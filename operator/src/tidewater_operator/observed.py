"""What was found in one namespace: the input of every decision. Values, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from tidewater_coordination.port import RegisteredTopic, Registry
from tidewater_core.crd.explain import problems
from tidewater_core.crd.pool import Pool
from tidewater_core.crd.subscription import Subscription
from tidewater_core.crd.topic import Topic
from tidewater_core.names import ANNOTATION_PAUSED
from tidewater_operator.model.names import Manifest
from tidewater_operator.report import Told, WorkerReport, by_topic

Key = tuple[str, str]
"""Kind and name of an object of the namespace."""


@dataclass(frozen=True)
class Snapshot:
    """The Kubernetes side."""

    namespace: str
    uid: str = ""
    """Of the namespace: another one of its name has another. Empty: we may not look at it."""
    is_terminating: bool = False
    topics: tuple[Manifest, ...] = ()
    subscriptions: tuple[Manifest, ...] = ()
    pools: tuple[Manifest, ...] = ()
    objects: Mapping[Key, Manifest] = field(default_factory=dict)
    """What we made: by kind and name."""
    claims: tuple[Manifest, ...] = ()
    pods: tuple[Manifest, ...] = ()
    """Of workers and of Spark jobs."""
    jobs: tuple[Manifest, ...] = ()
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """To copy: name in this namespace → data (base64)."""

    @property
    def worker_pods(self) -> dict[str, Manifest]:
        """Pods of workers by name, those that are about to go included."""
        return {
            pod["metadata"]["name"]: pod
            for pod in self.pods
            if pod["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "worker"
        }


@dataclass(frozen=True)
class Observed:
    """Everything that a plan is made from."""

    cluster: Snapshot
    registry: Registry
    now: datetime
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)
    """Of the workers that answered."""
    too_large: frozenset[str] = frozenset()
    """Workers that answered with more than is listened to."""
    registry_is_known: bool = True
    """The registry has been used for this namespace before: that it is empty means something."""
    retained: frozenset[str] = frozenset()
    """Uids of the Topics, also of some that are gone, that said last that their table stays."""
    unused_since: Mapping[str, datetime] = field(default_factory=dict)
    """Pool → since when no topic needs it."""
    elsewhere: Mapping[str, RegisteredTopic] = field(default_factory=dict)
    """Topics of other namespaces, by full name, where these may share a catalog namespace."""

    @cached_property
    def told(self) -> Told:
        """What workers say, by topic."""
        return by_topic(self.reports.values())

    def is_up(self, worker: str) -> bool:
        """Tell whether a worker's pod is ready, and not about to go."""
        return is_pod_ready(self.cluster.worker_pods.get(worker))

    def registered(self, name: str) -> RegisteredTopic | None:
        """Return a topic of this namespace as the registry has it."""
        return self.registry.topics.get(f"{self.cluster.namespace}/{name}")


def is_pod_ready(pod: Mapping[str, Any] | None) -> bool:
    """Tell whether a pod takes requests: one that is being deleted gets none."""
    if pod is None or "deletionTimestamp" in pod["metadata"]:
        return False
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def is_paused(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a person asked us to leave an object alone."""
    annotations = manifest["metadata"].get("annotations") or {}
    return str(annotations.get(ANNOTATION_PAUSED, "")).lower() == "true"


def conditions_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions that stand in an object's status."""
    found: list[dict[str, Any]] = (manifest.get("status") or {}).get("conditions") or []
    return found


def read_topic(manifest: Manifest) -> Topic | str:
    """Read a Topic, or say what is wrong with it."""
    try:
        return Topic.model_validate(_wanted(manifest))
    except ValidationError as error:
        return "; ".join(problems(error, Topic))


def read_subscription(manifest: Manifest) -> Subscription | str:
    """Read a Subscription, or say what is wrong with it."""
    try:
        return Subscription.model_validate(_wanted(manifest))
    except ValidationError as error:
        return "; ".join(problems(error, Subscription))


def read_pool(manifest: Manifest) -> Pool | str:
    """Read a Pool, or say what is wrong with it."""
    try:
        return Pool.model_validate(_wanted(manifest))
    except ValidationError as error:
        return "; ".join(problems(error, Pool))


def _wanted(manifest: Manifest) -> Manifest:
    return {key: value for key, value in manifest.items() if key != "status"}
