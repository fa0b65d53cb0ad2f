"""The messages of etcd's API that we use, as protobuf bytes. Pure.

    message := (tag value)*    tag := varint (field number << 3 | kind)
    kind 0 := varint           kind 2 := varint length, then so many bytes

Only these two kinds occur. Numbers are those of etcd's `rpc.proto` and `kv.proto`, API version 3;
an unknown field is skipped, so that a newer server can say more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

RANGE: Final = "/etcdserverpb.KV/Range"
TXN: Final = "/etcdserverpb.KV/Txn"
WATCH: Final = "/etcdserverpb.Watch/Watch"
LEASE_GRANT: Final = "/etcdserverpb.Lease/LeaseGrant"
LEASE_REVOKE: Final = "/etcdserverpb.Lease/LeaseRevoke"
LEASE_KEEP_ALIVE: Final = "/etcdserverpb.Lease/LeaseKeepAlive"
AUTHENTICATE: Final = "/etcdserverpb.Auth/Authenticate"
_VARINT: Final = 0
_BYTES: Final = 2
_FIXED64: Final = 1
_FIXED32: Final = 5
_MASK: Final = (1 << 64) - 1


def _varint(number: int) -> bytes:
    number &= _MASK
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    """Encode a number; 0 is the default and is left out."""
    return _varint(field << 3 | _VARINT) + _varint(value) if value else b""


def _data(field: int, value: bytes) -> bytes:
    """Encode bytes or a message, an empty one too."""
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (field, number, bytes) of a message; the one that does not apply is 0 or empty."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield tag >> 3, value, b""
        elif kind == _BYTES:
            length, at = _read_varint(data, at)
            if at + length > len(data):
                raise ValueError("a message from etcd is cut short")
            yield tag >> 3, 0, data[at : at + length]
            at += length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a message from etcd has a field of kind {kind}")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# ---- what is read


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it is stored."""

    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    """The revision of its last change."""
    lease: int = 0


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    """The keys of a range at one revision."""

    revision: int
    kvs: tuple[KeyValue, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class TxnAnswer:
    """How a transaction went."""

    revision: int
    succeeded: bool
    ranges: tuple[tuple[KeyValue, ...], ...]
    """Of the reads in the branch that was taken, in order."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a key; `deleted` has no value."""

    kv: KeyValue
    deleted: bool


@dataclass(frozen=True, slots=True)
class WatchAnswer:
    """What a watch tells."""

    revision: int
    created: bool
    canceled: bool
    events: tuple[Event, ...]
    cancel_reason: str = ""


def _revision(header: bytes) -> int:
    return next((_signed(number) for field, number, _ in fields(header) if field == 3), 0)


def _key_value(data: bytes) -> KeyValue:
    key = value = b""
    mod = lease = 0
    for field, number, content in fields(data):
        if field == 1:
            key = content
        elif field == 3:
            mod = number
        elif field == 5:
            value = content
        elif field == 6:
            lease = _signed(number)
    return KeyValue(key, value, mod, lease)


def read_range(data: bytes) -> RangeAnswer:
    """Decode a RangeResponse."""
    revision, kvs, more = 0, [], False
    for field, number, content in fields(data):
        if field == 1:
            revision = _revision(content)
        elif field == 2:
            kvs.append(_key_value(content))
        elif field == 3:
            more = bool(number)
    return RangeAnswer(revision, tuple(kvs), more)


def read_txn(data: bytes) -> TxnAnswer:
    """Decode a TxnResponse."""
    revision, succeeded, ranges = 0, False, []
    for field, number, content in fields(data):
        if field == 1:
            revision = _revision(content)
        elif field == 2:
            succeeded = bool(number)
        elif field == 3:
            ranges += [read_range(answer).kvs for kind, _, answer in fields(content) if kind == 1]
    return TxnAnswer(revision, succeeded, tuple(ranges))


def read_watch(data: bytes) -> WatchAnswer:
    """Decode a WatchResponse."""
    revision, created, canceled, reason = 0, False, False, ""
    events = []
    for field, number, content in fields(data):
        if field == 1:
            revision = _revision(content)
        elif field == 3:
            created = bool(number)
        elif field == 4:
            canceled = bool(number)
        elif field == 6:
            reason = content.decode(errors="replace")
        elif field == 11:
            deleted, kv = False, KeyValue(b"")
            for part, value, inner in fields(content):
                if part == 1:
                    deleted = value == 1
                elif part == 2:
                    kv = _key_value(inner)
            events.append(Event(kv, deleted))
    return WatchAnswer(revision, created, canceled, tuple(events), reason)


def read_lease(data: bytes) -> tuple[int, int]:
    """Decode a LeaseGrantResponse or LeaseKeepAliveResponse: id and seconds (0: it is gone)."""
    lease = ttl = 0
    for field, number, _ in fields(data):
        if field == 2:
            lease = _signed(number)
        elif field == 3:
            ttl = _signed(number)
    return lease, ttl


def read_token(data: bytes) -> str:
    """Decode an AuthenticateResponse."""
    return next((content.decode() for field, _, content in fields(data) if field == 2), "")


# ---- what is sent


def authenticate_request(user: str, password: str) -> bytes:
    """Encode an AuthenticateRequest."""
    return _data(1, user.encode()) + _data(2, password.encode())


def range_request(
    key: bytes, end: bytes = b"", *, limit: int = 0, revision: int = 0, keys_only: bool = False
) -> bytes:
    """Encode a RangeRequest: one key, or all from `key` up to before `end`."""
    return b"".join(
        (_data(1, key), _data(2, end) if end else b"", _number(3, limit), _number(4, revision),
         _number(8, int(keys_only)))
    )  # fmt: skip


def put(key: bytes, value: bytes, lease: int = 0) -> bytes:
    """Encode a put as an operation of a transaction."""
    return _data(2, _data(1, key) + _data(2, value) + _number(3, lease))


def delete(key: bytes, end: bytes = b"") -> bytes:
    """Encode a deletion as an operation of a transaction."""
    return _data(3, _data(1, key) + (_data(2, end) if end else b""))


def get(key: bytes, end: bytes = b"") -> bytes:
    """Encode a read as an operation of a transaction."""
    return _data(1, range_request(key, end))


def is_at(key: bytes, mod_revision: int) -> bytes:
    """Encode the condition that a key was last changed at a revision (0: does not exist)."""
    # result EQUAL (0), target MOD (2); the compared number is sent even if it is 0.
    return _number(2, 2) + _data(3, key) + _varint(6 << 3) + _varint(mod_revision)


def has_lease(key: bytes, lease: int) -> bytes:
    """Encode the condition that a key is attached to a lease (0: to none, or not there)."""
    return _number(2, 4) + _data(3, key) + _varint(8 << 3) + _varint(lease)


def txn_request(
    conditions: Sequence[bytes], success: Sequence[bytes], failure: Sequence[bytes] = ()
) -> bytes:
    """Encode a TxnRequest."""
    parts = [_data(1, condition) for condition in conditions]
    parts += [_data(2, operation) for operation in success]
    parts += [_data(3, operation) for operation in failure]
    return b"".join(parts)


def watch_request(key: bytes, end: bytes, revision: int) -> bytes:
    """Encode a WatchRequest that begins a watch of a range at a revision."""
    return _data(1, _data(1, key) + _data(2, end) + _number(3, revision))


def lease_grant_request(ttl_s: int) -> bytes:
    """Encode a LeaseGrantRequest; the server chooses the id."""
    return _number(1, ttl_s)


def lease_request(lease: int) -> bytes:
    """Encode a LeaseRevokeRequest or LeaseKeepAliveRequest."""
    return _number(1, lease)


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
