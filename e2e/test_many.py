"""Many topics: how long until all are ready, what the operator needs, and that it then rests."""

import time
from datetime import datetime

import pytest

from e2e import faults
from e2e.install import OPERATOR, OPERATOR_PODS, System
from e2e.kubectl import Kubectl, Object, is_pod_ready, wait_for
from e2e.tenant import manifest, pool, topic, wait_ready

pytestmark = pytest.mark.timeout(900)
TOPICS = 200
SUBSCRIPTIONS = 400
READY_S_MAX = 240.0
OPERATOR_BYTES_MAX = 400 * 1024 * 1024
RESYNC_S = 28.0
"""More than the operator's `resync`, as e2e installs the chart: all is looked at once more."""
WINDOWS = 3
QUIET_S = 8.0
"""More than the operator's `status` and a pass: figures that still change are written in it."""
PASS_S = 10.0
"""A condition's change is dated by when the pass began."""
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
    found: list[tuple[str, str]] = []

    def read() -> bool:
        pods = system.kubectl.get("pods", f"--selector={OPERATOR_PODS}")["items"]
        names = [str(each["metadata"]["name"]) for each in pods if is_pod_ready(each)]
        if len(names) == 1:
            found.append((names[0], system.kubectl.python(names[0], STATUS)))
        return bool(found)

    wait_for(read, 60, "the operator to be looked at")
    name, text = found[0]
    peak = next(line for line in text.splitlines() if line.startswith("VmHWM:"))
    times = text.rsplit(")", 1)[1].split()
    return name, int(peak.split()[1]) * 1024, (int(times[11]) + int(times[12])) / 100


def _state(kubectl: Kubectl) -> dict[str, Object]:
    items = kubectl.get(KINDS)["items"]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in items}


def _changed(before: dict[str, Object], after: dict[str, Object]) -> list[str]:
    """Return the objects that were written, made or taken away in between."""

    def version(state: dict[str, Object], name: str) -> str:
        return str(state.get(name, {}).get("metadata", {}).get("resourceVersion"))

    names = sorted(before.keys() | after.keys())
    return [name for name in names if version(before, name) != version(after, name)]


def _is_disturbed(state: dict[str, Object], since: float) -> bool:
    """Tell whether a condition changed: an answer came too late, and was noted, and its end too."""
    changes = [
        datetime.fromisoformat(condition["lastTransitionTime"]).timestamp()
        for name, each in state.items()
        if name.startswith(("Topic/", "Subscription/", "Pool/"))
        for condition in each.get("status", {}).get("conditions", ())
    ]
    return max(changes) > since - PASS_S


def _wait_quiet(kubectl: Kubectl) -> dict[str, Object]:
    """Wait until the last figures are in, and all is known; return how it then is."""
    found: list[dict[str, Object]] = []

    def quiet() -> bool:
        before = _state(kubectl)
        time.sleep(QUIET_S)
        found.append(_state(kubectl))
        return not _changed(before, found[-1])

    wait_for(quiet, 150, "the operator to rest", interval_s=0.0)
    return found[-1]


def _rested(kubectl: Kubectl, system: System) -> list[str]:
    """Let a new operator look at everything, twice; return what it wrote.

    On a busy machine the one worker may answer once in more than its three seconds: then all its
    topics turn Unknown and back, which must be written. Such a window, as the times of conditions
    tell, proves nothing, and is looked at again; any other must be without a write.
    """
    changed: list[str] = []
    for _ in range(WINDOWS):
        before, begin = _wait_quiet(kubectl), time.time()
        pod, _, _ = _operator(system)
        faults.delete_pod(system.kubectl, pod)
        system.kubectl.wait_ready(OPERATOR)
        time.sleep(RESYNC_S)
        after = _state(kubectl)
        changed = _changed(before, after)
        if not changed or not _is_disturbed(after, begin):
            break
        print(f"{len(changed)} objects were written when conditions changed: another window")
    return changed


def test_many_topics(namespace: Kubectl, system: System) -> None:
    begin = time.monotonic()
    namespace.apply(_objects())
    applied_s = time.monotonic() - begin
    wait_for(lambda: not _not_ready(namespace), READY_S_MAX, "all to be ready", interval_s=3.0)
    ready_s = time.monotonic() - begin
    _, peak_bytes, cpu_s = _operator(system)
    print(
        f"\n{TOPICS} topics, {SUBSCRIPTIONS} subscriptions: applied in {applied_s:.0f} s, ready "
        f"after {ready_s:.0f} s; operator {peak_bytes >> 20} MiB at most, {cpu_s:.0f} s of CPU"
    )
    assert peak_bytes < OPERATOR_BYTES_MAX
    # A new operator looks at everything anew, and finds nothing to write.
    wait_ready(namespace, "pool/default")
    assert _rested(namespace, system) == []
