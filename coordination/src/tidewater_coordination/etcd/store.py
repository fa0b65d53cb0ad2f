"""Coordination in etcd: for workers of many machines.

Every change is one transaction that requires what it was decided on: the revision of the record,
and that our session's key is still on our lease. A change that got no answer may be sent again:
if the first one landed the conditions no longer hold, and the decision is made anew.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from tidewater_coordination import rules
from tidewater_coordination.etcd import wire
from tidewater_coordination.etcd.client import EtcdClient
from tidewater_coordination.etcd.cursors import CURSORS_PER_TXN, Revisions, portions
from tidewater_coordination.etcd.keys import PREFIX, Keys
from tidewater_coordination.etcd.login import Login
from tidewater_coordination.etcd.mirror import Mirror, session_name
from tidewater_coordination.port import (
    GIVEN_UP_MAX,
    SESSION_TTL_S,
    AcceptedLoss,
    CursorKey,
    Gap,
    Grant,
    Ownership,
    RegisteredSubscription,
    RegisteredTopic,
    Registry,
    TopicPhase,
    WorkerInfo,
)
from tidewater_coordination.session import SessionKeeper
from tidewater_core.errors import Corrupt, OutcomeUnknown, Retryable

ROUNDS_MAX: Final = 20
"""Attempts against others that change the same record."""
CATCH_UP_S: Final = 2.0
Named = TypeVar("Named", RegisteredTopic, RegisteredSubscription)
Record = TypeVar("Record")


class EtcdCoordination:
    """Registry, ownership, leases and cursors in etcd."""

    def __init__(
        self, endpoints: Sequence[str], prefix: str = PREFIX, login: Login | None = None
    ) -> None:
        self.client = EtcdClient(endpoints, login)
        self._keys = Keys(prefix)
        self._mirror = Mirror(self.client, self._keys)
        self._worker: WorkerInfo | None = None
        self._ttl_s = SESSION_TTL_S
        self._keeper: SessionKeeper | None = None
        self._cursor_revisions = Revisions[bytes, int]()
        self._owner_revisions = Revisions[tuple[str, int], tuple[int, int]]()
        """Partition to its epoch and the revision of its record."""
        self._storing = asyncio.Lock()

    # ---- session

    async def start(self, worker: WorkerInfo | None = None, ttl_s: float = SESSION_TTL_S) -> None:
        """Connect; with a worker given, open its session and keep it alive."""
        self.client.open()
        try:
            await self._mirror.start()
            if worker is not None:
                self._worker, self._ttl_s = worker, ttl_s
                self._keeper = SessionKeeper(ttl_s, self._open_session, self._renew_session)
                await self._keeper.start()
        except BaseException:
            await self.close()  # as it was, so that it can be tried again
            raise

    @property
    def session(self) -> str:
        """The session's name; empty while there is none."""
        return "" if self._keeper is None else self._keeper.session

    @property
    def session_deadline(self) -> float:
        """The moment up to which the session is certainly live."""
        return 0.0 if self._keeper is None else self._keeper.deadline

    @property
    def session_counters(self) -> Mapping[str, int]:
        """What happened to the session so far."""
        return {} if self._keeper is None else self._keeper.counters

    async def close(self) -> None:
        """End the session and hang up."""
        session = self.session
        if self._keeper is not None:
            await self._keeper.close()
            self._keeper = None
        if session:
            with suppress(Retryable):
                await self.client.revoke_lease(int(session, 16))
        await self._mirror.close()
        await self.client.close()

    async def _open_session(self) -> str:
        worker = self._worker
        assert worker is not None
        key = self._session_key(worker)
        lease = await self.client.grant_lease(math.ceil(self._ttl_s))
        for _ in range(ROUNDS_MAX):
            found = (await self.client.range(key)).kvs
            if found and found[0].lease != lease:
                rules.check_id_free(worker, _read(found[0], WorkerInfo))
            answer = await self.client.txn(
                [wire.is_at(key, found[0].mod_revision if found else 0)],
                [wire.put(key, msgspec.json.encode(worker), lease)],
            )
            if answer.succeeded:
                if found and found[0].lease not in (0, lease):
                    # An earlier process of this volume: its session must not look live.
                    with suppress(Retryable):
                        await self.client.revoke_lease(found[0].lease)
                if not worker.is_job:
                    await self._mirror.reaches(answer.revision, CATCH_UP_S)
                return session_name(lease)
        raise _contended(key)

    async def _renew_session(self, session: str) -> bool:
        return await self.client.keep_alive(int(session, 16), self._ttl_s / 2)

    def _session_holds(self) -> bytes:
        """Return the condition that our session is live."""
        if self._worker is None or not self.session:
            raise Retryable("SessionLost", "this worker has no session", 500)
        return wire.has_lease(self._session_key(self._worker), int(self.session, 16))

    def _session_key(self, holder: WorkerInfo) -> bytes:
        keys = self._keys
        return keys.job(holder.worker_id) if holder.is_job else keys.worker(holder.worker_id)

    # ---- registry

    async def registry(self) -> Registry:
        """Return everything but cursors."""
        return self._mirror.registry()

    async def ask_registry(self) -> Registry:
        """Return everything but cursors by a read of its own, not from the watch's memory.

        For what cannot be undone: a watch may be behind, and nothing tells by how much.
        """
        return await self._mirror.ask()

    async def changed(self, since: int, timeout_s: float) -> int:
        """Wait until the version is not `since`, at most `timeout_s`; return it."""
        return await self._mirror.changed(since, timeout_s)

    async def register_topic(self, topic: str, spec: str, uuid: str) -> RegisteredTopic:
        """Add a topic or change its spec; an existing one keeps its uuid."""
        return await self._register(self._keys.topic(topic), RegisteredTopic(topic, uuid, spec))

    async def register_subscription(
        self, name: str, spec: str, uuid: str
    ) -> RegisteredSubscription:
        """Add a subscription or change its spec; an existing one keeps its uuid."""
        wanted = RegisteredSubscription(name, uuid, spec)
        return await self._register(self._keys.subscription(name), wanted)

    async def _register(self, key: bytes, wanted: Named) -> Named:
        def decide(known: Named | None) -> Named:
            if known is None:
                return wanted
            return msgspec.structs.replace(known, spec=wanted.spec)

        record = await self._change(key, type(wanted), decide)
        assert record is not None
        return record

    async def set_topic_phase(self, topic: str, uuid: str, phase: TopicPhase) -> bool:
        """Move a topic on in its life; False if there is none of that uuid."""

        def decide(known: RegisteredTopic | None) -> RegisteredTopic | None:
            if known is None or known.uuid != uuid:
                return None
            return rules.moved_on(known, phase)

        return await self._change(self._keys.topic(topic), RegisteredTopic, decide) is not None

    async def _change(
        self, key: bytes, kind: type[Record], decide: Callable[[Record | None], Record | None]
    ) -> Record | None:
        """Read a record, decide, and write it if nothing has changed since; None: leave it."""
        for _ in range(ROUNDS_MAX):
            found = (await self.client.range(key)).kvs
            known = _read(found[0], kind) if found else None
            wanted = decide(known)
            if wanted is None or wanted == known:
                return wanted
            answer = await self.client.txn(
                [wire.is_at(key, found[0].mod_revision if found else 0)],
                [wire.put(key, msgspec.json.encode(wanted))],
            )
            if answer.succeeded:
                await self._mirror.reaches(answer.revision, CATCH_UP_S)
                return wanted
        raise _contended(key)

    async def unregister_topic(self, topic: str, *, keep_cursors: bool = False) -> None:
        """Forget a topic, its assignment, owners and cursors (or those of nobody)."""
        owners, cursors = self._keys.owners(topic), self._keys.cursors(topic)
        await self._write(
            wire.delete(self._keys.topic(topic)),
            wire.delete(self._keys.assignment(topic)),
            wire.delete(owners, wire.prefix_end(owners)),
            *([] if keep_cursors else [wire.delete(cursors, wire.prefix_end(cursors))]),
        )
        if keep_cursors:
            prefix = self._keys.subscriptions.encode()
            found = await self.client.range(prefix, wire.prefix_end(prefix), keys_only=True)
            known = {kv.key.removeprefix(prefix).decode() for kv in found.kvs}
            await self._delete_cursors(cursors, lambda name: name not in known)

    async def unregister_subscription(self, name: str) -> None:
        """Forget a subscription and its cursors."""
        await self._delete_cursors(self._keys.all_cursors.encode(), lambda of: of == name)
        await self._write(wire.delete(self._keys.subscription(name)))

    async def _delete_cursors(self, prefix: bytes, is_doomed: Callable[[str], bool]) -> None:
        """Delete the cursors below a prefix whose subscription a rule names."""
        every = await self.client.range(prefix, wire.prefix_end(prefix), keys_only=True)
        names = [(kv.key, self._keys.subscription_of_cursor(kv.key)) for kv in every.kvs]
        doomed = [key for key, name in names if is_doomed(name)]
        for begin in range(0, len(doomed), CURSORS_PER_TXN):
            some = doomed[begin : begin + CURSORS_PER_TXN]
            # Nothing that is watched changes: the mirror would be waited for in vain.
            await self.client.txn([], [wire.delete(key) for key in some])

    async def set_assignment(self, topic: str, partitions: Mapping[int, str]) -> None:
        """Say which worker should have which partition of a topic."""
        value = msgspec.json.encode(dict(sorted(partitions.items())))
        await self._write(wire.put(self._keys.assignment(topic), value))

    async def assign(
        self, topic: str, partition: int, worker_id: str, others: Mapping[int, str]
    ) -> None:
        """Say which worker should have one partition; the rest stays."""
        await self._change(
            self._keys.assignment(topic),
            dict[int, str],
            lambda known: rules.reassigned(known, partition, worker_id, others),
        )

    async def _write(self, *operations: bytes) -> None:
        answer = await self.client.txn([], operations)
        await self._mirror.reaches(answer.revision, CATCH_UP_S)

    async def topics(self) -> list[RegisteredTopic]:
        """Return every topic, by name."""
        found = self._mirror.registry().topics
        return [found[name] for name in sorted(found)]

    async def subscriptions(self) -> list[RegisteredSubscription]:
        """Return every subscription, by name."""
        found = self._mirror.registry().subscriptions
        return [found[name] for name in sorted(found)]

    # ---- ownership

    async def acquire(self, topic: str, partition: int, epoch_above: int = 0) -> Grant:
        """Take a partition for this session."""
        condition = self._session_holds()
        worker, session = self._worker, self.session
        assert worker is not None
        given: list[Grant] = []

        def decide(found: Ownership | None) -> Ownership:
            record, one = rules.grant(topic, partition, found, worker, session, epoch_above)
            given.append(one)
            return record

        await self._change_owner(topic, partition, decide, condition)
        return given[-1]

    async def release(
        self, topic: str, partition: int, epoch: int, drained_at: int | None = None
    ) -> None:
        """Let a partition go."""

        def decide(found: Ownership | None) -> Ownership | None:
            if found is None or found.epoch != epoch:
                return None
            return rules.released(found, drained_at)

        await self._change_owner(topic, partition, decide)

    async def give_up(self, topic: str, partition: int, reason: str) -> Ownership:
        """Note a person's word that the volume of a partition is lost."""
        record = await self._change_owner(
            topic, partition, lambda found: rules.give_up(topic, partition, found, reason)
        )
        assert record is not None
        return record

    async def accept_loss(
        self, topic: str, uuid: str, accepted: AcceptedLoss, give_up: Sequence[int], reason: str
    ) -> bool:
        """Give partitions up by a person's word and remember the word, all or nothing.

        False if there is no topic of that uuid, or the word was acted on before; `Conflict` if one
        of the owners is there. No more than `GIVEN_UP_MAX` at once.
        """
        assert len(give_up) <= GIVEN_UP_MAX
        key, workers = self._keys.topic(topic), self._keys.workers.encode()
        places = [self._keys.owner(topic, number) for number in give_up]
        for _ in range(ROUNDS_MAX):
            found, sessions, *owners = await self.client.get_all(
                wire.get(key), wire.get(workers, wire.prefix_end(workers)), *map(wire.get, places)
            )
            known = _read(found[0], RegisteredTopic) if found else None
            if known is None or known.uuid != uuid:
                return False
            wanted = rules.accept_loss(known, accepted, give_up)
            if wanted is None:
                return False
            live = {session_name(kv.lease): _read(kv, WorkerInfo) for kv in sessions}
            lost = [
                rules.give_up(topic, number, _owner(kvs, live), reason)
                for number, kvs in zip(give_up, owners, strict=True)
            ]
            writes = {key: msgspec.json.encode(wanted)}
            writes |= dict(zip(places, map(rules.record_of, lost), strict=True))
            answer = await self.client.txn(
                [wire.is_at(kv.key, kv.mod_revision) for kvs in (found, *owners) for kv in kvs],
                [wire.put(place, value) for place, value in writes.items()],
            )
            if answer.succeeded:
                await self._mirror.reaches(answer.revision, CATCH_UP_S)
                return True
        raise _contended(key)

    async def begin(self, topic: str, partition: int, epoch: int, gap: Gap | None = None) -> None:
        """Note that the owner has taken over what the last one left."""
        await self._change_owner(
            topic, partition, lambda found: rules.begun(topic, partition, found, epoch, gap)
        )

    async def _change_owner(
        self,
        topic: str,
        partition: int,
        decide: Callable[[Ownership | None], Ownership | None],
        *conditions: bytes,
    ) -> Ownership | None:
        """Read a record with all sessions, decide, and write it if nothing has changed since."""
        key = self._keys.owner(topic, partition)
        workers = self._keys.workers.encode()
        for _ in range(ROUNDS_MAX):
            # One transaction reads both: whether an owner is live is true of one moment.
            found, sessions = await self.client.get_all(
                wire.get(key), wire.get(workers, wire.prefix_end(workers))
            )
            live = {session_name(kv.lease): _read(kv, WorkerInfo) for kv in sessions}
            record = decide(_owner(found, live))
            if record is None:
                return None
            answer = await self.client.txn(
                [wire.is_at(key, found[0].mod_revision if found else 0), *conditions],
                [wire.put(key, rules.record_of(record))],
            )
            if answer.succeeded:
                await self._mirror.reaches(answer.revision, CATCH_UP_S)
                return record
            if conditions and self.session not in live:
                raise Retryable("SessionLost", "this worker's session has run out", 500)
        raise _contended(key)

    # ---- leases for other things

    async def take_lease(self, name: str) -> bool:
        """Take or keep a named lease for this session."""
        assert self._worker is not None
        key, condition = self._keys.lease(name), self._session_holds()
        lease = int(self.session, 16)
        answer = await self.client.txn(
            [wire.is_at(key, 0), condition],
            [wire.put(key, self._worker.worker_id.encode(), lease)],
            [wire.get(key)],
        )
        if answer.succeeded:
            return True
        (found,) = answer.ranges
        return bool(found) and found[0].lease == lease

    async def drop_lease(self, name: str) -> None:
        """Give a named lease back, if it is ours."""
        if self.session:
            key = self._keys.lease(name)
            await self.client.txn([wire.has_lease(key, int(self.session, 16))], [wire.delete(key)])

    async def lease_holder(self, name: str) -> str | None:
        """Return the id of the worker that has a named lease, or None."""
        found = (await self.client.range(self._keys.lease(name))).kvs
        return found[0].value.decode() if found else None

    # ---- cursors

    async def load_cursors(self, subscription: str, topic: str) -> dict[int, bytes]:
        """Return a subscription's stored progress by partition."""
        prefix = self._keys.cursors(topic, subscription)
        answer = await self.client.range(prefix, wire.prefix_end(prefix))
        for kv in answer.kvs:
            self._cursor_revisions[kv.key] = kv.mod_revision
        return {int(kv.key.rpartition(b"/")[2]): kv.value for kv in answer.kvs}

    async def store_cursors(
        self,
        items: Mapping[CursorKey, bytes],
        epochs: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Store progress; durable when it returns. All or nothing: up to 60, and about 1 MB."""
        async with self._storing:
            self._forget_gone()
            for some in portions(items):
                await self._store(some, epochs or {})

    def _forget_gone(self) -> None:
        if not (self._cursor_revisions.is_due or self._owner_revisions.is_due):
            return
        now = self._mirror.registry()
        of = self._keys.subscription_of_cursor
        self._cursor_revisions.forget_gone(lambda key: of(key) in now.subscriptions)
        self._owner_revisions.forget_gone(lambda place: place[0] in now.topics)

    async def _store(
        self, items: Mapping[CursorKey, bytes], epochs: Mapping[tuple[str, int], int]
    ) -> None:
        """Store some cursors, each on the revision that we know it at.

        A write that got no answer could otherwise land after a later one, and take the cursor back.
        """
        known = self._cursor_revisions
        named = {
            self._keys.cursor(k.topic, k.subscription, k.partition): v for k, v in items.items()
        }
        places = {(key.topic, key.partition) for key in items} & epochs.keys()
        for _ in range(ROUNDS_MAX):
            fences = [await self._fence(*place, epochs[place]) for place in places]
            for key in named.keys() - known.keys():
                found = (await self.client.range(key)).kvs
                known[key] = found[0].mod_revision if found else 0
            answer = await self.client.txn(
                [*fences, *(wire.is_at(key, known[key]) for key in named)],
                [wire.put(key, value) for key, value in named.items()],
                [wire.get(key) for key in named],
            )
            if answer.succeeded:
                known.update(dict.fromkeys(named, answer.revision))
                return
            for key, kvs in zip(named, answer.ranges, strict=True):
                known[key] = kvs[0].mod_revision if kvs else 0
            for place in places:
                self._owner_revisions.pop(place, None)
        raise OutcomeUnknown("StoreContended", "cursors are being changed by somebody else")

    async def _fence(self, topic: str, partition: int, epoch: int) -> bytes:
        """Return the condition that a partition has not changed hands."""
        key = self._keys.owner(topic, partition)
        known = self._owner_revisions.get((topic, partition))
        if known is None or known[0] != epoch:
            found = (await self.client.range(key)).kvs
            record = _read(found[0], Ownership) if found else None
            rules.held(topic, partition, record, epoch)
            known = (epoch, found[0].mod_revision)
            self._owner_revisions[topic, partition] = known
        return wire.is_at(key, known[1])


def _read(kv: wire.KeyValue, kind: type[Record]) -> Record:
    try:
        return msgspec.json.decode(kv.value, type=kind)
    except msgspec.MsgspecError as error:
        message = f"etcd has something unreadable at {kv.key.decode()}: {error}"
        raise Corrupt("RecordUnreadable", message) from error


def _owner(kvs: Sequence[wire.KeyValue], live: Mapping[str, WorkerInfo]) -> Ownership | None:
    return rules.with_life(_read(kvs[0], Ownership), live) if kvs else None


def _contended(key: bytes) -> Retryable:
    return Retryable("StoreContended", f"{key.decode()} is being changed by others", 200)
