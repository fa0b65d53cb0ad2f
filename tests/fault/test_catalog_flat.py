"""A thousand commits: the last ones cost what the first ones did."""

import json
import statistics
import time
from pathlib import Path

import pytest

from table_fakes import (
    CountingIds,
    HandLog,
    SteppedClock,
    assignment,
    message_batch,
    worker_settings,
)
from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.table.catalog import open_catalog
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.topic import TopicRun

COMMITS = 1_000
WINDOW = 60
EARLY = 20
GROWTH_MAX = 1.5


REFERENCE = json.dumps([{"name": f"snapshot-{i}", "value": i * 0.5} for i in range(400)])


def reference_s() -> float:
    """Return the CPU time of a fixed piece of work, to tell a slow moment from a slow commit."""
    before = time.process_time()
    for _ in range(4):
        json.loads(REFERENCE)
    return time.process_time() - before


def typical(seconds: list[float]) -> float:
    """Return the lower quartile: what else the machine does only ever adds."""
    return statistics.quantiles(seconds, n=4)[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commit_cost_stays_flat(tmp_path: Path) -> None:
    spec = TopicSpec()
    settings = worker_settings(tmp_path, **{"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"})
    catalog = open_catalog(settings.catalog)
    clock = SteppedClock()
    log = HandLog(tmp_path / "log" / "shop" / "orders" / "0", 0)
    run = TopicRun(
        assignment(spec, [log]), lambda: catalog, clock, CountingIds(), lambda _: None, RangeIndex()
    )
    run.step()
    cpu_s: list[float] = []
    costs: list[float] = []
    for number in range(COMMITS):
        log.append(message_batch(spec, [b"x"] * 10, time_us=clock.now_us()))
        run.inbox.durable({0: log.end})
        run.step()
        clock.advance(1.0)
        before = time.process_time()
        run.step()
        cpu_s.append(time.process_time() - before)
        costs.append(cpu_s[-1] / reference_s())
        assert run.state.partitions[0].next == log.end, f"commit {number} did not land"
    health = run.reader.view(newest=True)
    snapshots = len(health.metadata.snapshots)
    manifests = len(health.metadata.current_snapshot().manifests(health.table.io))  # type: ignore[union-attr]
    metadata_files = len(list(tmp_path.glob("warehouse/shop/orders/metadata/*.metadata.json")))
    early = typical(costs[EARLY - WINDOW // 4 : EARLY + WINDOW // 4])
    late = typical(costs[-WINDOW:])
    mean_early = statistics.mean(cpu_s[EARLY : EARLY + 100])
    mean_late = statistics.mean(cpu_s[-100:])
    print(
        f"commit / reference: {early:.1f} early, {late:.1f} late; "
        f"CPU ms {mean_early * 1000:.1f} and {mean_late * 1000:.1f} (means); "
        f"{snapshots} snapshots, {manifests} manifests, {metadata_files} metadata files"
    )
    catalog.close()
    assert late <= GROWTH_MAX * early, (
        f"a commit cost {early:.1f} times the reference early and {late:.1f} late"
    )
    assert snapshots <= spec.maintenance.keep_snapshots
    assert manifests <= 40
    assert metadata_files <= 25
