"""Many readers of one table: how many files at once, and what is asked and decoded once (G6)."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from table_bench import Bench
from table_fakes import HandLog, assignment, flush, message_batch, worker_settings
from tidewater_core.clock import SystemClock, SystemIds
from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.ports import Followed
from tidewater_worker.table.catalog import TableCatalog
from tidewater_worker.table.reads import SHARED_GROUP_BYTES_MAX, Decoded, Reads
from tidewater_worker.table.service import TableService

TOPIC = "shop/orders"
READERS = 50


class Watched:
    """Counts the calls of something, and how many are under way at once."""

    def __init__(self, call: Any, delay_s: float = 0.0) -> None:
        self.calls = self.now = self.most = 0
        self._call, self._delay_s, self._lock = call, delay_s, threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.calls += 1
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            time.sleep(self._delay_s)
            return self._call(*args, **kwargs)
        finally:
            with self._lock:
                self.now -= 1

    def of(self, owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> "Watched":
        """Stand in for a method."""
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: self(*args, **kwargs))
        return self


@pytest.mark.parametrize("reads_max", [1, 2])
def test_a_topic_reads_so_many_files_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, reads_max: int
) -> None:
    """Whoever reads, and however far ahead."""
    reader = {"maxConcurrentReads": reads_max, "prefetch": 8}
    spec = TopicSpec.model_validate({"reader": reader})
    log = bench.log()
    run = bench.topic(spec, log)
    for _ in range(6):
        log.append(message_batch(spec, [b"x"] * 2))
        bench.flush(run, log)
    whole = pq.ParquetFile.read_row_group
    watched = Watched(whole, 0.01).of(pq.ParquetFile, "read_row_group", monkeypatch)

    def read(_: int) -> int:
        return sum(batch.num_rows for batch in run.reader.read(0, 0, 12, 100))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [12] * 4
    assert watched.most == reads_max


def test_a_turn_is_given_back_whatever_happens() -> None:
    limit = [1]
    reads = Reads(lambda: limit[0])
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), reads.one():
            raise ZeroDivisionError
    limit[0] = 2
    with reads.one(), reads.one():
        pass


def test_what_many_ask_for_at_once_is_made_once() -> None:
    decoded = Decoded()
    table = pa.table({"a": [1]})
    make = Watched(lambda: table, 0.05)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: decoded.get("k", 1, make), range(8)))
    assert (found, make.calls) == ([table] * 8, 1)
    assert decoded.get("k", 1, make) is table
    large = Watched(lambda: table)
    for _ in range(2):
        decoded.get("large", SHARED_GROUP_BYTES_MAX + 1, large)
    assert large.calls == 2
    broken = Watched(lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            decoded.get("broken", 1, broken)
    assert broken.calls == 2, "an error is not kept"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TableService]:
    """Return a worker that has none of the topic's partitions; another has committed its rows."""
    spec = TopicSpec.model_validate({"reader": {"pollInterval": "1h"}})
    settings = worker_settings(tmp_path)
    log = HandLog(tmp_path / "log" / TOPIC / "0", 0)
    owner = TableService(settings, SystemClock(), SystemIds(), lambda _: None)
    owned = assignment(spec, [log])
    owner.assign([owned])
    log.append(message_batch(spec, [b"x"] * 10))
    owner.durable(TOPIC, {0: log.end})
    flush(owner, TOPIC, {0: 10}, 20)
    owner.close(5)
    made = TableService(settings, SystemClock(), SystemIds(), lambda _: None)
    made.assign([msgspec.structs.replace(owned, partitions={})])
    yield made
    made.close(5)


def test_readers_of_what_another_owns_share_one_look(
    service: TableService, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Watched(TableCatalog.load).of(TableCatalog, "load", monkeypatch)
    decodes = Watched(pq.ParquetFile.read_row_group).of(
        pq.ParquetFile, "read_row_group", monkeypatch
    )

    def follow(_: int) -> int:
        told = threading.Event()
        answers: list[Any] = []

        def answer(found: Any) -> None:
            answers.append(found)
            told.set()

        service.follow(TOPIC, None, 0.0, answer)
        assert told.wait(10)
        assert isinstance(answers[0], Followed)
        end = answers[0].partitions[0].next
        return sum(batch.num_rows for batch in service.history(TOPIC, 0, 0, end, 100))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(follow, range(READERS))) == [10] * READERS
    assert loads.calls == 1, "one look at the catalog for all"
    assert decodes.calls == 1, "decoded once for all"
