"""Jobs that outlast the snapshots that the writer keeps: what they need is held meanwhile."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from typing import Any

import pytest

from tidewater_core.names import HOLD, TopicName
from tidewater_core.units import ByteSize
from tidewater_pipeline import holding
from tidewater_pipeline.jobs import audit, compact
from tidewater_pipeline.report import Outcome
from tidewater_pipeline.session import Session
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.spark import SPARK_MARKS, small_spark

pytestmark = [*SPARK_MARKS]

TOPIC = "shop/few"
KEPT = 4
SPEC = {
    "partitions": 1,
    "writer": {"flushInterval": "100ms"},
    # Less than half a second of history, and a rewrite takes seconds.
    "maintenance": {"keepSnapshots": KEPT},
}
SLEEP = "SELECT java_method('java.lang.Thread', 'sleep', 5000L) FROM range(0, 1, 1, 1)"
OPTIONS = compact.CompactOptions(include_open=True, target=ByteSize("64Mi"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker whose topic gets messages all the time."""
    over = threading.Event()

    def produce(part: Worker) -> None:
        body = json.dumps({"messages": [{"value": "x" * 400 + str(n)} for n in range(50)]})
        while not over.wait(0.08):
            with suppress(OSError, HTTPException):
                part.post(f"/v1/{TOPIC}/messages?partition=0", body)

    with Worker(tmp_path_factory.mktemp("hold"), [topic_manifest(TOPIC, SPEC)]) as part:
        load = threading.Thread(target=produce, args=(part,), daemon=True)
        load.start()
        yield part
        over.set()
        load.join(10)


@pytest.fixture(scope="module")
def session(worker: Worker) -> Iterator[Session]:
    """Start Spark on the worker's catalog."""
    with small_spark(worker.settings.catalog, shuffle_partitions=1) as part:
        yield part


def test_a_rewrite_may_outlast_the_snapshots_that_the_writer_keeps(
    worker: Worker, session: Session
) -> None:
    table = session.table(TopicName.parse(TOPIC))
    wait_until(lambda: table.load().size.files >= 60, 60, "small files")
    for _ in range(2):
        began, before = time.monotonic(), table.load()
        done = compact.run(session, table, OPTIONS)
        assert time.monotonic() - began > KEPT * 0.1, "it outlasts what is kept"
        assert done.outcome is Outcome.DONE, done.to_json()
        (one,) = done.details["ranges"]
        assert one["rewritten_files"] >= 0.8 * before.size.files, done.to_json()
        assert one["failed_files"] == 0
        after = table.load()
        assert HOLD not in after.properties
        assert after.sequence > before.sequence + KEPT, "the writer went on"
        wait_until(lambda: table.load().size.files >= 20, 60, "more small files")
    wait_until(
        lambda: len(table.load().snapshots) <= KEPT, 30, "the writer to expire what was held"
    )


def test_without_the_hold_it_is_a_lost_race_and_never_nothing(
    worker: Worker, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a writer that does not know of holds: every commit fails, Iceberg tells of none."""
    plain = Session.sql

    def outlasted(self: Session, text: str) -> list[dict[str, Any]]:
        """Run it while something else has Spark's only core for the time of many commits."""
        if "rewrite_data_files" not in text:
            return plain(self, text)
        with ThreadPoolExecutor(1) as pool:
            sleeper = pool.submit(plain, self, SLEEP)
            tracker = self.spark.sparkContext.statusTracker()
            wait_until(lambda: bool(tracker.getActiveStageIds()), 30, "the core to be taken")
            rows = plain(self, text)
            sleeper.result()
        return rows

    monkeypatch.setattr(holding, "hold_ms", lambda _nbytes: 0)
    monkeypatch.setattr(Session, "sql", outlasted)
    table = session.table(TopicName.parse(TOPIC))
    wait_until(lambda: table.load().size.files >= 60, 60, "small files")
    done = compact.run(session, table, OPTIONS)
    assert done.outcome is Outcome.CONFLICT, done.to_json()
    (one,) = done.details["ranges"]
    assert (one["rewritten_files"], one["failed_files"] > 0) == (0, True), done.to_json()
    assert one["error"].startswith("CommitConflict")


def test_nothing_is_lost(worker: Worker, session: Session) -> None:
    worker.flush(TOPIC)
    sound = audit.run(session, session.table(TopicName.parse(TOPIC)), audit.AuditOptions())
    assert sound.outcome is Outcome.DONE, sound.to_json()
