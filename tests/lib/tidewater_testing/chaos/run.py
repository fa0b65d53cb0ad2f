"""One run: three workers, a topic, seven subscriptions with three consumers each."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tidewater_testing.chaos.clients import ClientConsumer
from tidewater_testing.chaos.history import History, Story, violations
from tidewater_testing.chaos.meddling import Meddler, be_away
from tidewater_testing.chaos.people import Consumer, Producer
from tidewater_testing.chaos.schedule import BESIDE, Event, Kind, plan
from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import subscription_manifest

TOPIC: Final = "shop/all"
NAMES: Final = ("a", "b", "c")
PARTITIONS: Final = 6
SESSION_TTL: Final = "3s"
CONSUMERS: Final = 3
PRODUCERS: Final = 3
QUIET_S: Final = 240.0
"""How long the last message may take to be acknowledged once all is well again."""
READ_ROWS: Final = 10_000
SPEC: Final = {
    "partitions": PARTITIONS,
    "log": {"segmentSize": "64Ki", "tailCache": "64Ki", "retention": {"time": "0s", "size": "0"}},
    "writer": {"flushInterval": "500ms"},
}
SUBSCRIPTION: Final = {"ackDeadline": "2s", "backoff": {"initial": "50ms", "max": "200ms"}}
PREFIX: Final = "p0-"
SUBSCRIPTIONS: Final[dict[str, dict[str, Any]]] = {
    "exclusive": {"type": "Exclusive"},
    "failover": {"type": "Failover"},
    "shared": {"type": "Shared"},
    "keyshared": {"type": "KeyShared"},
    "committed": {"type": "Failover", "isolation": "committed"},
    "filtered": {"type": "KeyShared", "filter": {"keyPrefix": PREFIX}},
    "client": {"type": "Shared"},
}


@dataclass
class Outcome:
    """How it went."""

    seed: int
    seconds: float
    events: Counter[str] = field(default_factory=Counter)
    history: History = field(default_factory=History)
    resent: int = 0
    quiet_s: float = 0.0
    """How long after the last event everything was acknowledged."""
    found: list[str] = field(default_factory=list)
    meddled: str = ""

    def told(self) -> str:
        """Sum it up."""
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s of chaos, quiet {self.quiet_s:.1f} s later",
            f"events: {', '.join(f'{name} {n}' for name, n in sorted(self.events.items()))}",
            f"produced {len(self.history.produced)} messages, {self.resent} requests re-sent",
            self.meddled,
        ]
        lines += [
            f"{name:10} {len(story.deliveries)} deliveries of "
            f"{len({d.place for d in story.deliveries})} messages, "
            f"{sum(a.stored_at is not None for a in story.acks)} acks stored, "
            f"{story.refused} refused, {story.unknown} pulls without an answer"
            for name, story in self.history.stories.items()
        ]
        lines.append("broken promises: none" if not self.found else "BROKEN PROMISES:")
        return "\n".join([*lines, *self.found])


class Chaos:
    """A run in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        seconds: float,
        store: str = "etcd",
        pause_s: float = 0.1,
        messages_min: int = 0,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._directory, self._store, self._pause_s, self._say = directory, store, pause_s, say
        self.outcome = Outcome(seed, seconds)
        self._messages_min = messages_min
        self.workers: dict[str, Worker] = {}
        self._down: set[str] = set()
        self._aftermath: set[asyncio.Task[None]] = set()
        catalog = {
            "type": "sql",
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
        }
        self._catalog, self._meddler = catalog, Meddler(catalog, TOPIC)
        self._place: Etcd | Path = directory / "coordination.db"

    def run(self) -> Outcome:
        """Do all of it."""
        with ExitStack() as stack:
            if self._store == "etcd":
                self._place = stack.enter_context(Etcd(self._directory / "etcd"))
                coordination = self._place.coordination
            else:
                coordination = str(self._place)
            self._start(stack, coordination)
            asyncio.run(self._live())
        return self.outcome

    def _start(self, stack: ExitStack, coordination: str) -> None:
        manifests = [topic_manifest(TOPIC, SPEC)]
        manifests += [
            subscription_manifest(f"shop/{name}", "all", **SUBSCRIPTION, **spec)
            for name, spec in SUBSCRIPTIONS.items()
        ]
        for name in NAMES:
            worker = Worker(
                self._directory / name, manifests if name == NAMES[0] else [],
                catalog=self._catalog, coordination=coordination, worker_id=name,
                session_ttl=SESSION_TTL,
            )  # fmt: skip
            self.workers[name] = worker
            stack.push(worker)
            worker.start(wait=False)
            if name == NAMES[0]:
                worker.wait_ready(QUIET_S)  # it registers the topic
        for name in NAMES:
            self.workers[name].wait_ready(QUIET_S)
        for number in range(PARTITIONS):
            self._move(number, NAMES[number % len(NAMES)])
        wait_until(self._is_dealt, QUIET_S, "the partitions to be dealt out", 0.2)

    def _move(self, number: int, to: str) -> None:
        for worker in self.workers.values():
            path = f"/v1/{TOPIC}/partitions/{number}/move"
            try:
                if worker.post(path, json.dumps({"to": to}), timeout_s=3).status == 202:
                    return
            except OSError:
                continue

    def _is_dealt(self) -> bool:
        parts = self.workers[NAMES[0]].get(f"/v1/{TOPIC}").json()["partitions"]
        return all(
            part["owner"] == NAMES[part["partition"] % len(NAMES)] and part["state"] == "running"
            for part in parts
        )

    # ---- the run

    async def _live(self) -> None:
        outcome = self.outcome
        addresses = [worker.address for worker in self.workers.values()]
        seed, history = outcome.seed, outcome.history
        producers = [Producer(history, TOPIC, addresses, i, seed) for i in range(PRODUCERS)]
        consumers: list[Consumer | ClientConsumer] = []
        for name, spec in SUBSCRIPTIONS.items():
            prefix = PREFIX if "filter" in spec else ""
            story = history.stories[name] = Story(spec["type"], prefix)
            path = f"/v1/{TOPIC}/subscriptions/{name}"
            if name == "client":
                each = enumerate(addresses)
                consumers += [ClientConsumer(story, TOPIC, name, to, i, seed) for i, to in each]
            else:
                consumers += [Consumer(story, path, addresses, i, seed) for i in range(CONSUMERS)]
        sent, over = asyncio.Event(), asyncio.Event()
        sending = [asyncio.create_task(each.run(sent, self._pause_s)) for each in producers]
        consuming = [asyncio.create_task(each.run(over)) for each in consumers]
        try:
            await self._suffer()
            calm = time.monotonic()
            await self._enough(calm + QUIET_S)
            sent.set()
            await asyncio.gather(*sending)
            for consumer in consumers:
                consumer.is_steady = True
            await self._quiet(consuming)
            outcome.quiet_s = time.monotonic() - calm
        finally:
            sent.set()
            over.set()
            results = await asyncio.gather(*sending, *consuming, return_exceptions=True)
        outcome.resent = sum(producer.resent for producer in producers)
        made = self._meddler
        outcome.meddled = (
            f"the table was rewritten {made.rewrites} times by others, snapshots expired "
            f"{made.expired} times, {made.deleted} files deleted"
        )
        outcome.found += [f"a client failed: {r!r}" for r in results if isinstance(r, Exception)]
        outcome.found += violations(history, await asyncio.to_thread(self._read_all))

    async def _enough(self, deadline: float) -> None:
        """On a busy machine little is produced meanwhile: go on until there is enough to judge."""
        while len(self.outcome.history.produced) < self._messages_min:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.1)

    async def _suffer(self) -> None:
        outcome = self.outcome
        begun = time.monotonic()
        for event in plan(outcome.seed, outcome.seconds, NAMES, PARTITIONS):
            await asyncio.sleep(max(begun + event.at_s - time.monotonic(), 0))
            if not await self._can_happen(event):
                outcome.events["skipped"] += 1
                continue
            self._say(str(event))
            try:
                await self._happen(event)
                outcome.events[event.kind] += 1
            except TimeoutError:  # on a slow machine its victim may not have come back yet
                outcome.events["skipped"] += 1
        if self._aftermath:
            await asyncio.wait(self._aftermath)
        for worker in self.workers.values():
            await asyncio.to_thread(worker.wait_ready, QUIET_S)

    async def _can_happen(self, event: Event) -> bool:
        if event.kind is Kind.MOVE:
            return True
        if event.kind in BESIDE:
            return event.kind not in self._down
        if event.worker in self._down:
            return False
        return event.is_hard or await asyncio.to_thread(self.workers[event.worker].answers)

    async def _happen(self, event: Event) -> None:
        worker = self.workers[event.worker]
        match event.kind:
            case Kind.MOVE:
                await asyncio.to_thread(self._move, event.partition, event.worker)
            case Kind.KILL_EDGE:
                await asyncio.to_thread(worker.kill, Victim.EDGE)
            case Kind.KILL_TABLE:
                await asyncio.to_thread(worker.kill, Victim.TABLE)
            case Kind.KILL_WORKER:
                self._later(event.worker, self._be_away(worker, event.lasts_s))
            case Kind.FREEZE_EDGE:
                self._later(event.worker, self._be_frozen(worker, Victim.EDGE, event.lasts_s))
            case Kind.FREEZE_TABLE:
                self._later(event.worker, self._be_frozen(worker, Victim.TABLE, event.lasts_s))
            case Kind.STORE_AWAY:
                self._later(event.kind, asyncio.to_thread(be_away, self._place, event.lasts_s))
            case Kind.REWRITE:
                self._later(event.kind, asyncio.to_thread(self._meddler.meddle))

    def _later(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._down.add(name)
        task = asyncio.create_task(work)
        self._aftermath.add(task)

        def done(task: "asyncio.Task[None]") -> None:
            self._aftermath.discard(task)
            self._down.discard(name)

        task.add_done_callback(done)

    async def _be_away(self, worker: Worker, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.to_thread(worker.kill, Victim.EDGE, Victim.TABLE)
        await asyncio.to_thread(worker.process.kill)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(worker.start, wait=False)

    async def _be_frozen(self, worker: Worker, victim: Victim, seconds: float) -> None:
        try:
            pid = await asyncio.to_thread(worker.freeze, victim)
        except TimeoutError:
            return  # it is not there
        try:
            await asyncio.sleep(seconds)
        finally:
            worker.thaw(pid)

    # ---- the end

    async def _quiet(self, consuming: "list[asyncio.Task[None]]") -> None:
        """Wait until everything that was produced has been acknowledged by everybody."""
        history = self.outcome.history
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline and not any(task.done() for task in consuming):
            if all(
                story.wanted(history.produced) <= {ack.place for ack in story.acks}
                for story in history.stories.values()
            ) and await asyncio.to_thread(self._nothing_is_open):
                return
            await asyncio.sleep(0.5)
        self.outcome.found.append(
            f"G4 At least once: not everything was acknowledged {QUIET_S:.0f} s after the last "
            f"event: { {name: self._open(name) for name in SUBSCRIPTIONS} }"
        )

    def _nothing_is_open(self) -> bool:
        return all(self._open(name) == 0 for name in SUBSCRIPTIONS)

    def _open(self, name: str) -> int:
        """Return how many messages a subscription has not acknowledged; -1: not known."""
        path = f"/v1/{TOPIC}/subscriptions/{name}"
        try:
            answer = self.workers[NAMES[0]].get(path, timeout_s=10)
        except OSError:
            return -1
        status = answer.json()
        is_whole = answer.status == 200 and len(status["partitions"]) == PARTITIONS
        return int(status["lag"]) if is_whole else -1

    def _read_all(self) -> dict[int, list[tuple[int, str]]]:
        """Read every partition from its beginning, each through another worker."""
        found: dict[int, list[tuple[int, str]]] = {}
        for number in range(PARTITIONS):
            worker = self.workers[NAMES[(number + 1) % len(NAMES)]]
            rows: list[tuple[int, str]] = []
            while True:
                path = f"/v1/{TOPIC}/messages?partition={number}&offset={len(rows)}"
                page = self._page(worker, f"{path}&limit={READ_ROWS}")
                rows += [(each["offset"], each["value"]) for each in page["messages"]]
                if not page["messages"] or page["next_offset"] >= page["end_offset"]:
                    break
            found[number] = rows
        return found

    def _page(self, worker: Worker, path: str) -> Any:
        """Read; a partition may still be on its way."""
        deadline = time.monotonic() + QUIET_S
        while True:
            answer = worker.get(path)
            if answer.status == 200:
                return answer.json()
            assert answer.status == 503, answer.body
            assert time.monotonic() < deadline, answer.body
            time.sleep(0.2)
