"""What every catalog and warehouse is asked: a topic lives on it and goes, through a real worker.

Messages are produced, reach the table, are read by another program, and by the worker itself from
the table once its log has let go of them; the metadata files that the table no longer needs are
removed; with the topic its table and all its files go.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pyiceberg.catalog import load_catalog

from tidewater_coordination import connect_as
from tidewater_coordination.port import TopicPhase
from tidewater_testing.checker import verify
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.traffic import Load, Traffic

LOAD_S = 1.5
WAIT_S = 60.0
METADATA_FILES_MAX = 2
SPEC = {
    "partitions": 2,
    "log": {"segmentSize": "64Ki", "tailCache": "64Ki", "retention": {"time": "0s", "size": "0"}},
    "writer": {"flushInterval": "200ms"},
    "table": {"properties": {"write.metadata.previous-versions-max": str(METADATA_FILES_MAX)}},
    "deletionPolicy": "Delete",
}


async def live_and_go(
    directory: Path,
    catalog: Mapping[str, str],
    topic: str,
    files: Callable[[], list[str]],
    read_by: Mapping[str, str] | None = None,
) -> None:
    """Let a topic live and go; `files` lists what the warehouse holds of its table.

    `read_by` is how the other program opens the catalog, where that differs.
    """
    properties = dict(catalog)
    with Worker(directory, [topic_manifest(topic, SPEC)], catalog=properties) as worker:
        load = Load(
            worker.address, topic, senders=4, partitions=2, payload_bytes_max=1_000, pause_s=0.01
        )
        async with Traffic(load) as traffic:
            await asyncio.sleep(LOAD_S)
        flushed = await asyncio.to_thread(worker.flush, topic)
        evidence = verify(
            dict(read_by or catalog),
            worker.settings.log_root,
            topic,
            traffic.record.acked,
            flushed=True,
        )
        ends = {int(number): end for number, end in flushed["frontier"].items()}
        assert {n: len(side.rows) for n, side in evidence.table.items()} == ends
        await asyncio.to_thread(_read_history, worker, topic, ends)
        metadata = [name for name in files() if name.endswith(".metadata.json")]
        kept = METADATA_FILES_MAX + 1
        assert len(metadata) <= kept, "metadata files that the table has dropped are removed"
        await _delete(worker, topic)
        assert files() == [], "with deletionPolicy Delete the table's files go, too"
        reader = load_catalog("tidewater", **(read_by or catalog))
        namespace, _, name = topic.partition("/")
        assert not reader.table_exists((namespace, name))


def _read_history(worker: Worker, topic: str, ends: Mapping[int, int]) -> None:
    """Read each partition from its beginning, which the log no longer has."""

    def log_starts() -> list[int]:
        partitions = worker.get(f"/v1/{topic}").json()["partitions"]
        return [int(partition["log_start"]) for partition in partitions]

    wait_until(lambda: min(log_starts()) > 0, WAIT_S, "the log to let go of its first segments")
    for partition, end in ends.items():
        seen: list[int] = []
        while len(seen) < end:
            path = f"/v1/{topic}/messages?partition={partition}&offset={len(seen)}&limit=5000"
            answer = worker.get(path)
            assert answer.status == 200, answer.body
            found = [message["offset"] for message in answer.json()["messages"]]
            assert found, f"G3 One stream: nothing at offset {len(seen)} of {end}"
            seen += found
        assert seen == list(range(end)), "G3 One stream"


async def _delete(worker: Worker, topic: str) -> None:
    store = connect_as(worker.settings)
    await store.start()
    try:
        uuid = (await store.registry()).topics[topic].uuid
        assert await store.set_topic_phase(topic, uuid, TopicPhase.DELETING)
        deadline = time.monotonic() + WAIT_S
        while (phase := (await store.registry()).topics[topic].phase) is not TopicPhase.DROPPED:
            said = f"the topic is {phase}\n{worker.process.log_tail()}"
            assert time.monotonic() < deadline, said
            await asyncio.sleep(0.05)
    finally:
        await store.close()
