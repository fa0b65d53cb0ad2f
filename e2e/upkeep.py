"""Spark's upkeep from outside: tables made old, jobs by hand, files that nothing names."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import FileSelector, FileType, S3FileSystem
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from e2e.kubectl import Kubectl, Object, wait_for
from tidewater_testing.evidence import CATALOG_NAME

JOB_S_MAX = 300.0
TARGET_SIZE = "write.target-file-size-bytes"


def age(table: Table, hours: int, files: int) -> None:
    """Move all rows of an idle table back in time, in as many files as commits would have left.

    Nobody can wait for an hour to close; so the table becomes what it will be a few hours later.
    """
    rows = (
        table.scan().to_arrow().sort_by([("tw_partition", "ascending"), ("tw_offset", "ascending")])
    )
    at = rows.schema.get_field_index("tw_time")
    earlier = pc.subtract(rows["tw_time"], pa.scalar(timedelta(hours=hours), pa.duration("us")))
    rows = rows.set_column(at, rows.schema.field(at), earlier.cast(rows.schema.field(at).type))
    before = table.properties[TARGET_SIZE]
    with table.transaction() as change:
        change.set_properties({TARGET_SIZE: str(rows.nbytes // files)})
        change.overwrite(rows)
        change.set_properties({TARGET_SIZE: before})


def run_like(kubectl: Kubectl, model: Object, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a job of the pipeline image as the operator's `model` is run; return its report."""
    spec = json.loads(json.dumps(model["spec"]))
    spec.pop("selector", None)
    spec["backoffLimit"] = 0
    kept = ("app.kubernetes.io/part-of", "app.kubernetes.io/component")  # the storage lets it in
    labels = {key: spec["template"]["metadata"]["labels"][key] for key in kept}
    spec["template"]["metadata"] = {"labels": {**labels, "e2e": name}}
    (driver,) = spec["template"]["spec"]["containers"]
    settings = driver["args"].index("--settings")
    driver["args"] = ["tidewater-pipeline", *words, *driver["args"][settings : settings + 4]]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
    kubectl.apply([job])

    def ended() -> bool:
        conditions = kubectl.get("job", name).get("status", {}).get("conditions", ())
        return any(each["type"] in ("Complete", "Failed") for each in conditions)

    wait_for(ended, JOB_S_MAX, f"job {name} to end", interval_s=1.0)
    printed = kubectl("logs", f"job/{name}")
    _, found, last = printed.rpartition("\n{\n")  # after the lines of progress
    assert found, f"job {name} left no report:\n{printed[-4000:]}"
    report: dict[str, Any] = json.loads("{" + last)
    return report


def topics_with_rows(catalog: Mapping[str, str]) -> Iterator[tuple[str, Table]]:
    """Give every topic of the catalog whose table has rows."""
    opened = load_catalog(CATALOG_NAME, **catalog)
    for namespace in opened.list_namespaces():
        for identifier in opened.list_tables(namespace):
            table = opened.load_table(identifier)
            snapshot = table.current_snapshot()
            summary = None if snapshot is None else snapshot.summary
            is_topic = any(key.startswith("tidewater.partition.") for key in table.properties)
            if is_topic and summary is not None and int(summary["total-records"] or 0):
                yield "/".join(identifier), table


def unnamed(table: Table, catalog: Mapping[str, str]) -> list[str]:
    """List the files below a table's location that no version of it names."""
    named = set(_named(table))
    store = S3FileSystem(
        access_key=catalog["s3.access-key-id"],
        secret_key=catalog["s3.secret-access-key"],
        endpoint_override=catalog["s3.endpoint"],
        region=catalog["s3.region"],
    )
    place = table.location().partition("://")[2].rstrip("/")
    listed = store.get_file_info(FileSelector(place, recursive=True))
    paths = {each.path for each in listed if each.type == FileType.File}
    return sorted(paths - {each.partition("://")[2] for each in named})


def _named(table: Table) -> Iterator[str]:
    yield table.metadata_location
    yield from (each.metadata_file for each in table.metadata.metadata_log)
    for snapshot in table.metadata.snapshots:
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(table.io):
            yield manifest.manifest_path
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                yield entry.data_file.file_path
