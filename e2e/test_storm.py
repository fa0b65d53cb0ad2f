"""Everything at once: what must hold while workers, operator, nodes and parts come and go."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from e2e import faults, guarantees, truth
from e2e.history import gather
from e2e.install import ETCD, OPERATOR, OPERATOR_PODS, SEAWEEDFS, System
from e2e.kubectl import Kubectl, wait_for
from e2e.tenant import POOL, WORKER, Tenant, make_tenant, pool, topic, wait_ready
from e2e.traffic import BackgroundTraffic, gentle
from e2e.witness import Witness
from tidewater_testing.traffic import Record

pytestmark = pytest.mark.timeout(600)
WORKER_KILLS = 20
OPERATOR_KILLS = 20
OPERATOR_KILL_EVERY_S = 9.0
AWAY_S = 60.0
CHANGE_S_MAX = 240.0
LOOKS_MIN = 40
"""Looks at the conditions that must be worth judging."""


@pytest.fixture(scope="module")
def pair(namespace: Kubectl, catalog: dict[str, str]) -> Iterator[Tenant]:
    """Give a pool of two workers."""
    with make_tenant(namespace, catalog, replicas=2) as tenant:
        yield tenant


@pytest.fixture(scope="module")
def witness(pair: Tenant, system: System) -> Iterator[Witness]:
    """Give somebody who sees whether conditions are true."""
    watching = Witness(pair.kubectl, system, pair.catalog)
    yield watching
    watching.close()


class OperatorKiller:
    """Kills the operator's pods again and again, every second time by force, until told to stop."""

    def __init__(self, system: System) -> None:
        self._kubectl = system.kubectl
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator-killer")
        self.kills = 0

    def _run(self) -> None:
        while not self._stop.is_set():
            force = ("--grace-period=0", "--force") if self.kills % 2 else ()
            self._kubectl("delete", "pods", f"--selector={OPERATOR_PODS}", "--wait=false", *force)
            self.kills += 1
            self._stop.wait(OPERATOR_KILL_EVERY_S)

    def __enter__(self) -> "OperatorKiller":
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and wait until an operator is there again."""
        self._stop.set()
        self._thread.join()
        self._kubectl.wait_ready(OPERATOR)


def _scaled(tenant: Tenant, replicas: int) -> None:
    """Scale as a person does, and wait until it is so; workers that go are drained before."""
    tenant.kubectl("scale", f"pool/{POOL}", f"--replicas={replicas}")
    wait_for(
        lambda: (
            tenant.kubectl.get("pool", POOL)["status"].get("replicas") == replicas
            and len(tenant.workers()) == replicas
        ),
        CHANGE_S_MAX,
        f"{replicas} workers",
        interval_s=1.0,
    )
    wait_ready(tenant.kubectl, f"pool/{POOL}", "topic/orders", timeout_s=CHANGE_S_MAX)


def _updated(tenant: Tenant) -> None:
    """Give the worker pods another annotation: all are replaced, one at a time."""
    before = {each: tenant.kubectl.incarnation(each) for each in tenant.workers()}
    tenant.kubectl.apply([pool(2, podAnnotations={"e2e": "updated"})])
    wait_for(
        lambda: all(tenant.kubectl.incarnation(each) != was for each, was in before.items()),
        CHANGE_S_MAX,
        "all workers to be replaced",
        interval_s=1.0,
    )
    tenant.kubectl.wait_ready(WORKER)


def test_changes_and_kills_under_load(pair: Tenant, system: System, witness: Witness) -> None:
    """Rolling update, 2→4→2 workers, 20 workers killed, while the operator is killed 20 times."""
    with pair.load("changes-") as traffic:
        traffic.wait_for_more(300, 60)
        with OperatorKiller(system) as killer:
            _updated(pair)
            traffic.wait_for_more(100, 120)
            pods = itertools.cycle(("tidewater-default-0", "tidewater-default-1"))
            for pod in itertools.islice(pods, WORKER_KILLS):
                faults.delete_pod(pair.kubectl, pod, grace=False)
                traffic.wait_for_more(20, 120)
            pair.kubectl.wait_ready(WORKER)
            _scaled(pair, 4)
            traffic.wait_for_more(300, 120)
            _scaled(pair, 2)
            wait_for(lambda: killer.kills >= OPERATOR_KILLS, 120, "all the kills")
        traffic.wait_for_more(300, 120)
        witness.wait_well()
    volumes = pair.kubectl.get("persistentvolumeclaims")["items"]
    assert len(volumes) == 2
    guarantees.hold(pair.history(traffic))
    # Hardly any: while operators come and go by the second, what is said may be old.
    witness.judge(0)


@contextmanager
def _away(system: System, workload: str) -> Iterator[float]:
    """Stop a part of the release for a minute in all."""
    with faults.stopped_part(system.kubectl, workload):
        begin = time.monotonic()
        yield begin
        time.sleep(max(0.0, begin + AWAY_S - time.monotonic()))


def _node_without_etcd(tenant: Tenant, system: System) -> str:
    """Return the node of a worker that is not etcd's, whose volume binds it to its node."""
    taken = system.kubectl.node_of("tidewater-etcd-0")
    nodes = {tenant.kubectl.node_of(each) for each in tenant.workers()} - {taken}
    assert nodes, "the workers are not spread over the nodes"
    return min(nodes)


def test_outages_under_load(pair: Tenant, system: System, witness: Witness) -> None:
    """Catalog and etcd away for a minute each, then a node drained; conditions say what is so."""
    watched, watcher, workers = truth.TYPES
    with pair.load("outages-") as traffic:
        traffic.wait_for_more(300, 60)
        with _away(system, SEAWEEDFS):
            traffic.wait_for_more(300, 60)
            behind = {"Ready": "True", "Committing": "False", "FreshnessMet": "False"}
            for name in (watched, "topic/orders"):
                witness.wait_told(name, behind)
            traffic.wait_for_more(300, 60)
        for name in (watched, "topic/orders"):
            witness.wait_told(name, {"Committing": "True", "FreshnessMet": "True"}, 90)
        with _away(system, ETCD):
            nobody_knows = "Unknown RegistryAway"
            for name, types in truth.TYPES.items():
                known = {"Maintained", "VolumeGrown", "Paused"}
                expected = {type_: nobody_knows for type_ in types if type_ not in known}
                witness.wait_told(name, expected)
        witness.wait_well(90)
        traffic.wait_for_more(300, 120)
        with faults.drained_node(pair.kubectl, _node_without_etcd(pair, system)):
            away = {"Ready": "False WorkerAway", "Assigned": "False WorkerAway"}
            witness.wait_told(watched, {**away, "Degraded": "True WorkerAway"})
            witness.wait_told(watcher, {"Ready": "False WorkerAway"})
            short = {"Ready": "False", "Degraded": "True WorkerAway", "Scaling": "False"}
            witness.wait_told(workers, short)
            traffic.wait_for_more(100, 120)
        witness.wait_well(90)
        traffic.wait_for_more(300, 120)
    guarantees.hold(pair.history(traffic))
    witness.judge(LOOKS_MIN)


def test_partitions_grow_under_load(pair: Tenant) -> None:
    """From two to five while messages come: nothing is lost, doubled or out of order."""
    name = f"{pair.kubectl.namespace}/growing"
    pair.kubectl.apply([topic("growing", partitions=2)])
    wait_ready(pair.kubectl, "topic/growing")
    with BackgroundTraffic(gentle(pair.door, name, 2, prefix="two-")) as first:
        first.wait_for_more(300, 60)
        pair.kubectl.apply([topic("growing", partitions=5)])
        # Ready counts for this generation alone: kubectl waits until it was observed.
        wait_ready(pair.kubectl, "topic/growing")
        parts = pair.kubectl.get("topic", "growing")["status"]["partitions"]
        assert [part["worker"] != "" for part in parts] == [True] * 5
        # Every second sender keeps to one partition: ten, so that each gets some.
        load = replace(gentle(pair.door, name, 5, prefix="five-"), senders=10)
        with BackgroundTraffic(load) as second:
            first.wait_for_more(300, 60)
            second.wait_for_more(300, 60)
    record = Record(acked=[*first.record.acked, *second.record.acked])
    history = gather(pair.door, name, record, pair.catalog, 5)
    assert all(history.stream[partition] for partition in range(5))
    guarantees.hold(history)
