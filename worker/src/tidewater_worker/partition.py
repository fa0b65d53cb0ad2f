"""One partition that this worker owns: from its lock to its last acknowledgement.

    opening ──(frontier known, or the log alone is enough)──▶ open ──▶ closed
       └─────────────── refused (locked, corrupt, fenced, stopped) ◀──┘

An empty log cannot know where to begin: a table kept from before may have rows, so it waits for
the frontier. A log with messages knows its end; it waits a moment for the frontier all the same,
since a table that is ahead of its log (an import, a disk that lied) must not get an offset twice.
Without an answer (the catalog is away) it goes on by itself, but until then the table process
hears of nothing newer than what was recovered: it holds that end against the frontier, however
far the log is by the time that the catalog comes back.

A log that stopped (`Appender.failure`) refuses messages like any other reason does, and can still
be read; `cluster.owning` opens it again after a while, by what its disk has then.
"""

import asyncio
import fcntl
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from tidewater_coordination.port import Ownership
from tidewater_core.errors import (
    Conflict,
    Corrupt,
    Fenced,
    Overloaded,
    Retryable,
    TidewaterError,
)
from tidewater_worker.log.appender import Appender
from tidewater_worker.log.recover import Segment
from tidewater_worker.log.tail import Tail
from tidewater_worker.ports import PartitionAssignment, PartitionState, Phase
from tidewater_worker.pulse import Pulse

FRONTIER_WAIT_S: Final = 5.0
"""How long a log with messages waits to hear from the table before it goes on without."""
OFFSET_MAX: Final = 2**63 - 1
log = logging.getLogger(__name__)


class DirectoryLock:
    """The lock on a partition's log directory: one process appends (G5)."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise Fenced("LogLocked", f"another process holds the log in {directory}") from None

    def release(self) -> None:
        """Let the next process in."""
        os.close(self._fd)


class TableEnd:
    """Stands for the log of a partition that is elsewhere: there is only its table."""

    def __init__(self, end: int) -> None:
        self.start = self.end = self.durable_end = end
        self.tail = Tail(end, 0)
        self.segments: list[Segment] = []

    async def wait_past(self, offset: int, timeout_s: float) -> bool:
        """Wait in vain: nothing comes while the owner is away."""
        await asyncio.sleep(timeout_s)
        return self.end > offset


@dataclass(slots=True)
class Partition:
    """A partition and what is known about it."""

    topic: str
    number: int
    directory: Path
    epoch: int = 0
    lock: DirectoryLock | None = None
    appender: Appender | None = None
    table: PartitionState = field(default_factory=PartitionState)
    refusal: TidewaterError | None = None
    """Why appends are refused; None while they are taken."""
    leaving: TidewaterError | None = None
    """Why they are refused while it is drained, whatever else is said of it meanwhile."""
    is_open: bool = False
    frontier_known: asyncio.Event = field(default_factory=asyncio.Event)
    owner: Ownership | None = None
    """As the registry last said; None if nobody ever had it."""
    is_elsewhere: bool = False
    """Another worker has it, or waits to: not this one's to open."""
    session: str = ""
    """The session that it was taken for."""
    drained: int | None = None
    """Everything up to here is in the table and it is about to be let go."""
    unheard_at: float = 0.0
    """Since when the registry knows of an earlier epoch than ours, or of none; 0 if it does not."""
    is_busy: bool = False
    """It is being opened or drained."""
    table_end: TableEnd | None = None
    """Set in a view of a partition whose owner is away."""
    retry_at: float = 0.0
    """When to try again to open it."""
    reopen_at: float = 0.0
    """When to open a log that stopped again; 0 before that is decided."""
    recovered_end: int = 0
    """Where the log ended when it was opened."""
    acked_end: int = 0
    """How far a log that stopped had acknowledged: no less may be found when it is opened."""
    pulse: Pulse = field(default_factory=Pulse)

    def assignment(self) -> PartitionAssignment | None:
        """Describe it to the table process."""
        if self.appender is None or self.drained is not None:
            return None
        gap = None if self.owner is None else self.owner.gap
        is_known = self.frontier_known.is_set()
        end = self.appender.durable_end if is_known else self.recovered_end
        return PartitionAssignment(self.epoch, str(self.directory), end, gap.end if gap else 0)

    def begin(self, appender: Appender, epoch: int, session: str) -> None:
        """Open with a recovered log; appends wait for `open_when_known`."""
        self.appender, self.epoch, self.session = appender, epoch, session
        self.table = PartitionState()
        self.frontier_known = asyncio.Event()
        self.recovered_end, self.acked_end = appender.next_offset, 0
        self.reopen_at = self.unheard_at = 0.0
        self.refusal = self.leaving = None
        self.is_open = self.is_elsewhere = False

    @property
    def refused(self) -> TidewaterError | None:
        """Why appends are refused, by us or by the log; None while they are taken."""
        if self.appender is not None and self.appender.failure is not None:
            return self.appender.failure
        return self.refusal if self.leaving is None else self.leaving

    @property
    def has_failed(self) -> bool:
        """Tell whether its log has stopped and has to be opened again."""
        return self.appender is not None and self.appender.failure is not None

    @property
    def remote_url(self) -> str:
        """Where the owner is while that is another worker and it is there; else empty."""
        owner = self.owner
        return owner.url if self.is_elsewhere and owner is not None and owner.is_live else ""

    def past_gap(self, offset: int) -> int:
        """Return the first offset from `offset` on that was not lost with a volume."""
        for start, end in self.table.gaps:
            if start <= offset < end:
                return end
        return offset

    def gap_after(self, offset: int) -> int:
        """Return where the next gap begins; past all offsets if there is none."""
        return min((start for start, _ in self.table.gaps if start > offset), default=OFFSET_MAX)

    def ready(self) -> Appender:
        """Return the appender, or raise why appends are refused."""
        refused = self.refused
        if refused is not None:
            # Without the traces of earlier raises, which would keep every request in memory.
            raise refused.with_traceback(None)
        if not self.is_open:
            raise self._opening()
        assert self.appender is not None
        return self.appender

    def _opening(self) -> Retryable:
        where = f"{self.topic} partition {self.number}"
        return Retryable("PartitionOpening", f"{where} is opening", 200)

    def readable(self) -> Appender:
        """Return the appender for reading; a partition that stopped can still be read."""
        if self.table_end is not None:
            return self.table_end  # type: ignore[return-value]  # as far as readers look
        if self.appender is None:
            raise self._opening() if self.refusal is None else self.refusal.with_traceback(None)
        return self.appender

    def note(self, state: PartitionState) -> None:
        """Take what the table process says."""
        if state.epoch != self.epoch:
            return  # of an ownership that is over
        start, self.table = self.table.start, state
        self.note_start(start)  # retention moves it up while nothing is committed here
        if state.state is Phase.STOPPED:
            kind = Fenced if state.reason == "Fenced" else Conflict
            self.refusal = kind(state.reason, state.message)
        elif state.state is Phase.RUNNING:
            if self.refusal is not None and isinstance(self.refusal, (Fenced, Conflict)):
                self.refusal = None
            self._check_frontier(state.next)
            self._know_frontier()

    def note_start(self, start: int) -> None:
        """Take what the table says of its first offset, by whomever it was asked."""
        if start > self.table.start:
            self.table = msgspec.structs.replace(self.table, start=start)

    def _know_frontier(self) -> None:
        if not self.frontier_known.is_set():
            self.frontier_known.set()
            if self.appender is not None:
                self.appender.tell_durable()

    def note_backlog(self, bytes_max: int) -> None:
        """Push back on producers when more waits for the table than the log may hold (G6)."""
        if self.appender is None:
            return
        waiting = 0
        for segment in reversed(self.appender.segments):  # of days of a log a few, each second
            if segment.end_offset <= self.table.next:
                break
            waiting += segment.index.size
        full = isinstance(self.refusal, Overloaded)
        if waiting > bytes_max and self.refusal is None:
            self.refusal = Overloaded(
                "BacklogFull", f"{waiting} bytes of the log wait for the table", 1_000
            )
        elif full and waiting <= bytes_max:
            self.refusal = None

    def _check_frontier(self, frontier: int) -> None:
        appender = self.appender
        if appender is None or frontier <= appender.next_offset:
            return
        if not self.is_open:
            if appender.segments:
                log.warning(
                    "%s partition %s: the table (%s) is ahead of the log (%s); going on there",
                    self.topic, self.number, frontier, appender.next_offset,
                )  # fmt: skip
            appender.start_at(frontier)
        else:
            self.refusal = Corrupt(
                "LogBehindTable",
                f"the table has offsets up to {frontier}, the log ends at {appender.end}: the log "
                "lost messages that it had made durable",
            )

    async def open_when_known(self) -> None:
        """Wait for the frontier as far as that is needed, then take appends."""
        appender, known = self.appender, self.frontier_known
        assert appender is not None
        if appender.segments:
            try:
                await asyncio.wait_for(known.wait(), FRONTIER_WAIT_S)
            except TimeoutError:
                log.warning(
                    "%s partition %s: no word from the table; going on from the log alone",
                    self.topic, self.number,
                )  # fmt: skip
        else:
            await known.wait()
        if self.appender is appender:  # it was not let go meanwhile
            self.is_open = True

    async def close(
        self, refusal: TidewaterError | None = None, *, keep_lock: bool = False
    ) -> None:
        """Finish what was offered, close the log and release the lock."""
        self.refusal = refusal or Retryable("ShuttingDown", "this worker is shutting down", 500)
        appender = self.appender
        if appender is not None:
            await appender.close()
        if refusal is not None:
            self.appender, self.drained, self.leaving = None, None, None
            self.is_open, self.session = False, ""
        if not keep_lock:
            self.unlock()

    def unlock(self) -> None:
        """Let the next process have the log."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None
