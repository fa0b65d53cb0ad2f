"""One partition of a subscription on the worker that owns the partition."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
import pyarrow as pa

from tidewater_core import names
from tidewater_core.crd.subscription import SubscriptionSpec, SubscriptionType
from tidewater_core.errors import Corrupt, Invalid, Retryable, TidewaterError
from tidewater_worker.dispatch.ackid import AckId
from tidewater_worker.dispatch.cursor import Begun, Progress, encode_failures, encode_ranges
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.policy import Leased, Order, Outcome, Policy
from tidewater_worker.dispatch.window import FETCH_ROWS_MIN, Piece, Window
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Topic

MOVING_RETRY_MS: Final = 200
"""When to ask again for a partition that is on its way to another worker."""
SCAN_ROWS_MAX: Final = 100_000
"""Messages that one pull looks through for ones that it wants; then others have their turn."""

_ORDERS: Final = {
    SubscriptionType.EXCLUSIVE: Order.PARTITION,
    SubscriptionType.FAILOVER: Order.PARTITION,
    SubscriptionType.SHARED: Order.NONE,
    SubscriptionType.KEY_SHARED: Order.KEY,
}


def policy_of(spec: SubscriptionSpec) -> Policy:
    """Read off a Subscription's spec how it delivers."""
    return Policy(
        order=_ORDERS[spec.type],
        ack_deadline_s=spec.ack_deadline.seconds,
        deliveries_max=spec.max_deliveries if spec.dead_letter is not None else None,
        backoff_initial_s=spec.backoff.initial.seconds,
        backoff_multiplier=float(spec.backoff.multiplier),
        backoff_max_s=spec.backoff.max.seconds,
    )


class Delivered(msgspec.Struct, frozen=True):
    """Messages on their way to a consumer."""

    batch: pa.RecordBatch
    """In the table's columns."""
    ack_ids: list[str]
    deliveries: list[int]
    """How often each was delivered, this time included."""
    nbytes: int = 0
    """About what they take."""
    gaps: list[dict[str, int]] = []
    """Offsets that were lost with a volume, just before one of these messages."""


class Part:
    """A partition that a subscription is served from."""

    def __init__(
        self,
        topic: Topic,
        partition: Partition,
        uuid: str,
        delivery: Delivery,
        window: Window,
        begun: Begun,
        served_by: SubscriptionSpec | None = None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.epoch = partition.epoch
        self.delivery = delivery
        self.window = window
        self.begun = begun
        self.lock = asyncio.Lock()
        """Held while fetching and while the position is moved."""
        self.is_burying = False
        self.is_retired = False
        """Another place was chosen since: this progress must not be stored any more."""
        self.used_at = 0.0
        self.spec = topic.spec
        """The topic's spec that batches are read by."""
        self.served_by = served_by
        """The subscription's spec that it is delivered by."""
        self.error: TidewaterError | None = None
        """Why the last look at it gave nothing."""
        self.dead_lettered = 0
        """Messages put into the dead-letter topic since this began."""
        self.cut_back = 0
        """Offsets that were acknowledged and that the log has lost."""
        self.first_end = partition.readable().end
        """Where the log ended at first: nothing past it was delivered by an owner before."""
        self._uuid = uuid
        self._syncing = asyncio.Lock()
        self._fetching: asyncio.Task[bool] | None = None

    @property
    def number(self) -> int:
        """The partition's number."""
        return self.partition.number

    @property
    def is_current(self) -> bool:
        """Tell whether this worker still owns the partition as it did when this was made."""
        return (
            not self.is_retired
            and self.topic.partitions.get(self.number) is self.partition
            and self.partition.epoch == self.epoch
            and self.partition.appender is not None
        )

    def encode(self) -> tuple[bytes, int] | None:
        """Return the progress to store, and the epoch it stands on."""
        if not self.is_current:
            return None
        delivery = self.delivery
        state, begun = self.topic.state, self.begun
        if state is not None and state.table_uuid:
            begun = begun._replace(table=state.table_uuid)
        # Progress must not outlive its log: other messages would get offsets that it calls done.
        cursor = delivery.cursor.below(self.partition.readable().durable_end)
        progress = Progress(
            self._uuid,
            str(self.topic.uuid),
            cursor.next,
            encode_ranges(cursor),
            delivery.generation,
            snapshot=state.snapshot_id if state else None,
            failed=encode_failures(cursor.next, delivery.failures()),
            **begun._asdict(),
        )
        return msgspec.json.encode(progress), self.epoch

    @property
    def is_durable(self) -> bool:
        """Tell whether what is acknowledged survives a power cut: always with `sync: Always`."""
        appender = self.partition.appender
        return appender is None or self.delivery.cursor.end <= appender.durable_end

    async def make_durable(self) -> None:
        """See to it that what is acknowledged survives a power cut, so that it may be stored.

        Those who come while the disk works share its next turn.
        """
        if self.is_durable:
            return
        async with self._syncing:
            appender, end = self.partition.readable(), self.delivery.cursor.end
            if end > appender.durable_end:
                try:
                    await appender.make_durable()
                except (OSError, Corrupt) as error:
                    raise Retryable("LogSyncFailed", f"the log is not durable: {error}") from error
            if end > appender.durable_end:
                raise Retryable("LogNotDurable", "what was acknowledged is not durable yet", 200)

    async def close(self) -> None:
        """Let go of what was read, once nothing is being fetched."""
        async with self.lock:
            await self.window.close()

    async def replace(
        self, spec: SubscriptionSpec, again: "Callable[[SubscriptionSpec, Part], Part]"
    ) -> None:
        """Deliver by another spec from the same place, or by the topic's other columns."""
        async with self.lock:
            if self.served_by is spec and self.spec.schema_ == self.topic.spec.schema_:
                return  # somebody else has done it meanwhile
            fresh, window = again(spec, self), self.window
            # Before anything waits: what the old delivery gives out from here on would have the
            # numbers that the new one gives to others.
            self.delivery, self.window = fresh.delivery, fresh.window
            self.spec, self.served_by = self.topic.spec, spec
            await window.close()

    # ---- out

    async def take(
        self,
        consumer: str,
        limit: Callable[[], int],
        bytes_max: int,
        now: Callable[[], float],
    ) -> list[Delivered]:
        """Give a consumer its next messages: at most `limit()`, and about `bytes_max`."""
        leases: list[Leased] = []
        pieces: list[Piece] = []
        done, delivery, generation = 0, self.delivery, self.delivery.generation
        try:
            self._check_ours()
            await self._lease(leases, consumer, limit, now)
            leases.sort()
            if leases:
                pieces, fit = await self._payloads(leases, bytes_max)
                self._check_ours()
                if self.delivery is not delivery or delivery.generation != generation:
                    return []  # another spec or place came meanwhile: the next look goes by it
                done = fit
        finally:
            # What does not fit, or could not be read, was not delivered.
            rest = [leased.offset for leased in leases[done:]]
            if rest:
                delivery.release(consumer, rest)
        return [self._delivered(piece) for piece in pieces]

    def _check_ours(self) -> None:
        """Refuse to deliver once the next owner may do so."""
        if self.partition.drained is not None:
            message = f"partition {self.number} is going to another worker"
            raise Retryable("PartitionMoving", message, MOVING_RETRY_MS)

    def take_back(self, consumer: str, delivered: Sequence[Delivered]) -> None:
        """Take back what did not reach its consumer."""
        for piece in delivered:
            self.delivery.release(consumer, piece.batch.column(names.TW_OFFSET).to_pylist())

    async def has_for(
        self, consumer: str, limit: Callable[[], int], now: Callable[[], float]
    ) -> bool:
        """Tell whether there is a message for a consumer; none is given to it."""
        leases: list[Leased] = []
        delivery = self.delivery
        try:
            self._check_ours()
            await self._lease(leases, consumer, limit, now)
        finally:
            delivery.release(consumer, [leased.offset for leased in leases])
        return bool(leases)

    async def _lease(
        self,
        leases: list[Leased],
        consumer: str,
        limit: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        """Lease what there is, fetching as far as that is needed."""
        delivery, want, scanned = self.delivery, limit(), 0
        while True:
            leases += delivery.take(consumer, now(), min(want - len(leases), limit()))
            left = min(want - len(leases), limit())
            if left <= 0 or scanned >= SCAN_ROWS_MAX or delivery.fetch_at >= self.window.end:
                return
            before = delivery.fetched
            if not await self._fetch(left, bool(leases)) or self.delivery is not delivery:
                return
            scanned += delivery.fetched - before
            if scanned >= FETCH_ROWS_MIN or delivery.fetched == before:
                await asyncio.sleep(0)  # others have their turn, and a fetch that is over its end

    async def _fetch(self, left: int, has_some: bool) -> bool:
        """Fetch, or wait for a fetch that is under way.

        It goes on when the consumer that asked for it is gone: one that waits at several owners
        and is served by the quickest would else begin a slow read again and again.
        """
        # One that is over may not have been cleared away yet: nobody must wait for it again.
        is_idle = self._fetching is None or self._fetching.done()
        try:
            if is_idle and not self.lock.locked() and self.window.is_live(self.delivery):
                return await self._fetch_once(left)
            if self._fetching is None or is_idle:
                self._fetching = asyncio.create_task(self._fetch_once(left))
                self._fetching.add_done_callback(self._fetched)
            return await asyncio.shield(self._fetching)
        except TidewaterError:
            if has_some:
                return False  # the next pull, which has nothing to give, says why
            raise

    async def _fetch_once(self, want: int) -> bool:
        async with self.lock:
            return await self.window.fetch(self.delivery, want)

    def _fetched(self, task: "asyncio.Task[bool]") -> None:
        if self._fetching is task:
            self._fetching = None
        if not task.cancelled():
            task.exception()  # whoever waits is told; if nobody does, the next one is

    async def _payloads(self, leases: Sequence[Leased], bytes_max: int) -> tuple[list[Piece], int]:
        pieces: list[Piece] = []
        size = done = 0
        async with aclosing(self.window.payloads(leases)) as found:
            async for piece in found:
                count = len(piece.leases)
                fit = max((bytes_max - size) // piece.row_bytes, 0 if pieces else 1)
                if fit:
                    pieces.append(piece if fit >= count else piece.first(fit))
                    done += min(fit, count)
                    size += min(fit, count) * piece.row_bytes
                if fit < count or size >= bytes_max:
                    break
        return pieces, done

    def _delivered(self, piece: Piece) -> Delivered:
        leases = piece.leases
        epoch, number, generation = self.epoch, self.number, self.delivery.generation
        ids = [str(AckId(epoch, number, generation, at.offset, at.lease)) for at in leases]
        size = len(leases) * piece.row_bytes
        gaps: list[dict[str, int]] = []
        if self.partition.table.gaps:
            offsets = {leased.offset for leased in leases}
            gaps = [
                {"partition": number, "start": start, "end": end}
                for start, end in self.partition.table.gaps
                if end in offsets
            ]
        return Delivered(piece.batch, ids, [leased.delivery for leased in leases], size, gaps)

    # ---- back

    def lease_of(self, ack_id: AckId) -> int | Outcome | None:
        """Return the lease that an ack id names; None: one of an owner before; or STALE."""
        if ack_id.epoch < self.epoch and ack_id.offset >= self.first_end:
            return Outcome.STALE  # the log has lost that message: this is another one
        if ack_id.offset >= self.partition.readable().end:
            raise Invalid("InvalidAckId", f"{str(ack_id)!r} names a message that does not exist")
        if ack_id.generation != self.delivery.generation or ack_id.epoch > self.epoch:
            return Outcome.STALE
        if ack_id.epoch < self.epoch or ack_id.lease <= self.delivery.first_lease:
            return None
        return ack_id.lease

    # ---- status

    def oldest_us(self) -> int | None:
        """Return about when the oldest message came that is not acknowledged; None: there is none.

        By the log's index: as old as the log's first message if it is older than the log.
        """
        first, appender = self.delivery.cursor.next, self.partition.appender
        if appender is None or first >= self.window.end:
            return None
        held = [segment for segment in appender.segments if segment.end_offset > first]
        return held[0].index.time_of(first) if held else None

    def status(self) -> dict[str, object]:
        """Describe it for people and programs."""
        delivery = self.delivery
        end = self.window.end
        return {
            "partition": self.number,
            "next_offset": delivery.cursor.next,
            "end_offset": end,
            "lag": delivery.cursor.count_open(end),
            "unacked": sum(delivery.out_by.values()),
            "acked_ranges": len(delivery.cursor),
            "dead": len(delivery.dead),
            **({"cut_back": self.cut_back} if self.cut_back else {}),
            **({"error": self.error.to_body()["error"]} if self.error is not None else {}),
        }
