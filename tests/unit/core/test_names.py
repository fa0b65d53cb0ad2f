"""Names that others read: pinned here, since changing one is a migration."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewater_core import names
from tidewater_core.errors import Invalid
from tidewater_core.names import TopicName


def test_property_keys_are_the_documented_ones() -> None:
    assert names.frontier_property(3) == "tidewater.partition.3"
    assert names.start_property(3) == "tidewater.start.3"
    assert names.COMMIT_ID == "tidewater.commit-id"
    assert names.TOPIC_UUID == "tidewater.topic-uuid"


@pytest.mark.parametrize(
    ("key", "partition"),
    [
        ("tidewater.partition.0", 0),
        ("tidewater.partition.12", 12),
        ("tidewater.partition.", None),
        ("tidewater.partition.x", None),
        ("tidewater.partition.-1", None),
        ("tidewater.partition.²", None),
        ("tidewater.start.1", None),
        ("write.format", None),
        ("1", None),
    ],
)
def test_partition_is_found_in_a_frontier_key_only(key: str, partition: int | None) -> None:
    assert names.partition_of_frontier(key) == partition


def test_partition_of_start() -> None:
    assert names.partition_of_start("tidewater.start.7") == 7
    assert names.partition_of_start("tidewater.partition.7") is None


def test_topic_name_reads_and_writes() -> None:
    topic = TopicName.parse("shop/orders")
    assert topic == TopicName("shop", "orders")
    assert str(topic) == "shop/orders"
    assert topic.table_identifier == ("shop", "orders")
    assert names.log_path(Path("/log"), topic, 2) == Path("/log/shop/orders/2")


@pytest.mark.parametrize(
    "text",
    [
        "orders", "", "/", "shop/", "/orders", "shop/or/ders", "Shop/orders", "shop/../x",
        "shop/..", "shop/a.b", "shop/-a", "shop/a-", "shop/" + "a" * 64, "shop/a\n", "shop/ä",
    ],
)  # fmt: skip
def test_bad_topic_names_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match="InvalidTopicName"):
        TopicName.parse(text)


@given(st.text(max_size=80))
def test_no_name_leaves_its_directory(text: str) -> None:
    root = Path("/log")
    try:
        topic = TopicName.parse(text)
    except Invalid:
        return
    path = names.log_path(root, topic, 0)
    assert path.resolve().is_relative_to(root)
    assert len(path.relative_to(root).parts) == 3
