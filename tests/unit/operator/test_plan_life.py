"""Whatever happens, and wherever the operator stops: nothing is lost, and it ends at the spec."""

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from tidewater_operator.plan import plan
from tidewater_testing.namespace import SETTINGS, World


def one_pass(world: World, stop_after: int | None = None) -> int:
    """Plan and do, up to an effect; return how many there were."""
    decided = plan(world.observed(), SETTINGS)
    world.unused_since = {
        name: world.unused_since.get(name, world.now) for name in decided.unused_pools
    }
    done = 0
    for effect in world.effects(decided):
        if stop_after is not None and done >= stop_after:
            break
        effect()
        done += 1
    world.now += timedelta(seconds=10)
    return done


def is_settled(world: World) -> bool:
    """Tell whether a pass would change nothing but what is so already."""
    decided = plan(world.observed(), SETTINGS)
    scales = any(case.replicas != world.sets.get(case.name) for case in decided.pools)
    return not (
        decided.registry
        or decided.make_pools
        or decided.drop_pools
        or decided.drop_claims
        or decided.grow
        or scales
    )


def settle(world: World, rounds: int = 70) -> None:
    for _ in range(rounds):
        one_pass(world)
        world.work()
    assert is_settled(world)


def check_served(world: World) -> None:
    for name, topic in world.topics.items():
        spec = topic["spec"]
        served = world.holders(name)
        assert len(served) == spec.get("partitions", 3), f"{name}: {served}"
        pool = f"topic-{name}" if spec.get("dedicated") else spec.get("pool", "default")
        wanted = world.pools[pool]["spec"].get("replicas", 1)
        members = {f"tidewater-{pool}-{n}" for n in range(wanted)}
        assert set(served.values()) <= members


names = st.sampled_from(["a", "b", "c"])
steps = st.one_of(
    st.tuples(st.just("topic"), names, st.integers(1, 4)),
    st.tuples(st.just("grow"), names, st.integers(1, 3)),
    st.tuples(st.just("dedicated"), names, st.integers(1, 3)),
    st.tuples(st.just("dropping"), names, st.integers(1, 3)),
    st.tuples(st.just("delete"), names, st.just(0)),
    st.tuples(st.just("scale"), st.sampled_from(["default", "other"]), st.integers(1, 4)),
    st.tuples(st.just("move"), names, st.integers(0, 1)),
    st.tuples(st.just("unpool"), st.sampled_from(["default", "other"]), st.just(0)),
    st.tuples(st.just("away"), st.just(""), st.integers(0, 3)),
    st.tuples(st.just("back"), st.just(""), st.integers(0, 3)),
    st.tuples(st.just("pass"), st.just(""), st.integers(0, 6)),
    st.tuples(st.just("work"), st.just(""), st.just(0)),
)


def do(world: World, what: str, name: str, number: int) -> None:  # noqa: C901 - a script's words
    match what:
        case "topic" if name not in world.topics:
            world.add_topic(name, partitions=number)
        case "dedicated" if name not in world.topics:
            world.add_topic(name, partitions=number, dedicated=True)
        case "dropping" if name not in world.topics:
            world.add_topic(name, partitions=number, deletionPolicy="Delete")
        case "grow" if name in world.topics:
            world.topics[name]["spec"]["partitions"] += number
        case "delete":
            world.topics.pop(name, None)
        case "scale" if name in world.pools:
            world.pools[name]["spec"]["replicas"] = number
        case "move" if name in world.topics and not world.topics[name]["spec"].get("dedicated"):
            world.topics[name]["spec"]["pool"] = ["default", "other"][number]
        case "unpool" if name in world.pools:
            world.delete_pool(name)
        case "away":
            world.away.add(f"tidewater-default-{number}")
        case "back":
            world.away.discard(f"tidewater-default-{number}")
        case "pass":
            one_pass(world, stop_after=number)  # the operator is killed in the middle
        case "work":
            world.work()


@given(st.lists(steps, max_size=40))
@settings(max_examples=40, deadline=None)
def test_any_history_ends_at_the_spec(script: list[tuple[str, str, int]]) -> None:
    world = World()
    for what, name, number in script:
        do(world, what, name, number)
    world.away.clear()
    settle(world)
    check_served(world)
    assert set(world.registered) == set(world.topics)
    # No worker, no volume and no pool is left that nobody needs.
    for pool, manifest in world.pools.items():
        assert world.sets[pool] == manifest["spec"].get("replicas", 1)
    assert world.claims == set(world.workers())
    dedicated = {f"topic-{n}" for n, t in world.topics.items() if t["spec"].get("dedicated")}
    assert {pool for pool in world.pools if pool.startswith("topic-")} == dedicated


def test_scaling_in_drains_before_it_removes() -> None:
    world = World()
    world.add_topic("orders", partitions=6)
    settle(world)
    world.pools["default"]["spec"]["replicas"] = 3
    settle(world)
    assert sorted(world.holders("orders").values()) == [
        f"tidewater-default-{n}" for n in (0, 0, 1, 1, 2, 2)
    ]
    world.pools["default"]["spec"]["replicas"] = 1
    one_pass(world)
    assert world.sets["default"] == 3, "nobody goes while it holds something"
    world.work()
    world.work()
    one_pass(world)
    assert world.sets["default"] == 1
    assert world.claims == {f"tidewater-default-{n}" for n in range(3)}, "pods first"
    one_pass(world)
    assert world.claims == {"tidewater-default-0"}


def test_a_worker_that_is_away_keeps_its_partitions_and_its_volume() -> None:
    world = World()
    world.add_topic("orders", partitions=4)
    world.add_pool("default", replicas=2)
    settle(world)
    before = world.holders("orders")
    world.away.add("tidewater-default-1")
    world.pools["default"]["spec"]["replicas"] = 1
    for _ in range(20):
        one_pass(world)
        world.work()
    assert world.sets["default"] == 2, "it has to come back to be drained"
    assert "tidewater-default-1" in world.claims
    world.away.clear()
    settle(world)
    assert world.sets["default"] == 1
    assert set(world.holders("orders")) == set(before)


def test_a_lost_volume_waits_for_a_persons_word_and_takes_it_once() -> None:
    world = World()
    world.add_pool("default", replicas=2)
    world.add_topic("orders", partitions=2)
    settle(world)
    lost = [p for p, w in world.holders("orders").items() if w == "tidewater-default-1"]
    world.lose_volume("tidewater-default-1")
    settle(world)
    assert set(world.holders("orders")) == {0, 1} - set(lost), "nobody takes it unasked"
    world.topics["orders"]["metadata"]["annotations"] = {"tidewater.dev/accept-loss": f"{lost[0]}"}
    settle(world)
    assert set(world.holders("orders")) == {0, 1}
    # The same word counts once: it is in the registry from now on.
    owner = world.holders("orders")[lost[0]]
    world.away.add(owner)
    settle(world)
    assert lost[0] not in world.holders("orders")
    world.away.clear()
    settle(world)
    assert set(world.holders("orders")) == {0, 1}


def test_a_new_topic_of_the_name_waits_until_the_old_one_is_drained() -> None:
    world = World()
    world.add_topic("orders", partitions=1)
    settle(world)
    world.away.add("tidewater-default-0")
    del world.topics["orders"]
    one_pass(world)
    world.add_topic("orders", partitions=2)
    one_pass(world)
    (case,) = plan(world.observed(), SETTINGS).topics
    assert case.refusal is not None
    assert case.refusal.reason == "PreviousDeleting"
    world.away.clear()
    settle(world)
    assert world.registered["orders"].uuid == world.topics["orders"]["metadata"]["uid"]
    assert set(world.holders("orders")) == {0, 1}


def test_a_terminating_namespace_is_left_alone() -> None:
    """Workers commit what they have as they stop; of a topic that is not registered they do not."""
    world = World()
    world.add_topic("orders")
    world.add_subscription("billing", topic="orders")
    settle(world)
    known = dict(world.registered)
    world.is_terminating = True
    world.topics.clear()
    world.subscriptions.clear()
    assert one_pass(world) == 0
    assert world.registered == known
    assert set(world.registered_subscriptions) == {"billing"}


def test_volumes_grow_and_never_shrink() -> None:
    world = World()
    world.add_pool("default", storage={"size": "20Gi"})
    world.add_topic("orders")
    one_pass(world)
    decided = plan(world.observed(), SETTINGS)
    assert [(growth.claim, growth.size) for growth in decided.grow] == [
        ("data-tidewater-default-0", "20Gi")
    ]
    settle(world)
    world.pools["default"]["spec"]["storage"]["size"] = "5Gi"
    assert not plan(world.observed(), SETTINGS).grow


def test_a_pool_that_nobody_needs_goes_after_a_while() -> None:
    world = World()
    world.add_topic("orders")
    settle(world)
    del world.topics["orders"]
    for _ in range(10):
        one_pass(world)
        world.work()
    assert "default" in world.pools, "it may be needed again in a moment"
    settle(world, rounds=70)
    assert world.pools == {}
    assert world.claims == set()


def test_a_pool_that_a_person_made_stays() -> None:
    world = World()
    world.add_pool("default")
    settle(world, rounds=100)
    assert set(world.pools) == {"default"}


def test_a_pool_that_a_person_scaled_is_theirs() -> None:
    world = World()
    world.add_topic("orders")
    settle(world)
    entry = {"manager": "kubectl", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    world.pools["default"]["metadata"]["managedFields"] = [entry]
    del world.topics["orders"]
    settle(world, rounds=100)
    assert set(world.pools) == {"default"}


def test_a_registry_that_was_lost_is_filled_from_what_the_status_remembers() -> None:
    world = World()
    world.add_pool("default", replicas=3)
    world.add_topic("orders", partitions=5)
    settle(world)
    before = {0: 2, 1: 2, 2: 0, 3: 1, 4: 0}
    world.topics["orders"]["status"] = {
        "partitions": [
            {"partition": p, "worker": f"tidewater-default-{w}"} for p, w in before.items()
        ]
    }
    for part in (world.registered, world.assignments, world.owners):
        part.clear()
    one_pass(world)
    assert world.assignments["orders"] == {p: f"tidewater-default-{w}" for p, w in before.items()}


def test_pausing_leaves_things_alone() -> None:
    world = World()
    world.add_topic("orders", partitions=2)
    settle(world)
    paused = {"tidewater.dev/paused": "true"}
    world.topics["orders"]["metadata"]["annotations"] = paused
    world.topics["orders"]["spec"]["partitions"] = 4
    world.pools["default"]["metadata"]["annotations"] = paused
    world.pools["default"]["spec"]["replicas"] = 3
    settle_changes = one_pass(world)
    assert settle_changes == 0
    assert world.sets["default"] == 1


def test_a_topic_that_is_paused_from_the_start_gets_nothing() -> None:
    world = World()
    world.add_topic("orders", partitions=2)
    world.topics["orders"]["metadata"]["annotations"] = {"tidewater.dev/paused": "true"}
    assert one_pass(world) == 0
    assert world.pools == {}
    world.topics["orders"]["metadata"]["annotations"] = {}
    settle(world)
    check_served(world)


def test_a_paused_topic_keeps_its_pool_when_the_registry_is_lost() -> None:
    """G1: its messages may be on the volumes alone, and only the Topic says so by then."""
    world = World()
    world.add_topic("orders", partitions=2)
    settle(world)
    claims = set(world.claims)
    world.topics["orders"]["metadata"]["annotations"] = {"tidewater.dev/paused": "true"}
    for part in (world.registered, world.assignments, world.owners):
        part.clear()
    for _ in range(70):
        one_pass(world)
    assert set(world.pools) == {"default"}
    assert world.claims == claims
