"""The Spark side of the soak: one driver that does a round of upkeep for each line on stdin.

It is a process of its own so that it can be killed: the whole driver, or the JVM under it.
"""

import json
import sys
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
    reports = [compact.run(session, table, COMPACT), expire.run(session, table, EXPIRE)]
    if number % 3 == 2:
        reports.append(manifests.run(session, table, manifests.ManifestOptions()))
        reports.append(orphans.run(session, table, ORPHANS))
    return reports


def main() -> int:
    """Answer every line with a line: `N` a round of upkeep, `audit` an audit."""
    data, topic = Path(sys.argv[1]), TopicName.parse(sys.argv[2])
    catalog = embedded(data).catalog
    spark = replace(SPARK, conf={"spark.sql.adaptive.enabled": "false"})
    with Session(catalog, spark, Progress(quiet=True)) as session:
        say({"ready": round(session.start_seconds, 1)})
        table = session.table(topic)
        for line in sys.stdin:
            word = line.strip()
            try:
                if word == "audit":
                    reports = [audit.run(session, table, audit.AuditOptions())]
                else:
                    reports = upkeep(session, table, int(word))
            except TidewaterError as error:
                say({"error": str(error)})
                continue
            say({"reports": [each.to_json() for each in reports]})
    return 0


def say(what: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
