"""etcd's messages as bytes: known encodings, and whatever a server may send."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewater_coordination.etcd import wire


def test_known_bytes() -> None:
    assert wire.range_request(b"a") == b"\x0a\x01a"
    assert wire.range_request(b"a", b"b", limit=300) == b"\x0a\x01a\x12\x01b\x18\xac\x02"
    assert wire.put(b"k", b"v", 5) == b"\x12\x08\x0a\x01k\x12\x01v\x18\x05"
    assert wire.lease_grant_request(10) == b"\x08\x0a"
    # target MOD, key, and the revision 0 said aloud: the key must not exist
    assert wire.is_at(b"k", 0) == b"\x10\x02\x1a\x01k\x30\x00"
    assert wire.prefix_end(b"tidewater/meta/") == b"tidewater/meta0"


def test_reading_answers() -> None:
    header = b"\x0a\x02\x18\x07"
    kv = b"\x12\x0c\x0a\x01k\x18\x05\x2a\x02vv\x30\x80\x01"
    answer = wire.read_range(header + kv + b"\x18\x01")
    assert answer.revision == 7
    assert answer.more
    assert answer.kvs[0].key == b"k"
    assert answer.kvs[0].value == b"vv"
    assert answer.kvs[0].mod_revision == 5
    assert answer.kvs[0].lease == 128
    assert wire.read_lease(header + b"\x10\x2a\x18\x0a") == (42, 10)
    assert wire.read_lease(header + b"\x10\x2a") == (42, 0), "a lease that is gone"


def test_a_message_cut_short_is_noticed() -> None:
    with pytest.raises(ValueError, match="cut short"):
        list(wire.fields(b"\x0a\x05abc"))


@given(st.binary(max_size=30), st.binary(max_size=30), st.integers(0, 2**62))
def test_what_is_put_is_read(key: bytes, value: bytes, lease: int) -> None:
    ((field, _, body),) = list(wire.fields(wire.put(key, value, lease)))
    assert field == 2
    found = {number: content or value for number, value, content in wire.fields(body)}
    assert found.get(1, b"") in (key, 0)
    assert found.get(3, 0) == lease
