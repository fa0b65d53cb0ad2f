"""One partition as the table process sees it."""

from dataclasses import dataclass, field
from pathlib import Path

from tidewater_worker.log.reader import LogReader
from tidewater_worker.ports import PartitionAssignment, PartitionState, Phase
from tidewater_worker.table.frontier import Claim, Frontier


@dataclass(slots=True)
class PartitionRun:
    """A partition's log, how far it is durable, and how far it is in the table."""

    number: int
    epoch: int
    directory: str
    durable_end: int
    log: LogReader = field(repr=False)
    opened: bool = False
    """The frontier is known."""
    next: int = 0
    start: int = 0
    phase: Phase = Phase.OPENING
    reason: str = ""
    message: str = ""

    @classmethod
    def of(cls, number: int, assignment: PartitionAssignment) -> "PartitionRun":
        """Begin with an assignment."""
        return cls(
            number=number,
            epoch=assignment.epoch,
            directory=assignment.directory,
            durable_end=assignment.durable_end,
            log=LogReader(Path(assignment.directory)),
        )

    @property
    def active(self) -> bool:
        """Say if rows of this partition may be committed."""
        return self.opened and self.phase is not Phase.STOPPED

    @property
    def waiting(self) -> int:
        """Rows that are durable and not yet in the table."""
        return max(0, self.durable_end - self.next) if self.active else 0

    @property
    def claim(self) -> Claim:
        """What we hold against the table."""
        return Claim(self.epoch, self.next if self.opened else None)

    def open(self, found: Frontier, start: int) -> None:
        """Take the frontier from the table, unless log and table do not fit together (G7)."""
        self.start = start
        if found.epoch > self.epoch:
            self.fence(found.epoch)
            return
        problem = self._misfit(found.next)
        self.next = found.next
        if problem is not None:
            self.stop(*problem)
            return
        self.opened = True
        self.running()

    def _misfit(self, table_next: int) -> tuple[str, str] | None:
        first = self.log.start_offset()
        if first is None:
            return None
        if first > table_next:
            return (
                "RowsLost",
                f"offsets {table_next} to {first - 1} are neither in the table nor in the log",
            )
        if self.durable_end < table_next and first < table_next:
            return (
                "LogBehindTable",
                f"the log ends at offset {self.durable_end} but the table has rows up to "
                f"{table_next - 1}: new messages would get offsets that are taken",
            )
        return None

    def rewind(self, table_next: int) -> None:
        """Go back to where the table stands; stop if the log no longer has the rows."""
        problem = self._misfit(table_next)
        self.next = table_next
        if problem is not None:
            self.stop(*problem)

    def running(self) -> None:
        """Note that commits go through."""
        if self.active:
            self.phase, self.reason, self.message = Phase.RUNNING, "", ""

    def retrying(self, reason: str, message: str) -> None:
        """Note that the last attempt failed in a way that may pass."""
        if self.phase is not Phase.STOPPED:
            self.phase, self.reason, self.message = Phase.RETRYING, reason, message

    def stop(self, reason: str, message: str) -> None:
        """Stop with a reason."""
        self.phase, self.reason, self.message = Phase.STOPPED, reason, message

    def fence(self, epoch: int) -> None:
        """Stop: another owner has this partition."""
        self.stop("Fenced", f"the table carries epoch {epoch}, ours is {self.epoch}")

    def state(self) -> PartitionState:
        """Return what the edge is told."""
        return PartitionState(
            next=self.next,
            start=self.start,
            epoch=self.epoch,
            state=self.phase,
            reason=self.reason,
            message=self.message,
        )
