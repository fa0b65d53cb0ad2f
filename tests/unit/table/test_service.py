"""The service: many topics on few threads, flush, state, closing."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from table_fakes import HandLog, assignment, flush, message_batch, worker_settings
from tidewater_core.clock import SystemClock, SystemIds
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Conflict, Fenced, NotFound, Overloaded, Retryable
from tidewater_worker.ports import Phase, TopicState
from tidewater_worker.table import waiting
from tidewater_worker.table.catalog import open_catalog
from tidewater_worker.table.scheduler import Scheduler
from tidewater_worker.table.service import TableService

SPEC = TopicSpec.model_validate({"writer": {"flushInterval": "1h"}, "freshness": "1h"})
QUICK = TopicSpec.model_validate({"writer": {"flushInterval": "50ms"}})
TOPIC = "shop/orders"
Start = Callable[[], TableService]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a starter of services that are closed in the end."""
    settings = worker_settings(tmp_path)
    started: list[TableService] = []

    def begin() -> TableService:
        service = TableService(settings, SystemClock(), SystemIds(), lambda _: None)
        started.append(service)
        return service

    yield begin
    for service in started:
        service.close(5)


def log_of(tmp_path: Path, topic: str = TOPIC, partition: int = 0) -> HandLog:
    return HandLog(tmp_path / "log" / topic / str(partition), partition)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.01)


def test_flush_waits_for_the_table(start: Start, tmp_path: Path) -> None:
    service, log = start(), log_of(tmp_path)
    service.assign([assignment(SPEC, [log])])
    log.append(message_batch(SPEC, [b"1", b"2"]))
    service.durable(TOPIC, {0: log.end})
    result = flush(service, TOPIC, {0: 2}, 20)
    assert result.frontier == {0: 2}
    assert result.snapshot_id is not None
    assert flush(service, TOPIC, {0: 2}, 20) == result
    assert [b.num_rows for b in service.history(TOPIC, 0, 0, 2, 10)] == [2]
    assert service.stats(TOPIC)["table_rows"] == 2


def test_a_flush_that_cannot_succeed_says_why(start: Start, tmp_path: Path) -> None:
    service, log = start(), log_of(tmp_path)
    with pytest.raises(NotFound, match="UnknownTopic"):
        flush(service, TOPIC, {0: 1}, 1)
    service.assign([assignment(SPEC, [log], epoch=5)])
    with pytest.raises(NotFound, match="UnknownPartition"):
        flush(service, TOPIC, {3: 1}, 1)
    with pytest.raises(Retryable, match="FlushTimeout"):
        flush(service, TOPIC, {0: 1}, 0.2)
    log.append(message_batch(SPEC, [b"1"]))
    service.durable(TOPIC, {0: 1})
    flush(service, TOPIC, {0: 1}, 20)
    other = start()
    log.append(message_batch(SPEC, [b"2"]))
    other.assign([assignment(SPEC, [log], epoch=4)])
    with pytest.raises(Fenced):
        flush(other, TOPIC, {0: 2}, 20)


def test_a_new_edge_is_told_the_state(tmp_path: Path) -> None:
    told: list[TopicState] = []
    service = TableService(worker_settings(tmp_path), SystemClock(), SystemIds(), told.append)
    log = log_of(tmp_path)
    service.assign([assignment(SPEC, [log])])
    until(lambda: bool(told) and told[-1].partitions[0].state is Phase.RUNNING)
    told.clear()
    service.assign([assignment(SPEC, [log])])
    until(lambda: bool(told))
    assert told[-1].partitions[0].state is Phase.RUNNING
    service.close(5)


def test_closing_commits_what_is_durable(start: Start, tmp_path: Path) -> None:
    service, log = start(), log_of(tmp_path)
    service.assign([assignment(SPEC, [log])])
    log.append(message_batch(SPEC, [b"1"] * 10))
    service.durable(TOPIC, {0: log.end})
    service.close(20)
    assert service.states()[0].partitions[0].next == 10
    assert not [t for t in threading.enumerate() if t.name.startswith("table-")]


def test_rows_are_committed_when_they_are_old_enough(start: Start, tmp_path: Path) -> None:
    service, log = start(), log_of(tmp_path)
    service.assign([assignment(QUICK, [log])])
    for _ in range(5):
        log.append(message_batch(QUICK, [b"x"]))
        service.durable(TOPIC, {0: log.end})
        until(lambda: service.states()[0].partitions[0].next == log.end)


def test_topics_come_and_go(start: Start, tmp_path: Path) -> None:
    service = start()
    logs = {name: log_of(tmp_path, name) for name in ("shop/a", "shop/b")}
    service.assign([assignment(QUICK, [log], topic=name) for name, log in logs.items()])
    for name, log in logs.items():
        log.append(message_batch(QUICK, [b"x"]))
        service.durable(name, {0: 1})
        flush(service, name, {0: 1}, 20)
    service.assign([assignment(QUICK, [logs["shop/b"]], topic="shop/b")])
    assert [state.topic for state in service.states()] == ["shop/b"]
    service.durable("shop/a", {0: 2})
    service.assign([assignment(QUICK, [log], topic=name) for name, log in logs.items()])
    logs["shop/a"].append(message_batch(QUICK, [b"y"]))
    service.durable("shop/a", {0: 2})
    assert flush(service, "shop/a", {0: 2}, 20).frontier == {0: 2}


class Repeated:
    """A task that says when it ran, and never runs twice at once."""

    def __init__(self, again: list[float | None]) -> None:
        self.again = again
        self.runs = 0
        self._running = threading.Lock()

    def step(self) -> float | None:
        assert self._running.acquire(blocking=False), "one task ran on two threads"
        self.runs += 1
        time.sleep(0.002)
        self._running.release()
        wait = self.again.pop(0) if self.again else None
        return None if wait is None else time.monotonic() + wait


def test_the_scheduler_runs_what_is_due_and_only_that() -> None:
    scheduler = Scheduler(3, SystemClock(), "test")
    once, thrice, later = Repeated([]), Repeated([0.0, 0.02]), Repeated([60.0])
    for task in (once, thrice, later):
        scheduler.poke(task)
    until(lambda: thrice.runs == 3)
    time.sleep(0.05)
    assert (once.runs, thrice.runs, later.runs) == (1, 3, 1)
    busy = Repeated([])
    for _ in range(200):
        scheduler.poke(busy)
        time.sleep(0.0005)
    ran = busy.runs
    assert ran > 1
    scheduler.poke(later)
    until(lambda: later.runs == 2)
    assert scheduler.stop(5)


def test_a_forgotten_task_runs_no_more_even_if_it_was_running() -> None:
    scheduler = Scheduler(2, SystemClock(), "test")
    entered, leave = threading.Event(), threading.Event()

    class Stubborn:
        runs = 0

        def step(self) -> float | None:
            self.runs += 1
            entered.set()
            leave.wait(5)
            return time.monotonic()

    task = Stubborn()
    scheduler.poke(task)
    assert entered.wait(5)
    scheduler.forget(task)
    scheduler.poke(task)
    leave.set()
    time.sleep(0.1)
    assert task.runs == 1
    scheduler.poke(task)  # an answer comes that it had asked for before
    scheduler.poke(task, time.monotonic() + 0.01)
    time.sleep(0.1)
    assert task.runs == 1
    assert not scheduler._due
    assert not scheduler._poked
    assert scheduler.stop(5)


def test_a_failing_step_does_not_end_the_others() -> None:
    class Broken:
        def step(self) -> float | None:
            raise RuntimeError("by script")

    scheduler = Scheduler(1, SystemClock(), "test")
    scheduler.poke(Broken())
    fine = Repeated([])
    scheduler.poke(fine)
    until(lambda: fine.runs == 1)
    assert scheduler.stop(5)


def test_a_fenced_partition_tells_the_epoch_it_must_come_after(
    start: Start, tmp_path: Path
) -> None:
    service, log = start(), log_of(tmp_path)
    log.append(message_batch(SPEC, [b"1"]))
    service.assign([assignment(SPEC, [log], epoch=7)])
    flush(service, TOPIC, {0: 1}, 20)
    late = start()
    late.assign([assignment(SPEC, [log], epoch=2)])
    until(lambda: late.states()[0].partitions[0].state is Phase.STOPPED)
    part = late.states()[0].partitions[0]
    assert (part.reason, part.table_epoch) == ("Fenced", 7), f"G5 One owner: {part}"
    # The same owner, granted a higher epoch, goes on with the same log.
    late.assign([assignment(SPEC, [log], epoch=8)])
    until(lambda: late.states()[0].partitions[0].state is Phase.RUNNING)
    log.append(message_batch(SPEC, [b"2"]))
    late.durable(TOPIC, {0: 2})
    assert flush(late, TOPIC, {0: 2}, 20).frontier == {0: 2}


def test_the_table_of_a_deleted_topic_goes_with_all_its_files(start: Start, tmp_path: Path) -> None:
    service, log = start(), log_of(tmp_path)
    service.assign([assignment(SPEC, [log])])
    for value in (b"1", b"2"):
        log.append(message_batch(SPEC, [value]))
        service.durable(TOPIC, {0: log.end})
        flush(service, TOPIC, {0: log.end}, 20)
    with pytest.raises(Retryable, match="TopicInUse"):
        service.drop_table(TOPIC)
    with pytest.raises(NotFound, match="UnknownTopic"):
        service.drop_table("shop/other")
    service.assign([assignment(SPEC, [])])
    table = tmp_path / "warehouse" / "shop" / "orders"
    orphan = table / "data" / "orphan.parquet"
    orphan.write_bytes(b"rows of a commit that never landed")
    assert service.drop_table(TOPIC)
    assert not table.exists(), sorted(table.rglob("*"))
    assert not service.drop_table(TOPIC)


def test_a_table_of_another_topic_is_not_dropped(start: Start, tmp_path: Path) -> None:
    service, log = start(), log_of(tmp_path)
    log.append(message_batch(SPEC, [b"1"]))
    service.assign([assignment(SPEC, [log])])
    flush(service, TOPIC, {0: 1}, 20)
    service.assign([assignment(SPEC, [], uuid="00000000-0000-0000-0000-00000000beef")])
    with pytest.raises(Conflict, match="TableNotOurs"):
        service.drop_table(TOPIC)
    assert service.stats(TOPIC)["table_rows"] == 1


def test_so_many_flushes_may_wait(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "WAITING_MAX", 2)
    service, log = start(), log_of(tmp_path)
    service.assign([assignment(SPEC, [log])])
    said: list[object] = []
    for _ in range(2):
        service.flush(TOPIC, {0: 1}, 20, said.append)
    with pytest.raises(Overloaded, match="TooManyFlushes"):
        service.flush(TOPIC, {0: 1}, 20, said.append)
    log.append(message_batch(SPEC, [b"1"]))
    service.durable(TOPIC, {0: 1})
    until(lambda: len(said) == 2)
    assert flush(service, TOPIC, {0: 1}, 20) == said[0] == said[1]


def test_a_renamed_table_in_the_same_place_is_not_dropped_along(
    start: Start, tmp_path: Path
) -> None:
    """A rename keeps the location: the topic made anew has its table in it, too."""
    service, log = start(), log_of(tmp_path)
    log.append(message_batch(SPEC, [b"kept"]))
    service.assign([assignment(SPEC, [log])])
    flush(service, TOPIC, {0: 1}, 20)
    service.assign([assignment(SPEC, [])])
    catalog = open_catalog(worker_settings(tmp_path).catalog)
    renamed = catalog._catalog.rename_table("shop.orders", "shop.kept")
    shutil.rmtree(tmp_path / "log")
    service.close(5)

    anew, log = start(), log_of(tmp_path)
    log.append(message_batch(SPEC, [b"new"]))
    anew.assign([assignment(SPEC, [log])])
    flush(anew, TOPIC, {0: 1}, 20)
    assert catalog.load(("shop", "orders")).location() == renamed.location()
    anew.assign([assignment(SPEC, [])])
    with pytest.raises(Conflict, match="SharedLocation"):
        anew.drop_table(TOPIC)
    assert anew.stats(TOPIC)["table_rows"] == 1
    assert catalog.load(("shop", "kept")).scan().to_arrow().num_rows == 1
    catalog.close()


def test_who_follows_a_topic_that_is_let_go_is_told_so(start: Start, tmp_path: Path) -> None:
    """G6: they waited for half a minute longer than they had asked for."""
    service, log = start(), log_of(tmp_path)
    log.append(message_batch(SPEC, [b"1"]))
    service.assign([assignment(SPEC, [log])])
    known = flush(service, TOPIC, {0: 1}, 20).snapshot_id
    told: list[object] = []
    for _ in range(3):
        service.follow(TOPIC, known, 60.0, told.append)
    follower = service._followers[TOPIC]
    service.assign([])
    until(lambda: len(told) == 3)
    follower.wait(known, time.monotonic() + 60, told.append)  # it had just been looked up
    assert len(told) == 4
    assert all(isinstance(each, NotFound) for each in told), told
