"""What takes something away for good waits until it is certain, and a person's word counts once."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec

from tidewater_coordination import rules
from tidewater_coordination.port import GIVEN_UP_MAX, RegisteredTopic, TopicPhase
from tidewater_core.crd.topic import TopicSpec
from tidewater_operator.cluster.write import make
from tidewater_operator.conditions import holds
from tidewater_operator.life import AcceptLoss, UnregisterTopic, topic_cases
from tidewater_operator.other_status import pool_status
from tidewater_operator.plan import plan
from tidewater_operator.report import LeftoverReport, WorkerReport, read_report
from tidewater_operator.topic_status import topic_status
from tidewater_testing.api_server import ApiServer
from tidewater_testing.namespace import SETTINGS, World, manifest


def settle(world: World, rounds: int = 20) -> None:
    for _ in range(rounds):
        for effect in world.effects(plan(world.observed(), SETTINGS)):
            effect()
        world.work()


def unregistered(world: World) -> list[str]:
    """Return the topics that a pass would forget."""
    actions = plan(world.observed(), SETTINGS).registry
    return [action.name for action in actions if isinstance(action, UnregisterTopic)]


# ---- records that cannot be read


def test_nothing_goes_while_a_record_cannot_be_read() -> None:
    """G1: it may say that any of the volumes is needed."""
    world = World()
    world.add_pool("default", replicas=3)
    world.add_topic("orders", partitions=3)
    settle(world)
    held = world.owners["orders"].pop(2)
    assert held.worker_id == "tidewater-default-2"
    world.pools["default"]["spec"]["replicas"] = 2
    whole = world.observed()
    registry = msgspec.structs.replace(whole.registry, unreadable=("owners/shop/orders/2",))
    seen = replace(whole, registry=registry)
    assert plan(whole, SETTINGS).pools[0].replicas == 2
    decided = plan(seen, SETTINGS)
    assert decided.pools[0].replicas == 3
    (pool,) = decided.pools
    degraded = {c["type"]: c for c in pool_status(seen, pool, None, {})["conditions"]}["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "RecordUnreadable")
    assert "owners/shop/orders/2" in degraded["message"]
    (topic,) = decided.topics
    told = topic_status(seen, topic, None, holds("Maintained", "Maintained"))["conditions"]
    assert {c["type"]: c["reason"] for c in told}["Ready"] == "RecordUnreadable"
    # Its worker is gone: the volume stays all the same, and so does a topic that was deleted.
    world.sets["default"] = 2
    whole = world.observed()
    assert plan(whole, SETTINGS).drop_claims == ["data-tidewater-default-2"]
    assert plan(replace(whole, registry=registry), SETTINGS).drop_claims == []
    del world.topics["orders"]
    reg = world.registered["orders"]
    world.registered["orders"] = rules.moved_on(reg, TopicPhase.DELETING)
    world.owners["orders"] = {n: rules.released(o, 0) for n, o in world.owners["orders"].items()}
    assert unregistered(world) == ["orders"]
    seen = world.observed()
    registry = msgspec.structs.replace(seen.registry, unreadable=("owners/shop/orders/2",))
    actions = plan(replace(seen, registry=registry), SETTINGS).registry
    assert not any(isinstance(action, UnregisterTopic) for action in actions)


# ---- pools


async def test_a_pool_that_a_person_made_meanwhile_stays_theirs() -> None:
    api = ApiServer()
    theirs = manifest("Pool", "default", "u", {"replicas": 5, "storage": {"size": "500Gi"}})
    path = api.put(theirs)
    await make(api, manifest("Pool", "default", "", {"replicas": 1, "storage": {"size": "10Gi"}}))
    assert api.objects[path]["spec"] == theirs["spec"]
    await make(api, manifest("Pool", "other", "", {"replicas": 1}))
    assert api.find("Pool", "other") is not None


# ---- tables


def test_a_table_is_dropped_before_its_topic_is_forgotten() -> None:
    """Also if a volume was given up: the workers that are there drop it all the same."""
    world = World()
    world.add_pool("default", replicas=2)
    world.add_topic("orders", partitions=2, deletionPolicy="Delete")
    settle(world)
    del world.topics["orders"]
    owner = world.owners["orders"][1]
    world.owners["orders"] = {
        0: rules.released(world.owners["orders"][0], 7),
        1: msgspec.structs.replace(owner, session="", given_up="burnt"),
    }
    reg = world.registered["orders"]
    world.registered["orders"] = rules.moved_on(reg, TopicPhase.DELETING)
    assert unregistered(world) == []
    world.work()
    assert world.registered["orders"].phase is TopicPhase.DROPPED
    assert unregistered(world) == ["orders"]


def test_progress_stays_with_a_table_that_is_kept() -> None:
    for policy, keeps in (("Retain", True), ("Delete", False)):
        world = World()
        world.add_topic("orders", partitions=1, deletionPolicy=policy)
        settle(world)
        del world.topics["orders"]
        found: list[bool] = []
        for _ in range(5):
            decided = plan(world.observed(), SETTINGS)
            found += [a.keeps_table for a in decided.registry if isinstance(a, UnregisterTopic)]
            for effect in world.effects(decided):
                effect()
            world.work()
        assert found == [keeps], policy


def test_a_table_of_another_namespace_is_taken() -> None:
    world = World()
    spec: dict[str, Any] = {"table": {"name": "bank.accounts"}}
    world.add_topic("copy", **spec)
    theirs = {"bank/accounts": RegisteredTopic("bank/accounts", "u", TopicSpec().to_json())}
    seen = replace(world.observed(), elsewhere=theirs)
    (case,) = topic_cases(seen, allow_foreign=True)
    assert case.refusal is not None
    assert case.refusal.reason == "TableTaken"
    assert "bank/accounts" in case.refusal.message
    # What is registered here goes on: its workers know whose table it is.
    world.registered["copy"] = RegisteredTopic(
        "copy", world.topics["copy"]["metadata"]["uid"], TopicSpec.model_validate(spec).to_json()
    )
    seen = replace(world.observed(), elsewhere=theirs)
    (case,) = topic_cases(seen, allow_foreign=True)
    assert case.refusal is None


# ---- a person's word


def with_word(world: World, word: str) -> None:
    world.topics["orders"]["metadata"]["annotations"] = {"tidewater.dev/accept-loss": word}


def given_up(world: World) -> list[int]:
    return [n for n, owner in world.owners["orders"].items() if owner.given_up is not None]


def told(world: World) -> str:
    """Return the word that the status would say was acted on."""
    seen = world.observed()
    (topic,) = plan(seen, SETTINGS).topics
    status = topic_status(seen, topic, None, holds("Maintained", "Maintained"))
    return str(status.get("acceptedLoss", ""))


def two_workers() -> World:
    world = World()
    world.add_pool("default", replicas=2)
    world.add_topic("orders", partitions=2)
    settle(world)
    assert {owner.worker_id for owner in world.owners["orders"].values()} == set(world.workers())
    return world


def a_pass(world: World) -> None:
    """Let the operator look, and the workers do nothing."""
    for effect in world.effects(plan(world.observed(), SETTINGS)):
        effect()
    world.now += timedelta(seconds=5)


def a_minute(world: World) -> None:
    for _ in range(14):
        a_pass(world)


def test_a_word_waits_for_the_session_of_a_dead_worker() -> None:
    """A worker that died has its session for ten seconds more, and answers nobody."""
    world = two_workers()
    world.reports = {"tidewater-default-0": WorkerReport("tidewater-default-0")}
    with_word(world, "all")
    a_pass(world)
    a_pass(world)
    assert given_up(world) == []
    assert told(world) == "", "nothing was done yet"
    world.away.add("tidewater-default-1")
    world.claims.discard("tidewater-default-1")
    a_pass(world)
    assert [world.owners["orders"][n].worker_id for n in given_up(world)] == ["tidewater-default-1"]
    assert told(world) == "all"


def test_a_word_about_a_worker_that_is_there_is_spent() -> None:
    """Whether or not it could be written into the status: it never is, here."""
    world = two_workers()
    world.reports = {worker: WorkerReport(worker) for worker in world.workers()}
    with_word(world, "all")
    a_pass(world)
    assert told(world) == "all"
    world.reports = {}
    world.away.add("tidewater-default-1")
    a_pass(world)
    assert given_up(world) == [], "nobody asked for that"
    with_word(world, "all again")
    a_minute(world)
    assert len(given_up(world)) == 1


def test_all_is_not_said_of_a_worker_that_is_starting_anew() -> None:
    """G1: its volume is there, with what was acknowledged and is not in the table yet."""
    world = two_workers()
    world.lose_volume("tidewater-default-1")
    world.away.add("tidewater-default-0")
    with_word(world, "all")
    a_pass(world)
    assert [world.owners["orders"][n].worker_id for n in given_up(world)] == ["tidewater-default-1"]
    assert told(world) == "", "the other one is waited for"
    world.away.clear()
    a_minute(world)
    assert len(given_up(world)) == 1
    assert told(world) == "all"


def test_a_worker_that_is_named_is_not_waited_for() -> None:
    world = two_workers()
    world.away.update(world.workers())
    with_word(world, "1")
    a_pass(world)
    assert given_up(world) == [1]


def test_one_word_is_told_once_of_a_topic_that_is_still_in_deletion() -> None:
    world = two_workers()
    world.registered["orders"] = rules.moved_on(world.registered["orders"], TopicPhase.DELETING)
    world.away.update(world.workers())
    with_word(world, "1")
    told_of = [a for a in plan(world.observed(), SETTINGS).registry if isinstance(a, AcceptLoss)]
    assert [action.give_up for action in told_of] == [(1,)]


def test_a_pool_says_that_a_volume_is_lost() -> None:
    world = two_workers()
    world.lose_volume("tidewater-default-1")
    seen = world.observed()
    (case,) = plan(seen, SETTINGS).pools
    told_of = {c["type"]: c for c in pool_status(seen, case, None, {})["conditions"]}["Degraded"]
    assert (told_of["status"], told_of["reason"]) == ("True", "VolumeLost")
    assert told_of["message"].startswith("1 partitions")


def test_a_word_is_not_armed_for_ever_by_a_worker_that_never_answers() -> None:
    world = two_workers()
    with_word(world, "all")
    for _ in range(15):  # more than a minute: it has a session all that time
        a_pass(world)
    world.away.add("tidewater-default-1")
    a_pass(world)
    assert given_up(world) == []
    assert told(world) == "all"


def test_a_word_counts_for_a_topic_whose_new_spec_is_refused() -> None:
    world = two_workers()
    world.reports = {"tidewater-default-0": WorkerReport("tidewater-default-0")}
    world.topics["orders"]["spec"]["partitions"] = 1  # fewer: InvalidChange
    world.away.add("tidewater-default-1")
    with_word(world, "all")
    a_minute(world)
    assert len(given_up(world)) == 1
    assert told(world) == "all"


def test_a_word_that_a_new_topic_brings_along_is_about_nothing_of_it() -> None:
    world = World()
    world.add_topic("orders", partitions=1, annotations={"tidewater.dev/accept-loss": "all"})
    settle(world)
    world.away.add("tidewater-default-0")
    a_pass(world)
    assert given_up(world) == []


def test_more_than_one_transaction_takes_is_given_up_in_turn() -> None:
    world = World()
    world.add_topic("orders", partitions=GIVEN_UP_MAX + 7)
    settle(world)
    world.away.add("tidewater-default-0")
    world.claims.discard("tidewater-default-0")
    with_word(world, "all")
    a_pass(world)
    assert (len(given_up(world)), told(world)) == (GIVEN_UP_MAX, "")
    world.claims.discard("tidewater-default-0")  # an empty one was made
    a_pass(world)
    assert (len(given_up(world)), told(world)) == (GIVEN_UP_MAX + 7, "all")


def test_a_spec_of_another_version_is_written_again_once() -> None:
    """An operator that was rolled back, or a record that somebody spoilt."""
    for text in (TopicSpec(partitions=3).to_json().replace("{", '{"of_tomorrow":1,', 1), "{"):
        world = World()
        world.add_topic("orders", partitions=3)
        settle(world)
        known = world.registered["orders"]
        world.registered["orders"] = msgspec.structs.replace(known, spec=text)
        assert len(plan(world.observed(), SETTINGS).registry) == 1
        settle(world, 1)
        assert world.registered["orders"].spec == TopicSpec(partitions=3).to_json()
        assert plan(world.observed(), SETTINGS).registry == []


def test_a_volume_with_logs_that_are_left_over_stays_until_a_person_has_them() -> None:
    """G7: they are evidence, and the worker that told of them is gone before its volume is."""
    world = World()
    world.add_pool("default", replicas=2)
    world.add_topic("orders", partitions=2)
    settle(world)
    worker = "tidewater-default-1"
    said = {
        "worker": worker,
        "leftovers": [
            {"topic": "shop/old", "partition": n, "segments": 2, "bytes": 70, "directory": "/d"}
            for n in range(5)
        ],
    }
    told = read_report(json.dumps(said).encode())
    assert told is not None
    world.reports = {worker: told}
    world.pools["default"]["spec"]["replicas"] = 1
    settle(world, 5)
    assert world.sets == {"default": 1}
    assert "shop/old partition 0 (2 segments, 70 bytes)" in world.marks[worker]
    assert "and 2 more" in world.marks[worker]
    # It does not answer any more, or was started anew and has not looked yet.
    for reports in ({}, {worker: WorkerReport(worker)}):
        world.reports = reports
        settle(world, 5)
        assert worker in world.claims, "evidence is not deleted"
    seen = world.observed()
    (pool,) = plan(seen, SETTINGS).pools
    degraded = {c["type"]: c for c in pool_status(seen, pool, None, {})["conditions"]}["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "LeftoverLog")
    assert f"annotate pvc data-{worker} tidewater.dev/leftover-log-" in degraded["message"]
    assert "once the worker is scaled in" in degraded["message"], "or it is noted again"
    world.marks.clear()
    settle(world, 5)
    assert worker not in world.claims


def test_a_worker_goes_when_what_is_left_on_its_volume_is_noted_there() -> None:
    """G7: whoever is stopped between the two, or refused the note, leaves nobody who tells."""
    world = World()
    world.add_pool("default", replicas=2)
    settle(world)
    worker = "tidewater-default-1"
    left = LeftoverReport("shop/gone", 0, 2, 4096)
    world.reports = {worker: WorkerReport(worker, leftovers=(left,))}
    world.pools["default"]["spec"]["replicas"] = 1
    decided = plan(world.observed(), SETTINGS)
    assert list(decided.mark_claims) == [f"data-{worker}"]
    assert decided.pools[0].replicas == 2
    seen = world.observed()
    scaling = pool_status(seen, decided.pools[0], None, {})["conditions"]
    assert {c["type"]: c["status"] for c in scaling}["Scaling"] == "True"
    settle(world, 2)
    assert "shop/gone" in world.marks[worker]
    assert world.sets == {"default": 1}


def test_a_worker_that_has_not_said_what_is_on_its_volume_is_waited_for() -> None:
    """G7: nobody else knows of logs of topics that are gone, and the volume goes with it."""
    world = World()
    world.add_pool("default", replicas=3)
    world.add_topic("orders", partitions=3)
    settle(world)
    silent, last = "tidewater-default-1", "tidewater-default-2"
    world.reports = {w: WorkerReport(w) for w in ("tidewater-default-0", last)}
    world.pools["default"]["spec"]["replicas"] = 1
    settle(world)
    assert world.sets == {"default": 2}
    assert sorted(world.claims) == ["tidewater-default-0", silent], "the one that spoke may go"
    seen = world.observed()
    (pool,) = plan(seen, SETTINGS).pools
    scaling = {c["type"]: c for c in pool_status(seen, pool, None, {})["conditions"]}["Scaling"]
    assert (scaling["status"], scaling["reason"]) == ("True", "Draining")
    assert f"{silent} has not said what is on its volume" in scaling["message"]
    # Its workers are made again around their pods, with larger volumes, meanwhile.
    objects = {key: one for key, one in seen.cluster.objects.items() if key[0] != "StatefulSet"}
    seen = replace(seen, cluster=replace(seen.cluster, objects=objects))
    assert plan(seen, SETTINGS).pools[0].replicas == 2
    left = LeftoverReport("shop/gone", 0, 2, 4096)
    world.reports[silent] = WorkerReport(silent, leftovers=(left,))
    settle(world)
    assert world.sets == {"default": 1}
    assert silent in world.claims
    assert "shop/gone" in world.marks[silent]


def test_a_worker_that_stops_by_our_word_is_not_called_back() -> None:
    """It does not answer any more, and has its session for a moment."""
    world = World()
    world.add_pool("default", replicas=2)
    settle(world)
    world.pools["default"]["spec"]["replicas"] = 1
    decided = plan(world.observed(), SETTINGS)
    assert decided.pools[0].replicas == 1
    world.reports = {}
    world.leaving.add("tidewater-default-1")
    assert plan(world.observed(), SETTINGS).pools[0].replicas == 1
    world.leaving.clear()
    seen = world.observed()
    live = {"metadata": {"name": "tidewater-default"}, "spec": {"replicas": 1}}
    objects = {("StatefulSet", "tidewater-default"): live}
    seen = replace(seen, cluster=replace(seen.cluster, objects=objects))
    assert plan(seen, SETTINGS).pools[0].replicas == 1, "its pod is not told yet"
