"""The Spark jobs on real tables: one session and one worker for all tests of this module."""

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tidewater_core.errors import Conflict, Invalid, Retryable
from tidewater_core.names import TopicName
from tidewater_core.settings import CatalogSettings
from tidewater_core.units import Duration
from tidewater_pipeline.cli import maintain
from tidewater_pipeline.cli import options as given
from tidewater_pipeline.cli.arguments import build_parser
from tidewater_pipeline.cli.run import Run
from tidewater_pipeline.jobs import audit, compact, expire, ingest, manifests, orphans, replay
from tidewater_pipeline.jobs import retention as retain
from tidewater_pipeline.report import Outcome
from tidewater_pipeline.session import Session, TopicTable
from tidewater_pipeline.subscribers import Cursor
from tidewater_testing.checker import verify
from tidewater_testing.parts.seaweed import SeaweedFS
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.spark import SPARK_MARKS, small_spark, within_one_hour
from tidewater_testing.subscriptions import Consumer, subscription_manifest
from tidewater_testing.traffic import Load, Traffic
from tidewater_testing.walking import Walker

pytestmark = [*SPARK_MARKS]

DONE = Outcome.DONE
PAGE = Path(__file__).resolve().parents[2] / "docs" / "spark.md"
QUICK = {"partitions": 2, "writer": {"flushInterval": "100ms"}}
LIVE = {
    "partitions": 2,
    "writer": {"flushInterval": "1s"},
    # Segments go as soon as they are in the table, so that readers need its history.
    "log": {"segmentSize": "64Ki", "retention": {"time": "0s", "size": "0"}},
}
TOPICS = {
    "shop/orders": QUICK,
    "shop/small-files": QUICK,
    "shop/planted": QUICK,
    "shop/aged": QUICK,
    "shop/copy": QUICK,
    "shop/loaded": {"partitions": 1, "writer": {"flushInterval": "100ms"}},
    "shop/read": {**QUICK, "retention": {"time": "1h"}},
    "shop/from-table": {"partitions": 1, "writer": {"flushInterval": "100ms"}},
    "shop/from-csv": {"partitions": 1, "writer": {"flushInterval": "100ms"}},
    "shop/live": LIVE,
}


class LaterClock:
    """The real time, moved."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def now_us(self) -> int:
        return int((time.time() + self.ahead_s) * 1_000_000)

    def monotonic(self) -> float:
        return time.monotonic()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start an embedded worker with the topics of all tests."""
    manifests_ = [topic_manifest(name, spec) for name, spec in TOPICS.items()]
    manifests_.append(subscription_manifest("shop/billing", "read"))
    with Worker(tmp_path_factory.mktemp("pipeline"), manifests_) as part:
        yield part


@pytest.fixture(scope="module")
def session(worker: Worker) -> Iterator[Session]:
    """Start Spark on the worker's catalog."""
    with small_spark(
        worker.settings.catalog,
        lambda: worker.get("/readyz").status == 200,
        conf={"spark.sql.adaptive.enabled": "false"},
    ) as part:
        yield part


def produce(worker: Worker, topic: str, batches: int, rows: int = 10, partitions: int = 2) -> None:
    """Send batches and commit each: one file a batch."""
    within_one_hour()
    for number in range(batches):
        for partition in range(partitions):
            messages = [
                {"key": f"k{row}", "value": {"city": ("Oslo", "Rome")[row % 2], "amount": number}}
                for row in range(rows)
            ]
            answer = worker.post(
                f"/v1/{topic}/messages?partition={partition}", json.dumps({"messages": messages})
            )
            assert answer.status == 200, answer.body
        worker.flush(topic)


def table_of(session: Session, topic: str) -> TopicTable:
    return session.table(TopicName.parse(topic))


def read_all(worker: Worker, topic: str, partition: int, offset: int = 0) -> list[dict[str, Any]]:
    """Read a partition from an offset to its end, through the worker."""
    read: list[dict[str, Any]] = []
    while True:
        answer = worker.get(
            f"/v1/{topic}/messages?partition={partition}&offset={offset}&limit=5000"
        )
        assert answer.status == 200, answer.body
        page = answer.json()
        read += page["messages"]
        offset = page["next_offset"]
        if offset >= page["end_offset"]:
            return read


def test_the_page_about_spark_holds(worker: Worker, session: Session, tmp_path: Path) -> None:
    """Every example of docs/spark.md runs as it stands: SQL, incremental, streaming."""
    produce(worker, "shop/orders", batches=4, rows=5)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    scope: dict[str, Any] = {"spark": session.spark, "checkpoint": str(tmp_path / "checkpoint")}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)


def test_upkeep_of_a_table(worker: Worker, session: Session) -> None:
    """Small files become one, pinned and tagged snapshots stay, what nothing names goes."""
    topic = "shop/small-files"
    produce(worker, topic, batches=8)
    table = table_of(session, topic)
    closed = compact.run(session, table, compact.CompactOptions())
    assert closed.outcome is Outcome.NOTHING, "the hour in use is left alone"
    session.sql(f"ALTER TABLE {table.full_name} CREATE TAG kept")
    pinned = table.load().snapshots[0].snapshot_id

    done = compact.run(session, table, compact.CompactOptions(include_open=True))
    assert done.before is not None
    assert done.after is not None
    # A flush of its own accord may come between the two halves of a batch.
    assert done.before.files >= 8, done.to_json()
    assert done.after.files == 1, done.to_json()
    assert done.after.rows == 160
    assert table.load().sort_order == compact.ORDER, "so nothing is shuffled"
    (whole,) = table.files(table.load())
    columns = pq.read_table(whole.path.removeprefix("file:"), columns=list(compact.ORDER))
    pairs = list(zip(*(column.to_pylist() for column in columns.columns), strict=True))
    assert pairs == [(p, offset) for p in range(2) for offset in range(80)], "sorted in the file"
    again = compact.run(session, table, compact.CompactOptions(include_open=True))
    assert again.outcome is Outcome.NOTHING, "twice changes nothing"

    manifests.run(session, table, manifests.ManifestOptions(manifests_min=1))
    options = expire.ExpireOptions(older_than=Duration("1ms"), pins=frozenset({pinned}))
    expired = expire.run(session, table, options)
    state = table.load()
    assert {s.snapshot_id for s in state.snapshots} == {pinned, *state.refs.values()}
    assert expired.details["expired_snapshots"] > 0

    stray = Path(state.location.removeprefix("file:")) / "data" / "stray.parquet"
    stray.write_bytes(b"left by a writer that died")
    hour_ago = time.time() - 3600
    os.utime(stray, (hour_ago, hour_ago))
    young = stray.with_name("in-flight.parquet")
    young.write_bytes(b"of a commit that is under way")
    chosen = orphans.OrphanOptions(grace=Duration("30m"), settle=Duration("1ms"))
    looked = orphans.run(session, table, chosen)
    assert looked.details["found"] == 1, looked.to_json()
    assert stray.exists(), "a dry run removes nothing"
    orphans.run(session, table, replace(chosen, delete=True))
    assert not stray.exists()
    assert young.exists()
    young.unlink()

    produce(worker, topic, batches=1)
    sound = audit.run(session, table, audit.AuditOptions(chunk_rows=17))
    assert sound.outcome is Outcome.DONE, sound.to_json()
    assert sound.details["rows_read"] == 180
    for partition in range(2):
        offsets = [message["offset"] for message in read_all(worker, topic, partition)]
        assert offsets == list(range(90)), "G3 One stream"


def test_audit_finds_what_was_planted(worker: Worker, session: Session) -> None:
    """Rows are deleted and doubled behind Tidewater's back; each range is named exactly."""
    topic = "shop/planted"
    produce(worker, topic, batches=2, rows=50)
    table = table_of(session, topic)
    name = table.full_name
    session.sql(f"DELETE FROM {name} WHERE tw_partition = 0 AND tw_offset BETWEEN 30 AND 40")
    session.sql(f"DELETE FROM {name} WHERE tw_partition = 1 AND tw_offset >= 97")
    session.sql(
        f"INSERT INTO {name} SELECT * FROM {name} "
        "WHERE tw_partition = 1 AND tw_offset BETWEEN 10 AND 12"
    )
    session.sql(
        f"INSERT INTO {name} SELECT tw_partition, 100, tw_time, tw_key, tw_headers, value "
        f"FROM {name} WHERE tw_partition = 0 AND tw_offset = 5"
    )
    session.sql(f"ALTER TABLE {name} ALTER COLUMN tw_time DROP NOT NULL")
    session.sql(
        f"INSERT INTO {name} SELECT tw_partition, -1, NULL, tw_key, tw_headers, value "
        f"FROM {name} WHERE tw_partition = 1 AND tw_offset = 5"
    )
    # Of partition 0 a person gave 32 to 35 up: a record, not a finding.
    table.set_properties({"tidewater.gap.0": '[{"start":32,"end":36}]'})
    report = audit.run(session, table, audit.AuditOptions(chunk_rows=16))
    assert report.outcome is Outcome.FOUND
    assert report.details["recorded_gaps"] == [{"partition": 0, "first": 32, "last": 35}]
    assert (report.details["missing"], report.details["twice"]) == (7 + 3, 3)
    found = {(f["kind"], f["partition"], f["first"], f["last"]) for f in report.details["findings"]}
    assert found == {
        ("missing", 0, 30, 31),
        ("missing", 0, 36, 40),
        ("past-frontier", 0, 100, 100),
        ("time-order", 0, 100, 100),
        ("before-start", 1, -1, -1),
        ("no-time", 1, -1, -1),
        ("twice", 1, 10, 12),
        ("missing", 1, 97, 99),
    }


def test_retention_raises_the_start_first_and_respects_cursors(
    worker: Worker, session: Session
) -> None:
    topic = "shop/aged"
    produce(worker, topic, batches=3)
    table = table_of(session, topic)
    later = replace(session, clock=LaterClock(3 * 3600))
    cursor = Cursor("billing", 1, 29)
    options = retain.RetentionOptions(keep=Duration("1h"), cursors=(cursor,))
    refused = retain.run(later, table, options)
    assert refused.outcome is Outcome.REFUSED
    assert "billing" in refused.message
    assert table.load().starts == {0: 0, 1: 0}

    kept = retain.run(session, table, replace(options, cursors=()))
    assert kept.outcome is Outcome.NOTHING, "young rows stay"
    done = retain.run(later, table, replace(options, force=True))
    assert done.outcome is Outcome.DONE, done.to_json()
    assert done.after is not None
    assert done.after.files == 0
    assert table.load().starts == {0: 30, 1: 30}

    produce(worker, topic, batches=1)
    sound = audit.run(session, table, audit.AuditOptions())
    assert sound.outcome is Outcome.DONE, sound.to_json()
    assert sound.details["rows_read"] == 20
    gone = session.sql(f"SELECT min(tw_offset) AS n FROM {table.full_name}")
    assert gone == [{"n": 30}]


def test_upkeep_asks_who_still_reads(worker: Worker, session: Session) -> None:
    """Rows that a subscription has not read stay, files are joined all the same; then they go.

    Three hours pass, so that the hour has closed and there is something to cut.
    """
    topic = "shop/read"
    produce(worker, topic, batches=6)
    words = ["maintain", "--topic", topic, "--data", str(worker.directory), "--older-than", "1m"]
    args = build_parser().parse_args(words)
    later = replace(session, clock=LaterClock(3 * 3600))
    run = Run(later, args, given.places(args, {}).store)
    refused = maintain.maintain(run, TopicName.parse(topic))
    assert refused.verdict.outcome is Outcome.REFUSED, refused.to_json()
    assert "shop/billing has read partition 0 up to 0" in refused.verdict.message
    assert refused.after is not None
    assert (refused.after.files, refused.after.rows) == (1, 120), "compacted, none removed"
    assert refused.removed["expired_snapshots"] > 0

    consumer = Consumer(worker.address, topic, "billing")
    read = 0
    while read < 120:
        messages = consumer.pull(wait_ms=1000)
        consumer.ok("ack", ack_ids=[message["ack_id"] for message in messages])
        read += len(messages)
    done = maintain.maintain(run, TopicName.parse(topic))
    assert done.verdict.outcome is Outcome.DONE, done.to_json()
    assert done.after is not None
    assert done.after.rows == 0
    assert table_of(session, topic).load().starts == {0: 60, 1: 60}
    last = {step.job: step for step in done.steps}["orphans"]
    assert "ago" in last.message, "every file is not listed at each run"


def test_import_and_replay_send_every_row_once(
    worker: Worker, session: Session, tmp_path: Path
) -> None:
    """Two files of JSON lines go in, twice; their rows go on to another topic, twice."""
    for number in range(2):
        lines = [json.dumps({"id": number * 100 + row, "who": f"w{row % 3}"}) for row in range(25)]
        (tmp_path / f"part-{number}.json").write_text("\n".join(lines) + "\n")
    url = f"http://{worker.address}"
    loaded = table_of(session, "shop/loaded")
    options = ingest.ImportOptions(
        source=str(tmp_path), format="json", url=url, key="who", batch_rows=10
    )
    first = ingest.run(session, loaded, options)
    second = ingest.run(session, loaded, options)
    assert (first.details["messages"], first.details["stored_before"]) == (50, 0)
    assert (second.details["messages"], second.outcome) == (0, Outcome.NOTHING)
    messages = read_all(worker, "shop/loaded", 0)
    ids = [json.loads(message["value"])["id"] for message in messages]
    assert sorted(ids) == [*range(25), *range(100, 125)]
    assert [i for i in ids if i < 100] == list(range(25)), "a file's rows keep their order"

    worker.flush("shop/loaded")
    again = replay.ReplayOptions(
        to=TopicName.parse("shop/copy"),
        url=url,
        begin=5,
        end=45,
        where="CAST(tw_key AS STRING) <> 'w0'",
        batch_rows=10,
    )
    sent = [replay.run(session, loaded, again) for _ in range(2)]
    wanted = [m for m in messages if 5 <= m["offset"] < 45 and m["key"] != "w0"]
    assert [each.details["messages"] for each in sent] == [len(wanted), 0]
    assert sent[1].outcome is Outcome.NOTHING, "it is through"
    copied = [message for p in range(2) for message in read_all(worker, "shop/copy", p)]
    assert sorted(m["value"] for m in copied) == sorted(m["value"] for m in wanted)
    assert {m["headers"]["tw-replayed-from"] for m in copied} == {
        f"shop/loaded/0/{m['offset']}" for m in wanted
    }


def test_import_from_a_table_goes_on_where_it_was_cut(worker: Worker, session: Session) -> None:
    """The run is cut in the middle and the source is rewritten: still each row once."""
    source = "tidewater.lake.events"
    session.sql("CREATE NAMESPACE IF NOT EXISTS tidewater.lake")
    session.sql(
        f"CREATE TABLE {source} USING iceberg AS SELECT id, concat('u', id % 7) AS who "
        "FROM range(0, 20000, 1, 2)"
    )
    target = table_of(session, "shop/from-table")
    options = ingest.ImportOptions(
        source=source, format="table", url=f"http://{worker.address}", key="who", batch_rows=10
    )
    frontier = threading.Event()

    def cut() -> None:
        while not frontier.is_set():
            if worker.get("/v1/shop/from-table/messages?partition=0&offset=0").json()["end_offset"]:
                session.spark.sparkContext.cancelAllJobs()
                return

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(Retryable):
        ingest.run(session, target, options)
    frontier.set()
    cutter.join()
    session.sql(f"INSERT INTO {source} SELECT id, 'late' FROM range(20000, 20010)")
    compact_call = "CALL tidewater.system.rewrite_data_files(table => 'lake.events', "
    session.sql(compact_call + "options => map('rewrite-all', 'true'))")

    again = ingest.run(session, target, options)
    assert again.details["messages"] == 20_000, again.to_json()
    assert 0 < again.details["stored_before"] < 20_000
    rows = [json.loads(m["value"]) for m in read_all(worker, "shop/from-table", 0)]
    assert sorted(row["id"] for row in rows) == list(range(20_000)), "each once, of one version"
    assert all(row["who"] == f"u{row['id'] % 7}" for row in rows)
    assert ingest.run(session, target, options).outcome is Outcome.NOTHING, "it is through"
    more = ingest.run(session, target, replace(options, run_id="a-second-look"))
    assert more.details["messages"] == 20_010


def test_import_of_csv(worker: Worker, session: Session, tmp_path: Path) -> None:
    lines = ["id,city,amount", '1,"Oslo, N",2.5', "2,Rome,", "3,Bern,7"]
    (tmp_path / "orders.csv").write_text("\n".join(lines) + "\n")
    url = f"http://{worker.address}"
    options = ingest.ImportOptions(source=str(tmp_path), format="csv", url=url, key="id")
    target = table_of(session, "shop/from-csv")
    assert ingest.run(session, target, options).details["messages"] == 3
    assert ingest.run(session, target, options).outcome is Outcome.NOTHING
    messages = read_all(worker, "shop/from-csv", 0)
    assert [m["key"] for m in messages] == ["1", "2", "3"]
    assert [json.loads(m["value"]) for m in messages] == [
        {"id": "1", "city": "Oslo, N", "amount": "2.5"},
        {"id": "2", "city": "Rome"},
        {"id": "3", "city": "Bern", "amount": "7"},
    ]
    with pytest.raises(Invalid, match="no column 'nobody'"):
        ingest.run(session, target, replace(options, key="nobody"))


async def test_the_stream_goes_on_under_upkeep(worker: Worker, session: Session) -> None:
    """Compaction, expiry and removal of orphans against a commit a second and readers from 0."""
    topic = "shop/live"
    table = table_of(session, topic)
    readers = [Walker(worker, topic, partition) for partition in range(2)]
    outcomes: list[Outcome] = []
    rewritten = 0
    load = Load(worker.address, topic, senders=2, partitions=2, pause_s=0.05)
    async with Traffic(load) as traffic:
        await asyncio.sleep(3)
        for reader in readers:
            reader.start()
        began = time.monotonic()
        while (took := time.monotonic() - began) < 20 or (outcomes.count(DONE) < 2 and took < 90):
            done = await asyncio.to_thread(
                compact.run, session, table, compact.CompactOptions(include_open=True, files_min=2)
            )
            outcomes.append(done.outcome)
            rewritten += sum(r["rewritten_files"] for r in done.details.get("ranges", []))
            await asyncio.to_thread(
                expire.run, session, table, expire.ExpireOptions(older_than=Duration("3s"))
            )
            await asyncio.to_thread(
                orphans.run,
                session,
                table,
                orphans.OrphanOptions(grace=Duration("8s"), settle=Duration("1s"), delete=True),
            )
    for reader in readers:
        reader.halt.set()
    for reader in readers:
        await asyncio.to_thread(reader.join, 60)
        assert reader.wrong == []
        assert reader.rounds > 0, "a reader from the beginning gets to the end"
    flushed = await asyncio.to_thread(worker.flush, topic)
    verify(
        worker.catalog_properties,
        worker.settings.log_root,
        topic,
        traffic.record.acked,
        flushed=True,
    )
    assert outcomes.count(DONE) >= 2, f"compaction loses its races: {outcomes}"
    assert rewritten >= 4, "several commits' files were joined"
    sound = await asyncio.to_thread(audit.run, session, table, audit.AuditOptions(chunk_rows=500))
    assert sound.outcome is Outcome.DONE, sound.to_json()
    assert sound.details["rows_read"] == sum(flushed["frontier"].values())


def test_rest_catalog_and_s3(tmp_path: Path, session: Session, seaweedfs: SeaweedFS) -> None:
    """The same jobs on a REST catalog with object storage, in the same session."""
    topic, neighbour = "lake-jobs/orders", "lake-jobs/orders-dead"
    properties = {**seaweedfs.properties, "s3.path-style-access": "true"}
    topics = [topic_manifest(name, QUICK) for name in (topic, neighbour)]
    with Worker(tmp_path / "w", topics, catalog=properties) as worker:
        produce(worker, topic, batches=6)
        lake = replace(session, catalog=CatalogSettings(name="lake", properties=properties))
        lake._open(lake.catalog)
        table = table_of(lake, topic)
        done = compact.run(lake, table, compact.CompactOptions(include_open=True))
        assert done.after is not None
        assert done.after.files == 1, done.to_json()
        aged = expire.ExpireOptions(older_than=Duration("1ms"))
        assert expire.run(lake, table, aged).outcome is Outcome.DONE
        produce(worker, topic, batches=1)
        sound = audit.run(lake, table, audit.AuditOptions())
        assert sound.outcome is Outcome.DONE, sound.to_json()
        assert sound.details["rows_read"] == 140
        # What a neighbour has stays, whether its name begins alike or it shares the place.
        produce(worker, neighbour, batches=2)
        options = orphans.OrphanOptions(grace=Duration("1ms"), settle=Duration("1ms"), delete=True)
        orphans.run(lake, table, options)
        assert audit.run(lake, table_of(lake, neighbour), audit.AuditOptions()).message == ""
        place = f"{table.load().location}/metadata/00007-other.metadata.json"
        stream = table.java().io().newOutputFile(place).create()
        stream.write(b'{"table-uuid": "another"}')
        stream.close()
        with pytest.raises(Conflict, match="SharedLocation"):
            orphans.run(lake, table, options)
