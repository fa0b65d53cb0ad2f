"""Conditions told the truth: each one is held against what was seen by others. Pure.

What others saw: a probe inside the cluster (messages taken or not, workers' reports, pulls), the
frontier in the table, pods and StatefulSets. A condition may be late by `DELAY_S` and may know
things `AHEAD_S` before they can be seen from outside. So it lies if the opposite was true all the
time from the one to the other; and Unknown is a lie if all was well and everybody answered.

The operator's heartbeat is its Lease: while that is not renewed, or has changed hands within the
delay, conditions may be old and are not judged.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

from e2e.kubectl import Object, is_pod_ready

TOPIC = "watched"
SUBSCRIPTION = "watcher"
PARTITIONS = 3
POOL = "default"
DELAY_S = 25.0
"""docs/operator.md: a session's end (10 s), a beat of figures (5 s, as e2e installs the chart), a
pass and a busy machine."""
AHEAD_S = 15.0
PASS_S = 10.0
"""From when a pass begins, which is a change's time, until all is written; on a busy machine."""
LEASE_S = 5.0
"""As e2e installs the chart."""
STEADY_MIN = 4
"""So many looks at least make a window."""
FRESH_S = 10.0
"""The topic's `freshness`."""
MARGIN_S = 3.0
CONSUMER_S = 10.0
"""The subscription's `ackDeadline`: a silent consumer is gone after it."""
CLAIM = "Conditions are true"
TYPES = {
    f"topic/{TOPIC}": (
        "Ready", "Assigned", "Committing", "FreshnessMet", "Maintained", "Degraded", "Paused",
    ),
    f"subscription/{SUBSCRIPTION}": ("Ready", "Active", "LagBounded", "Paused"),
    f"pool/{POOL}": ("Ready", "Scaling", "Degraded", "VolumeGrown", "Paused"),
}  # fmt: skip

Verdict = bool | None
"""None: from what was seen nobody can tell."""


@dataclass(frozen=True)
class Look:
    """What the API server had at a time."""

    at: float
    """When it was asked."""
    objects: Mapping[str, Object]
    """`kind/name` in lower case."""
    holder: str
    """Who leads, by the Lease."""
    renewed_at: float
    until: float
    """When it had answered."""

    def conditions(self, name: str) -> dict[str, Object]:
        """Return the conditions of an object by type."""
        status = self.objects.get(name, {}).get("status") or {}
        return {each["type"]: each for each in status.get("conditions", ())}

    def pods(self) -> dict[int, Object]:
        """Return the pool's pods by their number."""
        found = {}
        for name, pod in self.objects.items():
            if match := re.fullmatch(rf"pod/tidewater-{POOL}-(\d+)", name):
                found[int(match[1])] = pod
        return found

    @property
    def wanted(self) -> int:
        """Workers that the Pool asks for."""
        return int(self.objects[f"pool/{POOL}"]["spec"]["replicas"])


@dataclass(frozen=True)
class Round:
    """What the probe met at a time (`probe.py`)."""

    at: float
    reports: Mapping[str, Any]
    sent: Sequence[tuple[int, str, int | None]]
    pulled: bool

    def owners(self, topic: str) -> dict[int, list[str]]:
        """Return which workers say that they have a partition."""
        found: dict[int, list[str]] = {}
        for worker, report in self.reports.items():
            for number, state in report["topics"].get(topic, {}).items():
                if state != "closed":
                    found.setdefault(int(number), []).append(worker)
        return found

    def states(self) -> set[str]:
        """Return the states of the topic's partitions."""
        return {
            state
            for report in self.reports.values()
            for state in report["topics"].get(TOPIC, {}).values()
        }

    @property
    def is_reported(self) -> bool:
        """Every partition is somebody's."""
        return len(self.owners(TOPIC)) == PARTITIONS


@dataclass(frozen=True)
class Frontier:
    """How far the table was at a time: partition to the first offset that is not in it."""

    at: float
    next: Mapping[int, int]


def read_rounds(text: str) -> list[Round]:
    """Read what the probe printed; its last line may be cut."""
    found = []
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        sent = [(status, reason, offset) for status, reason, offset in said["sent"]]
        found.append(Round(said["at"], said["reports"], sent, said["pulled"]))
    return found


@dataclass(frozen=True)
class Seen:
    """All that was seen, in the order of time."""

    looks: Sequence[Look]
    rounds: Sequence[Round]
    frontiers: Sequence[Frontier] = field(default=())

    def looks_in(self, start: float, end: float) -> Sequence[Look]:
        """Return the looks of a window."""
        times = self._look_times
        return self.looks[bisect_left(times, start) : bisect_right(times, end)]

    def rounds_in(self, start: float, end: float) -> Sequence[Round]:
        """Return the probe's rounds of a window."""
        times = self._round_times
        return self.rounds[bisect_left(times, start) : bisect_right(times, end)]

    @cached_property
    def _look_times(self) -> list[float]:
        return [each.at for each in self.looks]

    @cached_property
    def _round_times(self) -> list[float]:
        return [each.at for each in self.rounds]

    @cached_property
    def _waits(self) -> list[tuple[float, float, float, float]]:
        """Of each message: when it came (not before, not after), was last seen missing, was there.

        One that was stored without an answer shows as a jump of its partition's offsets: it came
        at some time between the two that were acknowledged.
        """
        found = []
        last: dict[int, tuple[int, float]] = {}
        for each in self.rounds:
            for partition, (_, _, offset) in enumerate(each.sent):
                if offset is None:
                    continue
                before, came = last.get(partition, (offset - 1, each.at))
                last[partition] = (offset, each.at)
                found.append((each.at, each.at, *self._waited(partition, offset, each.at)))
                if offset > before + 1:
                    found.append((came, each.at, *self._waited(partition, offset - 1, each.at)))
        return found

    def _waited(self, partition: int, offset: int, came: float) -> tuple[float, float]:
        missing, there = came, float("inf")
        for frontier in self.frontiers:
            if frontier.next.get(partition, 0) <= offset:
                missing = max(missing, frontier.at)
            elif there == float("inf"):
                there = frontier.at
        return missing, there

    @cached_property
    def _ages(self) -> dict[float, tuple[float, float]]:
        return {}

    def ages(self, at: float) -> tuple[float, float]:
        """Return the age of the oldest message that is not in the table: at least, at most."""
        if at not in self._ages:  # the windows of looks overlap: each round is asked for many times
            self._ages[at] = self._aged(at)
        return self._ages[at]

    def _aged(self, at: float) -> tuple[float, float]:
        least = most = 0.0
        for earliest, latest, missing, there in self._waits:
            if latest <= at <= missing:
                least = max(least, at - latest)
            if earliest <= at < there:
                most = max(most, at - earliest)
        return least, most

    def is_led(self, start: float, end: float) -> bool:
        """Tell whether one operator led all the time."""
        looks = self.looks_in(start, end)
        beats = all(each.at - each.renewed_at < LEASE_S for each in looks)
        return start >= self.looks[0].at and beats and len({each.holder for each in looks}) == 1

    def is_judged(self, look: Look) -> bool:
        """Tell whether a look is worth judging: before it one operator led for long enough."""
        start = look.at - DELAY_S
        return self.is_led(start, look.at) and len(self.looks_in(start, look.at)) >= STEADY_MIN


# ---- what is true


Judge = Callable[[Seen, float, float], list[Verdict]]
"""Says of each time in a window what was true."""


def takes_messages(each: Round) -> Verdict:
    """Every partition took a message."""
    codes = [status for status, _, _ in each.sent]
    if all(code == 200 for code in codes):
        return True
    return None if -1 in codes else False


def is_balanced(rounds: Sequence[Round]) -> bool:
    """Tell whether partitions stood still, each with one worker, evenly spread."""
    first = rounds[0].owners(TOPIC)
    counts: dict[str, int] = dict.fromkeys(rounds[0].reports, 0)
    for report in rounds[0].reports.items():
        counts[report[0]] = sum(len(parts) for parts in report[1]["topics"].values())
    return (
        all(each.owners(TOPIC) == first for each in rounds)
        and all(len(owners) == 1 for owners in first.values())
        and max(counts.values(), default=0) - min(counts.values(), default=0) <= 1
    )


def all_ready(look: Look) -> bool:
    """Every worker that is asked for is ready."""
    pods = look.pods()
    return all(number in pods and is_pod_ready(pods[number]) for number in range(look.wanted))


def is_scaled(look: Look) -> bool:
    """There are as many workers as asked for, and no more."""
    made = look.objects.get(f"statefulset/tidewater-{POOL}", {}).get("spec", {}).get("replicas")
    return made == look.wanted and max(look.pods(), default=-1) < look.wanted


def _by_rounds(judge: Callable[[Round], Verdict]) -> Judge:
    return lambda seen, start, end: [judge(each) for each in seen.rounds_in(start, end)]


def _by_looks(judge: Callable[[Look], Verdict]) -> Judge:
    return lambda seen, start, end: [judge(each) for each in seen.looks_in(start, end)]


def _by_age(limit_s: float) -> Judge:
    def judge(seen: Seen, start: float, end: float) -> list[Verdict]:
        found: list[Verdict] = []
        for each in seen.rounds_in(start, end):
            least, most = seen.ages(each.at)
            late = least > limit_s + MARGIN_S or bool(each.states() & {"retrying", "stopped"})
            found.append(False if late else True if most < limit_s - MARGIN_S else None)
        return found

    return judge


def _assigned(seen: Seen, start: float, end: float) -> list[Verdict]:
    rounds = seen.rounds_in(start, end)
    if rounds and is_balanced(rounds) and all(each.is_reported for each in rounds):
        return [True] * len(rounds)
    return [None if each.is_reported else False for each in rounds]


def _active(seen: Seen, start: float, end: float) -> list[Verdict]:
    found: list[Verdict] = []
    for each in seen.rounds_in(start, end):
        lately = seen.rounds_in(each.at - CONSUMER_S - MARGIN_S, each.at)
        found.append(True if each.pulled else None if any(r.pulled for r in lately) else False)
    return found


def _always(value: bool) -> Judge:
    return lambda seen, start, end: [value] * len(seen.looks_in(start, end))


def _scaling(seen: Seen, start: float, end: float) -> list[Verdict]:
    """Say True while the number differs; while workers start nobody can tell from outside."""
    return [
        True if not is_scaled(each) else False if all_ready(each) else None
        for each in seen.looks_in(start, end)
    ]


def _all_reported(each: Round) -> bool:
    return each.is_reported and all(
        SUBSCRIPTION in report["subscriptions"] for report in each.reports.values()
    )


def _lapsed(each: Round) -> bool:
    """Tell whether a worker refused for want of a session: it may say that it has a partition."""
    return any(reason == "SessionLost" for _, reason, _ in each.sent)


def _joined(judge: Judge) -> Judge:
    """Say that nobody can tell while a worker has no session: what it reports is not so."""

    def judged(seen: Seen, start: float, end: float) -> list[Verdict]:
        lapsed = any(_lapsed(each) for each in seen.rounds_in(start, end))
        return [None] if lapsed else judge(seen, start, end)

    return judged


TRUTH: Mapping[tuple[str, str], Judge] = {
    ("topic", "Ready"): _by_rounds(takes_messages),
    ("topic", "Assigned"): _joined(_assigned),
    ("topic", "Committing"): _by_age(FRESH_S + 5.0),
    ("topic", "FreshnessMet"): _by_age(FRESH_S),
    ("topic", "Maintained"): _always(True),
    ("topic", "Degraded"): _joined(_by_rounds(lambda each: not each.is_reported)),
    ("topic", "Paused"): _always(False),
    ("subscription", "Ready"): _joined(_by_rounds(_all_reported)),
    ("subscription", "Active"): _active,
    ("subscription", "LagBounded"): _always(True),
    ("subscription", "Paused"): _always(False),
    ("pool", "Ready"): _joined(_by_looks(all_ready)),
    ("pool", "Scaling"): _scaling,
    ("pool", "Degraded"): _joined(_by_rounds(lambda each: not each.is_reported)),
    ("pool", "VolumeGrown"): _always(True),
    ("pool", "Paused"): _always(False),
}
MAY_BE_UNKNOWN = frozenset({"Maintained"})
"""No Spark job was needed yet."""


# ---- the judge


def violations(seen: Seen) -> list[str]:
    """Return one line for each stretch of time in which a condition was not true."""
    found: dict[str, tuple[float, float]] = {}
    for look in filter(seen.is_judged, seen.looks):
        for name, types in TYPES.items():
            for line in _lies(seen, look, name, types):
                first, _ = found.get(line, (look.at, 0.0))
                found[line] = (first, look.at)
        for line in generations(seen, look):
            first, _ = found.get(line, (look.at, 0.0))
            found[line] = (first, look.at)
    lines = [f"{text} ({_clock(a)} to {_clock(b)})" for text, (a, b) in found.items()]
    return [*lines, *transitions(seen)]


def judged(seen: Seen, since: float = 0.0) -> int:
    """Return how many looks from a time on could be judged: none would prove nothing."""
    return sum(map(seen.is_judged, seen.looks_in(since, float("inf"))))


def decided(seen: Seen) -> int:
    """Return of how many statements (a condition at a look) others saw if they were true."""
    return sum(
        _verdict(seen, look, name, type_) is not None
        for look in filter(seen.is_judged, seen.looks)
        for name, types in TYPES.items()
        for type_ in types
    )


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def _window(look: Look) -> tuple[float, float]:
    return look.at - DELAY_S, look.at + AHEAD_S


def _verdict(seen: Seen, look: Look, name: str, type_: str) -> Verdict:
    """Return what was true all the time; None: it changed meanwhile, or nobody can tell."""
    verdicts = TRUTH[name.partition("/")[0], type_](seen, *_window(look))
    if len(verdicts) < STEADY_MIN or len(set(verdicts)) > 1:
        return None
    return verdicts[0]


def _lies(seen: Seen, look: Look, name: str, types: Sequence[str]) -> Iterator[str]:
    told, window = look.conditions(name), _window(look)
    for type_ in types:
        if type_ not in told:
            yield f"{CLAIM}: {name} does not say {type_}"
            continue
        truth = _verdict(seen, look, name, type_)
        if truth is None:
            continue
        status = told[type_]["status"]
        said = f"{name} {type_}={status} ({told[type_]['reason']})"
        if status == "Unknown":
            before = seen.looks_in(window[0], look.at)
            lasts = all(e.conditions(name).get(type_, {}).get("status") == status for e in before)
            # One answer that came too late is no lie; that nobody asks again would be.
            if lasts and type_ not in MAY_BE_UNKNOWN and _is_well(seen, *window):
                yield f"{CLAIM}: {said} while everybody could tell"
        elif (status == "True") is not truth:
            yield f"{CLAIM}: {said} while the opposite was true"


def _is_well(seen: Seen, start: float, end: float) -> bool:
    """Tell whether every worker answered and every message was taken, all the time."""
    rounds = seen.rounds_in(start, end)
    return all(takes_messages(each) and _all_reported(each) for each in rounds) and all(
        all_ready(look) for look in seen.looks_in(start, end)
    )


def generations(seen: Seen, look: Look) -> Iterator[str]:
    """Hold `observedGeneration` against the spec: behind it by the delay at most, never ahead."""
    for name in TYPES:
        known = look.objects.get(name, {})
        if not known:
            continue
        wanted = int(known["metadata"].get("generation", 0))
        observed = int(known.get("status", {}).get("observedGeneration", 0))
        for each in look.conditions(name).values():
            if each.get("observedGeneration", 0) > wanted or not each["reason"]:
                yield f"{CLAIM}: {name} {each['type']} has no reason, or a generation to come"
        if observed > wanted:
            yield f"{CLAIM}: {name} observed generation {observed} of {wanted}"
        before = seen.looks_in(look.at - DELAY_S, look.at)
        same = all(e.objects[name]["metadata"].get("generation", 0) == wanted for e in before)
        conditions = look.conditions(name).values()
        is_away = any(each["reason"] == "RegistryAway" for each in conditions)
        if same and observed < wanted and not is_away:
            yield f"{CLAIM}: {name} observed generation {observed} of {wanted} for {DELAY_S:g} s"


def transitions(seen: Seen) -> Iterator[str]:
    """Hold each change between two looks against the time that the condition gives for it.

    That is the time when a pass began. An operator that has just come to lead begins with all that
    was left undone, on a machine that starts more than this one: its pass may last longer.
    """
    for before, after in pairwise(seen.looks):
        pass_s = PASS_S if seen.is_led(before.at - DELAY_S, after.at) else DELAY_S
        for name in TYPES:
            old = before.conditions(name)
            for type_, now in after.conditions(name).items():
                if type_ not in old or old[type_]["status"] == now["status"]:
                    continue
                at = datetime.fromisoformat(now["lastTransitionTime"]).timestamp()
                if not before.at - pass_s <= at <= after.until + 1:
                    when = f"between {_clock(before.at)} and {_clock(after.until)}"
                    yield f"{CLAIM}: {name} {type_} changed {when}, and says {_clock(at)}"
