"""What the two ends of a socket say, as values. Pure.

A message is an object with one key that says what it is; its value has an `id` that the client
chose and that every answer repeats. In a binary message the object is followed by Arrow:

    binary := length:u32 (little endian)  object (JSON, padded with spaces)  Arrow IPC stream

The stream begins at a multiple of 8 bytes, so that its buffers can be used where they lie.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

from tidewater_core.errors import Invalid, TidewaterError
from tidewater_worker.api.messages import MessageDecoder

ID_MAX: Final = 2**53 - 1
"""The largest whole number that a browser can count to."""
_HEAD_BYTES: Final = 4
_ALIGNMENT: Final = 8

Id = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
AckIds = Annotated[list[str], msgspec.Meta(min_length=1, max_length=100_000)]

_PRODUCE_FIELDS: Final[list[Any]] = [
    ("partition", Count | None, None),
    ("ack", Literal["log", "table"], "log"),
    ("timeout_ms", Count, 30_000),
    ("producer", Text | None, None),
    ("sequence", Count | None, None),
]


class Read(msgspec.Struct, forbid_unknown_fields=True):
    """Send messages of a partition, from a position on, as far as the credit goes."""

    id: Id
    partition: Count = 0
    offset: Count | None = None
    timestamp: str | int | None = None
    snapshot_id: int | None = None
    tag: Text | None = None
    position: Literal["earliest", "latest"] = "earliest"
    credit: Count = 0
    format: Literal["json", "arrow"] = "json"
    columns: list[str] | None = None
    """These alone, besides partition, offset and time."""
    isolation: Literal["acknowledged", "committed"] = "acknowledged"


class Subscribe(msgspec.Struct, forbid_unknown_fields=True):
    """Send messages of a subscription; each must be acknowledged."""

    id: Id
    subscription: Text
    consumer: Text | None = None
    credit: Count = 0
    format: Literal["json", "arrow"] = "json"


class Credit(msgspec.Struct, forbid_unknown_fields=True):
    """Allow so many messages more to a read or subscription."""

    id: Id
    messages: Count


class Stop(msgspec.Struct, forbid_unknown_fields=True):
    """End a read or subscription."""

    id: Id


class Acknowledge(msgspec.Struct, forbid_unknown_fields=True):
    """Acknowledge messages of a subscription of this socket."""

    id: Id
    subscription: Text
    ack_ids: AckIds


class Reject(msgspec.Struct, forbid_unknown_fields=True):
    """Give messages back, to be delivered again after a delay."""

    id: Id
    subscription: Text
    ack_ids: AckIds
    delay_ms: Annotated[int, msgspec.Meta(ge=0, le=7 * 86_400_000)] | None = None


class Extend(msgspec.Struct, forbid_unknown_fields=True):
    """Ask for more time to acknowledge."""

    id: Id
    subscription: Text
    ack_ids: AckIds
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)] | None = None


class _Named(msgspec.Struct):
    id: Id


_KINDS: Final[dict[str, Any]] = {
    "read": Read,
    "subscribe": Subscribe,
    "credit": Credit,
    "stop": Stop,
    "acknowledge": Acknowledge,
    "reject": Reject,
    "extend": Extend,
}
NAMES: Final = ("produce", *_KINDS)


def _command(produce: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """Build the decoder of an object that has exactly one of the known keys."""
    fields: list[Any] = [("produce", produce | None, None)]
    fields += [(name, kind | None, None) for name, kind in _KINDS.items()]
    return msgspec.json.Decoder(
        msgspec.defstruct("Command", fields, forbid_unknown_fields=True, gc=False)
    )


_BINARY: Final = _command(
    msgspec.defstruct("Produce", [("id", Id), *_PRODUCE_FIELDS], forbid_unknown_fields=True)
)
_ANY_ID: Final = msgspec.json.Decoder(dict[str, _Named])


class CommandDecoder:
    """Decodes what clients of one topic say."""

    def __init__(self, messages: MessageDecoder) -> None:
        message: Any = messages.message_type
        self._text = _command(
            msgspec.defstruct(
                "Produce",
                [("id", Id), ("messages", list[message]), *_PRODUCE_FIELDS],
                forbid_unknown_fields=True,
                gc=False,
            )
        )

    def text(self, payload: bytes) -> Any:
        """Decode a text message: an object with one attribute of `NAMES` set."""
        try:
            return self._text.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Invalid("InvalidFrame", str(error)) from None
        except RecursionError:
            raise Invalid("InvalidFrame", "JSON that is nested too deeply") from None

    def binary(self, payload: bytes) -> tuple[Any, bytes]:
        """Decode a binary message: a `produce` object, and its Arrow stream."""
        length = int.from_bytes(payload[:_HEAD_BYTES], "little")
        begin = _HEAD_BYTES + length
        if begin > len(payload):
            raise Invalid("InvalidFrame", "a binary message begins with its object's length")
        try:
            command = _BINARY.decode(payload[_HEAD_BYTES:begin])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Invalid("InvalidFrame", str(error)) from None
        if command.produce is None:
            raise Invalid("InvalidFrame", "a binary message is a produce")
        return command.produce, payload[begin:]


def id_of(payload: bytes, *, is_binary: bool) -> int | None:
    """Find the id in a message that could not be decoded, so that its error can name it."""
    if is_binary:
        length = int.from_bytes(payload[:_HEAD_BYTES], "little")
        payload = payload[_HEAD_BYTES : _HEAD_BYTES + length]
    try:
        found = _ANY_ID.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return next(iter(found.values())).id if len(found) == 1 else None


def error(id_: int | None, cause: TidewaterError) -> bytes:
    """Say what went wrong with which message."""
    said = {"id": id_, "status": cause.status, **cause.to_body()["error"]}
    return msgspec.json.encode({"error": said})


def binary(head: bytes, stream: bytes) -> bytes:
    """Join an object and an Arrow stream."""
    pad = -(len(head) + _HEAD_BYTES) % _ALIGNMENT
    return b"".join(((len(head) + pad).to_bytes(_HEAD_BYTES, "little"), head, b" " * pad, stream))
