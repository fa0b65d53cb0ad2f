"""Which worker commits the rows of a topic whose partitions several workers own.

One per table, by the lease `committer/<topic>`: whoever of the owners first has files to commit
takes it, and keeps it with its session. The others hand their files to it, from edge to edge. If
it is away they agree on a stand-in without asking anybody: the first of the topic's owners that is
not away. Nobody has to be right about this: the table refuses what must not land, and a worker
that finds nobody commits alone.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tidewater_coordination.port import Coordination
from tidewater_core.errors import Retryable, TidewaterError
from tidewater_worker.ports import Commits, OfferAnswer
from tidewater_worker.topic import Topic

if TYPE_CHECKING:
    from tidewater_worker.node import Node

ROUND_S: Final = 1.0
TRIES: Final = 3
PENDING_S: Final = 3.0
"""After this long the committing worker says that it is still at it, and is asked again."""
PING_S: Final = 1.0
SILENT_S: Final = 2.0
"""Past that it is taken for away: paused, or cut off."""
SUSPECT_S: Final = 3.0
"""How long a worker that did not answer is passed over; twice as long each time in a row."""
SUSPECT_S_MAX: Final = 24.0
STAND_IN_S: Final = 3.0
"""A stand-in commits for the others this long after the last of their offers."""
OFFER_S_MIN: Final = 60.0
"""An offer is given up after this and two intervals of the topic: the table is asked then."""
log = logging.getLogger(__name__)


class Target(NamedTuple):
    """Who commits."""

    worker_id: str
    url: str
    """Empty: this worker."""
    stands_in: bool


def choose(
    me: str,
    holder: str | None,
    owners: Mapping[str, str],
    away: Collection[str],
) -> Target:
    """Say who commits: the lease's holder, or the first of the owners while that one is away.

    `owners` are the live workers with partitions of the topic and how to reach them, `me` too.
    """
    if holder is not None and holder not in away and holder in owners:
        return Target(holder, "" if holder == me else owners[holder], stands_in=False)
    able = sorted(worker for worker in owners if worker not in away and worker != holder)
    first = able[0] if able and me in able else me
    return Target(first, "" if first == me else owners[first], stands_in=True)


def _not_landed(reason: str, message: str) -> OfferAnswer:
    return OfferAnswer(landed=False, reason=reason, message=message)


class Committing:
    """Finds the committing worker of each topic, or is it."""

    def __init__(self, node: "Node", coordination: Coordination) -> None:
        self._node, self._coordination = node, coordination
        self._held: dict[str, str] = {}
        """Topic → the session for which this worker has its lease."""
        self._holders: dict[str, str | None] = {}
        """Topic → the worker that has its lease, as of the last question."""
        self._standing_in: dict[str, float] = {}
        """Topic → until when this worker commits for one that is away."""
        self._away: dict[tuple[str, str], float] = {}
        """(Topic, worker) → until when it is passed over."""
        self._strikes: dict[tuple[str, str], int] = {}
        """(Topic, worker) → how often in a row it did not answer."""
        self._told: dict[str, Commits] = {}
        node.link.on_offer = self._on_offer

    # ---- what the table process is told

    def role(self, topic: Topic) -> Commits:
        """Say who commits what this worker writes."""
        if not any(partition.is_elsewhere for partition in topic.partitions.values()):
            return Commits.ALONE
        name = str(topic.name)
        here = self._is_holder(name) or name in self._standing_in
        return Commits.HERE if here else Commits.ELSEWHERE

    def told(self, topic: Topic) -> Commits:
        """Say who commits, and remember that the table process knows."""
        role = self._told[str(topic.name)] = self.role(topic)
        return role

    def _is_holder(self, name: str) -> bool:
        session = self._coordination.session
        return bool(session) and self._held.get(name) == session

    async def watch(self) -> None:
        """Follow what changes by time or by the registry alone."""
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                await self._round()
            except TidewaterError as error:
                log.warning("a round over the committing workers failed: %s", error)
            except Exception:
                log.exception("a round over the committing workers failed")

    async def _round(self) -> None:
        now = self._node.clock.monotonic()
        self._away = {key: until for key, until in self._away.items() if until > now}
        for name in [name for name, until in self._standing_in.items() if until <= now]:
            del self._standing_in[name]
        topics = self._node.topics
        for gone in [name for name in self._told if name not in topics]:
            del self._told[gone]
        self._strikes = {key: n for key, n in self._strikes.items() if key[0] in topics}
        for name in list(self._held):
            topic = topics.get(name)
            if topic is None or not self._has_part(topic):
                session = self._held.pop(name)
                try:
                    await self._coordination.drop_lease(_lease(name))
                except TidewaterError:
                    self._held.setdefault(name, session)  # the next round tries again
                    raise
        self._tell()

    def _tell(self) -> None:
        """Tell the table process if a topic's rows are committed by another one now."""
        if any(self.role(t) is not self._told.get(n) for n, t in self._node.topics.items()):
            self._node.link.assign()

    @staticmethod
    def _has_part(topic: Topic) -> bool:
        parts = topic.partitions.values()
        return any(p.appender for p in parts) and any(p.is_elsewhere for p in parts)

    # ---- finding it

    async def _committer_of(self, topic: Topic) -> Target:
        name = str(topic.name)
        me = self._node.settings.worker_id
        now = self._node.clock.monotonic()
        if self._is_holder(name):
            return Target(me, "", stands_in=False)
        owners = self._owners(topic)
        holder = self._holders.get(name)
        # Who has no part in the topic any more gives the lease back: another one may have it.
        if holder is None or holder not in owners or self._is_away(name, holder, now):
            try:
                if await self._coordination.take_lease(_lease(name)):
                    self._held[name] = self._coordination.session
                    log.info("this worker commits for all owners of topic %s", name)
                    return Target(me, "", stands_in=False)
                holder = await self._coordination.lease_holder(_lease(name))
                if holder == me:
                    holder = None  # an earlier life of this worker, whose session runs out
                self._holders[name] = holder
            except TidewaterError as error:
                log.warning("who commits for topic %s is not known: %s", name, error)
        away = {worker for worker in owners if self._is_away(name, worker, now)}
        return choose(me, holder, owners, away)

    def _owners(self, topic: Topic) -> dict[str, str]:
        registry = self._node.owning.registry
        owners = {self._node.settings.worker_id: ""}
        for owner in registry.owners.get(str(topic.name), {}).values():
            worker = registry.workers.get(owner.worker_id)
            if owner.is_live and worker is not None:
                owners.setdefault(owner.worker_id, worker.url)
        return owners

    def _is_away(self, name: str, worker: str, now: float) -> bool:
        return self._away.get((name, worker), 0.0) > now

    # ---- handing over

    def _on_offer(self, offer: dict[str, Any], answered: Callable[[OfferAnswer], None]) -> None:
        self._node.spawn(self._hand_over(offer, answered))

    async def _hand_over(
        self, offer: dict[str, Any], answered: Callable[[OfferAnswer], None]
    ) -> None:
        topic = self._node.topics.get(offer["topic"])
        answer = _not_landed("CommitterAway", "no worker was there to commit")
        try:
            for _ in range(TRIES):
                if topic is None:
                    break
                target = await self._committer_of(topic)
                if not target.url:
                    answer = self._commit_here(topic, target)
                    break
                try:
                    answer = await self._send(topic, target, offer)
                    break
                except TidewaterError as error:
                    self._pass_over(topic, target, error)
        finally:
            answered(answer)

    def _commit_here(self, topic: Topic, target: Target) -> OfferAnswer:
        """Have the table process commit itself from now on, and what it offered as well."""
        if target.stands_in:
            self._stand_in(str(topic.name))
        self._tell()
        return _not_landed("CommitHere", "this worker commits for all owners of the topic")

    def _stand_in(self, name: str) -> None:
        self._standing_in[name] = self._node.clock.monotonic() + STAND_IN_S

    async def _send(self, topic: Topic, target: Target, offer: dict[str, Any]) -> OfferAnswer:
        interval_s = topic.spec.writer.flush_interval.seconds
        give_up_at = self._node.clock.monotonic() + OFFER_S_MIN + 2 * interval_s
        path = f"/v1/{topic.name}/commits?stand_in={str(target.stands_in).lower()}"
        body = msgspec.json.encode(offer)
        while self._node.clock.monotonic() < give_up_at:
            found = await self._node.forwarding.call(
                target.url, "POST", path, body, PENDING_S + SILENT_S, as_worker=True
            )
            if not found.get("pending"):
                self._strikes.pop((str(topic.name), target.worker_id), None)
                return msgspec.convert(found, OfferAnswer, str_keys=True)
        raise Retryable("CommitterSlow", f"{target.worker_id} has not committed in time")

    def _pass_over(self, topic: Topic, target: Target, error: TidewaterError) -> None:
        name = str(topic.name)
        log.warning("%s: %s does not commit for this worker: %s", name, target.worker_id, error)
        key = (name, target.worker_id)
        strikes = self._strikes[key] = self._strikes.get(key, 0) + 1
        pause_s = min(SUSPECT_S * 2 ** min(strikes - 1, 10), SUSPECT_S_MAX)
        self._away[key] = self._node.clock.monotonic() + pause_s
        self._holders.pop(name, None)

    # ---- being it

    async def take(self, topic: Topic, offer: Any, stand_in: bool) -> OfferAnswer | None:
        """Commit files of another worker; None if it takes longer and is to be asked again."""
        name = str(topic.name)
        if not self._is_holder(name):
            if not stand_in:
                raise Retryable("NotCommitter", f"this worker does not commit for {name}", 100)
            self._stand_in(name)
            self._tell()
        try:
            async with asyncio.timeout(PENDING_S):
                return await self._node.link.commit(offer, 2 * PENDING_S)
        except TimeoutError:
            await self._check_alive(name)
            return None

    async def _check_alive(self, name: str) -> None:
        """Let another one commit if our table process does not run; a catalog may take long."""
        try:
            await self._node.link.ping(PING_S)
        except TidewaterError:
            self._standing_in.pop(name, None)
            if self._held.pop(name, None) is not None:
                log.warning("the table process does not answer: %s is let go", _lease(name))
                await self._coordination.drop_lease(_lease(name))
            raise


def _lease(topic: str) -> str:
    return f"committer/{topic}"
