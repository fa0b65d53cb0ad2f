"""One run of the command: its session, its arguments, and what the coordination store says."""

import argparse
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from tidewater_core.crd.topic import table_identifier
from tidewater_core.errors import Conflict, TidewaterError
from tidewater_core.names import TOPIC, TopicName
from tidewater_pipeline.places import StoreSettings
from tidewater_pipeline.report import Outcome, Report, passes
from tidewater_pipeline.session import ConflictError, Session, TopicTable
from tidewater_pipeline.state import TableState
from tidewater_pipeline.subscribers import Store, Subscribers
from tidewater_pipeline.syncing import DISK_REFUSED
from tidewater_pipeline.turns import turn
from tidewater_pipeline.upkeep import STEPS

EXIT_GOOD: Final = 0
EXIT_AGAIN: Final = 1
"""Something failed that may be gone later: run it again as it is."""
EXIT_WRONG: Final = 2
"""The command line or the settings cannot be used."""
EXIT_PERSON: Final = 3
"""Running it again changes nothing: a person must look."""
EXIT_STOPPED: Final = 128 + signal.SIGTERM
STOP_S_MAX: Final = 10.0
"""How long Spark may take to end after SIGTERM."""
UPKEEP: Final = frozenset(STEPS)
"""Jobs that change what is there: one at a time on a table. The others read, or append; import and
replay are one at a time of the same id."""


class StoppedError(BaseException):
    """SIGTERM came. No `Exception`: nothing on the way may take it for an error of its own."""


@dataclass(frozen=True, slots=True)
class Run:
    """What every job of a run shares."""

    session: Session
    args: argparse.Namespace
    store: StoreSettings | None = None

    def subscribers(self, topic: str) -> Subscribers:
        """Ask who reads a topic; without a coordination store nobody is known to."""
        if self.store is None:
            return Subscribers()
        self.session.progress.say(f"{topic}: asking the coordination store who reads it")
        return Store(self.store).subscribers(topic)

    def table(self, topic: TopicName, known: Subscribers | None = None) -> TopicTable:
        """Return the topic's table: as the arguments name it, as its spec does, or as by default.

        A table that was made for another topic is refused, unless forced: names are given anew,
        and a store or a catalog may be another one than was meant.
        """
        name: str | None = self.args.table
        if name is None:
            known = self.subscribers(str(topic)) if known is None else known
            if known.spec is not None:
                name = ".".join(table_identifier(topic, known.spec))
        table = self.session.table(topic, name)
        if not self.args.force:
            check_owner(table.load(), str(topic))
        return table

    def turn(self, topic: str, job: str) -> AbstractContextManager[None]:
        """Be the only one that changes a topic's table meanwhile.

        A topic that the store does not know is refused, unless forced: the lease would keep nobody
        out, and no cursor would be seen.
        """
        if self.store is not None and not self.args.force:
            Store(self.store).check(topic)
        return turn(self.store, topic, job, self.session.progress)

    def hold(self, topic: str, job: str) -> Callable[[str], AbstractContextManager[None]]:
        """Return what takes a lease by its name, for jobs that know only then what they do."""
        return lambda name: turn(self.store, topic, job, self.session.progress, lease=name)


def check_owner(state: TableState, topic: str) -> None:
    """Refuse a table that is not this topic's."""
    owner = state.properties.get(TOPIC)
    if owner != topic:
        what = f"is of the topic {owner}" if owner else "is of no topic"
        raise Conflict(
            "TableNotOurs",
            f"the table {'.'.join(state.identifier)} {what}, not of {topic}: name its own by "
            "--table, or --force",
        )


def failure(job: str, topic: str, error: TidewaterError) -> Report:
    """Report an error by what to do next.

    Upkeep that lost a race is left to the next run. Nobody but a person runs an import, a replay or
    an audit again: what is not done has failed.
    """
    if isinstance(error, ConflictError) and job in UPKEEP:
        return Report(job, topic, outcome=Outcome.CONFLICT, message=str(error))
    return Report(
        job,
        topic,
        outcome=Outcome.FAILED,
        message=str(error),
        retry=passes(error),
        is_last=error.reason == DISK_REFUSED,
    )


def timed(run: Run, job: str, topic: str, work: Callable[[], Report]) -> Report:
    """Do a job or a step; report how long it took and, where it failed, what to do next."""
    began = time.monotonic()
    try:
        report = work()
    except TidewaterError as error:
        report = failure(job, topic, error)
    report.seconds = time.monotonic() - began
    run.session.progress.say(f"{topic}: {job}: {report.outcome} {report.message}".rstrip())
    return report


def cores_of(master: str, executors: int = 0, executor_cores: int = 1) -> int:
    """Count the cores that a run takes, for the cost in the report."""
    number = re.fullmatch(r"local\[(\d+)\]", master)
    if executors:
        return 1 + executors * executor_cores
    if number:
        return int(number.group(1))
    return os.cpu_count() or 1 if master == "local[*]" else 1


@contextmanager
def stopped_by_sigterm(last_words: Callable[[], None]) -> Iterator[None]:
    """Turn SIGTERM into `StoppedError`, also as a container's first process.

    `last_words` are said at once; a JVM that does not end in time is killed.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        last_words()
        watchdog = threading.Timer(STOP_S_MAX, _leave_at_once)
        watchdog.daemon = True
        watchdog.start()
        raise StoppedError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except StoppedError:
        _end_children()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave_at_once() -> None:
    _end_children()
    os._exit(EXIT_STOPPED)


def _end_children() -> None:
    """Kill the JVM: one that was stopped in the middle of its start would not end by itself."""
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in task.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
