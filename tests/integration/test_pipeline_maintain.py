"""`tidewater-pipeline maintain` as the operator runs it: a process, its last message, its end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.spark import within_one_hour

pytestmark = [pytest.mark.slow, pytest.mark.java, pytest.mark.timeout(600)]

QUICK = {
    "partitions": 2,
    "writer": {"flushInterval": "100ms"},
    "maintenance": {"targetFileSize": "1Mi", "snapshotAge": "1m"},
}
TOPIC = "shop/orders"
SMALL = ("--master", "local[1]", "--memory", "700m", "--conf", "spark.sql.shuffle.partitions=2")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker with a topic that has many small files."""
    with Worker(tmp_path_factory.mktemp("maintain"), [topic_manifest(TOPIC, QUICK)]) as part:
        within_one_hour()
        for number in range(12):
            messages = [{"key": f"k{n}", "value": f"{number}-{n}"} for n in range(10)]
            answer = part.post(f"/v1/{TOPIC}/messages", json.dumps({"messages": messages}))
            assert answer.status == 200, answer.body
            part.flush(TOPIC)
        yield part


def start(worker: Worker, left: Path, *words: str) -> "subprocess.Popen[str]":
    """Start a run; its variables stand in the settings as ${NAME}."""
    settings = json.loads(worker.settings.to_json())
    settings["catalog"]["properties"]["uri"] = "sqlite:///${DATA}/catalog.db"
    place = left.with_name("settings.json")
    place.write_text(json.dumps(settings))
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tidewater_pipeline", "maintain", "--topic", TOPIC),
            *(f"--settings={place}", f"--termination-log={left}", *SMALL, *words),
        ],
        env={**os.environ, "DATA": str(worker.directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]", left: Path, code: int) -> dict[str, Any]:
    """Wait for the end and return the last message."""
    with process:
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == code, err
    assert json.loads(left.read_text()) == json.loads(out)
    (topic,) = json.loads(out)["topics"]
    assert isinstance(topic, dict)
    return topic


def test_the_whole_upkeep_of_a_topic(worker: Worker, tmp_path: Path) -> None:
    left = tmp_path / "termination-log"
    topic = finish(start(worker, left, "--open", "--min-manifests=2"), left, 0)
    steps = {step["job"]: step["outcome"] for step in topic["steps"]}
    assert list(steps) == ["retention", "compact", "manifests", "expire", "orphans"]
    assert (topic["outcome"], steps["compact"]) == ("done", "done"), topic
    # A flush of its own accord may come between the two halves of a batch.
    assert topic["before"]["files"] >= 12, topic
    assert topic["after"]["files"] == 1, topic
    assert topic["after"]["rows"] == 120
    assert topic["removed"]["rewritten_files"] == topic["before"]["files"]


def test_a_stop_is_quick_and_leaves_its_message(worker: Worker, tmp_path: Path) -> None:
    left = tmp_path / "termination-log"
    process = start(worker, left)
    assert process.stderr is not None
    for line in process.stderr:
        if "starting Spark" in line:
            break
    time.sleep(1)  # somewhere in the start of the JVM
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: process.poll() is not None, 15, "the run to end")
    process.communicate()
    assert process.returncode == 143
    assert time.monotonic() - began < 15
    message = json.loads(left.read_text())
    assert (message["ok"], message["retry"]) == (False, True)
    assert message["message"] == "stopped by SIGTERM"
