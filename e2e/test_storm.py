"""Everything at once: what must hold while workers, operator, nodes and parts come and go."""

import itertools
import random
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from e2e import faults, guarantees, truth
from e2e.history import gather
from e2e.install import ETCD, OPERATOR, OPERATOR_PODS, SEAWEEDFS, System
from e2e.kubectl import CommandError, Kubectl, wait_for
from e2e.tenant import POOL, WORKER, Tenant, make_tenant, pool, topic, wait_ready
from e2e.traffic import BackgroundTraffic, gentle
from e2e.witness import Witness
from tidewater_testing.traffic import Record

pytestmark = pytest.mark.timeout(900)
WORKER_KILLS = 20
WORKER_KILLS_WATCHED = 4
OPERATOR_KILLS = 20
OPERATOR_KILLS_SCALING = 6
"""So many of them are kept for when workers are added and taken away."""
OPERATOR_PAUSES_S = (2.0, 9.0)
"""Between two kills, at random: now while it starts, now while it leads."""
AWAY_S = 60.0
PAUSE_S = 0.12
"""Between a sender's requests: minutes of them are read again and judged in the end."""
CHANGE_S_MAX = 240.0
LOOKS_MIN = 40
LOOKS_CALM_MIN = 3
"""Looks at the conditions that must be worth judging: of the outages, and of each calm.

Conditions may follow by half a minute, and no look counts while operators come and go by the
second. So amid their kills there are calms of that length (`OperatorKiller.calm`).
"""
CALMS = 4
"""Before the kills, amid them, and as workers begin to come and to go."""


SPREAD = [
    {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        # Without it the control plane counts, which takes none: each node would take one at most.
        "nodeTaintsPolicy": "Honor",
    }
]
"""A volume keeps its worker on the node where it began: one of two is drained, so both are used."""


@pytest.fixture(scope="module")
def pair(namespace: Kubectl, catalog: dict[str, str]) -> Iterator[Tenant]:
    """Give a pool of two workers."""
    with make_tenant(namespace, catalog, replicas=2, topologySpread=SPREAD) as tenant:
        yield tenant


@pytest.fixture(scope="module")
def witness(pair: Tenant, system: System) -> Iterator[Witness]:
    """Give somebody who sees whether conditions are true."""
    watching = Witness(pair.kubectl, system, pair.catalog)
    yield watching
    watching.close()


class OperatorKiller:
    """Kills the operator's pods again and again, every second time by force, up to a number."""

    def __init__(self, system: System, kills_max: int) -> None:
        self._kubectl = system.kubectl
        self.kills_max = kills_max
        """May be raised meanwhile; until then the operator is left alone."""
        self._stop = threading.Event()
        self._striking = threading.Lock()
        self._chance = random.Random(OPERATOR_KILLS)
        self._thread = threading.Thread(target=self._run, name="operator-killer")
        self.kills = 0
        self.trouble = ""

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._striking:
                if self.kills < self.kills_max:
                    self._kill()
            self._stop.wait(self._chance.uniform(*OPERATOR_PAUSES_S))

    def _kill(self) -> None:
        force = ("--grace-period=0", "--force") if self.kills % 2 else ()
        words = ("delete", "pods", f"--selector={OPERATOR_PODS}", "--wait=false", *force)
        try:
            self.kills += "deleted" in self._kubectl(*words, timeout_s=60)
        except (CommandError, OSError, subprocess.TimeoutExpired) as error:
            self.trouble = repr(error)  # nobody was killed: the next one counts

    @contextmanager
    def calm(self, witness: Witness) -> Iterator[None]:
        """Kill nobody inside; begins once conditions can be judged, ends when some were."""
        with self._striking:
            witness.wait_judged(1)
            begun = time.time()
            yield
            witness.wait_judged(LOOKS_CALM_MIN, begun)

    def __enter__(self) -> "OperatorKiller":
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and wait until an operator is there again."""
        self._stop.set()
        self._thread.join()
        self._kubectl.wait_ready(OPERATOR, timeout_s=180)


def _scale(tenant: Tenant, replicas: int) -> None:
    """Ask for another number of workers, as a person does."""
    tenant.kubectl("scale", f"pool/{POOL}", f"--replicas={replicas}")


def _wait_scaled(tenant: Tenant, replicas: int) -> None:
    """Wait for the workers that were asked for; those that go are drained before."""
    wait_for(
        lambda: (
            tenant.kubectl.get("pool", POOL).get("status", {}).get("replicas") == replicas
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
    tenant.kubectl.apply([pool(2, topologySpread=SPREAD, podAnnotations={"e2e": "updated"})])
    wait_for(
        lambda: all(tenant.kubectl.incarnation(each) != was for each, was in before.items()),
        CHANGE_S_MAX,
        "all workers to be replaced",
        interval_s=1.0,
    )
    tenant.kubectl.wait_ready(WORKER)


def _killed(tenant: Tenant, traffic: BackgroundTraffic, pods: Iterable[str]) -> None:
    """Kill workers one after another, as soon as messages come through again."""
    for pod in pods:
        # On a busy machine messages may come through the other one before this one is back.
        wait_for(lambda pod=pod: pod in tenant.workers(), 120, f"{pod} to be there")  # type: ignore[misc]
        faults.kill_pod(tenant.kubectl, pod, grace=False)
        traffic.wait_for_more(20, 120)
    tenant.kubectl.wait_ready(WORKER)


def test_changes_and_kills_under_load(pair: Tenant, system: System, witness: Witness) -> None:
    """Rolling update, 2→4→2 workers and 20 of them killed, while the operator is killed 20 times.

    The update, some kills and the first worker more come while it is left alone; the others begin
    in a calm amid its kills, where conditions can be judged, and end while they go on.
    """
    pods = itertools.cycle(("tidewater-default-0", "tidewater-default-1"))
    kills = WORKER_KILLS - WORKER_KILLS_WATCHED
    with pair.load("changes-", PAUSE_S) as traffic:
        traffic.wait_for_more(300, 60)
        _updated(pair)
        traffic.wait_for_more(100, 120)
        _killed(pair, traffic, itertools.islice(pods, WORKER_KILLS_WATCHED))
        _scale(pair, 3)
        witness.wait_told(f"pool/{POOL}", {"Scaling": "True"})
        _wait_scaled(pair, 3)
        witness.wait_well()
        witness.wait_judged(LOOKS_CALM_MIN)
        begun = time.time()
        with OperatorKiller(system, OPERATOR_KILLS - OPERATOR_KILLS_SCALING) as killer:
            _killed(pair, traffic, itertools.islice(pods, kills // 2))
            with killer.calm(witness):
                _killed(pair, traffic, itertools.islice(pods, 2))
            _killed(pair, traffic, itertools.islice(pods, kills - kills // 2 - 2))
            killer.kills_max = OPERATOR_KILLS
            for replicas in (4, 2):
                with killer.calm(witness):
                    _scale(pair, replicas)
                _wait_scaled(pair, replicas)
                traffic.wait_for_more(100, 120)
            wait_for(lambda: killer.kills >= OPERATOR_KILLS, 240, "all the kills")
        print(f"\n{killer.kills} operators killed; the last trouble: {killer.trouble or 'none'}")
        print(f"\nconditions judged at {witness.judged(begun)} looks meanwhile")
        traffic.wait_for_more(100, 120)
        witness.wait_well()
    guarantees.hold(pair.history(traffic))
    # A volume goes when its worker has no session any more, its pod is gone, and a pass saw both.
    wait_for(lambda: len(pair.kubectl.get("pvc")["items"]) == 2, 120, "the volumes to go")
    witness.judge(CALMS * LOOKS_CALM_MIN)


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
    with pair.load("outages-", PAUSE_S) as traffic:
        traffic.wait_for_more(300, 60)
        with _away(system, SEAWEEDFS):
            traffic.wait_for_more(100, 60)
            behind = {"Ready": "True", "Committing": "False", "FreshnessMet": "False"}
            for name in (watched, "topic/orders"):
                witness.wait_told(name, behind)
            traffic.wait_for_more(100, 60)
        for name in (watched, "topic/orders"):
            witness.wait_told(name, {"Committing": "True", "FreshnessMet": "True"}, 120)
        with _away(system, ETCD):
            nobody_knows = "Unknown RegistryAway"
            for name, types in truth.TYPES.items():
                known = {"Maintained", "VolumeGrown", "Paused"}
                expected = {type_: nobody_knows for type_ in types if type_ not in known}
                witness.wait_told(name, expected)
        witness.wait_well()
        traffic.wait_for_more(100, 120)
        with faults.drained_node(pair.kubectl, _node_without_etcd(pair, system)):
            away = {"Ready": "False WorkerAway", "Assigned": "False WorkerAway"}
            witness.wait_told(watched, {**away, "Degraded": "True WorkerAway"})
            witness.wait_told(watcher, {"Ready": "False WorkerAway"})
            short = {"Ready": "False", "Degraded": "True WorkerAway", "Scaling": "False"}
            witness.wait_told(workers, short)
            traffic.wait_for_more(100, 120)
        witness.wait_well()
        traffic.wait_for_more(100, 120)
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

        def placed() -> bool:
            parts = pair.kubectl.get("topic", "growing")["status"]["partitions"]
            return [part["worker"] != "" for part in parts] == [True] * 5

        wait_for(placed, 30, "five partitions with a worker each")
        # Every second sender keeps to one partition: ten, so that each gets some.
        load = replace(gentle(pair.door, name, 5, prefix="five-"), senders=10)
        with BackgroundTraffic(load) as second:
            first.wait_for_more(300, 60)
            second.wait_for_more(300, 60)
            wait_for(lambda: _partitions(second.record) == set(range(5)), 60, "all to be sent to")
    record = Record(acked=[*first.record.acked, *second.record.acked])
    history = gather(pair.door, name, record, pair.catalog, 5)
    assert all(history.stream[partition] for partition in range(5))
    guarantees.hold(history)


def _partitions(record: Record) -> set[int]:
    return {place.partition for batch in list(record.acked) for place in batch.ranges}
