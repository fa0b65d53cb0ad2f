"""Why a Topic is not ready is what its workers say, not where its partitions are (G7)."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tidewater_coordination.port import Ownership
from tidewater_operator.conditions import unknown
from tidewater_operator.observed import Observed
from tidewater_operator.other_status import pool_status, subscription_status
from tidewater_operator.plan import plan
from tidewater_operator.report import read_report
from tidewater_operator.topic_status import topic_status
from tidewater_testing.namespace import SETTINGS, World


def serve(world: World) -> World:
    for _ in range(4):
        settle(world)
        world.work()
    return world


def settle(world: World) -> None:
    for effect in world.effects(plan(world.observed(), SETTINGS)):
        effect()


def status(world: World) -> dict[str, Any]:
    seen = world.observed()
    case = plan(seen, SETTINGS).topics[0]
    return topic_status(seen, case, None, unknown("Maintained", "NotYet"))


def told(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in found["conditions"]}


def topic_conditions(world: World) -> dict[str, tuple[str, str]]:
    return told(status(world))


def partition_status(world: World) -> dict[str, Any]:
    found: dict[str, Any] = status(world)["partitions"][0]
    return found


def say(world: World, refused: list[dict[str, str]], **partition: Any) -> None:
    """Have the one worker report on the one partition."""
    uuid = world.registered["orders"].uuid
    parts = [{"partition": 0, "state": "closed", "open": False, **partition}]
    topics = [{"name": "orders", "uuid": uuid, "partitions": parts, "freshness_ms": 0}]
    said = {"worker": WORKER, "topics": topics if partition else [], "refused": refused}
    found = read_report(json.dumps(said).encode())
    assert found is not None
    world.reports = {WORKER: found}


WORKER = "tidewater-default-0"


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("reason", ["TooManyPartitions", "LogUnreadable", "CatalogUnreachable"])
def test_why_a_partition_cannot_be_opened_is_told(
    reason: str, is_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G7: on a worker that never had it, and on one that came back with its volume."""
    world = World()
    world.add_topic("orders", partitions=1)
    for _ in range(4):
        settle(world)
        if is_back:
            world.work()
    base = "Opening"
    if is_back:  # it has another session, and has not taken its partition yet
        base, real = "WorkerAway", world.observed
        owner = msgspec.structs.replace(world.owners["orders"][0], is_live=False)
        monkeypatch.setattr(world, "observed", lambda: held(real(), owner))
    assert topic_conditions(world)["Ready"] == ("False", base)
    say(world, [], reason=reason, message="this is why")
    found = topic_conditions(world)
    assert found["Ready"] == ("False", reason)
    assert found["Degraded"] == ("True", reason)
    part = partition_status(world)
    assert part["reason"] == reason
    assert "this is why" in part["message"]
    # What passes by itself is said beside.
    say(world, [], reason="PartitionOpening", message="a moment")
    assert topic_conditions(world)["Ready"] == ("False", base)
    assert "a moment" in partition_status(world)["message"]
    say(world, [], reason=None)
    assert topic_conditions(world)["Ready"] == ("False", base)


@pytest.mark.parametrize(
    "reason", ["LogLocked", "OwnerSilent", "OwnerUnreachable", "StoreAway", "StoreContended"]
)
def test_what_passes_by_itself_is_no_trouble(reason: str) -> None:
    world = World()
    world.add_topic("orders", partitions=1)
    serve(world)
    say(world, [], epoch=1, reason=reason, message="a moment")
    found = topic_conditions(world)
    assert found["Ready"] == ("False", reason)
    assert found["Degraded"] == ("False", "AsExpected")


def held(seen: Observed, owner: Ownership) -> Observed:
    registry = msgspec.structs.replace(seen.registry, owners={"shop/orders": {0: owner}})
    return replace(seen, registry=registry)


def test_why_an_owner_takes_no_message_is_told() -> None:
    world = World()
    world.add_topic("orders", partitions=1)
    serve(world)
    say(world, [], state="running", epoch=1, reason="LogSyncFailed", message="an I/O error")
    assert topic_conditions(world)["Degraded"] == ("True", "LogSyncFailed")
    assert partition_status(world)["reason"] == "LogSyncFailed"
    say(world, [], state="running", epoch=1, reason="SessionLost", message="no session")
    assert topic_conditions(world)["Degraded"] == ("False", "AsExpected")


def test_a_spec_that_a_worker_does_not_take_is_told() -> None:
    refused = [{"topic": "shop/orders", "reason": "InvalidSpec", "message": "what is that?"}]
    world = World()
    world.add_topic("orders", partitions=1)
    for _ in range(4):
        settle(world)
    say(world, refused)
    found = topic_conditions(world)
    assert (found["Ready"], found["Degraded"]) == (
        ("False", "InvalidSpec"),
        ("True", "InvalidSpec"),
    )
    # One that goes on with an earlier spec takes messages.
    world.add_subscription("billing", topic="orders")
    serve(world)
    refused.append({"subscription": "shop/billing", "reason": "InvalidSpec", "message": "what?"})
    say(world, refused, state="running", open=True, epoch=1)
    found = topic_conditions(world)
    assert (found["Ready"], found["Degraded"]) == (("True", "Ready"), ("True", "InvalidSpec"))
    seen = world.observed()
    (case,) = plan(seen, SETTINGS).subscriptions
    assert told(subscription_status(seen, case))["Ready"] == ("False", "InvalidSpec")


def test_a_worker_that_came_back_is_opening_its_logs() -> None:
    """It has its session again and refuses nothing: that it takes a moment is no trouble."""
    world = World()
    world.add_topic("orders", partitions=1)
    serve(world)
    say(world, [], epoch=1)
    found = topic_conditions(world)
    assert found["Ready"] == ("False", "Opening")
    assert found["Degraded"] == ("False", "AsExpected")


def test_a_spec_that_was_changed_while_paused_is_claimed_by_nobody() -> None:
    world = World()
    world.add_pool("default", replicas=1)
    world.add_topic("orders", partitions=2)
    world.add_subscription("billing", topic="orders")
    serve(world)
    for one, change in (
        (world.topics["orders"], {"partitions": 5}),
        (world.subscriptions["billing"], {"resetToken": "again"}),
        (world.pools["default"], {"replicas": 3}),
    ):
        one["status"] = {"observedGeneration": 1, "resetToken": "once"}
        one["metadata"] |= {"generation": 2, "annotations": {"tidewater.dev/paused": "true"}}
        one["spec"] = {**one["spec"], **change}
    seen = world.observed()
    decided = plan(seen, SETTINGS)
    statuses = [
        topic_status(seen, decided.topics[0], None, unknown("Maintained", "NotYet")),
        subscription_status(seen, decided.subscriptions[0]),
        pool_status(seen, decided.pools[0], None, {}),
    ]
    for found in statuses:
        assert found["observedGeneration"] == 1
        assert {c["observedGeneration"] for c in found["conditions"]} == {1}
        assert told(found)["Paused"] == ("True", "Paused")
    assert statuses[1]["resetToken"] == "once"


def test_a_worker_that_says_too_much_is_not_called_silent() -> None:
    world = World()
    world.add_topic("orders")
    serve(world)
    world.reports = {}
    seen = replace(world.observed(), too_large=frozenset({"tidewater-default-0"}))
    (case,) = plan(seen, SETTINGS).topics
    found = {
        c["type"]: c
        for c in topic_status(seen, case, None, unknown("Maintained", "NotYet"))["conditions"]
    }
    for type_ in ("Ready", "Degraded"):
        assert (found[type_]["status"], found[type_]["reason"]) == ("Unknown", "ReportTooLarge")
        assert "tidewater-default-0 said more" in found[type_]["message"]


def test_between_two_workers_of_a_rolling_update_a_pool_is_not_ready() -> None:
    """`kubectl wait` would end there, with an old worker that goes in the next moment."""
    world = World()
    world.add_pool("default", replicas=2)
    world.add_topic("orders")
    serve(world)

    def ready() -> tuple[str, str]:
        seen = world.observed()
        return told(pool_status(seen, plan(seen, SETTINGS).pools[0], None, {}))["Ready"]

    revisions = {"currentRevision": "a", "updateRevision": "b", "updatedReplicas": 1}
    world.set_status = {"default": revisions}
    assert ready() == ("False", "Updating")
    world.set_status = {"default": {**revisions, "currentRevision": "b", "updatedReplicas": 2}}
    assert ready() == ("True", "Ready")
