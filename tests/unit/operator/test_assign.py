"""Assignment: total, sticky, balanced, and never off a volume that is away."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tidewater_operator.assign import Crew, Holder, Place, assign

Current = dict[str, dict[int, str]]


def workers(count: int) -> list[str]:
    return [f"w-{number}" for number in range(count)]


def loads(wanted: Current, members: list[str]) -> list[int]:
    counts = Counter(w for topic in wanted.values() for w in topic.values())
    return [counts[w] for w in members]


def held(wanted: Current, live: set[str]) -> dict[Place, Holder]:
    """Everything is owned by who was told to own it."""
    return {(t, p): Holder(w, w in live) for t, ps in wanted.items() for p, w in ps.items()}


topic_sizes = st.dictionaries(
    st.sampled_from([f"t{n}" for n in range(12)]), st.integers(1, 9), min_size=1, max_size=8
)


@given(topic_sizes, st.integers(1, 7))
def test_new_partitions_are_spread_evenly(sizes: dict[str, int], count: int) -> None:
    members = workers(count)
    wanted = assign(sizes, Crew(members, live=members), {}, {})
    assert {t: set(ps) for t, ps in wanted.items()} == {t: set(range(n)) for t, n in sizes.items()}
    counts = loads(wanted, members)
    assert max(counts) - min(counts) <= 1


@given(topic_sizes, st.integers(1, 7))
def test_a_second_look_changes_nothing(sizes: dict[str, int], count: int) -> None:
    members = workers(count)
    crew = Crew(members, live=members)
    first = assign(sizes, crew, {}, {})
    assert assign(sizes, crew, first, {}) == first
    assert assign(sizes, crew, first, held(first, set(members))) == first


@given(topic_sizes, st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
@settings(deadline=None)
def test_scaling_settles_balanced_with_few_moves_at_a_time(
    sizes: dict[str, int], before: int, after: int, moves_max: int
) -> None:
    everybody = workers(max(before, after))
    wanted = assign(sizes, Crew(workers(before), live=workers(before)), {}, {})
    crew = Crew(workers(after), live=everybody)
    owners = held(wanted, set(everybody))
    total_moves = 0
    for _ in range(200):
        new = assign(sizes, crew, wanted, owners, moves_max)
        moves = [
            place for place, holder in owners.items() if new[place[0]][place[1]] != holder.worker
        ]
        assert len(moves) <= moves_max
        if not moves:
            break
        total_moves += len(moves)
        wanted = new
        owners = held(wanted, set(everybody))  # all of them have drained and arrived
    counts = loads(wanted, workers(after))
    assert sum(counts) == sum(sizes.values())
    assert max(counts) - min(counts) <= 1
    # No more than what had to go: all of the leaving ones', or what the new ones get.
    if after >= before:
        assert total_moves <= sum(counts[before:])


@given(topic_sizes, st.integers(1, 6), st.data())
def test_nothing_leaves_a_volume_that_is_away(
    sizes: dict[str, int], count: int, data: st.DataObject
) -> None:
    members = workers(count)
    wanted = assign(sizes, Crew(members, live=members), {}, {})
    away = set(data.draw(st.lists(st.sampled_from(members), unique=True)))
    live = set(members) - away
    new = assign(sizes, Crew(members, live=live), wanted, held(wanted, live))
    for topic, partitions in wanted.items():
        for partition, worker in partitions.items():
            if worker in away:
                assert new[topic][partition] == worker


def test_a_move_in_progress_goes_on() -> None:
    crew = Crew(workers(2), live=workers(2))
    current = {"t": {0: "w-1", 1: "w-0"}}
    owners = {("t", 0): Holder("w-0", True), ("t", 1): Holder("w-0", True)}
    assert assign({"t": 2}, crew, current, owners) == current


def test_a_move_to_a_worker_that_went_away_is_called_back() -> None:
    current = {"t": {0: "w-1"}}
    crew = Crew(workers(2), live=["w-0"])
    assert assign({"t": 1}, crew, current, {("t", 0): Holder("w-0", True)}) == {"t": {0: "w-0"}}


def test_a_leaving_workers_partitions_go_in_turn() -> None:
    current = {"t": dict.fromkeys(range(5), "w-1")}
    owners = {("t", p): Holder("w-1", True) for p in range(5)}
    crew = Crew(workers(1), live=workers(2))
    wanted = assign({"t": 5}, crew, current, owners, moves_max=2)["t"]
    assert Counter(wanted.values()) == {"w-0": 2, "w-1": 3}


def test_a_drained_partition_goes_to_who_is_there() -> None:
    current = {"t": {0: "w-1"}}
    assert assign({"t": 1}, Crew(workers(2), live=["w-0"]), current, {}) == {"t": {0: "w-0"}}


def test_workers_that_start_get_their_share_at_once() -> None:
    crew = Crew(workers(3), live=["w-0"], starting=["w-1", "w-2"])
    wanted = assign({"t": 3}, crew, {}, {})["t"]
    assert sorted(wanted.values()) == workers(3)


def test_nobody_is_there_yet() -> None:
    wanted = assign({"t": 4}, Crew(workers(2)), {}, {})["t"]
    assert Counter(wanted.values()) == {"w-0": 2, "w-1": 2}


def test_a_topic_spreads_over_the_workers() -> None:
    wanted = assign({f"t{n}": 3 for n in range(20)}, Crew(workers(3), live=workers(3)), {}, {})
    assert all(len(set(partitions.values())) == 3 for partitions in wanted.values())
