"""Eight owners of one table's partitions at a one-second interval: one of them commits for all."""

import threading
import time
from pathlib import Path

import msgspec
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from table_fakes import TIME_US, HandLog, assignment, flush, message_batch, worker_settings
from tidewater_core.clock import SystemClock, SystemIds
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.settings import WorkerSettings
from tidewater_worker.ports import Commits, Offer, TopicAssignment
from tidewater_worker.table.offers import Answer
from tidewater_worker.table.service import TableService

WRITERS = 8
SECONDS = 8
ROWS = 20
SPEC = TopicSpec()
TOPIC = "shop/orders"


class Writer:
    """One worker that owns one partition of the shared topic; the first one commits for all."""

    def __init__(self, settings: WorkerSettings, data: Path, partition: int) -> None:
        # A directory of its own, as on a machine of its own.
        directory = data / f"worker-{partition}" / "shop" / "orders" / str(partition)
        self.log = HandLog(directory, partition)
        self.committer: Writer = self
        self.service = TableService(
            settings, SystemClock(), SystemIds(), lambda _: None, hand=self.hand
        )

    def begin(self, committer: "Writer") -> None:
        self.committer = committer
        role = Commits.HERE if committer is self else Commits.ELSEWHERE
        made: TopicAssignment = assignment(SPEC, [self.log])
        self.service.assign([msgspec.structs.replace(made, commits=role)])

    def hand(self, offer: Offer, answer: Answer) -> None:
        self.committer.service.commit_offer(offer, answer)

    def work(self, until: float) -> None:
        while time.monotonic() < until:
            first = self.log.end
            values = [f"{self.log.partition}:{first + i}".encode() for i in range(ROWS)]
            self.log.append(message_batch(SPEC, values, time_us=TIME_US))
            self.service.durable(TOPIC, {self.log.partition: self.log.end})
            time.sleep(0.2)
        flush(self.service, TOPIC, {self.log.partition: self.log.end}, 60)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_one_commit_per_interval_serves_eight_owners(tmp_path: Path) -> None:
    settings = worker_settings(tmp_path)
    writers = [Writer(settings, tmp_path, number) for number in range(WRITERS)]
    for writer in writers:
        writer.begin(writers[0])
    began = time.monotonic()
    threads = [threading.Thread(target=writer.work, args=(began + SECONDS,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    intervals = (time.monotonic() - began) / SPEC.writer.flush_interval.seconds
    stats = [writer.service.stats(TOPIC) for writer in writers]
    for writer in writers:
        writer.service.close(20)
    commits, conflicts = (sum(s[name] for s in stats) for name in ("commits", "conflicts"))
    handed = sum(s["handed_over"] for s in stats)
    print(f"{intervals:.1f} intervals, {commits} commits, {conflicts} conflicts, {handed} handed")
    catalog = SqlCatalog("tidewater", **dict(settings.catalog.properties))
    rows = catalog.load_table("shop.orders").scan().to_arrow()
    catalog.close()
    found = sorted(
        zip(rows["tw_partition"].to_pylist(), rows["tw_offset"].to_pylist(), strict=True)
    )
    expected = [(w.log.partition, offset) for w in writers for offset in range(w.log.end)]
    assert found == expected, "G2 Once in the table: rows are missing or doubled"
    # Everybody's last flush is in haste, and may take a commit of its own.
    assert commits <= intervals + WRITERS + 1, "one commit per interval serves all owners"
    assert conflicts <= 0.05 * commits + 1, f"{conflicts} conflicts at {commits} commits"
    assert handed >= commits, "the others hand their files over"
