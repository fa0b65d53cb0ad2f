"""Two operators: who leads, by what each says of itself, and who writes. The judge is pure."""

import itertools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from e2e.install import OPERATOR_PODS, System
from e2e.kubectl import CommandError

LEASE = "tidewater-operator"
ANSWER_S = 5
"""One that is paused never answers."""


@dataclass(frozen=True)
class Beat:
    """What the operators said, one after the other: who leads, and how often they wrote."""

    leaders: frozenset[str]
    at_once: frozenset[str]
    """Those of them that led while the last of them did: they said so before it and after it."""
    writes: dict[str, int]


def beat(system: System) -> Beat:
    """Ask each operator, and if more than one leads, those again."""
    pods = system.kubectl.get("pods", f"--selector={OPERATOR_PODS}")["items"]
    said = {}
    for pod in pods:
        name = str(pod["metadata"]["name"])
        if (figures := _figures(system, name)) is not None:
            said[name] = figures
    leaders = frozenset(name for name, (leads, _) in said.items() if leads)
    at_once = leaders
    if len(leaders) > 1:  # leadership may have changed between the two answers
        at_once = frozenset(n for n in leaders if (_figures(system, n) or (False, 0))[0])
    return Beat(leaders, at_once, {name: writes for name, (_, writes) in said.items()})


def _figures(system: System, pod: str) -> tuple[bool, int] | None:
    """Return whether it leads and how often it wrote; None: not up yet, paused, or gone."""
    path = f"/api/v1/namespaces/{system.kubectl.namespace}/pods/{pod}:8080/proxy/metrics"
    wait = f"--request-timeout={ANSWER_S}s"
    try:
        text = system.kubectl.once("get", "--raw", path, wait, timeout_s=ANSWER_S + 5)
    except (CommandError, subprocess.TimeoutExpired):
        return None
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    leads = figures.get("tidewater_operator_is_leader")
    writes = figures.get("tidewater_operator_api_writes_total")
    return None if leads is None or writes is None else (leads == "1", int(writes))


def one_writer(beats: Sequence[Beat]) -> None:
    """Hold that one led at a time, and that nobody wrote from one beat to the next without it."""
    for each in beats:
        assert len(each.at_once) <= 1, f"two lead: {each.at_once}"
    for before, after in itertools.pairwise(beats):
        for pod in before.writes.keys() & after.writes.keys() - before.leaders - after.leaders:
            assert after.writes[pod] == before.writes[pod], f"{pod} wrote and did not lead"


def lease(system: System) -> tuple[str, float, float]:
    """Return who holds the Lease, since when, and when it was last renewed."""
    spec = system.kubectl.get("lease", LEASE)["spec"]
    times = [datetime.fromisoformat(spec[key]).timestamp() for key in ("acquireTime", "renewTime")]
    return spec["holderIdentity"], times[0], times[1]
