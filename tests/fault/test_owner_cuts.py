"""A partition is taken from whoever had it last, and that is cut at every step.

Whatever fails, dies or is overtaken, the next round ends right: no offset is given twice (G1),
a gap is recorded once (G7), requests from before are known as long as the old owner is there (G8),
and nobody goes on whom another has replaced (G5).
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from owner_fakes import HOUR_US, TOPIC, Crash, Cut, Kind, World
from tidewater_core.clock import SystemClock
from tidewater_worker.cluster.plan import GAP_OFFSETS

STEPS_MAX = 40
Prepare = Callable[[World], Awaitable[None]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def nothing_before(_: World) -> None:
    """Nobody ever had it."""


async def taken_by_a(world: World) -> None:
    """Worker a has five messages of it, three of them in the table."""
    await world.assign("a")
    a = await world.settle("a")
    for sequence in range(5):
        await a.append(b"%d" % sequence, sequence)
    world.table.next += 3


async def drained(world: World) -> None:
    """Worker a drained it, and is there to be asked."""
    await taken_by_a(world)
    await world.members["a"].drain()


async def given_up(world: World) -> None:
    """Worker a is gone with messages that nobody else has."""
    await taken_by_a(world)
    await world.members["a"].die()
    await world.store.give_up(TOPIC, 0, "burnt")


def with_an_old_log(prepare: Prepare) -> Prepare:
    """Let worker b have had the partition before: an old, drained log of it is on its disk."""

    async def prepared(world: World) -> None:
        await world.assign("b")
        b = await world.settle("b")
        await b.append(b"old", 100)
        await b.append(b"older", 101)
        await b.drain()
        await b.die()
        await prepare(world)

    return prepared


SCENES: dict[str, tuple[Prepare, bool, bool]] = {
    "fresh": (nothing_before, False, False),
    "drained": (drained, True, False),
    "given-up": (given_up, False, True),
    "drained, back on an old log": (with_an_old_log(drained), True, False),
    "given-up, back on an old log": (with_an_old_log(given_up), False, True),
}


async def _attempt(world: World, cut: Cut) -> None:
    """Let worker b take the partition, cut as said."""
    await world.assign("b")

    async def lapse() -> None:
        await world.members["b"].lose_session()
        await world.assign("c")
        c = world.members.get("c") or await world.join("c")
        await c.round()
        await c.round()

    cut.lapse = lapse
    world.cut = cut
    try:
        b = await world.join("b")
        await b.round()
    except Crash:
        await world.members["b"].die()
    world.cut = Cut()
    if cut.kind is Kind.LAPSES and cut.at < len(cut.steps):
        held = [name for name in "bc" if world.members[name].partition.appender is not None]
        assert len(held) <= 1, f"G5 One owner: {held} both have it"
        await world.members["b"].store._keeper._once()  # type: ignore[union-attr]


async def _has_begun(world: World, name: str) -> bool:
    owner = (await world.store.registry()).owners.get(TOPIC, {}).get(0)
    return owner is not None and owner.worker_id == name


async def _check(
    world: World, taker: str, *, is_known: bool, is_gap: bool, is_restarted: bool
) -> None:
    """See what the taker makes of it, and what is left of that after a restart."""
    if taker != "b" and "b" not in world.members and await _has_begun(world, "b"):
        await world.join("b")  # nobody else may have it before it has drained it
    member = await world.settle(taker)
    owner = await world.owner()
    assert (owner.worker_id, owner.after) == (taker, None)
    first = 2 if b"old" in world.acked.values() else 0
    if is_gap:
        assert world.table.gaps == [(first + 3, 2 * GAP_OFFSETS)], "G7: recorded once"
        assert owner.gap is not None
        assert (owner.gap.start, owner.gap.reason) == (first + 3, "burnt")
    else:
        assert (world.table.gaps, owner.gap) == ([], None)
    if is_restarted:  # before a message is written
        await member.die()
        member = await world.settle(taker)
    for attempt in range(2):
        before = dict(world.acked)
        stored = await member.append(b"new %d" % attempt, 200 + attempt)
        assert stored.offset not in before, f"G1 Durable: offset {stored.offset} twice"
        if is_known:
            for sequence in range(5):
                again = await member.append(b"%d" % sequence, sequence)
                assert again.offset == first + sequence, "G8 Idempotent producers: stored once"
            ahead_us = member.partition.readable().last_time_us - SystemClock().now_us()
            assert ahead_us > HOUR_US // 2, "the time of messages never goes back"
        await member.die()
        member = await world.settle(taker)


async def _cut_and_check(world: World, scene: str, cut: Cut, taker: str) -> bool:
    """Take it with a cut, and see that it ends right; tell if there was such a step."""
    prepare, is_known, is_gap = SCENES[scene]
    await world.start()
    try:
        await prepare(world)
        await _attempt(world, cut)
        is_cut = cut.at < len(cut.steps)
        taker = taker if is_cut else "b"
        await world.assign(taker)
        restarted = cut.at % 2 == 0
        await _check(world, taker, is_known=is_known, is_gap=is_gap, is_restarted=restarted)
    except AssertionError as error:
        raise AssertionError(f"step {cut.at} of {cut.steps} {cut.kind}: {error}") from error
    finally:
        await world.close()
    return is_cut


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("scene", SCENES)
async def test_a_partition_is_taken_right_after_every_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: str, kind: Kind
) -> None:
    takers = "c" if kind is Kind.LAPSES else "b"
    if kind in (Kind.DIES, Kind.DIES_DONE) and scene != "fresh":
        # Of a fresh partition nothing tells that its first owner died before it had a message.
        takers = "bc"
    for taker in takers:
        for at in range(STEPS_MAX):
            cut = Cut("b", at, kind)
            world = World(tmp_path / f"{taker}{at}", monkeypatch)
            if not await _cut_and_check(world, scene, cut, taker):
                assert ("begin" in cut.steps) == (scene != "fresh"), cut.steps
                break
        else:
            pytest.fail(f"there are more than {STEPS_MAX} steps")
