"""What a consumer gets: messages with their ack ids, or Arrow batches of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from tidewater import wire
from tidewater.leases import Lease
from tidewater.wire import Received
from tidewater_core import names

if TYPE_CHECKING:
    import pyarrow as pa

ACK_ID: Final = "tw_ack_id"
DELIVERY: Final = "tw_delivery"
MESSAGE_BYTES: Final = 300
"""What a message takes besides its key and value."""


class Settles(Protocol):
    """A consumer, as its messages see it."""

    def _settle(self, verb: str, leases: tuple[Lease, ...], delay_s: float | None) -> None:
        """Tell the server what became of deliveries."""


class Delivery(Received, frozen=True, eq=False):
    """A message of a subscription. Say what became of it: `ack` or `nack`."""

    attempt: int
    """1 at the first delivery; the owner of the partition counts, and forgets at a restart."""
    leases: tuple[Lease, ...]
    nbytes: int
    consumer: Settles

    def ack(self) -> None:
        """Say that the message is done; the server hears of it within `ack_wait_s`."""
        self.consumer._settle("ack", self.leases, None)

    def nack(self, delay_s: float | None = None) -> None:
        """Give the message back, to come again after `delay_s`, or the subscription's backoff."""
        self.consumer._settle("nack", self.leases, delay_s)

    def __repr__(self) -> str:
        """Show the message, not the machinery."""
        return (
            f"Delivery(partition={self.partition}, offset={self.offset}, key={self.key!r}, "
            f"value={self.value!r}, attempt={self.attempt})"
        )


class ArrowDelivery:
    """Many messages as one Arrow batch. Acknowledge it as a whole, or some of its rows."""

    __slots__ = ("batch", "consumer", "leases")

    def __init__(
        self, batch: "pa.RecordBatch", leases: tuple[Lease, ...], consumer: Settles
    ) -> None:
        """Join a batch and its deliveries, row by row."""
        self.batch = batch
        """The columns of the topic's table."""
        self.leases = leases
        self.consumer = consumer

    def __len__(self) -> int:
        """Count the messages."""
        return len(self.leases)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Hand the rows to pandas, polars, DuckDB or whoever reads Arrow."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return int(self.batch.nbytes) + MESSAGE_BYTES * len(self.leases)

    def to_arrow(self) -> "pa.Table":
        """Return the rows as a table."""
        import pyarrow as pa

        return pa.Table.from_batches([self.batch])

    def ack(self, rows: slice | None = None) -> None:
        """Say that the messages (or some rows) are done."""
        self.consumer._settle("ack", self.leases[rows or slice(None)], None)

    def nack(self, delay_s: float | None = None, rows: slice | None = None) -> None:
        """Give the messages (or some rows) back."""
        self.consumer._settle("nack", self.leases[rows or slice(None)], delay_s)


Delivered = Delivery | ArrowDelivery
MakeLease = Callable[[str, int, int], Lease]
"""(ack id, partition, offset) -> a delivery."""


class Pulled(wire.Incoming, kw_only=True):
    """A message of a subscription as JSON has it."""

    ack_id: str
    delivery: int = 1


class Pulls(msgspec.Struct):
    """The answer to a pull."""

    messages: list[Pulled]


def of_messages(pulled: list[Pulled], lease: MakeLease, consumer: Settles) -> list[Delivery]:
    """Return messages as they are handed out."""
    found = []
    for message in pulled:
        plain = wire.received(message)
        value: Any = plain.value
        size = len(value) if isinstance(value, bytes) else MESSAGE_BYTES
        leases = (lease(message.ack_id, plain.partition, plain.offset),)
        found.append(
            Delivery(
                plain.partition, plain.offset, plain.time, plain.key, value, plain.headers,
                message.delivery, leases, MESSAGE_BYTES + size, consumer,
            )
        )  # fmt: skip
    return found


def of_arrow(stream: bytes, lease: MakeLease, consumer: Settles) -> list[ArrowDelivery]:
    """Return the batches of an Arrow stream; the ack ids are taken out of the columns."""
    import pyarrow as pa

    found = []
    with pa.ipc.open_stream(stream) as batches:
        for batch in batches:
            if batch.num_rows:
                places = (ACK_ID, names.TW_PARTITION, names.TW_OFFSET)
                rows = zip(*(batch.column(name).to_pylist() for name in places), strict=True)
                leases = tuple(lease(*row) for row in rows)
                kept = [name for name in batch.schema.names if name not in (ACK_ID, DELIVERY)]
                found.append(ArrowDelivery(batch.select(kept), leases, consumer))
    return found
