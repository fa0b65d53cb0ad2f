"""Retention raises a topic's start while nobody produces; who reads from the first on hears it."""

import json
import time
from pathlib import Path

from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_worker.table.catalog import open_catalog

TOPIC = "shop/quiet"
KEPT = 300
SPEC = {
    "partitions": 1,
    "writer": {"flushInterval": "300ms"},
    "log": {"segmentSize": "64Ki", "retention": {"time": "0s", "size": "0"}},
}
SUBSCRIPTION = json.dumps(
    {
        "apiVersion": "tidewater.dev/v1alpha1",
        "kind": "Subscription",
        "metadata": {"name": "s", "namespace": "shop"},
        "spec": {"topic": "quiet", "startFrom": {"position": "earliest"}},
    }
)


def test_readers_from_the_first_message_hear_of_it(tmp_path: Path) -> None:
    with Worker(tmp_path / "w", [topic_manifest(TOPIC, SPEC), SUBSCRIPTION]) as worker:
        batch = {"messages": [{"value": "x" * 300}] * 50}
        for _ in range(12):
            assert worker.post(f"/v1/{TOPIC}/messages", json.dumps(batch)).status == 200
            time.sleep(0.05)  # a segment takes whole groups: several make several segments
        assert worker.post(f"/v1/{TOPIC}/flush", "").status == 200
        logs = worker.settings.log_root / TOPIC / "0"
        deadline = time.monotonic() + 60
        while int(min(logs.glob("*.wal")).stem) <= KEPT:
            assert time.monotonic() < deadline, "the log keeps what the table has"
            time.sleep(0.1)
        table = open_catalog(worker.settings.catalog).load(("shop", "quiet"))
        with table.transaction() as transaction:
            transaction.set_properties({"tidewater.start.0": str(KEPT)})

        subscription = f"/v1/{TOPIC}/subscriptions/s"
        found = json.loads(worker.get(f"/v1/{TOPIC}/messages?partition=0&limit=5").body)
        assert [m["offset"] for m in found["messages"]] == list(range(KEPT, KEPT + 5))
        moved = worker.post(f"{subscription}/seek", json.dumps({"position": "earliest"}))
        assert json.loads(moved.body) == {"offsets": {"0": KEPT}}
        pulled = worker.post(f"{subscription}/pull", json.dumps({"max": 5, "wait_ms": 5000}))
        assert json.loads(pulled.body)["messages"][0]["offset"] == KEPT
        gone = worker.get(f"/v1/{TOPIC}/messages?partition=0&offset=0")
        assert (gone.status, gone.reason) == (410, "OffsetExpired")
