"""Many topics: how long until all are ready, what the operator needs, and that it then rests."""

import time

import pytest

from e2e import faults
from e2e.install import OPERATOR, OPERATOR_PODS, System
from e2e.kubectl import Kubectl, Object, wait_for
from e2e.tenant import manifest, pool, topic, wait_ready

pytestmark = pytest.mark.timeout(600)
TOPICS = 200
SUBSCRIPTIONS = 400
READY_S_MAX = 240.0
OPERATOR_BYTES_MAX = 400 * 1024 * 1024
RESYNC_S = 60.0
STATUS = "import sys; print(open('/proc/1/status').read()); print(open('/proc/1/stat').read())"
KINDS = "topics,subscriptions,pools,statefulsets,services,configmaps,serviceaccounts,rolebindings"


def _objects() -> list[Object]:
    # Upkeep once a year: the default's next time, which status tells, changes every half hour.
    upkeep = {"schedule": "0 0 1 1 *"}
    topics = [topic(f"t{n:03d}", partitions=1, maintenance=upkeep) for n in range(TOPICS)]
    subscriptions = [
        manifest("Subscription", f"s{n:03d}", topic=f"t{n % TOPICS:03d}", type="Shared")
        for n in range(SUBSCRIPTIONS)
    ]
    resources = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}}
    return [pool(1, resources=resources), *topics, *subscriptions]


def _not_ready(kubectl: Kubectl) -> int:
    items = kubectl.get("topics,subscriptions")["items"]
    ready = [
        each
        for each in items
        for condition in each.get("status", {}).get("conditions", ())
        if condition["type"] == "Ready" and condition["status"] == "True"
    ]
    return TOPICS + SUBSCRIPTIONS - len(ready)


def _operator(system: System) -> tuple[str, int, float]:
    """Return the operator's pod, its memory at the most, and its CPU seconds."""
    (pod,) = system.kubectl.get("pods", f"--selector={OPERATOR_PODS}")["items"]
    name = str(pod["metadata"]["name"])
    text = system.kubectl.python(name, STATUS)
    peak = next(line for line in text.splitlines() if line.startswith("VmHWM:"))
    times = text.rsplit(")", 1)[1].split()
    return name, int(peak.split()[1]) * 1024, (int(times[11]) + int(times[12])) / 100


def _versions(kubectl: Kubectl) -> dict[str, str]:
    return {
        f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["resourceVersion"]
        for each in kubectl.get(KINDS)["items"]
    }


def test_many_topics(namespace: Kubectl, system: System) -> None:
    begin = time.monotonic()
    namespace.apply(_objects())
    applied_s = time.monotonic() - begin
    wait_for(lambda: not _not_ready(namespace), READY_S_MAX, "all to be ready", interval_s=3.0)
    ready_s = time.monotonic() - begin
    pod, peak_bytes, cpu_s = _operator(system)
    print(
        f"\n{TOPICS} topics, {SUBSCRIPTIONS} subscriptions: applied in {applied_s:.0f} s, ready "
        f"after {ready_s:.0f} s; operator {peak_bytes >> 20} MiB at most, {cpu_s:.0f} s of CPU"
    )
    assert peak_bytes < OPERATOR_BYTES_MAX
    # A new operator looks at everything anew, and finds nothing to write.
    wait_ready(namespace, "pool/default")
    time.sleep(15)  # the last figures of the start are in
    before = _versions(namespace)
    faults.delete_pod(system.kubectl, pod)
    system.kubectl.wait_ready(OPERATOR)
    time.sleep(RESYNC_S)
    after = _versions(namespace)
    changed = sorted(name for name in before if before[name] != after.get(name))
    assert changed == []
