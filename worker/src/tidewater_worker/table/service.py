"""The table process's engine: all topics of a worker on a few threads (implements TableEngine)."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa

from tidewater_core.clock import Clock, IdSource
from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import NotFound, Retryable, TidewaterError
from tidewater_core.names import TopicName, log_path
from tidewater_core.settings import WorkerSettings
from tidewater_worker.memory import give_back
from tidewater_worker.ports import (
    FlushResult,
    Followed,
    Offer,
    OfferAnswer,
    PartitionState,
    Sifted,
    TopicAssignment,
    TopicState,
)
from tidewater_worker.table.catalog import TableCatalog, open_catalog
from tidewater_worker.table.dropping import drop_table
from tidewater_worker.table.follower import Follower, partition_states
from tidewater_worker.table.health import HealthIndex
from tidewater_worker.table.history import HistoryReader
from tidewater_worker.table.opening import TopicTable
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.reads import Decoded
from tidewater_worker.table.scheduler import Scheduler
from tidewater_worker.table.snapshots import frontier_at
from tidewater_worker.table.topic import TopicRun
from tidewater_worker.table.topic_joint import JointTopic
from tidewater_worker.table.waiting import Flushes

log = logging.getLogger(__name__)

THREADS: Final = 4
"""Encoding and uploads release the GIL; more threads than this only take turns."""
CLOSE_POLL_S: Final = 0.05
SEEN_US_MAX: Final = 60_000_000
"""How old the last commit's word on a table's health may be, before the catalog is asked."""
SHARED_READERS_MAX: Final = 256
"""Topics of other owners whose table is kept in mind for readers."""
JANITOR_S: Final = 10.0
"""How long after a read its memory goes back to the system."""
STOP_TIMEOUT_S: Final = 5.0


class Janitor:
    """Gives memory back some time after it was used for reading."""

    def step(self) -> float | None:
        """Give it back, and wait for the next read."""
        give_back()
        return None


Hand = Callable[[Offer, Callable[[OfferAnswer], None]], None]
"""Sends files to the committing worker of a topic; the answer comes once, later."""


class TableService:
    """Commits the rows of many topics, and reads them back."""

    def __init__(
        self,
        settings: WorkerSettings,
        clock: Clock,
        ids: IdSource,
        notify: Callable[[TopicState], None],
        catalog: TableCatalog | None = None,
        hand: Hand | None = None,
    ) -> None:
        self._settings = settings
        self._hand = hand
        self._clock = clock
        self._ids = ids
        self._notify = notify
        self._catalog = catalog
        self._catalog_lock = threading.Lock()
        self._lock = threading.Lock()
        self._topics: dict[str, TopicRun] = {}
        self._followers: dict[str, Follower] = {}
        self._others: dict[str, TopicAssignment] = {}
        self._shared: OrderedDict[str, tuple[TopicAssignment, HistoryReader]] = OrderedDict()
        """Of topics that others own: one for all who read, with the view that one has looked up."""
        self._decoded = Decoded()
        self._index = RangeIndex()
        self._health = HealthIndex(self._index)
        self._scheduler = Scheduler(THREADS, clock, "table")
        self._janitor = Janitor()
        self._flushes = Flushes(clock)
        self._flush_scheduler = Scheduler(1, clock, "flushes")
        """Of their own: those who wait are told in time also while every thread commits."""

    def assign(self, topics: list[TopicAssignment]) -> None:
        """Take the full set of topics owned now."""
        wanted = {assignment.topic: assignment for assignment in topics if assignment.partitions}
        # History is readable everywhere: topics that others own are read, never written.
        before = self._others
        others = {a.topic: a for a in topics if not a.partitions}
        self._others = {n: before[n] if before.get(n) == a else a for n, a in others.items()}
        with self._lock:
            for name in [n for n in self._followers if n not in wanted and n not in self._others]:
                follower = self._followers.pop(name)
                self._scheduler.forget(follower)
                follower.end(NotFound("UnknownTopic", f"{name} is not on this worker"))
            for name in [name for name in self._topics if name not in wanted]:
                self._let_go(self._topics.pop(name))
                log.info("topic let go topic=%s", name)
            for name, assignment in wanted.items():
                run = self._topics.get(name)
                if run is None or run.where.uuid != assignment.uuid:
                    if run is not None:
                        self._let_go(run)
                    run = TopicRun(
                        assignment,
                        self.catalog,
                        self._clock,
                        self._ids,
                        self._on_state,
                        self._index,
                    )
                    if self._hand is not None:
                        run.hand = self._hand_over
                    self._topics[name] = run
                else:
                    run.inbox.assign(assignment)
                self._scheduler.poke(run)

    def _on_state(self, state: TopicState) -> None:
        self._flush_scheduler.poke(self._flushes)
        self._notify(state)

    def _let_go(self, run: TopicRun) -> None:
        self._scheduler.forget(run)
        run.offers.refuse("NotCommitter", "the topic was let go by this worker", close=True)

    def _hand_over(self, run: JointTopic, offer: Offer) -> None:
        def answered(answer: OfferAnswer) -> None:
            run.answered(offer.id, answer)
            self._scheduler.poke(run)

        assert self._hand is not None
        self._hand(offer, answered)

    def commit_offer(self, offer: Offer, answer: Callable[[OfferAnswer], None]) -> None:
        """Take another worker's files into the next commit; `answer` is called once, later."""
        run = self._topics.get(offer.topic)
        if run is None or run.where.uuid != offer.topic_uuid:
            raise Retryable("NotCommitter", f"{offer.topic} has no partition on this worker", 100)
        run.take_offer(offer, answer)
        self._scheduler.poke(run)

    def durable(self, topic: str, ends: dict[int, int]) -> None:
        """Note how far partitions are durable."""
        run = self._topics.get(topic)
        if run is not None:
            run.inbox.durable(ends)
            self._scheduler.poke(run)

    def flush(
        self,
        topic: str,
        upto: dict[int, int],
        timeout_s: float,
        answer: Callable[[FlushResult | TidewaterError], None],
    ) -> None:
        """Commit until every frontier reaches `upto`; `answer` is called once, later."""
        run = self._find(topic)
        self._flushes.wait(run, upto, self._clock.monotonic() + timeout_s, answer)
        run.inbox.want(upto)
        self._scheduler.poke(run)
        self._flush_scheduler.poke(self._flushes)

    def history(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        max_rows: int,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read [start, end) from the table in offset order, at most `max_rows`."""
        self._scheduler.poke(self._janitor, self._clock.monotonic() + JANITOR_S)
        return self._reader(topic).read(partition, start, end, max_rows, columns)

    def sift(
        self, topic: str, partition: int, start: int, end: int, wanted: FilterSpec
    ) -> Iterator[Sifted]:
        """Read what a filter wants of [start, end)."""
        self._scheduler.poke(self._janitor, self._clock.monotonic() + JANITOR_S)
        return self._reader(topic).sift(partition, start, end, wanted)

    def follow(
        self,
        topic: str,
        known: int | None,
        timeout_s: float,
        answer: Callable[[Followed | TidewaterError], None],
    ) -> None:
        """Call `answer` once, when the table's snapshot is not `known` or the time is up."""
        reader = self._reader(topic)
        with self._lock:
            follower = self._followers.get(topic)
            if follower is None or follower.uuid != reader.where.uuid:
                poll_s = reader.where.spec.reader.poll_interval.seconds
                follower = Follower(reader, self._clock, poll_s)
                self._followers[topic] = follower
            follower.reader = reader
        follower.wait(known, self._clock.monotonic() + timeout_s, answer)
        self._scheduler.poke(follower)

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        """Return the first offset in the table whose time is not before `timestamp_us`."""
        return self._reader(topic).offset_at(partition, timestamp_us)

    def frontier_at(self, topic: str, snapshot_id: int | None, tag: str | None) -> dict[int, int]:
        """Return each partition's frontier in a snapshot, named by its id or tag."""
        reader = self._reader(topic)
        view = reader.view()
        return frontier_at(view, snapshot_id, tag, partial(reader.rows_end, view))

    def stats(self, topic: str) -> dict[str, Any]:
        """Return table health from metadata, and what has happened since the process began."""
        run = self._topics.get(topic)
        reader = self._reader(topic)
        # What the last commit told will do; after a pause others may have committed since.
        view = None if run is None else run.seen
        if view is None or self._clock.now_us() - view.committed_at_us > SEEN_US_MAX:
            view = reader.view(newest=True)
        spec = reader.where.spec
        target_bytes = int(spec.maintenance.target_file_size)
        health = self._health.look(view, target_bytes, self._clock.now_us())
        filters = {"filters": reader.skipping.to_dict()}
        return {**health, **({} if run is None else {**run.counters(), **filters})}

    def bounds(self, topic: str) -> dict[int, PartitionState]:
        """Return how far each partition is in the table now."""
        return partition_states(self._reader(topic).view(newest=True))

    def drop_table(self, topic: str) -> bool:
        """Drop the table of a topic that is being deleted, with its files; False if none."""
        if topic in self._topics:
            raise Retryable("TopicInUse", f"{topic} still has partitions on this worker", 500)
        return drop_table(self.catalog(), self._other(topic))

    def _other(self, topic: str) -> TopicTable:
        """Return a topic of which this worker has no partition."""
        other = self._others.get(topic)
        if other is None:
            raise NotFound("UnknownTopic", f"{topic} is not on this worker")
        name = TopicName.parse(topic)
        return TopicTable(
            name,
            other.uuid,
            TopicSpec.from_json(other.spec),
            log_path(self._settings.log_root, name, 0).parent,
        )

    def _reader(self, topic: str) -> HistoryReader:
        run = self._topics.get(topic)
        if run is not None:
            return run.reader
        other = self._others.get(topic)
        with self._lock:
            known, reader = self._shared.get(topic, (None, None))
            if reader is None or known is not other:
                where = self._other(topic)
                # Nobody here expires its snapshots, so there is nothing to pin against.
                reader = HistoryReader(
                    lambda: where, self.catalog, lambda: None, lambda _snapshot, _count: None,
                    self._index, self._decoded,
                )  # fmt: skip
                assert other is not None
                self._shared[topic] = other, reader
            self._shared.move_to_end(topic)
            while len(self._shared) > SHARED_READERS_MAX:
                self._shared.popitem(last=False)
            return reader

    def states(self) -> list[TopicState]:
        """Return the state of every topic."""
        with self._lock:
            return [run.state for run in self._topics.values()]

    def close(self, deadline_s: float) -> None:
        """Commit everything durable, then stop; bounded by the deadline."""
        deadline = self._clock.monotonic() + deadline_s
        with self._lock:
            runs = list(self._topics.values())
        for run in runs:
            run.inbox.hurry()
            self._scheduler.poke(run)
        for run in runs:
            with run.inbox.changed:
                while not run.drained and (left := deadline - self._clock.monotonic()) > 0:
                    run.inbox.changed.wait(min(left, CLOSE_POLL_S))
        late = [str(run.where.topic) for run in runs if not run.drained]
        if late:
            log.warning("closed before all rows were in the table topics=%s", ",".join(late))
        self._scheduler.stop(max(STOP_TIMEOUT_S, deadline - self._clock.monotonic()))
        self._flush_scheduler.stop(STOP_TIMEOUT_S)
        self._flushes.step()  # of what came last
        with self._catalog_lock:
            if self._catalog is not None:
                self._catalog.close()

    def catalog(self) -> TableCatalog:
        """Return the catalog, opened at the first use: its server may not be up yet."""
        with self._catalog_lock:
            if self._catalog is None:
                self._catalog = open_catalog(self._settings.catalog)
            return self._catalog

    def _find(self, topic: str) -> TopicRun:
        run = self._topics.get(topic)
        if run is None:
            raise NotFound("UnknownTopic", f"{topic} is not on this worker")
        return run
