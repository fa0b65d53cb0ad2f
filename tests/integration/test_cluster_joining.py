"""A worker that starts before its store is there: it waits, can be stopped, and then joins."""

from pathlib import Path

import pytest

from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_worker_waits_for_its_store(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path / "etcd")
    spec = {"partitions": 1}
    with etcd:
        worker = Worker(
            tmp_path / "w", [topic_manifest("shop/orders", spec)], coordination=etcd.coordination
        )
        with worker:
            etcd.servers[0].kill()
            worker.kill(Victim.EDGE)
            log = worker.directory / "worker.log"
            wait_until(lambda: "waits to join" in log.read_text(), 60, "the edge to wait", 0.1)
            waiting = worker.pid(Victim.EDGE)
            etcd.servers[0].start()
            etcd.wait()
            worker.wait_ready()
            assert worker.pid(Victim.EDGE) == waiting, "it waited, it did not die"
            etcd.servers[0].kill()
            worker.kill(Victim.EDGE)
            wait_until(lambda: log.read_text().count("waits to join") > 1, 60, "to wait again", 0.1)
            assert worker.stop() == 0, "it can be stopped while it waits"
