"""An owner that was thought dead wakes up with an old epoch, and must be refused (G5).

Worker A hangs (its table process is frozen) with acknowledged messages that are not in the table
yet. Worker B, with a log of its own, takes the partition: its epoch is higher. Then A wakes up
and tries to commit what it has, against a real catalog.

The coordination store would not allow it: it is told a lie, in a copy that B alone uses, so that
nothing but the frontier in the table stands between A and its rows.
"""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tidewater_coordination.sqlite import SqliteCoordination
from tidewater_testing.checker import AckedBatch, Range, make_payload, verify
from tidewater_testing.evidence import load_table, read_log_side, read_table_sides
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.traffic import encode_json

TOPIC = "zombie/orders"
SPEC = {"partitions": 1, "writer": {"flushInterval": "100ms"}}
FENCED_TIMEOUT_S = 30.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Give the properties of the catalog that the test names."""
    properties: dict[str, str]
    match request.param:
        case "rest":
            properties = request.getfixturevalue("rest_catalog").properties
        case "seaweedfs":
            properties = request.getfixturevalue("seaweedfs").properties
        case "postgresql":
            properties = request.getfixturevalue("postgres").properties(f"file://{tmp_path}/w")
        case "glue":
            properties = request.getfixturevalue("aws").properties
        case _:
            properties = {
                "type": "sql",
                "uri": f"sqlite:///{tmp_path}/shared.db",
                "warehouse": f"file://{tmp_path}/warehouse",
            }
    return properties


def _worker(tmp_path: Path, name: str, store: str, catalog: dict[str, str]) -> Worker:
    return Worker(
        tmp_path / name,
        [topic_manifest(TOPIC, SPEC)],
        catalog=catalog,
        coordination=tmp_path / store,
        worker_id=name,
    )


def _lie(tmp_path: Path, epoch: int, drained_at: int) -> None:
    """Copy A's store, and say in the copy that A has drained the partition and let it go."""
    with sqlite3.connect(tmp_path / "a.db") as truth, sqlite3.connect(tmp_path / "b.db") as copy:
        truth.backup(copy)
        copy.execute("DELETE FROM sessions")  # and that nobody can ask A about it
    truth.close()
    copy.close()

    async def release() -> None:
        store = SqliteCoordination(tmp_path / "b.db")
        await store.start()
        await store.release(TOPIC, 0, epoch, drained_at)
        await store.close()

    asyncio.run(release())


def _send(worker: Worker, sender: str, first: int, count: int) -> AckedBatch:
    payloads = [make_payload(sender, first + i) for i in range(count)]
    kind, body = encode_json(payloads, None)
    answer = worker.post(f"/v1/{TOPIC}/messages?partition=0", body, kind)
    assert answer.status == 200, answer.body
    acks: list[dict[str, Any]] = answer.json()["acks"]
    ranges = tuple(Range(ack["partition"], ack["offset"], ack["count"]) for ack in acks)
    return AckedBatch(tuple(payloads), ranges)


def _is_fenced(worker: Worker) -> bool:
    answer = worker.post(f"/v1/{TOPIC}/messages?partition=0", '{"messages": [{"value": "x:1:"}]}')
    return answer.status == 409 and answer.reason == "Fenced"


def _settled(worker: Worker) -> None:
    """Wait until the worker has made up its mind about the partition."""

    def known() -> bool:
        if not worker.answers():
            return False
        (partition,) = worker.get(f"/v1/{TOPIC}").json()["partitions"]
        return bool(partition.get("reason")) or partition["state"] == "running"

    wait_until(known, FENCED_TIMEOUT_S, "the partition to open or to be refused", 0.1)


@pytest.mark.parametrize(
    ("catalog", "of_zombie", "of_owner"),
    [
        ("sqlite", 5, 20),
        ("sqlite", 20, 5),
        ("rest", 5, 20),
        ("seaweedfs", 20, 5),
        ("postgresql", 5, 20),
        ("glue", 20, 5),  # a stand-in of AWS
    ],
    indirect=["catalog"],
)
def test_a_zombie_is_refused(
    tmp_path: Path, catalog: dict[str, str], of_zombie: int, of_owner: int
) -> None:
    """Its rows overlap the new owner's offsets: fewer, and more."""
    acked: list[AckedBatch] = []
    with _worker(tmp_path, "a", "a.db", catalog) as zombie:
        acked.append(_send(zombie, "first", 0, 10))
        zombie.flush(TOPIC)
        frozen = zombie.freeze(Victim.TABLE)
        kept = _send(zombie, "zombie", 0, of_zombie)
        _lie(tmp_path, 1, 10)
        with _worker(tmp_path, "b", "b.db", catalog) as owner:
            acked.append(_send(owner, "owner", 0, of_owner))
            owner.flush(TOPIC)
            zombie.thaw(frozen)
            wait_until(
                lambda: _is_fenced(zombie), FENCED_TIMEOUT_S, "G5 One owner: A to be fenced", 0.2
            )
            acked.append(_send(owner, "owner", of_owner, 5))
            owner.flush(TOPIC)
            evidence = verify(catalog, owner.settings.log_root, TOPIC, acked, flushed=True)
            (partition,) = owner.get(f"/v1/{TOPIC}").json()["partitions"]
    table = evidence.table[0]
    assert len(table.rows) == 10 + of_owner + 5, "G5 One owner: only the owner's rows"
    assert table.epoch == partition["epoch"] > 1, "G5 One owner: the epoch never goes back"
    in_log = read_log_side(zombie.settings.log_root / TOPIC / "0")
    assert {row.payload for row in in_log.rows} >= set(kept.payloads), "G7: evidence is kept"


@pytest.mark.parametrize("catalog", ["sqlite"], indirect=True)
def test_a_zombie_that_dies_and_comes_back_keeps_its_evidence(
    tmp_path: Path, catalog: dict[str, str]
) -> None:
    """Started again on its old log, it may not throw away or mix in what only it has."""
    acked: list[AckedBatch] = []
    with _worker(tmp_path, "a", "a.db", catalog) as zombie:
        acked.append(_send(zombie, "first", 0, 10))
        zombie.flush(TOPIC)
        zombie.freeze(Victim.TABLE)
        kept = _send(zombie, "zombie", 0, 5)
    _lie(tmp_path, 1, 10)
    with _worker(tmp_path, "b", "b.db", catalog) as owner:
        acked.append(_send(owner, "owner", 0, 20))
        owner.flush(TOPIC)
    again = _worker(tmp_path, "a", "b.db", catalog).start(wait=False)
    try:
        _settled(again)
    finally:
        again.process.kill()
    rows = read_table_sides(load_table(catalog, TOPIC))[0].rows
    assert [row.offset for row in rows] == list(range(30)), "G2 Once in the table"
    stored = b"".join(
        path.read_bytes() for path in (again.settings.log_root / TOPIC / "0").iterdir()
    )
    for payload in kept.payloads:
        assert payload in stored, "G7 Nothing is silently skipped: acknowledged bytes are gone"
