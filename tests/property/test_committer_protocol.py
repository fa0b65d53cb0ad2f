"""One committing worker for many: files handed over a network and a catalog that both fail."""

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.sql import SqlCatalog

from table_fakes import (
    CountingIds,
    HandLog,
    SteppedClock,
    assignment,
    message_batch,
    worker_settings,
)
from table_faults import Fault, FaultyCatalog
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import TidewaterError
from tidewater_worker.ports import Commits, Offer, OfferAnswer, Phase
from tidewater_worker.table.catalog import TableCatalog
from tidewater_worker.table.offers import not_landed
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.topic import TopicRun
from tidewater_worker.table.topic_joint import JointTopic

SPEC = TopicSpec()
WORKERS = 3
ROUNDS_MAX = 300
TOO_SLOW = HealthCheck.too_slow
PASSING = [fault for fault in Fault if fault not in (Fault.DROPPED, Fault.REPLACED)]


class Net(StrEnum):
    """What becomes of one offer on its way."""

    OK = "ok"
    AWAY = "nobody there"
    LOST = "lost on the way there"
    MUTE = "the answer is lost"
    TWICE = "comes twice"
    ASTRAY = "goes to another worker, which commits too"
    STALE = "comes again after the answer"


class Worker:
    """One process that owns one partition."""

    def __init__(self, world: "World", number: int, epoch: int) -> None:
        self.world, self.number, self.epoch = world, number, epoch
        catalog = TableCatalog(world.catalog)  # type: ignore[arg-type]
        self.run = TopicRun(
            self.assigned(),
            lambda: catalog,
            world.clock,
            CountingIds(next(world.seeds)),
            lambda _: None,
            RangeIndex(),
        )
        self.run.hand = self.hand

    @property
    def log(self) -> HandLog:
        return self.world.logs[self.number]

    def assigned(self) -> Any:
        made = assignment(SPEC, [self.log], epoch=self.epoch)
        role = Commits.HERE if self.world.committer == self.number else Commits.ELSEWHERE
        return msgspec.structs.replace(made, commits=role)

    def hand(self, topic: JointTopic, offer: Offer) -> None:
        # Over the wire and back, as between two machines.
        copy = msgspec.json.decode(msgspec.json.encode(offer), type=Offer)
        self.world.deliver(self.number, copy, topic)

    def step(self) -> float | None:
        self.run.inbox.assign(self.assigned())
        self.run.inbox.durable({self.number: self.log.end})
        return self.run.step()


class World:
    """Three workers of one topic, a network and a catalog by script, and a clock that we move."""

    def __init__(self, data: Path) -> None:
        self.settings = worker_settings(data)
        self.catalog = FaultyCatalog(self.settings)
        self.catalog.interloper = self.interlope
        self.clock = SteppedClock()
        self.seeds = itertools.count(1)
        self.logs = [
            HandLog(data / f"worker-{p}" / "shop" / "orders" / str(p), p) for p in range(WORKERS)
        ]
        self.committer = 0
        self.net: list[Net] = []
        self.zombies: list[Worker] = []
        self.offers: list[Offer] = []
        self.workers = [Worker(self, number, 1) for number in range(WORKERS)]

    def deliver(self, sender: int, offer: Offer, topic: JointTopic) -> None:
        fault = self.net.pop(0) if self.net else Net.OK
        self.offers.append(offer)
        if fault is Net.AWAY or self.committer == sender:
            topic.answered(offer.id, not_landed("CommitterAway", "nobody there"))
            return
        if fault is Net.LOST:
            return
        target = self.workers[self.committer]
        if fault is Net.ASTRAY:
            target = self.workers[(self.committer + 1) % WORKERS]

        def answer(found: OfferAnswer) -> None:
            if fault is not Net.MUTE:
                topic.answered(offer.id, found)

        for _ in range(2 if fault is Net.TWICE else 1):
            self.give(target, offer, answer)
        if fault is Net.STALE:
            for old in self.offers[-3:]:
                self.give(target, old, lambda _: None)

    def give(self, target: Worker, offer: Offer, answer: Any) -> None:
        try:
            target.run.take_offer(offer, answer)
        except TidewaterError as error:
            answer(not_landed(error.reason, error.message))

    def interlope(self) -> None:
        """Let earlier processes work, with the logs as they are now."""
        for zombie in self.zombies:
            for _ in range(4):
                zombie.step()

    def append(self, partition: int, rows: int) -> None:
        log = self.logs[partition]
        values = [f"{partition}:{log.end + i}".encode() for i in range(rows)]
        log.append(message_batch(SPEC, values, time_us=self.clock.now_us()))

    def turn(self) -> None:
        """Let every worker do one thing, and time pass until one of them wants the next."""
        wanted = [again for worker in self.workers if (again := worker.step()) is not None]
        now = self.clock.monotonic()
        later = [again for again in wanted if again > now]
        if later and all(again > now for again in wanted):
            self.clock.advance(min(later) - now)
        else:
            self.clock.advance(0.001)

    def settle(self) -> None:
        for _ in range(ROUNDS_MAX):
            self.turn()
            if all(w.run.drained for w in self.workers) and all(
                part.state is Phase.RUNNING
                for w in self.workers
                for part in w.run.state.partitions.values()
            ):
                return
        pytest.fail(f"G2 Once in the table: never settled: {[w.run.state for w in self.workers]}")

    def check(self) -> None:
        """Judge from the table and the logs alone."""
        catalog = SqlCatalog("tidewater", **dict[str, Any](self.settings.catalog.properties))
        try:
            rows = catalog.load_table("shop.orders").scan().to_arrow()
        finally:
            catalog.close()
        found = sorted(
            zip(
                rows["tw_partition"].to_pylist(),
                rows["tw_offset"].to_pylist(),
                rows["value"].to_pylist(),
                strict=True,
            )
        )
        expected = [
            (log.partition, offset, f"{log.partition}:{offset}".encode())
            for log in self.logs
            for offset in range(log.end)
        ]
        assert found == expected, f"G1, G2: {found} are in the table, {expected} in the logs"


@contextmanager
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="tidewater-") as directory:
        made = World(Path(directory))
        try:
            yield made
        finally:
            made.catalog.close()


class Event(StrEnum):
    """What happens before a round."""

    NOTHING = "nothing"
    MOVES = "another worker commits"
    HOLDER_DIES = "the committing worker's process is killed and starts again"
    HOLDER_SLEEPS = "the committing worker's process is replaced and lives on"
    SENDER_DIES = "a sender's process is killed and starts again"
    NEW_EPOCH = "a sender has a new epoch, and its old process lives on"


def happen(w: World, event: Event) -> None:
    holder, sender = w.committer, (w.committer + 1) % WORKERS
    w.zombies = []
    match event:
        case Event.MOVES:
            w.committer = sender
        case Event.HOLDER_DIES:
            w.workers[holder] = Worker(w, holder, w.workers[holder].epoch)
        case Event.HOLDER_SLEEPS:
            w.zombies = [w.workers[holder]]
            w.committer = sender
            w.workers[holder] = Worker(w, holder, w.workers[holder].epoch)
        case Event.SENDER_DIES:
            w.workers[sender] = Worker(w, sender, w.workers[sender].epoch)
        case Event.NEW_EPOCH:
            w.zombies = [w.workers[sender]]
            w.workers[sender] = Worker(w, sender, w.workers[sender].epoch + 1)


Round = tuple[Event, tuple[int, ...], list[Fault], list[Net], int]
ROUNDS = st.lists(
    st.tuples(
        st.sampled_from(Event),
        st.tuples(*(st.integers(0, 3) for _ in range(WORKERS))),
        st.lists(st.sampled_from(PASSING), max_size=3),
        st.lists(st.sampled_from(Net), max_size=4),
        st.sampled_from([0, 1, 3, 8, ROUNDS_MAX]),
    ),
    min_size=1,
    max_size=5,
)


def check_rounds(rounds: list[Round]) -> World:
    with world() as w:
        for event, appends, faults, net, turns in rounds:
            happen(w, event)
            for partition, rows in enumerate(appends):
                if rows:
                    w.append(partition, rows)
            w.catalog.script, w.net = list(faults), list(net)
            if turns == ROUNDS_MAX:
                w.settle()
            else:
                for _ in range(turns):
                    w.turn()
        w.catalog.script, w.net = [], []
        w.interlope()
        # What a fault left for later happens now: old offers that are still on their way, too.
        for old in w.offers:
            w.give(w.workers[w.committer], old, lambda _: None)
        for _ in range(2):
            for partition in range(WORKERS):
                w.append(partition, 1)
            w.settle()
        w.check()
        return w


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[TOO_SLOW])
@given(rounds=ROUNDS)
@pytest.mark.timeout(300)
def test_every_row_lands_once_whatever_fails(rounds: list[Round]) -> None:
    check_rounds(rounds)


@pytest.mark.parametrize("net", Net)
@pytest.mark.parametrize("event", Event)
def test_each_failure_of_the_network_meets_each_event(event: Event, net: Net) -> None:
    check_rounds(
        [
            (Event.NOTHING, (2, 2, 1), [], [], ROUNDS_MAX),
            (event, (1, 2, 1), [Fault.LANDED, Fault.INTERLOPED], [net, net], 3),
            (Event.NOTHING, (1, 1, 1), [Fault.REFUSED], [net], ROUNDS_MAX),
        ]
    )


def test_in_quiet_times_one_commit_serves_all_and_nothing_is_refused() -> None:
    with world() as w:
        for partition in range(WORKERS):
            w.append(partition, 1)
        w.settle()
        w.catalog.commits = 0
        rounds = 5
        for _ in range(rounds):
            for partition in range(WORKERS):
                w.append(partition, 2)
            w.settle()
        stats = [worker.run.counters() for worker in w.workers]
        assert sum(found["conflicts"] for found in stats) == 0, stats
        # Cut a moment apart, so now and then a batch waits for the next commit.
        assert w.catalog.commits <= 2 * rounds, stats
        assert [found["commits"] for found in stats[1:]] == [0, 0], "only one of them commits"
        assert sum(found["handed_over"] for found in stats) >= (WORKERS - 1) * rounds
        w.check()
