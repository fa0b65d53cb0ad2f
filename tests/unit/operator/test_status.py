"""Statuses and conditions: true, stable, and told once."""

import json
from datetime import timedelta
from typing import Any

import pytest

from tidewater_core.crd.pool import Pool
from tidewater_core.crd.subscription import Subscription
from tidewater_core.crd.topic import Topic
from tidewater_operator.conditions import fails, holds, merge, status_of, transitions, unknown
from tidewater_operator.hearing import Hearing
from tidewater_operator.life import Refusal
from tidewater_operator.other_status import pod_trouble, pool_status, subscription_status
from tidewater_operator.plan import plan
from tidewater_operator.report import WorkerReport, read_report, topic_facts
from tidewater_operator.tell import is_urgent
from tidewater_operator.times import format_bytes_rate, format_ms, format_rate
from tidewater_operator.topic_status import topic_status
from tidewater_testing.namespace import SETTINGS, START, World

MAINTAINED = unknown("Maintained", "Disabled")


def serve(world: World, rounds: int = 20) -> World:
    for _ in range(rounds):
        for effect in world.effects(plan(world.observed(), SETTINGS)):
            effect()
        world.work()
    world.reports = {w: report(world, w) for w in world.workers() if w not in world.away}
    return world


def reports(world: World) -> dict[str, WorkerReport]:
    """Return what the workers say."""
    assert world.reports is not None
    return world.reports


def report(
    world: World, worker: str, freshness: int = 40, *, is_known: bool = True, **partition: Any
) -> WorkerReport:
    """Return the report of a worker on all that it holds."""
    topics = []
    for name, reg in world.registered.items():
        mine = [p for p, w in world.holders(name).items() if w == worker]
        parts = [
            {"partition": p, "state": "running", "epoch": 1, "end": 5, "committed": 5, **partition}
            for p in mine
        ]
        facts = {"rate": 2.0, "freshness_ms": freshness, "ack_ms": {"p50": 1.0, "p99": 3.0}}
        facts["freshness_known"] = is_known
        if parts:
            topics.append({"name": name, "uuid": reg.uuid, "partitions": parts, **facts})
    said = {
        "worker": worker,
        "topics": topics,
        "subscriptions": [{"name": name} for name in world.registered_subscriptions],
    }
    found = read_report(json.dumps(said).encode())
    assert found is not None
    return found


def topic_conditions(world: World, name: str = "orders") -> dict[str, tuple[str, str]]:
    seen = world.observed()
    case = next(case for case in plan(seen, SETTINGS).topics if case.name == name)
    status = topic_status(seen, case, None, MAINTAINED)
    Topic.model_validate({**case.manifest, "status": status})
    return {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


def test_a_topic_that_is_served() -> None:
    world = World()
    world.add_topic("orders")
    serve(world)
    found = topic_conditions(world)
    assert found["Ready"] == ("True", "Ready")
    assert found["Assigned"] == ("True", "Assigned")
    assert found["Committing"] == ("True", "Committing")
    assert found["FreshnessMet"] == ("True", "Fresh")
    assert found["Degraded"] == ("False", "AsExpected")


def test_workers_that_do_not_answer_leave_things_unknown() -> None:
    world = World()
    world.add_topic("orders")
    serve(world)
    world.reports = {}
    found = topic_conditions(world)
    assert found["Assigned"] == ("True", "Assigned")
    for type_ in ("Ready", "Committing", "FreshnessMet", "Degraded"):
        assert found[type_] == ("Unknown", "NoReport"), type_


@pytest.mark.parametrize(
    ("partition", "ready", "committing"),
    [
        ({"state": "stopped", "reason": "TableReplaced"}, ("False", "TableReplaced"), "False"),
        ({"state": "retrying", "reason": "CatalogAway"}, ("True", "Ready"), "False"),
        ({"open": False, "reason": "DiskFull"}, ("False", "DiskFull"), "True"),
    ],
)
def test_partitions_in_trouble(
    partition: dict[str, Any], ready: tuple[str, str], committing: str
) -> None:
    world = World()
    world.add_topic("orders")
    serve(world)
    world.reports = {w: report(world, w, **partition) for w in world.workers()}
    found = topic_conditions(world)
    assert found["Ready"] == ready
    assert found["Committing"][0] == committing


@pytest.mark.parametrize(
    ("partition", "status", "reason"),
    [
        ({"oldest_uncommitted_ms": 31_000}, "False", "Stalled"),
        ({"oldest_uncommitted_ms": 29_000}, "True", "Committing"),
        ({"state": "opening", "open": False}, "Unknown", "Opening"),
        ({"state": "closed", "open": False}, "Unknown", "Opening"),
    ],
)
def test_committing_is_not_taken_on_trust(
    partition: dict[str, Any], status: str, reason: str
) -> None:
    """A table process that stands still last said that all is well."""
    world = World()
    world.add_topic("orders")
    serve(world)
    world.reports = {w: report(world, w, **partition) for w in world.workers()}
    assert topic_conditions(world)["Committing"] == (status, reason)


def test_half_an_answer_is_no_answer() -> None:
    """What one worker says is no word about the other one's partitions."""
    world = World()
    world.add_pool("default", replicas=2)
    world.add_topic("orders", partitions=4, retention={"time": "1d"})
    world.add_subscription("billing", topic="orders")
    serve(world)
    del reports(world)["tidewater-default-1"]
    found = topic_conditions(world)
    for type_ in ("Ready", "Committing", "FreshnessMet", "Degraded"):
        assert found[type_] == ("Unknown", "NoReport"), type_
    told = subscription_conditions(world, "billing")
    for type_ in ("Ready", "Active", "LagBounded"):
        assert told[type_] == ("Unknown", "NoReport"), type_
    world.reports = {"tidewater-default-0": report(world, "tidewater-default-0", freshness=11_000)}
    assert topic_conditions(world)["FreshnessMet"] == ("False", "TooOld")


@pytest.mark.parametrize(
    ("freshness", "told"), [(40, ("Unknown", "Opening")), (600_000, ("False", "TooOld"))]
)
def test_nobody_calls_a_table_fresh_that_has_not_said_how_far_it_is(
    freshness: int, told: tuple[str, str]
) -> None:
    world = World()
    world.add_topic("orders")
    serve(world)
    world.reports = {w: report(world, w, freshness, is_known=False) for w in world.workers()}
    assert topic_conditions(world)["FreshnessMet"] == told


def test_a_pod_that_is_gone_counts_before_its_session_ends() -> None:
    world = World()
    world.add_pool("default", replicas=2)
    world.add_topic("orders", partitions=4)
    world.add_subscription("billing", topic="orders")
    serve(world)
    del reports(world)["tidewater-default-1"]
    world.leaving.add("tidewater-default-1")
    found = topic_conditions(world)
    assert found["Ready"] == ("False", "WorkerAway")
    assert found["Assigned"] == ("False", "WorkerAway")
    assert found["Degraded"] == ("True", "WorkerAway")
    assert subscription_conditions(world, "billing")["Ready"] == ("False", "WorkerAway")
    assert pool_conditions(world)["Ready"] == ("False", "Starting")


def test_a_generation_counts_when_workers_are_told_of_it() -> None:
    world = World()
    world.add_topic("orders", partitions=2)
    world.add_subscription("billing", topic="orders")
    serve(world)
    topic, subscription = world.topics["orders"], world.subscriptions["billing"]
    for one, change in ((topic, {"partitions": 5}), (subscription, {"resetToken": "again"})):
        one["status"] = {"observedGeneration": 1, "resetToken": "once"}
        one["metadata"]["generation"] = 2
        one["spec"] = {**one["spec"], **change}
    seen = world.observed()
    decided = plan(seen, SETTINGS)
    status = topic_status(seen, decided.topics[0], None, MAINTAINED)
    assert status["observedGeneration"] == 1
    assert {c["observedGeneration"] for c in status["conditions"]} == {1}
    told = subscription_status(seen, decided.subscriptions[0])
    assert (told["observedGeneration"], told["resetToken"]) == (1, "once")
    for action in decided.registry:
        world.tell(action)
    seen = world.observed()
    decided = plan(seen, SETTINGS)
    status = topic_status(seen, decided.topics[0], None, MAINTAINED)
    assert (status["observedGeneration"], status["conditions"][0]["status"]) == (2, "False")
    told = subscription_status(seen, decided.subscriptions[0])
    assert (told["observedGeneration"], told["resetToken"]) == (2, "again")


def test_a_worker_that_is_away() -> None:
    world = World()
    world.add_topic("orders")
    serve(world)
    world.away.add("tidewater-default-0")
    found = topic_conditions(world)
    assert found["Ready"] == ("False", "WorkerAway")
    assert found["Degraded"] == ("True", "WorkerAway")


def test_a_lost_volume_says_what_to_do() -> None:
    world = World()
    world.add_topic("orders", partitions=1)
    serve(world)
    world.lose_volume("tidewater-default-0")
    seen = world.observed()
    (case,) = plan(seen, SETTINGS).topics
    status = topic_status(seen, case, None, MAINTAINED)
    ready = status["conditions"][0]
    assert ready["reason"] == "VolumeLost"
    assert 'tidewater.dev/accept-loss="0"' in ready["message"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"table": {"name": "other.orders"}}, "ForeignTable"),
        ({"partitions": "three"}, "InvalidSpec"),
    ],
)
def test_refused_topics(spec: dict[str, Any], reason: str) -> None:
    world = World()
    world.add_topic("good")
    world.add_topic("orders", **spec)
    serve(world)
    assert "orders" not in world.registered
    seen = world.observed()
    case = next(case for case in plan(seen, SETTINGS).topics if case.name == "orders")
    assert topic_status(seen, case, None, MAINTAINED)["conditions"][0]["reason"] == reason
    # One bad topic never blocks another.
    assert topic_conditions(world, "good")["Ready"][0] == "True"


def test_two_topics_cannot_share_a_table() -> None:
    world = World()
    world.add_topic("orders", table={"name": "shop.both"})
    world.add_topic("young", table={"name": "shop.both"})
    world.topics["young"]["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
    serve(world)
    assert topic_conditions(world, "orders")["Ready"] == ("True", "Ready")
    assert topic_conditions(world, "young")["Ready"] == ("False", "TableTaken")


def test_a_change_that_is_not_allowed_leaves_the_topic_as_it_was() -> None:
    world = World()
    world.add_topic("orders", partitions=3)
    serve(world)
    world.topics["orders"]["spec"]["partitions"] = 2
    serve(world)
    assert topic_conditions(world)["Ready"] == ("False", "InvalidChange")
    assert len(world.holders("orders")) == 3


def subscription_conditions(world: World, name: str) -> dict[str, tuple[str, str]]:
    seen = world.observed()
    case = next(case for case in plan(seen, SETTINGS).subscriptions if case.name == name)
    status = subscription_status(seen, case)
    return {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


def test_a_subscription() -> None:
    world = World()
    world.add_topic("orders", retention={"time": "1d"})
    world.add_subscription("billing", topic="orders")
    world.add_subscription("lost", topic="nothing")
    serve(world)
    says = {"worker": "w", "subscriptions": [{"name": "billing", "backlog": 7, "consumers": 2}]}
    said = read_report(json.dumps(says).encode())
    assert said is not None
    reports(world)["w"] = said
    seen = world.observed()
    found = {}
    for case in plan(seen, SETTINGS).subscriptions:
        status = subscription_status(seen, case)
        Subscription.model_validate({**case.manifest, "status": status})
        found[case.name] = status
    assert status_of(found["billing"]["conditions"], "Ready") == "True"
    assert status_of(found["billing"]["conditions"], "Active") == "True"
    assert status_of(found["billing"]["conditions"], "LagBounded") == "True"
    assert found["billing"]["backlog"] == 7
    assert found["lost"]["conditions"][0]["reason"] == "TopicNotFound"


def pool_conditions(world: World, **more: Any) -> dict[str, tuple[str, str]]:
    seen = world.observed()
    case = next(case for case in plan(seen, SETTINGS).pools if case.name == "default")
    status = pool_status(seen, case, more.get("problem"), more.get("refused", {}))
    Pool.model_validate({**case.manifest, "status": status})
    return {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


def test_a_pool() -> None:
    world = World()
    world.add_pool("default", replicas=2)
    world.add_topic("orders")
    serve(world)
    found = pool_conditions(world)
    assert found["Ready"] == ("True", "Ready")
    assert found["Scaling"] == ("False", "Settled")
    assert found["VolumeGrown"] == ("True", "AsAsked")
    world.pools["default"]["spec"]["replicas"] = 1
    assert pool_conditions(world)["Scaling"] == ("True", "Draining")
    world.pools["default"]["spec"]["replicas"] = 4
    assert pool_conditions(world)["Scaling"] == ("True", "Scaling")
    # Asked for, but not there yet: it goes on until they are. One that is away later is no scaling.
    world.sets["default"] = 4
    world.away = {"tidewater-default-3"}
    scaling = [{"type": "Scaling", "status": "True", "lastTransitionTime": "t"}]
    world.pools["default"]["status"] = {"conditions": scaling}
    assert pool_conditions(world)["Scaling"] == ("True", "Scaling")
    world.pools["default"]["status"] = {}
    assert pool_conditions(world)["Scaling"] == ("False", "Settled")
    world.away, world.sets["default"] = set(), 2
    world.pools["default"]["spec"]["replicas"] = 2
    world.pools["default"]["spec"]["storage"] = {"size": "1Gi"}
    assert pool_conditions(world)["VolumeGrown"] == ("False", "CannotShrink")
    refused = {"data-tidewater-default-0": "no"}
    assert pool_conditions(world, refused=refused)["VolumeGrown"] == ("False", "NotExpandable")
    problem = Refusal("Forbidden", "no right")
    assert pool_conditions(world, problem=problem)["Ready"] == ("False", "Forbidden")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({}, None),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, None),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "ImagePullBackOff",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no node"}]},
            "Unschedulable",
        ),
    ],
)
def test_why_a_pod_does_not_run(status: dict[str, Any], reason: str | None) -> None:
    found = pod_trouble({"status": status})
    assert (found.reason if found else None) == reason


# ---- conditions


def test_a_conditions_time_changes_with_its_status_alone() -> None:
    first = merge([], [holds("Ready", "Ready")], 1, "t1")
    second = merge(first, [holds("Ready", "Other", "more")], 2, "t2")
    assert second[0]["lastTransitionTime"] == "t1"
    third = merge(second, [fails("Ready", "Away")], 2, "t3")
    assert third[0]["lastTransitionTime"] == "t3"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (None, holds("Ready", "Ready"), ["Ready"]),
        (None, fails("Ready", "Opening"), []),
        (None, fails("Ready", "ForeignTable"), ["ForeignTable"]),
        (None, fails("Degraded", "AsExpected"), []),
        (None, unknown("Ready", "NoReport"), []),
        (unknown("Degraded", "NoReport"), fails("Degraded", "AsExpected"), []),
        (unknown("Ready", "RegistryAway"), holds("Ready", "Ready"), ["Ready"]),
        (holds("Ready", "Ready"), holds("Ready", "Ready"), []),
        (holds("Ready", "Ready"), fails("Ready", "WorkerAway"), ["WorkerAway"]),
        (fails("Ready", "WorkerAway"), fails("Ready", "VolumeLost"), ["VolumeLost"]),
        (fails("Degraded", "AsExpected"), holds("Degraded", "WorkerAway"), ["WorkerAway"]),
        (holds("Degraded", "WorkerAway"), fails("Degraded", "AsExpected"), ["AsExpected"]),
    ],
)
def test_people_are_told_of_changes(before: Any, after: Any, told: list[str]) -> None:
    old = merge([], [before], 1, "t") if before else []
    new = merge(old, [after], 1, "t")
    found = transitions(old, new, ("Ready", "Degraded"))
    assert [change.reason for change in found] == told


def test_figures_alone_are_not_urgent() -> None:
    before = {"conditions": [], "rate": "1/s", "partitions": [{"partition": 0, "endOffset": 1}]}
    after = {"conditions": [], "rate": "2/s", "partitions": [{"partition": 0, "endOffset": 9}]}
    moved = {"conditions": [], "partitions": [{"partition": 0, "worker": "w"}]}
    assert not is_urgent(before, after)
    assert is_urgent(before, moved)
    later, other = {"next": "12:30", "failures": 1}, {"next": "12:30", "failures": 2}
    assert not is_urgent({"maintenance": {"next": "12:00", "failures": 1}}, {"maintenance": later})
    assert is_urgent({"maintenance": later}, {"maintenance": other})
    assert not is_urgent({}, {"maintenance": {"next": "12:00"}})
    assert not is_urgent({"partitions": 3}, {"partitions": 4})  # a pool's number of them


# ---- reports


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nonsense", b'{"topics": 3}', b'{"topics": [{"partitions": []}]}']
)
def test_reports_that_make_no_sense(body: bytes) -> None:
    assert read_report(body) is None


def test_reports_of_other_versions() -> None:
    found = read_report(b'{"worker": "w", "new": 1, "topics": [{"name": "a", "table": null}]}')
    assert found is not None
    assert found.topics[0].table is None


def test_of_two_owners_the_higher_epoch_counts() -> None:
    def says(worker: str, epoch: int) -> bytes:
        part = {"partition": 0, "epoch": epoch, "end": epoch}
        return json.dumps(
            {"worker": worker, "topics": [{"name": "t", "uuid": "u", "partitions": [part]}]}
        ).encode()

    world = World()
    world.reports = {w: r for w, e in (("a", 2), ("b", 3)) if (r := read_report(says(w, e)))}
    facts = topic_facts("t", "u", world.observed().told)
    assert facts.owners == {0: "b"}
    assert topic_facts("t", "another", world.observed().told).partitions == {}


# ---- amounts


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, ""), (0, "0s"), (0.42, "0.4ms"), (12.3, "12ms"), (3400, "3.4s"), (300_000, "5m")],
)
def test_spans(ms: float | None, text: str) -> None:
    assert format_ms(ms) == text


def test_rates() -> None:
    assert [format_rate(r) for r in (0, 3.21, 120.4, 45_000)] == ["0/s", "3.2/s", "120/s", "45k/s"]
    assert format_bytes_rate(3 << 20) == "3Mi/s"


# ---- hearing


def item(uid: str, generation: int) -> dict[str, Any]:
    made = "2026-01-01T00:00:00Z"
    return {"metadata": {"uid": uid, "generation": generation, "creationTimestamp": made}}


def test_only_changes_of_substance_are_news() -> None:
    hearing = Hearing()
    assert hearing.hear("Topic", {"uid": "a", "generation": 1}, gone=False)
    assert not hearing.hear("Topic", {"uid": "a", "generation": 1}, gone=False)
    assert hearing.hear("Topic", {"uid": "a", "generation": 2}, gone=False)
    noted = {"uid": "a", "generation": 2, "annotations": {"x": "y"}}
    assert hearing.hear("Topic", noted, gone=False)
    assert hearing.hear("Topic", noted, gone=True)


def test_deaf_watches_are_noticed_and_young_objects_are_waited_for() -> None:
    hearing = Hearing()
    later = START + timedelta(minutes=5)
    hearing.hear("Topic", {"uid": "a", "generation": 1}, gone=False)
    for _ in range(4):
        assert hearing.compare([item("a", 1)], later) == 0
    assert hearing.compare([item("a", 1), item("b", 1)], START + timedelta(seconds=5)) == 0
    assert hearing.compare([item("a", 2)], later) == 0
    assert hearing.compare([item("a", 2)], later) == 1
    is_deaf_at_once = hearing.is_deaf
    hearing.compare([item("a", 2)], later)
    assert (is_deaf_at_once, hearing.is_deaf) == (False, True)
    hearing.hear("Topic", {"uid": "a", "generation": 2}, gone=False)
    hearing.compare([item("a", 2)], later)
    assert [hearing.is_deaf] == [False]
