"""Health and compaction have one rule: what one counts as debt the other rewrites, and no more."""

import random

import pytest

from tidewater_core.compaction import HOUR_US
from tidewater_pipeline.jobs.compact import CompactOptions, plan_compact
from tidewater_pipeline.state import FileInfo
from tidewater_worker.table.health import debt, tally
from tidewater_worker.table.ranges import Bounds, FileRange

TARGET = 1_000
NOW = 500_000 * HOUR_US + 12 * 60_000_000


def both(files: list[tuple[int, int, int]], unit: str | None, now_us: int = NOW) -> tuple[int, int]:
    """Return the debt that health tells and the files that compaction plans to rewrite.

    A file is (group, time, bytes).
    """
    ranges = [FileRange("f", Bounds((0, 0), (0, 9), (at, at)), n, 1, {}, g) for g, at, n in files]
    told, _ = debt([tally(ranges, TARGET, unit)], TARGET, unit, now_us)
    infos = [FileInfo("f", str(g), n, 1, at, at) for g, at, n in files]
    plan = plan_compact(infos, CompactOptions(), target_bytes=TARGET, now_us=now_us, time_unit=unit)
    return told, sum(each.files for each in plan)


def test_a_topic_of_few_messages_is_joined_in_the_end() -> None:
    """Three files an hour for 40 hours: a debt of 120 was told that no job would ever pay."""
    hours = [(NOW // HOUR_US - n, n) for n in range(40)]
    files = [(hour, hour * HOUR_US + i, 10) for hour, _ in hours for i in range(3)]
    told, planned = both(files, "hour")
    assert told == planned == 3 * sum(1 for _, age in hours if age > 24)


@pytest.mark.parametrize("unit", ["hour", "day", None])
@pytest.mark.parametrize("seed", range(30))
def test_they_agree(unit: str | None, seed: int) -> None:
    draw = random.Random(seed)
    length = 24 * HOUR_US if unit == "day" else HOUR_US
    files = []
    for _ in range(draw.randrange(20, 200)):
        at = NOW - draw.randrange(60) * length - draw.randrange(HOUR_US // 6)
        bucket = draw.randrange(draw.choice((1, 3)))
        group = bucket if unit is None else (at // length) * 10 + bucket
        files.append((group, at, draw.choice((10, 400, 749, 750, 2_000))))
    told, planned = both(files, unit)
    # Of many ranges a run takes the first ones; the next run goes on.
    assert (planned == told) or (0 < planned < told)
    assert (told == 0) == (planned == 0)
