"""The Spark side of the soak: one driver that does a round of upkeep for each line on stdin.

It is a process of its own so that it can be killed: the whole driver, or the JVM under it.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidewater_core.errors import TidewaterError
from tidewater_core.names import TopicName
from tidewater_core.settings import embedded
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.jobs import audit, compact, expire, manifests, orphans
from tidewater_pipeline.report import Progress, Report
from tidewater_pipeline.session import Session, TopicTable
from tidewater_pipeline.settings import SparkSettings

COMPACT = compact.CompactOptions(target=ByteSize("1Mi"), files_min=5, include_open=True)
EXPIRE = expire.ExpireOptions(older_than=Duration("90s"))
ORPHANS = orphans.OrphanOptions(grace=Duration("4m"), settle=Duration("5s"), delete=True)
SPARK = SparkSettings(master="local[1]", driver_memory="700m", shuffle_partitions=2)


def upkeep(session: Session, table: TopicTable, number: int) -> list[Report]:
    """Compact and expire; now and then join manifests and look for orphans."""
    steps: list[Callable[[], Report]] = [
        lambda: compact.run(session, table, COMPACT),
        lambda: expire.run(session, table, EXPIRE),
    ]
    if number % 3 == 2:
        steps.append(lambda: manifests.run(session, table, manifests.ManifestOptions()))
        steps.append(lambda: orphans.run(session, table, ORPHANS))
    return [timed(step) for step in steps]


def timed(step: Callable[[], Report]) -> Report:
    """Run a step and note how long it took."""
    began = time.monotonic()
    report = step()
    report.seconds = time.monotonic() - began
    return report


def main() -> int:
    """Answer every line with a line: `N` a round of upkeep, `audit` an audit."""
    data, topic = Path(sys.argv[1]), TopicName.parse(sys.argv[2])
    catalog = embedded(data).catalog
    # It is killed every few minutes: a quick start counts more than peak speed.
    java = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto"
    conf = {"spark.sql.adaptive.enabled": "false", "spark.driver.extraJavaOptions": java}
    spark = replace(SPARK, conf=conf)
    with Session(catalog, spark, Progress(quiet=True)) as session:
        say({"ready": round(session.start_seconds, 1)})
        table = session.table(topic)
        for line in sys.stdin:
            word = line.strip()
            try:
                if word == "audit":
                    reports = [timed(lambda: audit.run(session, table, audit.AuditOptions()))]
                else:
                    reports = upkeep(session, table, int(word))
            except TidewaterError as error:
                say({"error": str(error)})
                continue
            steps_s = {each.job: round(each.seconds, 1) for each in reports}
            said = [each.to_json() for each in reports]
            say({"reports": said, "steps_s": steps_s, "seconds": sum(steps_s.values())})
    return 0


def say(what: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
