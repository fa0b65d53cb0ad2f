"""Coordination in one SQLite file: the embedded store, for workers of one machine.

Every call is a transaction in a thread of its own; a change is fsynced before it returns. Sessions
are rows with an expiry on the machine's monotonic clock, which all its processes share; rows of an
earlier boot are dead.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from tidewater_coordination import rules
from tidewater_coordination.port import (
    SESSION_TTL_S,
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
from tidewater_coordination.sqlite_schema import (
    SCHEMA,
    TOPICS,
    assignment_of,
    bump,
    put_assignment,
    put_owner,
    topic_of,
)
from tidewater_core.clock import IdSource, SystemIds
from tidewater_core.errors import Retryable

BUSY_TIMEOUT_MS: Final = 10_000
POLL_S: Final = 0.25
"""How soon a change by another process is seen."""
T = TypeVar("T")


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class SqliteCoordination:
    """Registry, ownership and cursors in an SQLite file."""

    def __init__(self, path: Path, ids: IdSource | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._ids = ids or SystemIds()
        self._boot = _boot_id()
        self._worker: WorkerInfo | None = None
        self._ttl_s = SESSION_TTL_S
        self._keeper: SessionKeeper | None = None
        self._thread = ThreadPoolExecutor(1, "coordination")
        self._db: sqlite3.Connection | None = None
        self._seen = -1

    # ---- session

    async def start(self, worker: WorkerInfo | None = None, ttl_s: float = SESSION_TTL_S) -> None:
        """Open the file; with a worker given, open its session and keep it alive."""
        await self._call(self._connect)
        if worker is not None:
            self._worker, self._ttl_s = worker, ttl_s
            self._keeper = SessionKeeper(
                ttl_s,
                lambda: self._call(self._open_session),
                lambda session: self._call(lambda: self._renew_session(session)),
            )
            await self._keeper.start()

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
        """End the session and close the file."""
        session = self.session
        if self._keeper is not None:
            await self._keeper.close()
        db = self._db
        if db is not None:
            with suppress(Retryable):
                await self._call(lambda: self._end_session(session))
            self._db = None
            await asyncio.get_running_loop().run_in_executor(self._thread, db.close)
        self._thread.shutdown()

    def _connect(self) -> None:
        self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        self._db.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        self._db.execute("PRAGMA journal_mode = WAL")
        # An epoch that is given out must never be given again, not even after a power cut.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(SCHEMA)
        self._take_over_old_owners()

    def _take_over_old_owners(self) -> None:
        """Bring the table of the first version along: its epochs must not be given again."""
        with self._change() as db:
            columns = [row[1] for row in db.execute("PRAGMA table_info(owners)")]
            if "owner" not in columns:
                return
            for topic, partition, owner, epoch in db.execute("SELECT * FROM owners").fetchall():
                record = Ownership(partition, owner, epoch)
                db.execute(
                    "INSERT OR IGNORE INTO partitions VALUES (?, ?, ?)",
                    (topic, partition, msgspec.json.encode(record).decode()),
                )
            db.execute("DROP TABLE owners")

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.OperationalError as error:
            raise Retryable("StoreAway", f"the coordination file: {error}", 500) from error

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        assert self._db is not None, "started"
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _open_session(self) -> str:
        worker, now = self._worker, time.monotonic()
        assert worker is not None
        session = str(self._ids.uuid())
        with self._change() as db:
            row = db.execute(
                "SELECT info FROM sessions WHERE worker_id = ? AND boot = ? AND expires > ?",
                (worker.worker_id, self._boot, now),
            ).fetchone()
            if row is not None:
                rules.check_id_free(worker, msgspec.json.decode(row[0], type=WorkerInfo))
            db.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)",
                (worker.worker_id, session, msgspec.json.encode(worker).decode(), self._boot,
                 now + self._ttl_s),
            )  # fmt: skip
            bump(db)
        return session

    def _renew_session(self, session: str) -> bool:
        # One that has run out is not renewed: others may have acted on that.
        now = time.monotonic()
        assert self._db is not None
        found = self._db.execute(
            "UPDATE sessions SET expires = ? WHERE session = ? AND boot = ? AND expires > ?",
            (now + self._ttl_s, session, self._boot, now),
        ).rowcount
        return found == 1

    def _end_session(self, session: str) -> None:
        with self._change() as db:
            if db.execute("DELETE FROM sessions WHERE session = ?", (session,)).rowcount:
                bump(db)

    # ---- registry

    async def registry(self) -> Registry:
        """Return everything but cursors."""
        return await self._call(self._registry)

    def _registry(self) -> Registry:
        assert self._db is not None
        db = self._db
        db.execute("BEGIN")
        try:
            live = self._live()
            topics = [topic_of(row) for row in db.execute(TOPICS)]
            named = [RegisteredSubscription(*r) for r in db.execute("SELECT * FROM subscriptions")]
            assignments = {
                topic: msgspec.json.decode(workers, type=dict[int, str])
                for topic, workers in db.execute("SELECT * FROM assignments")
            }
            owners: dict[str, dict[int, Ownership]] = {}
            for topic, partition, record in db.execute("SELECT * FROM partitions"):
                owner = rules.standing(rules.owner_of(record, live))
                owners.setdefault(topic, {})[partition] = owner
            version = db.execute("SELECT version FROM registry_version").fetchone()[0]
        finally:
            db.execute("COMMIT")
        return Registry(
            version,
            {found.topic: found for found in topics},
            {found.name: found for found in named},
            assignments,
            {worker.worker_id: worker for worker in live.values() if not worker.is_job},
            owners,
        )

    def _live(self) -> dict[str, WorkerInfo]:
        """Return the live sessions by name."""
        assert self._db is not None
        rows = self._db.execute(
            "SELECT session, info FROM sessions WHERE boot = ? AND expires > ?",
            (self._boot, time.monotonic()),
        )
        return {session: msgspec.json.decode(info, type=WorkerInfo) for session, info in rows}

    async def changed(self, since: int, timeout_s: float) -> int:
        """Wait until the version is not `since`, at most `timeout_s`; return it."""
        deadline = time.monotonic() + timeout_s
        while (version := await self._call(self._version)) == since:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(min(POLL_S, left_s))
        return version

    def _version(self) -> int:
        assert self._db is not None
        late = self._db.execute(
            "SELECT count(*) FROM sessions WHERE expires <= ? OR boot <> ?",
            (time.monotonic(), self._boot),
        ).fetchone()[0]
        if late:
            # Nobody writes when a session runs out: the first to notice makes it a change.
            with self._change() as db:
                gone = db.execute(
                    "DELETE FROM sessions WHERE expires <= ? OR boot <> ?",
                    (time.monotonic(), self._boot),
                ).rowcount
                if gone:
                    bump(db)
        return int(self._db.execute("SELECT version FROM registry_version").fetchone()[0])

    async def register_topic(self, topic: str, spec: str, uuid: str) -> RegisteredTopic:
        """Add a topic or change its spec; an existing one keeps its uuid."""
        row = await self._call(lambda: self._register("topics", "topic", (topic, uuid, spec)))
        return topic_of((*row[:3], await self._call(lambda: self._phase(topic))))

    async def register_subscription(
        self, name: str, spec: str, uuid: str
    ) -> RegisteredSubscription:
        """Add a subscription or change its spec; an existing one keeps its uuid."""
        row = await self._call(lambda: self._register("subscriptions", "name", (name, uuid, spec)))
        return RegisteredSubscription(*row)

    def _phase(self, topic: str) -> str:
        assert self._db is not None
        query = "SELECT phase FROM topic_phases WHERE topic = ?"
        row = self._db.execute(query, (topic,)).fetchone()
        return TopicPhase.ACTIVE if row is None else row[0]

    async def set_topic_phase(self, topic: str, uuid: str, phase: TopicPhase) -> bool:
        """Move a topic on in its life; False if there is none of that uuid."""

        def change() -> bool:
            with self._change() as db:
                row = db.execute(f"{TOPICS} WHERE topics.topic = ?", (topic,)).fetchone()
                if row is None or row[1] != uuid:
                    return False
                known = topic_of(row)
                wanted = rules.moved_on(known, phase)
                if wanted != known:
                    values = (topic, wanted.phase)
                    db.execute("INSERT OR REPLACE INTO topic_phases VALUES (?, ?)", values)
                    bump(db)
            return True

        return await self._call(change)

    def _register(
        self, table: str, column: str, values: tuple[str, str, str]
    ) -> tuple[str, str, str]:
        with self._change() as db:
            changed = db.execute(
                f"INSERT INTO {table} VALUES (?, ?, ?) ON CONFLICT ({column}) "  # noqa: S608
                "DO UPDATE SET spec = excluded.spec WHERE spec IS NOT excluded.spec",
                values,
            ).rowcount
            if changed:
                bump(db)
            row: tuple[str, str, str] = db.execute(
                f"SELECT * FROM {table} WHERE {column} = ?",  # noqa: S608
                values[:1],
            ).fetchone()
        return row

    async def unregister_topic(self, topic: str, *, keep_cursors: bool = False) -> None:
        """Forget a topic, its assignment, owners and cursors (or those of nobody)."""
        stays = "subscription IN (SELECT name FROM subscriptions)" if keep_cursors else "FALSE"

        def forget() -> None:
            with self._change() as db:
                for table in ("topics", "topic_phases", "assignments", "partitions"):
                    db.execute(f"DELETE FROM {table} WHERE topic = ?", (topic,))  # noqa: S608
                db.execute(f"DELETE FROM cursors WHERE topic = ? AND NOT {stays}", (topic,))  # noqa: S608
                bump(db)

        await self._call(forget)

    async def unregister_subscription(self, name: str) -> None:
        """Forget a subscription and its cursors."""

        def forget() -> None:
            with self._change() as db:
                db.execute("DELETE FROM subscriptions WHERE name = ?", (name,))
                db.execute("DELETE FROM cursors WHERE subscription = ?", (name,))
                bump(db)

        await self._call(forget)

    async def set_assignment(self, topic: str, partitions: Mapping[int, str]) -> None:
        """Say which worker should have which partition of a topic."""

        def change() -> None:
            with self._change() as db:
                put_assignment(db, topic, partitions)

        await self._call(change)

    async def assign(
        self, topic: str, partition: int, worker_id: str, others: Mapping[int, str]
    ) -> None:
        """Say which worker should have one partition; the rest stays."""

        def change() -> None:
            with self._change() as db:
                known = assignment_of(db, topic)
                wanted = rules.reassigned(known, partition, worker_id, others)
                put_assignment(db, topic, wanted)

        await self._call(change)

    async def topics(self) -> list[RegisteredTopic]:
        """Return every topic, by name."""
        found = (await self.registry()).topics
        return [found[name] for name in sorted(found)]

    async def subscriptions(self) -> list[RegisteredSubscription]:
        """Return every subscription, by name."""
        found = (await self.registry()).subscriptions
        return [found[name] for name in sorted(found)]

    # ---- ownership

    async def acquire(self, topic: str, partition: int, epoch_above: int = 0) -> Grant:
        """Take a partition for this session."""
        worker, session = self._worker, self.session
        if worker is None or not session:
            raise Retryable("SessionLost", "this worker has no session", 500)

        def take() -> Grant:
            with self._change() as db:
                if session not in self._live():
                    raise Retryable("SessionLost", "this worker's session has run out", 500)
                found = self._owner(topic, partition)
                record, given = rules.grant(topic, partition, found, worker, session, epoch_above)
                put_owner(db, topic, record)
            return given

        return await self._call(take)

    def _owner(self, topic: str, partition: int) -> Ownership | None:
        assert self._db is not None
        row = self._db.execute(
            "SELECT record FROM partitions WHERE topic = ? AND partition = ?", (topic, partition)
        ).fetchone()
        return None if row is None else rules.owner_of(row[0], self._live())

    async def release(
        self, topic: str, partition: int, epoch: int, drained_at: int | None = None
    ) -> None:
        """Let a partition go."""

        def let_go() -> None:
            with self._change() as db:
                found = self._owner(topic, partition)
                if found is not None and found.epoch == epoch:
                    put_owner(db, topic, rules.released(found, drained_at))

        await self._call(let_go)

    async def give_up(self, topic: str, partition: int, reason: str) -> Ownership:
        """Note a person's word that the volume of a partition is lost."""

        def note() -> Ownership:
            with self._change() as db:
                record = rules.give_up(topic, partition, self._owner(topic, partition), reason)
                put_owner(db, topic, record)
            return record

        return await self._call(note)

    async def begin(self, topic: str, partition: int, epoch: int, gap: Gap | None = None) -> None:
        """Note that the owner has taken over what the last one left."""

        def note() -> None:
            with self._change() as db:
                found = self._owner(topic, partition)
                put_owner(db, topic, rules.begun(topic, partition, found, epoch, gap))

        await self._call(note)

    # ---- leases for other things

    async def take_lease(self, name: str) -> bool:
        """Take or keep a named lease for this session."""
        session = self.session

        def take() -> bool:
            with self._change() as db:
                live = self._live()
                row = db.execute("SELECT session FROM leases WHERE name = ?", (name,)).fetchone()
                if session not in live or (row and row[0] != session and row[0] in live):
                    return False
                db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?)", (name, session))
            return True

        return await self._call(take)

    async def drop_lease(self, name: str) -> None:
        """Give a named lease back, if it is ours."""
        session = self.session

        def drop() -> None:
            with self._change() as db:
                db.execute("DELETE FROM leases WHERE name = ? AND session = ?", (name, session))

        await self._call(drop)

    async def lease_holder(self, name: str) -> str | None:
        """Return the id of the worker that has a named lease, or None."""

        def find() -> str | None:
            assert self._db is not None
            query = "SELECT session FROM leases WHERE name = ?"
            row = self._db.execute(query, (name,)).fetchone()
            holder = None if row is None else self._live().get(row[0])
            return None if holder is None else holder.worker_id

        return await self._call(find)

    # ---- cursors

    async def load_cursors(self, subscription: str, topic: str) -> dict[int, bytes]:
        """Return a subscription's stored progress by partition."""

        def load() -> dict[int, bytes]:
            assert self._db is not None
            rows = self._db.execute(
                "SELECT partition, value FROM cursors WHERE subscription = ? AND topic = ?",
                (subscription, topic),
            )
            return dict(rows.fetchall())

        return await self._call(load)

    async def store_cursors(
        self,
        items: Mapping[CursorKey, bytes],
        epochs: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Store progress, all or nothing; durable when it returns."""
        rows = [(*key, value) for key, value in items.items()]
        fences = list((epochs or {}).items())

        def store() -> None:
            with self._change() as db:
                for (topic, partition), epoch in fences:
                    rules.held(topic, partition, self._owner(topic, partition), epoch)
                db.executemany("INSERT OR REPLACE INTO cursors VALUES (?, ?, ?, ?)", rows)

        await self._call(store)
