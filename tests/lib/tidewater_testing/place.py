"""A namespace with an operator: a real etcd, workers by their sessions, the API in memory."""

from collections.abc import Mapping
from typing import Any

from tidewater_coordination.etcd.login import Login
from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.port import Registry, WorkerInfo
from tidewater_core.clock import SystemClock, SystemIds
from tidewater_operator.cluster.api import STATEFUL_SET
from tidewater_operator.cluster.events import Events
from tidewater_operator.cluster.gather import OURS
from tidewater_operator.model.names import labels
from tidewater_operator.reconcile import Memory, Outcome, Reconciler
from tidewater_operator.registry import Registries
from tidewater_operator.report import (
    PartitionReport,
    SubscriptionReport,
    TopicReport,
    WorkerReport,
)
from tidewater_operator.settings import OperatorSettings
from tidewater_operator.workers import Workers
from tidewater_testing.api_server import ApiServer
from tidewater_testing.namespace import SETTINGS
from tidewater_testing.parts.etcd import Etcd

CLUSTER = "cluster-a"


class Answers(Workers):
    """Workers that say what a test has them say; at first, that all they own is well."""

    def __init__(self, registries: Registries) -> None:
        super().__init__(dict)
        self._registries = registries
        self.said: dict[str, WorkerReport] = {}

    async def reports(self, namespace: str, workers: Mapping[str, WorkerInfo], *_: Any) -> Any:
        if self.said:
            return self.said
        registry = await self._registries.read(namespace)
        known = tuple(SubscriptionReport(name) for name in registry.subscriptions)
        return {
            worker: WorkerReport(worker, topics=_owned(registry, worker), subscriptions=known)
            for worker in workers
        }


def _owned(registry: Registry, worker: str) -> tuple[TopicReport, ...]:
    parts = {
        name: tuple(
            PartitionReport(number, state="running")
            for number, owner in owners.items()
            if owner.worker_id == worker
        )
        for name, owners in registry.owners.items()
    }
    return tuple(
        TopicReport(name.partition("/")[2], partitions=found, freshness_ms=1.0)
        for name, found in parts.items()
        if found
    )


class Place:
    """A namespace, an operator and the workers that a kubelet would run."""

    def __init__(
        self, etcd: Etcd, prefix: str, *, cluster: str = CLUSTER, take_over_from: str = ""
    ) -> None:
        self.api = ApiServer()
        self.registries = Registries(
            etcd.endpoints, prefix, Login(), cluster=cluster, take_over_from=take_over_from
        )
        self.answers = Answers(self.registries)
        self.use(SETTINGS)
        self.memory = Memory()
        self.workers: dict[str, EtcdCoordination] = {}
        self._etcd, self._prefix = etcd, prefix
        self.api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})

    def use(self, settings: OperatorSettings) -> None:
        """Start the operator anew, by other settings."""
        settings = settings.model_copy(update={"pipeline_image": "tidewater-pipeline:1"})
        events = Events(self.api, SystemClock(), SystemIds(), "test")
        self.reconciler = Reconciler(
            settings, self.api, self.registries, self.answers, events, SystemClock(), "tidewater"
        )

    def apply(self, kind: str, name: str, **spec: Any) -> str:
        return self.api.put(
            {
                "apiVersion": "tidewater.dev/v1alpha1",
                "kind": kind,
                "metadata": {"name": name, "namespace": "shop"},
                "spec": spec,
            }
        )

    async def run(self) -> Outcome:
        return await self.reconciler.run("shop", self.memory, full=True, figures=True)

    async def start_workers(self) -> None:
        """Do what kubelet and workers do: pods, volumes, sessions, partitions."""
        for item in await self.api.list(STATEFUL_SET, "shop", OURS):
            pool = item["metadata"]["labels"]["tidewater.dev/pool"]
            for number in range(item["spec"]["replicas"]):
                name = f"{item['metadata']['name']}-{number}"
                meta = {"namespace": "shop", "labels": labels(pool)}
                ready = {"conditions": [{"type": "Ready", "status": "True"}]}
                pod = {"metadata": {**meta, "name": name}, "status": ready}
                self.api.put({"apiVersion": "v1", "kind": "Pod", **pod})
                claim = {"metadata": {**meta, "name": f"data-{name}"}, "spec": {}}
                claim["spec"] = {"resources": {"requests": {"storage": "10Gi"}}}
                self.api.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim})
                if name not in self.workers:
                    store = EtcdCoordination(self._etcd.endpoints, f"{self._prefix}/shop")
                    await store.start(WorkerInfo(name, volume=name))
                    self.workers[name] = store
        registry = await self.registries.read("shop")
        for topic, wanted in registry.assignments.items():
            for partition, worker in wanted.items():
                if partition not in registry.owners.get(topic, {}):
                    await self.workers[worker].acquire(topic, partition)

    async def close(self) -> None:
        for worker in self.workers.values():
            await worker.close()
        await self.registries.close()


async def served(place: Place) -> None:
    """Bring a topic to Ready."""
    place.apply("Topic", "orders", partitions=2)
    place.apply("Subscription", "billing", topic="orders")
    await place.run()
    await place.run()
    await place.start_workers()
    await place.run()
