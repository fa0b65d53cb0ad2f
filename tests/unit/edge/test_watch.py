"""The watch over disk and segments outlives whatever happens meanwhile."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_worker import node as node_module
from tidewater_worker.log.index import SparseIndex
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
