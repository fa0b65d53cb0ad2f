"""A table that was to stay when its Topic was last seen does (G7), registered or not."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tidewater_coordination.etcd.login import Login
from tidewater_coordination.port import TopicPhase
from tidewater_core.clock import SystemClock
from tidewater_core.crd.topic import DeletionPolicy
from tidewater_core.errors import TidewaterError
from tidewater_operator.conditions import unknown
from tidewater_operator.handlers.marks import watches
from tidewater_operator.hearing import Hearing
from tidewater_operator.keepers import Keepers
from tidewater_operator.last_words import WORDS_MAX, LastWords
from tidewater_operator.life import Action, BeginDeletion, RegisterTopic, registered_spec
from tidewater_operator.plan import plan
from tidewater_operator.reconcile import Memory, Outcome
from tidewater_operator.registry import Registries
from tidewater_operator.settings import Intervals
from tidewater_operator.topic_status import topic_status
from tidewater_testing.namespace import SETTINGS, World, manifest
from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.place import Place, served

PAUSED = {"tidewater.dev/paused": "true"}


def settle(world: World, rounds: int = 12) -> None:
    for _ in range(rounds):
        for effect in world.effects(plan(world.observed(), SETTINGS)):
            effect()
        world.work()


def deleting() -> World:
    """Return a topic whose table is to go."""
    world = World()
    world.add_pool("default", replicas=1)
    world.add_topic("orders", partitions=2, deletionPolicy="Delete")
    settle(world)
    return world


def policy(world: World) -> DeletionPolicy:
    spec = registered_spec(world.registered["orders"])
    assert spec is not None
    return spec.deletion_policy


def observed_generation(world: World) -> int:
    seen = world.observed()
    (case,) = plan(seen, SETTINGS).topics
    status = topic_status(seen, case, None, unknown("Maintained", "NotYet"))
    return int(status.get("observedGeneration", 0))


CHANGES: dict[str, dict[str, Any]] = {
    "refused": {"table": {"name": "other.t"}},
    "unreadable": {"partitions": "many"},
    "fewer": {"partitions": 1},
    "paused": {},
    "paused and changed": {"partitions": 4},
}


@pytest.mark.parametrize("why", CHANGES)
def test_that_a_table_stays_is_taken_of_a_spec_that_is_not(why: str) -> None:
    world = deleting()
    topic = world.topics["orders"]
    topic["spec"] |= {"deletionPolicy": "Retain", **CHANGES[why]}
    topic["metadata"] |= {"generation": 2, "annotations": PAUSED if "paused" in why else {}}
    assert observed_generation(world) < 2, "nobody has seen it: it is not safe to delete yet"
    settle(world, 1)
    assert policy(world) is DeletionPolicy.RETAIN
    assert world.registered["orders"].phase is TopicPhase.ACTIVE
    known = registered_spec(world.registered["orders"])
    assert known is not None
    assert known.partitions == 2, "nothing else of it is"
    assert known.table.name is None
    if why != "paused and changed":
        assert observed_generation(world) == 2
    del world.topics["orders"]
    phases = []
    for _ in range(6):
        settle(world, 1)
        phases += [reg.phase for reg in world.registered.values()]
    assert TopicPhase.DROPPED not in phases
    assert world.registered == {}


@pytest.mark.parametrize("annotations", [PAUSED, {}])
def test_a_paused_or_refused_topic_puts_no_table_at_risk(annotations: dict[str, str]) -> None:
    """The other way round nothing is taken of it: only a spec that is served says Delete."""
    world = World()
    world.add_pool("default", replicas=1)
    world.add_topic("orders", partitions=2)
    settle(world)
    world.topics["orders"]["spec"] |= {"deletionPolicy": "Delete", "partitions": 1}
    world.topics["orders"]["metadata"]["annotations"] = annotations
    assert plan(world.observed(), SETTINGS).registry == []


def test_a_last_word_is_registered_before_the_deletion() -> None:
    """Also if the deletion had begun by then: until the table is dropped it can be kept."""
    world = deleting()
    uid = world.registered["orders"].uuid
    del world.topics["orders"]

    def next_action(retained: frozenset[str] = frozenset()) -> Action:
        (action,) = plan(replace(world.observed(), retained=retained), SETTINGS).registry
        return action

    first = next_action(frozenset({uid}))
    assert isinstance(first, RegisterTopic), "alone: what follows counts on it"
    begun = next_action()  # nobody remembered, so far
    assert isinstance(begun, BeginDeletion)
    world.tell(begun)
    assert next_action(frozenset({uid})) == first
    world.tell(first)
    assert policy(world) is DeletionPolicy.RETAIN
    assert world.registered["orders"].phase is TopicPhase.DELETING
    settle(world)
    assert world.registered == {}


def topic(uid: str, wanted: str) -> dict[str, Any]:
    return manifest("Topic", "orders", uid, {"deletionPolicy": wanted})


def test_the_word_with_which_it_went_is_the_last() -> None:
    words = LastWords()
    words.hear(topic("a", "Delete"), gone=False)
    words.hear(topic("a", "Retain"), gone=True)
    words.see([topic("a", "Delete"), topic("b", "Retain"), topic("c", "Retain")])
    words.hear(topic("c", "Delete"), gone=True)
    assert words.retained == {"a", "b"}
    words.keep({"b", "c"})
    assert words.retained == {"b"}
    for number in range(WORDS_MAX):
        words.hear(topic(f"n{number}", "Retain"), gone=True)
    assert len(words.retained) == WORDS_MAX
    assert "b" not in words.retained


# ---- whole passes


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as part:
        yield part


@pytest.fixture
async def place(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    found = Place(etcd, request.node.name)
    yield found
    await found.close()


async def kept(place: Place) -> bool:
    """Let the operator look twice; tell whether the registered table stays."""
    await place.run()
    await place.run()
    reg = (await place.registries.read("shop")).topics["shop/orders"]
    assert reg.phase is TopicPhase.DELETING
    spec = registered_spec(reg)
    return spec is not None and spec.deletion_policy is DeletionPolicy.RETAIN


@pytest.mark.parametrize("last", ["Retain", "Delete"])
async def test_what_was_last_seen_counts_when_etcd_was_away(place: Place, last: str) -> None:
    await served(place)
    place.apply("Topic", "orders", partitions=2, deletionPolicy="Delete")
    await place.run()
    registries = place.registries
    place.reconciler._registries = Registries(["http://127.0.0.1:9"], "x", Login(), cluster="c")
    path = place.apply("Topic", "orders", partitions=2, deletionPolicy=last)
    for is_there in (True, False):
        with pytest.raises(TidewaterError):
            await place.run()
        if is_there:
            place.api.remove(path)
    await place.reconciler._registries.close()
    place.reconciler._registries = registries
    assert await kept(place) is (last == "Retain")


async def test_a_change_that_only_the_watch_told_of_counts(place: Place) -> None:
    """Changed and deleted in one breath: no listing has seen it."""
    await served(place)
    path = place.apply("Topic", "orders", partitions=2, deletionPolicy="Delete")
    await place.run()
    last = {**place.api.objects[path], "spec": {"partitions": 2, "deletionPolicy": "Retain"}}
    place.api.remove(path)
    place.memory.last_words.hear(last, gone=True)
    assert await kept(place)


class Passes:
    """Stands for the reconciler and the registry: keeps the memory that it is given."""

    def __init__(self) -> None:
        self.memory: asyncio.Future[Memory] = asyncio.get_running_loop().create_future()

    async def run(self, name: str, memory: Memory, **_: Any) -> Outcome:
        self.memory.set_result(memory)
        return Outcome()

    async def changed(self, name: str, since: int, timeout_s: float) -> int:
        await asyncio.sleep(60)
        return 0


class Leader:
    """We lead."""

    def __init__(self) -> None:
        self.gained = asyncio.Event()
        self.gained.set()
        self.term = "1"


async def test_what_a_watch_tells_reaches_the_next_pass() -> None:
    passes: Any = Passes()
    leader: Any = Leader()
    group = Keepers(passes, passes, leader, SystemClock(), Intervals(), lambda _: True)
    group.hear(topic("nobody looks after it", "Retain"), gone=True)
    group.mark("shop")
    group.hear(topic("a", "Retain"), gone=True)
    registry = watches(group, Hearing(), clusterwide=False)
    (watch,) = [one for one in registry._watching.get_all_handlers() if one.id == "last-words"]
    told: Any = watch.fn
    await told(type="DELETED", body=topic("b", "Retain"))
    memory = await asyncio.wait_for(passes.memory, 10)
    assert memory.last_words.retained == {"a", "b"}
    await group.close()
