"""What a worker asks of the coordination store. Two stores answer it: SQLite and etcd.

Registry (which topics and subscriptions there are, which worker should have which partition),
ownership (who has it, by lease and epoch) and cursors. Never data, never per-file state.

A *session* is a worker's lease: while it is live the worker may append. A partition belongs to a
*volume*, the disk that holds its log, since messages may be there that are nowhere else: it comes
back to that volume whenever its worker does, and to another one only after draining, or when
a person has given the volume up (G5).

Every call raises `Retryable` when the store cannot be reached in time (`StoreAway`) and
`OutcomeUnknown` when a change was sent and no answer came.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

SESSION_TTL_S = 10.0
"""A worker that the store has not heard of for this long is taken for dead."""

GIVEN_UP_MAX = 50
"""Partitions that are given up in one transaction: etcd takes 128 operations in one."""


class TopicPhase(StrEnum):
    """Where a topic stands in its life. It only goes forward; to begin anew takes a new uuid."""

    ACTIVE = "active"
    DELETING = "deleting"
    """No message is taken; its owners drain their partitions and let them go."""
    DROPPED = "dropped"
    """All is drained and its table was dropped with all files, as its spec asked for."""


class AcceptedLoss(msgspec.Struct, frozen=True):
    """A person's word that volumes are lost, as far as it was acted on: each counts once."""

    word: str
    waits: tuple[int, ...] = ()
    """Partitions that it names whose owner has a session and says nothing: it may have just died.
    They are given up if the session runs out by `until_s`."""
    until_s: int = 0
    """Seconds since 1970; the word means nothing to an owner whose session lives past it."""


class RegisteredTopic(msgspec.Struct, frozen=True):
    """A topic as the registry has it."""

    topic: str
    """`namespace/name`."""
    uuid: str
    """Given when the topic was first registered; a re-created topic has another."""
    spec: str
    """The Topic's spec as JSON."""
    phase: TopicPhase = TopicPhase.ACTIVE
    accepted: AcceptedLoss | None = None
    """The last word about lost volumes."""


class RegisteredSubscription(msgspec.Struct, frozen=True):
    """A subscription as the registry has it."""

    name: str
    """`namespace/name`."""
    uuid: str
    """Given when it was first registered; a re-created one has another."""
    spec: str
    """The Subscription's spec as JSON."""


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker with a live session, and how to reach it."""

    worker_id: str
    url: str = ""
    """`http://host:port` of its edge."""
    flight_url: str = ""
    """Of its Flight server; empty if it has none."""
    volume: str = ""
    """Identity of the disk that its logs are on."""
    is_job: bool = False
    """A session that is there to hold leases: no worker, and in nobody's registry."""


class Gap(msgspec.Struct, frozen=True):
    """Offsets whose messages were lost with a volume that a person gave up."""

    start: int
    end: int
    """Exclusive: the partition goes on here."""
    volume: str
    reason: str = ""
    """What the person said."""
    worker_id: str = ""
    """Whose volume it was."""


class Ownership(msgspec.Struct, frozen=True):
    """Who has a partition, or had it last."""

    partition: int
    worker_id: str
    epoch: int
    volume: str = ""
    session: str = ""
    """Of the owner; empty once it was released."""
    is_live: bool = False
    """The owner's session is there: it serves the partition."""
    url: str = ""
    """Of the owner's edge while it is live."""
    drained_at: int | None = None
    """Released with everything in the table up to this offset: any volume may have it next."""
    given_up: str | None = None
    """A person's word, with its reason, that the volume will not come back."""
    gap: Gap | None = None
    """The newest gap of this partition."""
    after: "Ownership | None" = None
    """The last owner, on another volume, while this one has not begun: nothing was appended since.

    If this one goes without having begun, that one counts as if nothing had happened.
    """


class Grant(msgspec.Struct, frozen=True):
    """A partition that was acquired."""

    epoch: int
    """Higher than any before."""
    previous: Ownership | None
    """The last owner that had begun, None for a partition that nobody ever had.

    If it is of another volume, `begin` has to be called before a message is taken.
    """


class Registry(msgspec.Struct, frozen=True):
    """Everything but cursors, as of one version."""

    version: int = 0
    topics: dict[str, RegisteredTopic] = {}
    subscriptions: dict[str, RegisteredSubscription] = {}
    assignments: dict[str, dict[int, str]] = {}
    """topic → partition → the worker that should have it. No entry: who comes first keeps it."""
    workers: dict[str, WorkerInfo] = {}
    """Those with a live session, by id."""
    owners: dict[str, dict[int, Ownership]] = {}
    """topic → partition → owner; partitions that nobody ever had are not in it."""
    unreadable: tuple[str, ...] = ()
    """Records that are there and cannot be read, as `owners/<namespace>/<topic>/<partition>`.

    They are in nothing above; whoever lets something go must not take them for nothing.
    """


class CursorKey(NamedTuple):
    """Whose progress it is."""

    subscription: str
    """`namespace/name`."""
    topic: str
    """`namespace/name`."""
    partition: int


class Coordination(Protocol):
    """Registry, ownership, leases and cursors."""

    # ---- session

    async def start(self, worker: WorkerInfo | None = None, ttl_s: float = SESSION_TTL_S) -> None:
        """Connect; with a worker given, open its session and keep it alive in the background.

        Raises `Fenced` (`WorkerIdTaken`) while another volume has a live session of that id.
        """

    @property
    def session(self) -> str:
        """The session's name; another one after each loss, empty while there is none."""

    @property
    def session_deadline(self) -> float:
        """The moment (`time.monotonic`) up to which the session is certainly live.

        Counted from *before* the last successful renewal was sent. Past it nothing may be
        appended (G5), whatever the store may say later. 0 without a session.
        """

    @property
    def session_counters(self) -> Mapping[str, int]:
        """`sessions_opened` and `session_renewals_failed` so far; empty without a worker."""

    async def close(self) -> None:
        """End the session and let go of the store. What is owned stays with its volume."""

    # ---- registry

    async def registry(self) -> Registry:
        """Return everything but cursors. An own change that has returned is in it."""

    async def changed(self, since: int, timeout_s: float) -> int:
        """Wait until the registry's version is not `since`, at most `timeout_s`; return it."""

    async def register_topic(self, topic: str, spec: str, uuid: str) -> RegisteredTopic:
        """Add a topic or change its spec; an existing one keeps its uuid and its phase."""

    async def set_topic_phase(self, topic: str, uuid: str, phase: TopicPhase) -> bool:
        """Move a topic on in its life; False if there is none of that uuid (any more).

        A phase that is behind the one it has changes nothing.
        """

    async def unregister_topic(self, topic: str, *, keep_cursors: bool = False) -> None:
        """Forget a topic, its assignment, owners and cursors.

        `keep_cursors`: not those of subscriptions that are registered. Its table was kept, and
        a topic that is made again on it has the same messages at the same offsets.
        """

    async def register_subscription(
        self, name: str, spec: str, uuid: str
    ) -> RegisteredSubscription:
        """Add a subscription or change its spec; an existing one keeps its uuid."""

    async def unregister_subscription(self, name: str) -> None:
        """Forget a subscription and its cursors."""

    async def set_assignment(self, topic: str, partitions: Mapping[int, str]) -> None:
        """Say which worker should have which partition of a topic (the whole topic)."""

    async def assign(
        self, topic: str, partition: int, worker_id: str, others: Mapping[int, str]
    ) -> None:
        """Say which worker should have one partition; what is assigned of the rest stays.

        Decided on what the store has when it is written, not on what this worker has heard of.
        `others`: for those of the rest that are assigned to nobody.
        """

    async def topics(self) -> list[RegisteredTopic]:
        """Return every topic, by name."""

    async def subscriptions(self) -> list[RegisteredSubscription]:
        """Return every subscription, by name."""

    # ---- ownership

    async def acquire(self, topic: str, partition: int, epoch_above: int = 0) -> Grant:
        """Take a partition for this session; its epoch is above any before and `epoch_above`.

        `Fenced` (`OwnedElsewhere`, `VolumeElsewhere`) if it belongs to another volume.
        """

    async def release(
        self, topic: str, partition: int, epoch: int, drained_at: int | None = None
    ) -> None:
        """Let a partition go; `drained_at`: everything up to there is in the table.

        An owner that has not begun leaves it as it was before, whatever it says.
        Nothing happens if a later epoch has it.
        """

    async def give_up(self, topic: str, partition: int, reason: str) -> Ownership:
        """Note a person's word that the volume of a partition is lost.

        `Conflict` (`OwnerIsLive`) while the owner's session is there.
        """

    async def begin(self, topic: str, partition: int, epoch: int, gap: Gap | None = None) -> None:
        """Note that the owner has taken over what the last one left, perhaps behind a gap.

        `Fenced` if it is not at `epoch`. Twice changes nothing.
        """

    # ---- leases for other things

    async def take_lease(self, name: str) -> bool:
        """Take or keep a named lease for this session; False if another live session has it."""

    async def drop_lease(self, name: str) -> None:
        """Give a named lease back, if it is ours."""

    async def lease_holder(self, name: str) -> str | None:
        """Return the id of the worker that has a named lease, or None."""

    # ---- cursors

    async def load_cursors(self, subscription: str, topic: str) -> dict[int, bytes]:
        """Return a subscription's stored progress by partition."""

    async def store_cursors(
        self,
        items: Mapping[CursorKey, bytes],
        epochs: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Store progress, all or nothing; durable when it returns (a group commit).

        `epochs` names the owned partitions, `(topic, partition) → epoch`, that it stands on:
        `Fenced` if one of them has another epoch by now.
        """
