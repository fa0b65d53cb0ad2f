"""Whose a metadata file is."""

import gzip
import json

import pytest

from tidewater_core.metadata_file import is_metadata_file, other_table

WHOLE = b'{"format-version": 2, "table-uuid": "theirs"}'
# The time that gzip notes by default would name the test anew every second.
PACKED = gzip.compress(WHOLE, mtime=0)


def written(topic: str, snapshots: int) -> bytes:
    properties = {"tidewater.topic": topic} if topic else {}
    metadata = {"table-uuid": "theirs", "properties": properties, "snapshots": [{}] * snapshots}
    return json.dumps(metadata).encode()


@pytest.mark.parametrize(
    ("data", "other"),
    [
        (WHOLE, "theirs"),
        (PACKED, "theirs"),
        (WHOLE.replace(b"theirs", b"ours"), None),
        (b'{"format-version": 1}', "it does not say which"),
        (WHOLE[:-4], None),
        (PACKED[:-4], None),
        (b"", None),
        (b"[]", None),
        (b"\xff\xfe", None),
    ],
)
def test_whose_a_file_is(data: bytes, other: str | None) -> None:
    """One that tells no identity is somebody's; one that is torn is nobody's."""
    assert other_table(data, "ours", "shop/orders") == other


def test_an_attempt_to_make_our_table_is_nobodys() -> None:
    """Two workers make a topic's table: the metadata of the one that comes too late stays."""
    assert other_table(written("shop/orders", 0), "ours", "shop/orders") is None
    assert other_table(written("shop/orders", 1), "ours", "shop/orders") == "theirs"
    assert other_table(written("shop/other", 0), "ours", "shop/orders") == "theirs"
    assert other_table(written("", 0), "ours", "") == "theirs"


def test_names_of_metadata_files() -> None:
    assert is_metadata_file("s3://b/t/metadata/00001-x.metadata.json")
    assert is_metadata_file("s3://b/t/metadata/00001-x.gz.metadata.json")
    assert not is_metadata_file("s3://b/t/metadata/snap-1.avro")
