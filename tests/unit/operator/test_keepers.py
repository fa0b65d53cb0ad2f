"""When a namespace gets a pass: on marks, on the clock, again after a failure, and no more."""

import asyncio
from typing import Any

from tidewater_core.clock import SystemClock
from tidewater_core.errors import Retryable
from tidewater_operator.keepers import Keepers
from tidewater_operator.reconcile import Outcome
from tidewater_operator.settings import Intervals


class Passes:
    """Stands for the reconciler and the registry: notes what is asked of it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.outcome = Outcome()
        self.failures = 0
        self.released: list[str] = []

    async def run(self, name: str, memory: Any, *, full: bool, figures: bool) -> Outcome:
        self.seen.append((name, full))
        if self.failures:
            self.failures -= 1
            raise Retryable("StoreAway", "etcd is away")
        return self.outcome

    async def changed(self, name: str, since: int, timeout_s: float) -> int:
        await asyncio.sleep(60)
        return 0

    async def release(self, name: str) -> None:
        self.released.append(name)


class Leader:
    """We lead."""

    def __init__(self) -> None:
        self.gained = asyncio.Event()
        self.gained.set()
        self.term = "1"


def keepers(passes: Passes) -> Keepers:
    watched = lambda name: name != "foreign"  # noqa: E731
    stand_in: Any = passes
    leader: Any = Leader()
    return Keepers(stand_in, stand_in, leader, SystemClock(), Intervals(), watched)


async def until(passes: Passes, count: int) -> None:
    async with asyncio.timeout(10):
        while len(passes.seen) < count:
            await asyncio.sleep(0.02)


async def test_marks_that_come_together_lead_to_one_pass() -> None:
    passes = Passes()
    group = keepers(passes)
    for _ in range(20):
        group.mark("shop")
    group.mark("foreign")
    group.mark("unknown", known_only=True)
    await until(passes, 1)
    await asyncio.sleep(1.0)
    assert len(passes.seen) <= 2
    assert {name for name, _ in passes.seen} == {"shop"}
    await group.close()


async def test_a_pass_that_fails_is_tried_again_whole() -> None:
    passes = Passes()
    passes.failures = 1
    group = keepers(passes)
    group.mark("shop")
    await until(passes, 2)
    assert passes.seen[:2] == [("shop", True), ("shop", True)]
    assert group.counters.failures == 1
    await group.close()


async def test_objects_that_must_change_are_looked_at_at_once() -> None:
    passes = Passes()
    group = keepers(passes)
    group.mark("shop")
    await until(passes, 1)
    await asyncio.sleep(0.6)
    done = len(passes.seen)
    passes.outcome = Outcome(needs_full=True)
    group.mark("shop", full=False)
    await until(passes, done + 1)
    passes.outcome = Outcome()
    await until(passes, done + 2)
    assert [full for _, full in passes.seen[done : done + 2]] == [False, True]
    await group.close()


async def test_who_leads_again_looks_at_all_objects() -> None:
    """What it remembers is from before another one led, which may have registered topics."""
    passes = Passes()
    group = keepers(passes)
    leader: Any = group.leadership
    group.mark("shop")
    await until(passes, 1)
    group.mark("shop", full=False)
    await until(passes, 2)
    leader.term = "3"
    group.mark("shop", full=False)
    await until(passes, 3)
    assert [full for _, full in passes.seen] == [True, False, True]
    await group.close()


async def test_a_worker_that_gave_no_answer_is_asked_again_soon() -> None:
    passes = Passes()
    passes.outcome = Outcome(is_silent=True)
    group = keepers(passes)
    group.mark("shop")
    await until(passes, 3)  # the beat of figures is every ten seconds
    assert [full for _, full in passes.seen] == [True, False, False]
    await group.close()


async def test_an_empty_namespace_is_let_go_and_taken_up_again() -> None:
    passes = Passes()
    passes.outcome = Outcome(is_empty=True)
    group = keepers(passes)
    group.mark("shop")
    async with asyncio.timeout(10):
        while group.names:
            await asyncio.sleep(0.02)
    assert passes.released == ["shop"]
    group.mark("shop")
    assert group.names == ["shop"]
    await group.close()


async def test_who_does_not_lead_lets_go_of_namespaces_that_are_gone() -> None:
    """It may wait for months, and each of them took memory, and a pass when it led at last."""
    passes = Passes()
    group = keepers(passes)
    leader: Any = group.leadership
    leader.gained.clear()
    group.mark("shop")
    group.mark("bank")
    await asyncio.sleep(0.3)
    group.gone("shop")
    group.gone("unknown")
    assert group.names == ["bank"]
    await asyncio.sleep(0.1)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "keep shop"] == []
    leader.gained.set()
    await until(passes, 1)
    assert {name for name, _ in passes.seen} == {"bank"}
    group.gone("bank")
    await until(passes, 2)
    await group.close()
