"""Workers of one partition in one process, with a table in memory, that can be cut at any step.

Everything else is real: the registry (SQLite), the rounds over it, the logs. A *step* is whatever
taking a partition waits for: a call to the store, to the table process, to another worker, or
a piece of work on the disk.
"""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from tidewater_coordination.port import Ownership
from tidewater_coordination.sqlite import SqliteCoordination
from tidewater_core.clock import SystemClock
from tidewater_core.errors import OutcomeUnknown, Retryable, TidewaterError
from tidewater_core.settings import CatalogSettings, WorkerSettings
from tidewater_core.units import Duration
from tidewater_worker import node as node_module
from tidewater_worker.cluster import taking
from tidewater_worker.cluster.handover import left
from tidewater_worker.log.group import Rows, Submission
from tidewater_worker.log.producers import Request, Stored
from tidewater_worker.log.syncpool import SyncPool
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.ports import FlushResult, PartitionState, Phase, TopicState

TOPIC = "shop/orders"
SETTLE_S = 60.0
SESSION_TTL = Duration("10m")
"""None runs out by itself, however busy the machine is."""
HOUR_US = 3_600_000_000


class Crash(BaseException):
    """The process is gone: nobody handles this."""


class Kind(StrEnum):
    """How a step is cut."""

    FAILS = "fails"
    FAILS_TWICE = "fails, and so does the next step"
    FAILS_DONE = "was done, and no answer came"
    DIES = "dies before it"
    DIES_DONE = "dies after it"
    LAPSES = "the session runs out before it, and another worker comes"


@dataclass
class Cut:
    """Which step of which worker is cut, and the steps so far."""

    worker: str = ""
    at: int = -1
    kind: Kind = Kind.FAILS
    lapse: Callable[[], Awaitable[None]] | None = None
    steps: list[str] = field(default_factory=list)

    async def step(self, worker: str, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if worker != self.worker:
            return await call()
        number = len(self.steps)
        self.steps.append(name)
        if number - self.at not in ((0, 1) if self.kind is Kind.FAILS_TWICE else (0,)):
            return await call()
        is_store = name in ("acquire", "begin", "release")
        match self.kind:
            case Kind.DIES:
                raise Crash(name)
            case Kind.DIES_DONE:
                await call()
                raise Crash(name)
            case Kind.FAILS_DONE:
                await call()
                raise OutcomeUnknown("StoreAway", name) if is_store else OSError(5, name)
            case Kind.FAILS | Kind.FAILS_TWICE:
                raise Retryable("StoreAway", name) if is_store else OSError(5, name)
        assert self.lapse is not None
        await self.lapse()
        return await call()


class Table:
    """A table of one partition; it takes claims as the real one does."""

    def __init__(self) -> None:
        self.next = self.epoch = 0
        self.gaps: list[tuple[int, int]] = []

    def state(self, epoch: int) -> PartitionState:
        phase = Phase.STOPPED if epoch < self.epoch else Phase.RUNNING
        reason = "Fenced" if epoch < self.epoch else ""
        gaps = tuple(self.gaps)
        return PartitionState(self.next, 0, epoch, phase, reason, reason, gaps)

    def claim(self, epoch: int, gap_end: int) -> None:
        if epoch < self.epoch:
            return
        self.epoch = epoch
        if gap_end > self.next:
            self.gaps.append((self.next, gap_end))
            self.next = gap_end


class Link:
    """Stands for the link to a table process."""

    table: Table
    is_connected = True

    def __init__(self, _: Path, assignments: Callable[[], Any], on_state: Any) -> None:
        self._assignments, self._on_state = assignments, on_state

    def assign(self) -> None:
        for topic in self._assignments():
            states = {}
            for number, assignment in topic.partitions.items():
                self.table.claim(assignment.epoch, assignment.gap_end)
                states[number] = self.table.state(assignment.epoch)
            self._on_state(TopicState(topic.topic, states))

    async def bounds(self, _: str) -> dict[int, PartitionState]:
        return {0: self.table.state(self.table.epoch)} if self.table.epoch else {}

    async def flush(self, _: str, ends: dict[int, int], _s: float) -> FlushResult:
        self.table.next = max(self.table.next, ends[0])
        self.assign()
        return FlushResult(None, {0: self.table.next})

    def durable(self, _: Any) -> None:
        pass


class Early(SystemClock):
    """Goes an hour ahead of the others."""

    def now_us(self) -> int:
        return super().now_us() + HOUR_US


class World:
    """Workers by name, the store and the table between them."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.table, self.cut = directory, Table(), Cut()
        self.members: dict[str, Member] = {}
        self.acked: dict[int, bytes] = {}
        self.store = SqliteCoordination(directory / "coordination.db")
        monkeypatch.setattr(Link, "table", self.table, raising=False)
        monkeypatch.setattr(node_module, "TableLink", Link)
        monkeypatch.setattr(taking, "asyncio", _Threads(self))

    async def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        await self.store.start()
        await self.store.register_topic(TOPIC, '{"partitions":1}', str(UUID(int=7)))

    async def close(self) -> None:
        self.cut = Cut()
        for member in list(self.members.values()):
            await member.die()
        await self.store.close()

    async def join(self, name: str) -> "Member":
        member = self.members[name] = Member(self, name)
        await member.start()
        return member

    async def assign(self, name: str) -> None:
        await self.store.set_assignment(TOPIC, {0: name})

    async def owner(self) -> Ownership:
        return (await self.store.registry()).owners[TOPIC][0]

    async def settle(self, name: str) -> "Member":
        """Let everybody make rounds until a worker takes messages; start it if it is not there."""
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        if name not in self.members:
            await self.join(name)
        while not self.members[name].is_open:
            assert asyncio.get_running_loop().time() < deadline, (
                f"{name} never took it: {self.members[name].partition.refusal}"
            )
            for member in list(self.members.values()):
                await member.round()
            await asyncio.sleep(0.01)
        return self.members[name]


class Member:
    """A worker."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self._world = name, world
        self.directory = world.directory / name
        settings = WorkerSettings(
            worker_id=name, log_root=self.directory, run_dir=world.directory / "run",
            coordination=str(world.directory / "coordination.db"), catalog=CatalogSettings(),
            assigned_only=True, session_ttl=SESSION_TTL,
        )  # fmt: skip
        self.store = SqliteCoordination(world.directory / "coordination.db")
        self.node = Node(settings, self.store, Early() if name == "a" else SystemClock())

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.node._loop, self.node._pool = loop, SyncPool(loop)
        for verb in ("acquire", "begin", "release"):
            self._wrap(self.store, verb)
        self._wrap(self.node.link, "bounds")
        self.node.forwarding.call = self._call  # type: ignore[method-assign]
        await self.node.owning.start(f"http://{self.name}", "")

    def _wrap(self, target: Any, verb: str) -> None:
        real = getattr(target, verb)

        async def cut(*args: Any) -> Any:
            return await self._world.cut.step(self.name, verb, lambda: real(*args))

        setattr(target, verb, cut)

    async def _call(self, url: str, *_: Any, **__: Any) -> Any:
        async def ask() -> Any:
            other = self._world.members.get(url.removeprefix("http://"))
            if other is None:
                raise Retryable("WorkerAway", url)
            return msgspec.to_builtins(left(other.partition.directory))

        return await self._world.cut.step(self.name, "handover", ask)

    @property
    def partition(self) -> Partition:
        return self.node.topics[TOPIC].partitions[0]

    @property
    def is_open(self) -> bool:
        return TOPIC in self.node.topics and self.partition.is_open

    async def round(self) -> None:
        """Make one round, and wait for all that it began, however slow the disk is."""
        if TOPIC in self.node.topics:
            self.partition.retry_at = 0.0
        owning = self.node.owning
        await owning._round()
        while owning._under_way:
            await owning._wait_for_work()

    async def append(self, value: bytes, sequence: int) -> Stored:
        """Store a message of producer `p`; note what was acknowledged for the first time."""
        done: asyncio.Future[Stored | TidewaterError] = asyncio.get_running_loop().create_future()
        request = Request("p", sequence)
        submission = Submission(Rows([None], [None], [value]), 100, done.set_result, request)
        appender = self.partition.ready()
        appender.check(submission)
        appender.offer(submission)
        stored = await done
        assert isinstance(stored, Stored), stored
        known = self._world.acked.setdefault(stored.offset, value)
        assert known == value, f"G1 Durable: offset {stored.offset} was given twice"
        return stored

    async def drain(self) -> None:
        await self.node.owning._drain(self.node.topics[TOPIC], self.partition)

    async def lose_session(self) -> None:
        """Let the session run out; this process does not know."""
        with sqlite3.connect(self._world.directory / "coordination.db") as db:
            db.execute("DELETE FROM sessions WHERE session = ?", (self.store.session,))
        db.close()

    async def die(self) -> None:
        """Go as a killed process goes: nothing is released but the lock."""
        self._world.members.pop(self.name, None)
        node = self.node
        for task in list(node._tasks):
            task.cancel()
        with suppress(Crash):
            await asyncio.gather(*node._tasks, return_exceptions=True)
        for topic in node.topics.values():
            for partition in topic.partitions.values():
                await partition.close()
        node._pool.close()
        await self.store.close()
        if node._dirty_timer is not None:
            node._dirty_timer.cancel()


class _Threads:
    """`asyncio` as `taking` sees it: work on a worker's disk is a step."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def to_thread(self, work: Any, directory: Path, *args: Any, **named: Any) -> Any:
        name = directory.relative_to(self._world.directory).parts[0]
        return await self._world.cut.step(
            name, work.__name__, lambda: asyncio.to_thread(work, directory, *args, **named)
        )
