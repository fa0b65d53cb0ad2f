"""One partition as the table process sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidewater_worker.log.reader import LogReader
from tidewater_worker.ports import PartitionAssignment, PartitionState, Phase, TopicAssignment
from tidewater_worker.table.cut import Source
from tidewater_worker.table.frontier import UNWRITTEN, Claim, Frontier


@dataclass(slots=True)
class PartitionRun:
    """A partition's log, how far it is durable, and how far it is in the table."""

    number: int
    epoch: int
    directory: str
    durable_end: int
    gap_end: int
    log: LogReader = field(repr=False)
    opened: bool = False
    """The frontier is known."""
    next: int = 0
    start: int = 0
    phase: Phase = Phase.OPENING
    reason: str = ""
    message: str = ""
    gaps: tuple[tuple[int, int], ...] = ()
    table_epoch: int = 0
    """The epoch that fenced us; 0 while none has."""
    is_damaged: bool = False
    """Its log has bytes that are not what was written: looking again makes them no better."""

    @classmethod
    def of(cls, number: int, assignment: PartitionAssignment) -> "PartitionRun":
        """Begin with an assignment."""
        return cls(
            number=number,
            epoch=assignment.epoch,
            directory=assignment.directory,
            durable_end=assignment.durable_end,
            gap_end=assignment.gap_end,
            log=LogReader(Path(assignment.directory)),
        )

    def __del__(self) -> None:
        """Close the log with the last one who reads it: a topic may be let go in mid-step."""
        self.log.close()

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
        return Claim(self.epoch, self.next if self.opened else None, self.gap_end)

    def must_go_first(self, found: Frontier | None) -> bool:
        """Say if our epoch, or the end of a gap, has to be in the table before a first row."""
        there = found or UNWRITTEN
        return there.epoch < self.epoch or there.next < self.gap_end

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
        self.table_epoch = epoch
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
            gaps=self.gaps,
            table_epoch=self.table_epoch,
        )


class PartitionSet(dict[int, PartitionRun]):
    """The partitions of a topic on this worker."""

    def absorb(self, assignment: TopicAssignment, ends: Mapping[int, int]) -> bool:
        """Take in an assignment and durable ends; say if owner or partitions have changed."""
        changed = False
        for number, part in assignment.partitions.items():
            run = self.get(number)
            if run is None or run.epoch != part.epoch or run.directory != part.directory:
                if run is not None:
                    run.log.close()
                run = self[number] = PartitionRun.of(number, part)
                changed = True
            run.durable_end = max(run.durable_end, part.durable_end, ends.get(number, 0))
        for number in [number for number in self if number not in assignment.partitions]:
            self.pop(number).log.close()
            changed = True
        return changed

    @property
    def waiting(self) -> int:
        """Rows that are durable and not yet in the table."""
        return sum(run.waiting for run in self.values())

    @property
    def opening(self) -> list[PartitionRun]:
        """Partitions whose frontier is not known yet."""
        return [r for r in self.values() if r.phase is not Phase.STOPPED and not r.opened]

    @property
    def stopped(self) -> bool:
        """Say if all partitions are stopped."""
        return bool(self) and all(run.phase is Phase.STOPPED for run in self.values())

    @property
    def mendable(self) -> list[PartitionRun]:
        """Those that stopped for what a person, or time, can mend while the others go on."""
        found = [r for r in self.values() if r.phase is Phase.STOPPED and r.reason != "Fenced"]
        return found if self.stopped else [run for run in found if not run.is_damaged]

    def claims(self) -> dict[int, Claim]:
        """Return what we hold of the partitions that go on."""
        return {number: run.claim for number, run in self.items() if run.active}

    def sources(self) -> list[Source]:
        """Return the rows that wait."""
        return [
            Source(run.number, run.log, run.next, run.durable_end)
            for run in self.values()
            if run.waiting
        ]

    def reopen(self) -> None:
        """Look at the table again before the next row."""
        for run in self.values():
            run.opened = False
            if run.phase is not Phase.STOPPED:
                run.phase = Phase.OPENING
