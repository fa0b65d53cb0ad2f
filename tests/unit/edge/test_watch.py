"""The watch over disk and segments outlives whatever happens meanwhile."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_worker import node as node_module
from tidewater_worker.log.index import SparseIndex
from tidewater_worker.log.reader import segment_name
from tidewater_worker.log.recover import Segment
from tidewater_worker.node import Node


def segment(base: int) -> Segment:
    index = SparseIndex()
    index.end_offset, index.size = base + 10, 100
    return Segment(base, index)


def topic(directory: Path) -> Any:
    retention = SimpleNamespace(time=SimpleNamespace(ms=0), size=SimpleNamespace(bytes=0))
    partition = SimpleNamespace(
        appender=SimpleNamespace(segments=[segment(0), segment(10), segment(20)]),
        is_open=True,
        table=SimpleNamespace(next=30),
        directory=directory,
    )
    return SimpleNamespace(
        partitions={0: partition}, spec=SimpleNamespace(log=SimpleNamespace(retention=retention))
    )


@pytest.mark.parametrize(
    ("round_", "verb"),
    [(Node._cool_segments, "cool_segment"), (Node._delete_segments, "remove_segment")],
)
async def test_topics_and_partitions_come_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, round_: Any, verb: str
) -> None:
    first = topic(tmp_path)
    topics = {"shop/first": first}
    done: list[int] = []

    def while_it_works(_directory: Path, base: int) -> None:
        done.append(base)
        topics[f"shop/{len(done)}"] = topic(tmp_path)
        first.partitions[len(done)] = topic(tmp_path).partitions[0]

    monkeypatch.setattr(node_module, verb, while_it_works)
    monkeypatch.setattr(node_module, "CACHED_BYTES", 0)
    clock = SimpleNamespace(now_us=lambda: 10**15)
    await round_(SimpleNamespace(topics=topics, clock=clock))
    assert done == [0, 10]


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_segment_that_stays_keeps_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """A later one alone would leave a hole, and such a log is refused at the next start (G7)."""
    tried: list[int] = []
    if is_there:
        (tmp_path / segment_name(0)).touch()

    def refused(_directory: Path, base: int) -> None:
        tried.append(base)
        raise OSError(errno.EIO, "unlink")

    monkeypatch.setattr(node_module, "remove_segment", refused)
    found = topic(tmp_path)
    clock = SimpleNamespace(now_us=lambda: 10**15)
    node: Any = SimpleNamespace(topics={"shop/first": found}, clock=clock)
    await Node._delete_segments(node)
    assert tried == [0]
    left = [segment.base_offset for segment in found.partitions[0].appender.segments]
    assert left == ([0, 10, 20] if is_there else [10, 20])
