"""Eight workers commit to one table at a one-second interval: all get through, each row once."""

import threading
import time
from pathlib import Path

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from table_fakes import TIME_US, HandLog, assignment, message_batch, worker_settings
from tidewater_core.clock import SystemClock, SystemIds
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.settings import WorkerSettings
from tidewater_worker.table.service import TableService

WRITERS = 8
SECONDS = 12
ROWS = 20
SPEC = TopicSpec()


class Writer:
    """One worker that owns one partition of the shared topic."""

    def __init__(self, settings: WorkerSettings, data: Path, partition: int) -> None:
        # A directory of its own, as on a machine of its own.
        directory = data / f"worker-{partition}" / "shop" / "orders" / str(partition)
        self.log = HandLog(directory, partition)
        self.service = TableService(settings, SystemClock(), SystemIds(), lambda _: None)
        self.service.assign([assignment(SPEC, [self.log])])
        self.waits_s: list[float] = []

    def work(self, until: float) -> None:
        while time.monotonic() < until:
            first = self.log.end
            values = [f"{self.log.partition}:{first + i}".encode() for i in range(ROWS)]
            self.log.append(message_batch(SPEC, values, time_us=TIME_US))
            began = time.monotonic()
            self.service.durable("shop/orders", {self.log.partition: self.log.end})
            while self.service.states()[0].partitions[self.log.partition].next < self.log.end:
                time.sleep(0.01)
                assert time.monotonic() < until + 60, f"never committed: {self.service.states()}"
            self.waits_s.append(time.monotonic() - began)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_eight_writers_on_one_table(tmp_path: Path) -> None:
    settings = worker_settings(tmp_path)
    writers = [Writer(settings, tmp_path, number) for number in range(WRITERS)]
    until = time.monotonic() + SECONDS
    threads = [threading.Thread(target=writer.work, args=(until,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = [writer.service.stats("shop/orders") for writer in writers]
    for writer in writers:
        writer.service.close(20)
    waits = sorted(wait for writer in writers for wait in writer.waits_s)
    commits, conflicts = (sum(s[name] for s in stats) for name in ("commits", "conflicts"))
    print(
        f"{commits} commits, {conflicts} conflicts;"
        f" row to table: median {waits[len(waits) // 2]:.2f} s, slowest {waits[-1]:.2f} s"
    )
    catalog = SqlCatalog("tidewater", **dict(settings.catalog.properties))
    rows = catalog.load_table("shop.orders").scan().to_arrow()
    catalog.close()
    found = sorted(
        zip(rows["tw_partition"].to_pylist(), rows["tw_offset"].to_pylist(), strict=True)
    )
    expected = [(w.log.partition, offset) for w in writers for offset in range(w.log.end)]
    assert found == expected, "G2 Once in the table: rows are missing or doubled"
    for writer in writers:
        # Each commit waits up to a second for its age: with 8 on one table all must still move.
        assert len(writer.waits_s) >= SECONDS // 4, f"{writer.log.partition} starved: {waits}"
