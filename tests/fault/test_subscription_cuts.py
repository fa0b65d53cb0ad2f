"""A power cut takes the end of a log that is not synced; no later message is skipped (G4)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import Consumer, subscription_manifest, values

TOPIC = "shop/orders"
SPEC: dict[str, Any] = {
    "partitions": 1, "log": {"sync": "Periodic", "syncInterval": "1m"},
    "freshness": "10m", "writer": {"flushInterval": "5m"},
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def send(worker: Worker, *texts: str) -> None:
    body = json.dumps({"messages": [{"value": text} for text in texts]})
    sent = lambda: worker.post(f"/v1/{TOPIC}/messages", body).status == 200  # noqa: E731
    wait_until(sent, 60, "messages to be taken", 0.2)


def test_new_messages_at_lost_offsets_are_delivered(tmp_path: Path) -> None:
    manifests = [topic_manifest(TOPIC, SPEC), subscription_manifest("shop/s", "orders")]
    before = tmp_path / "before"
    worker = Worker(tmp_path / "worker", manifests)
    with worker:
        mine = Consumer(worker.address, TOPIC, "s", "c")
        wait_until(lambda: bool(mine.status()["partitions"]), 60, "the partition", 0.2)
        log_root = Path(worker.settings.log_root)
        shutil.copytree(log_root, before)  # what the disk has for certain
        send(worker, *"abcde")
        got = mine.pull(10, wait_ms=5_000)
        assert values(got) == list("abcde")
        assert mine.ack(got)["acked"] == 5
        # Even a disk that lies about its syncs.
        worker.kill(Victim.SUPERVISOR, Victim.EDGE, Victim.TABLE)
        shutil.rmtree(log_root)
        shutil.copytree(before, log_root)
    worker.start()
    try:
        mine = Consumer(worker.address, TOPIC, "s", "c")
        send(worker, *"fgh")
        fresh = mine.pull(10, wait_ms=5_000)
        assert values(fresh) == list("fgh"), "G4: messages at offsets that were lost are skipped"
        assert mine.ack(got)["acked"] == 0, "ids of lost messages acknowledge no others"
        assert mine.ack(fresh)["acked"] == 3
        (part,) = mine.status()["partitions"]
        assert (part["next_offset"], part["cut_back"]) == (3, 5)
    finally:
        assert worker.process is not None
        worker.process.kill()
