"""Sees what is true of a topic, a subscription and a pool while things happen to them.

Three look at once: the probe in the cluster (`probe.py`), the API server's objects, the table.
`truth.py` then judges the conditions by what they saw.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from e2e import guarantees, truth
from e2e.install import System
from e2e.kubectl import CommandError, Kubectl, Object, wait_for
from e2e.tenant import conditions, manifest, topic, wait_ready
from tidewater_testing.evidence import load_table

POD = "probe"
WORKERS_MAX = 4
LOOK_S = 2.0
KINDS = "topics,subscriptions,pools,pods,statefulsets"
HEALTHY = {
    "Ready": "True", "Assigned": "True", "Committing": "True", "FreshnessMet": "True",
    "Degraded": "False", "Scaling": "False", "VolumeGrown": "True", "LagBounded": "True",
    "Paused": "False",
}  # fmt: skip


class Witness:
    """Watches from when it is made until `close`."""

    def __init__(self, kubectl: Kubectl, system: System, catalog: dict[str, str]) -> None:
        self._kubectl, self._system, self._catalog = kubectl, system, catalog
        self._looks: list[truth.Look] = []
        self._frontiers: list[truth.Frontier] = []
        self._stopping = threading.Event()
        spec = {"partitions": truth.PARTITIONS, "retention": {"time": "1d"}}
        deadline = f"{truth.CONSUMER_S:g}s"
        kubectl.apply(
            [
                topic(truth.TOPIC, freshness=f"{truth.FRESH_S:g}s", **spec),
                manifest(
                    "Subscription",
                    truth.SUBSCRIPTION,
                    topic=truth.TOPIC,
                    type="Shared",
                    ackDeadline=deadline,
                ),
            ]
        )
        wait_ready(kubectl, f"topic/{truth.TOPIC}", f"subscription/{truth.SUBSCRIPTION}")
        kubectl.apply([_probe(kubectl, system)])
        kubectl("wait", f"pod/{POD}", "--for=condition=Ready", "--timeout=120s")
        self._threads = [
            threading.Thread(target=self._repeat, args=(act,), name="witness", daemon=True)
            for act in (self._look, self._read_frontier)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def _repeat(self, act: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                act()
            except Exception as error:  # noqa: BLE001 - what cannot be seen was not seen
                self.trouble = repr(error)
            self._stopping.wait(LOOK_S)

    trouble = ""
    """What last kept a look from being made."""

    def _look(self) -> None:
        at = time.time()
        lease = self._system.kubectl.get("lease", "tidewater-operator")["spec"]
        items = self._kubectl.get(KINDS)["items"]
        objects = {f"{each['kind'].lower()}/{each['metadata']['name']}": each for each in items}
        renewed_at = datetime.fromisoformat(lease["renewTime"]).timestamp()
        holder = lease["holderIdentity"]
        self._looks.append(truth.Look(at, objects, holder, renewed_at, time.time()))

    def _read_frontier(self) -> None:
        at = time.time()
        table = load_table(self._catalog, f"{self._kubectl.namespace}/{truth.TOPIC}")
        prefix = "tidewater.partition."
        found = {
            int(key.removeprefix(prefix)): int(json.loads(value)["next"])
            for key, value in table.properties.items()
            if key.startswith(prefix)
        }
        self._frontiers.append(truth.Frontier(at, found))

    def seen(self) -> truth.Seen:
        """Return all that was seen so far."""
        rounds = truth.read_rounds(self._kubectl("logs", POD))
        return truth.Seen(tuple(self._looks), tuple(rounds), tuple(self._frontiers))

    def judge(self, judged_min: int) -> None:
        """Raise with every condition that lied; so many looks must have been worth judging."""
        seen = self.seen()
        guarantees.raise_all(truth.violations(seen))
        count = truth.judged(seen)
        print(
            f"\nconditions judged at {count} of {len(seen.looks)} looks; "
            f"of {truth.decided(seen)} statements others saw whether they were true"
        )
        assert count >= judged_min, f"only {count} of {len(seen.looks)} looks: {self.trouble}"

    def judged(self, since: float = 0.0) -> int:
        """Return how many looks from a time on are worth judging; only the looks tell."""
        return truth.judged(truth.Seen(tuple(self._looks), ()), since)

    def wait_judged(self, count: int, since: float | None = None, timeout_s: float = 180.0) -> None:
        """Wait until so many looks from now on are worth judging: while operators go, few are."""
        begun = time.time() if since is None else since
        what = f"{count} looks that can be judged"
        wait_for(lambda: self.judged(begun) >= count, timeout_s, what, interval_s=1.0)

    def wait_told(self, name: str, expected: Mapping[str, str], timeout_s: float = 90.0) -> None:
        """Wait until conditions of an object say this: `{"Ready": "False WorkerAway"}`."""

        def told() -> bool:
            found = conditions(self._kubectl, name)
            said = {t: f"{each['status']} {each['reason']}" for t, each in found.items()}
            wrong = {
                t: said.get(t) for t, e in expected.items() if not said.get(t, "").startswith(e)
            }
            if wrong:
                raise CommandError(f"{name} says {wrong}")
            return True

        wait_for(told, timeout_s, f"{name} to say {expected}", interval_s=0.5)

    def wait_well(self, timeout_s: float = 120.0) -> None:
        """Wait until every condition says that all is well, and until that was looked at.

        Else what ends at once may have been well between two looks, and the conditions that told
        so would pass for lies.
        """
        for name, types in truth.TYPES.items():
            wanted = {type_: HEALTHY[type_] for type_ in types if type_ in HEALTHY}
            self.wait_told(name, wanted, timeout_s)
        begun = len(self._looks) + 2  # one may have been under way
        wait_for(lambda: len(self._looks) >= begun, timeout_s, "looks at what is well")


def _probe(kubectl: Kubectl, system: System) -> Object:
    """Return the probe's pod: beside etcd, on the node that is not drained."""
    words = [kubectl.namespace, truth.TOPIC, truth.SUBSCRIPTION, truth.PARTITIONS, WORKERS_MAX]
    code = (Path(__file__).parent / "probe.py").read_text()
    container = {
        "name": "probe",
        "image": f"tidewater-worker:{system.tag}",
        "command": ["python", "-c", code, *map(str, words)],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD},
        "spec": {
            "serviceAccountName": "tester",
            "nodeName": system.kubectl.node_of("tidewater-etcd-0"),
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        },
    }
