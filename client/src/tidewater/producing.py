"""What blocking and asyncio producers share: how requests are numbered, encoded and routed.

The partition of messages without a key is that of the producer's id: a re-sent request must find
its first copy. While that partition's owner is away a producer goes on under another id, which has
a partition that is there. A batch gets the new id, too, but only if it is certain that no copy of
it was stored under the old one (G8); one that got no answer stays what it is.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tidewater import wire
from tidewater.errors import OutcomeUnknown, Retryable, TidewaterError
from tidewater.http1 import request_bytes
from tidewater.origin import Origin
from tidewater.routing import Routes
from tidewater.wire import Message
from tidewater_core.clock import IdSource, SystemIds
from tidewater_core.names import TopicName

AckLevel = Literal["log", "table"]
"""When a message counts as stored: fsynced in the worker's log, or a row of the table."""
Keys = Sequence[bytes | str | None]
HEADS_MAX: Final = 256
"""Remembered beginnings of requests: workers × content types."""
DRAWS_MAX: Final = 256
"""Ids that are drawn for one that has a partition with an owner."""
AWAY: Final = frozenset({"OwnerAway", "OwnerUnreachable"})
"""Nothing was stored, and will not be before a worker is back."""
BEFORE: Final = AWAY | {
    "ConnectionLost", "OwnedElsewhere", "PartitionMoving", "PartitionOpening", "Unreachable",
}  # fmt: skip
"""Said before anything is stored, without exception."""
UNKEYED: Final = -1
MOVED: Final = Retryable("Moved", "another partition takes it")


class _Identity:
    """A producer's name, and the numbers that it has given."""

    __slots__ = ("id", "numbers")

    def __init__(self, producer_id: str) -> None:
        self.id = producer_id
        self.numbers = itertools.count()


@dataclass(slots=True)
class Batch:
    """A batch on its way; it is sent under its number however often."""

    body: bytes
    content_type: str
    keys: Keys | None
    """Of its messages, or of one that stands for all; None: not known."""
    producer_id: str | None
    number: int
    is_unsent: bool = True
    """No copy of it was stored, for certain."""
    is_unanswered: bool = False
    """An attempt got no answer: a copy may be stored."""

    @property
    def is_unkeyed(self) -> bool:
        """Tell whether any partition would do for it."""
        return self.keys is not None and all(key is None for key in self.keys)

    def last_word(self, error: TidewaterError) -> TidewaterError:
        """Return what to raise when it is given up: the last error is about the last attempt.

        Also a refusal: a token that has run out since, or a proxy's 404, says nothing of the copy
        that may be stored, and a batch that is divided for it would be stored twice (G8).
        """
        if self.is_unanswered and not isinstance(error, OutcomeUnknown):
            said = f"{error.message}; an attempt before got no answer"
            return OutcomeUnknown(error.reason, said, error.retry_after_ms)
        return error


class Requests:
    """Builds the requests of one producer, for whichever worker they go to."""

    def __init__(
        self,
        topic: TopicName,
        *,
        ack: AckLevel,
        partition: int | None,
        idempotent: bool,
        ids: IdSource | None = None,
    ) -> None:
        """Begin with number 0; requests of a producer that is not idempotent have none."""
        query = "&".join(
            part
            for part in (
                "ack=table" if ack == "table" else "",
                f"partition={partition}" if partition is not None else "",
            )
            if part
        )
        self._target = f"/v1/{topic}/messages" + (f"?{query}" if query else "")
        self._partition = partition
        self._ids = ids or SystemIds()
        self._identity = _Identity(str(self._ids.uuid())) if idempotent else None
        self._heads: dict[tuple[Origin, str, str | None], tuple[str | None, bytes]] = {}

    def batch(self, body: bytes, content_type: str, keys: Keys | None) -> Batch:
        """Give the next batch its number."""
        identity = self._identity
        if identity is None:
            return Batch(body, content_type, keys, None, 0)
        return Batch(body, content_type, keys, identity.id, next(identity.numbers))

    def request(self, origin: Origin, batch: Batch) -> bytes:
        """Return the bytes that ask a worker to store a batch."""
        token = origin.bearer
        place = (origin, batch.content_type, batch.producer_id)
        known, head = self._heads.get(place, (None, b""))
        if not head or known != token:
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            head = origin.head(
                "POST", self._target, Content_Type=batch.content_type,
                Tidewater_Producer=batch.producer_id,
            )  # fmt: skip
            self._heads[place] = token, head
        if batch.producer_id is None:
            return request_bytes(head, batch.body)
        return request_bytes(head, batch.body, b"Tidewater-Sequence: %d\r\n" % batch.number)

    def moved(self, batch: Batch, error: TidewaterError, routes: Routes) -> bool:
        """Note an error; tell whether the batch goes to another partition, under another id."""
        if not isinstance(error, Retryable) or error.reason not in BEFORE:
            batch.is_unsent = False
            batch.is_unanswered |= isinstance(error, OutcomeUnknown)
        identity = self._identity
        if (
            identity is None
            or self._partition is not None
            or error.reason not in AWAY
            or not (batch.is_unsent and batch.is_unkeyed)
        ):
            return False
        if batch.producer_id == identity.id:
            found = self._id_elsewhere(routes, identity.id)
            if found is None:
                return False
            identity = self._identity = _Identity(found)
        batch.producer_id, batch.number = identity.id, next(identity.numbers)
        return True

    def _id_elsewhere(self, routes: Routes, away: str) -> str | None:
        """Return an id whose partition is not with the owner of another's; None: there is none."""
        there = routes.besides(routes.partition_of(away.encode()))
        if routes.partitions and not there:
            return None
        for _ in range(DRAWS_MAX):
            drawn = str(self._ids.uuid())
            # Where nobody told how many partitions there are, chance has to do.
            if not there or routes.partition_of(drawn.encode()) in there:
                return drawn
        return None

    def partition_of(self, routes: Routes, batch: Batch) -> int | None:
        """Return the one partition that a batch goes to; None: several, or the worker's choice."""
        if batch.keys is None:
            return None
        return self._partition_of(routes, batch.keys, batch.producer_id)

    def group_of(self, routes: Routes, key: bytes | str | None) -> int | None:
        """Return which messages may share a batch with those of a key: its partition's.

        Those without a key have batches of their own, since these may go elsewhere.
        """
        if key is None and self._partition is None:
            return UNKEYED
        return self._partition_of(routes, (key,), None)

    def _partition_of(
        self, routes: Routes, keys: Iterable[bytes | str | None], producer_id: str | None
    ) -> int | None:
        if self._partition is not None:
            return self._partition
        if not routes.partitions:
            return None
        found: int | None = None
        for key in keys:
            name = producer_id if key is None else key
            if name is None:
                return None
            chosen = routes.partition_of(name.encode() if isinstance(name, str) else name)
            if chosen is None or (found is not None and found != chosen):
                return None
            found = chosen
        return found


def encode_one(
    value: Any, key: bytes | str | None, headers: Mapping[str, str] | None
) -> tuple[bytes, str]:
    """Return body and content type of a single message: bare bytes cost least."""
    if key is None and not headers:
        if isinstance(value, bytes):
            return value, wire.RAW
        if isinstance(value, str):
            return value.encode(), wire.RAW
    return wire.encode_json((Message(value, key, headers),)), wire.JSON
