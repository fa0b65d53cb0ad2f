"""What a Flight client names: a ticket, a topic to write to, a partition to follow. Pure.

    ticket     := namespace "/" topic "@" partition ":" [from] "-" [to] ["?" option ("&" option)*]
    option     := "columns=" name ("," name)*  |  "isolation=committed"
    descriptor := path ["namespace", "topic"]  |  path ["namespace/topic"]  |  command (JSON)

`from` is the first offset, `to` the first that is not wanted; left out they are the first kept
message and the end of the log at the moment of the call.
"""

import re
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from tidewater_core.errors import Invalid

_TICKET: Final = re.compile(
    r"([a-z0-9-]{1,63})/([a-z0-9-]{1,63})@(\d{1,9}):(?:(\d{1,18})?-(\d{1,18})?)?(?:\?(.*))?",
    re.DOTALL,
)
TICKET_BYTES_MAX: Final = 64 * 1024
"""Columns are named in it."""
_T = TypeVar("_T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]


class Ticket(msgspec.Struct, frozen=True):
    """A range of a partition's offsets."""

    namespace: str
    name: str
    partition: int
    start: int | None = None
    end: int | None = None
    columns: tuple[str, ...] | None = None
    """These alone, besides partition, offset and time; None: all."""
    is_committed: bool = False
    """Only what is in the table."""

    def __str__(self) -> str:
        """Write it as it is read."""
        start = "" if self.start is None else self.start
        end = "" if self.end is None else self.end
        options = []
        if self.columns is not None:
            options.append("columns=" + ",".join(self.columns))
        if self.is_committed:
            options.append("isolation=committed")
        tail = f"?{'&'.join(options)}" if options else ""
        return f"{self.namespace}/{self.name}@{self.partition}:{start}-{end}{tail}"

    @staticmethod
    def parse(data: bytes) -> "Ticket":
        """Read a ticket; raise Invalid that says how one looks."""
        match = _TICKET.fullmatch(data[:TICKET_BYTES_MAX].decode("utf-8", "replace"))
        if match is None:
            raise Invalid(
                "InvalidTicket",
                f"a ticket looks like shop/orders@0:100-200, not like {data[:60]!r}",
            )
        start, end = (None if text is None else int(text) for text in match.group(4, 5))
        if start is not None and end is not None and end < start:
            raise Invalid("InvalidTicket", f"a ticket's end ({end}) is before its start ({start})")
        columns, is_committed = _options(match[6])
        return Ticket(match[1], match[2], int(match[3]), start, end, columns, is_committed)


def _options(text: str | None) -> tuple[tuple[str, ...] | None, bool]:
    columns: tuple[str, ...] | None = None
    is_committed = False
    for option in (text or "").split("&"):
        name, _, value = option.partition("=")
        if name == "columns":
            columns = tuple(column for column in value.split(",") if column)
        elif name == "isolation" and value in ("acknowledged", "committed"):
            is_committed = value == "committed"
        elif option:
            raise Invalid(
                "InvalidTicket",
                f"a ticket's options are columns=a,b and isolation=committed, not {option[:60]!r}",
            )
    return columns, is_committed


class Put(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a stream of batches goes, and how it is acknowledged."""

    topic: str
    """`namespace/topic`."""
    partition: Count | None = None
    ack: Literal["log", "table"] = "log"
    timeout_ms: Count = 30_000
    producer: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    """Makes the stream idempotent: each batch has a sequence number."""
    sequence: Count = 0
    """The first batch's number; the next ones follow, unless their metadata says another."""


class BatchNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a batch's metadata may say."""

    sequence: Count | None = None


class Follow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which partition to follow live, and from where."""

    topic: str
    partition: Count = 0
    offset: Count | None = None
    position: Literal["earliest", "latest"] = "latest"
    timestamp: str | int | None = None
    """The first message not before it: RFC 3339, or milliseconds since 1970."""
    snapshot_id: int | None = None
    tag: str | None = None
    """Where the partition was in a snapshot of the table, named by its id or tag."""
    columns: tuple[str, ...] | None = None
    isolation: Literal["acknowledged", "committed"] = "acknowledged"


def topic_of(path: list[bytes]) -> tuple[str, str]:
    """Read a descriptor's path."""
    return split(b"/".join(path).decode("latin-1"))


def split(topic: str) -> tuple[str, str]:
    """Split `namespace/topic`."""
    namespace, slash, name = topic.partition("/")
    if not slash or not namespace or not name or "/" in name:
        raise Invalid("InvalidTopic", f"a topic is named namespace/topic, not {topic[:100]!r}")
    return namespace, name


def put_of(path: list[bytes], command: bytes | None) -> Put:
    """Read the descriptor of a DoPut."""
    if command:
        return _decode(command, Put)
    return Put(topic="/".join(topic_of(path)))


def follow_of(path: list[bytes], command: bytes | None) -> Follow:
    """Read the descriptor of a DoExchange."""
    if command and command[:1] != b"{":
        ticket = Ticket.parse(command)
        if ticket.end is not None:
            raise Invalid("InvalidTicket", "what is followed live has no end")
        topic = f"{ticket.namespace}/{ticket.name}"
        isolation: Literal["acknowledged", "committed"] = (
            "committed" if ticket.is_committed else "acknowledged"
        )
        return Follow(
            topic, ticket.partition, ticket.start, "earliest",
            columns=ticket.columns, isolation=isolation,
        )  # fmt: skip
    if command:
        return _decode(command, Follow)
    return Follow(topic="/".join(topic_of(path)))


def note_of(metadata: bytes) -> BatchNote:
    """Read a batch's metadata."""
    return _decode(metadata, BatchNote)


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid("InvalidDescriptor", str(error)) from None
