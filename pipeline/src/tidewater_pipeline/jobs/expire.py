"""expire: removes old snapshots and the files that only they need.

Branches, tags and the snapshots that readers pin stay, whatever their age: those given, and those
that subscriptions which are still in history read from last. The ids to remove are named one by
one: an age alone would also take a pinned one. What a rewrite that is under way holds stays, too:
without a coordination store two jobs may be at work.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tidewater_core.hold import held_from
from tidewater_core.units import Duration
from tidewater_pipeline.calendar_time import sql_time
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import Session, TopicTable
from tidewater_pipeline.state import TableState, sql_text
from tidewater_pipeline.subscribers import Cursor, pins

OLDER_THAN: Final = Duration("1d")
RETAIN_LAST: Final = 1
IDS_PER_CALL: Final = 500
LONG_AGO_US: Final = 86_400_000_000
"""The procedure always expires by age as well: with this age, nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpireOptions:
    """What a person or the Topic can choose."""

    older_than: Duration = OLDER_THAN
    """Younger snapshots stay."""
    retain_last: int = RETAIN_LAST
    """So many of the newest stay, whatever their age."""
    pins: frozenset[int] = frozenset()
    """Snapshots that readers use now."""
    cursors: tuple[Cursor, ...] = ()
    """Of the topic's subscriptions: those that lie behind pin what they read from."""


def plan_expire(state: TableState, options: ExpireOptions, now_ms: int) -> list[int]:
    """Choose the snapshots to remove, oldest first."""
    pinned = options.pins | pins(options.cursors, state.frontiers)
    keep: Collection[int] = {*state.refs.values(), *pinned, state.snapshot_id or 0}
    held = held_from(state.properties, now_ms)
    newest_first = sorted(state.snapshots, key=lambda s: s.timestamp_ms, reverse=True)
    old = [
        s.snapshot_id
        for place, s in enumerate(newest_first)
        if place >= options.retain_last
        and s.timestamp_ms < now_ms - options.older_than.ms
        and s.snapshot_id not in keep
        and (held is None or s.sequence < held)
    ]
    return old[::-1]


def run(session: Session, table: TopicTable, options: ExpireOptions) -> Report:
    """Expire what the plan names."""
    state = table.load()
    report = Report("expire", str(table.topic), before=state.size)
    chosen = plan_expire(state, options, session.clock.now_us() // 1000)
    removed: dict[str, int] = {}
    session.sync(state)  # what replaced the files must be on the disk before they go
    for first in range(0, len(chosen), IDS_PER_CALL):
        ids = chosen[first : first + IDS_PER_CALL]
        session.progress.say(f"{table.topic}: expiring {len(ids)} of {len(chosen)} snapshots")
        (row,) = session.sql(
            f"CALL {session.procedure('expire_snapshots')}(table => {sql_text(table.name)}, "
            f"older_than => {sql_time(LONG_AGO_US)}, retain_last => 1, "
            f"snapshot_ids => array({', '.join(f'{each}L' for each in ids)}))"
        )
        for name, count in row.items():
            removed[name] = removed.get(name, 0) + int(count or 0)
    if not chosen:
        report.outcome = Outcome.NOTHING
    report.after = table.load().size
    there = {each.snapshot_id for each in state.snapshots}
    pinned = there & (options.pins | pins(options.cursors, state.frontiers))
    report.details = {
        "expired_snapshots": len(chosen),
        "pinned_snapshots": len(pinned),
        "removed": removed,
    }
    return report
