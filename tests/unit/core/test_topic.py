"""Topic: defaults, bounds, relations between fields, and messages that a person understands."""

import json

import pytest
from pydantic import ValidationError

from tidewater_core.crd.explain import problems
from tidewater_core.crd.topic import (
    FieldSpec,
    SchemaSpec,
    SyncMode,
    TableSpec,
    Topic,
    TopicSpec,
    table_identifier,
)
from tidewater_core.names import TopicName
from tidewater_core.units import ByteSize, Duration


def refusals(spec: dict[str, object]) -> str:
    """Validate a spec that is wrong; return what a person is told."""
    with pytest.raises(ValidationError) as caught:
        TopicSpec.model_validate(spec)
    return "; ".join(problems(caught.value, TopicSpec))


def test_an_empty_spec_is_a_good_topic() -> None:
    spec = TopicSpec.model_validate({})
    assert spec.partitions == 3
    assert (spec.pool, spec.dedicated) == ("default", False)
    assert spec.log.sync is SyncMode.ALWAYS
    assert spec.log.sync_interval == Duration("1s")
    assert spec.log.segment_size == ByteSize("64Mi")
    assert spec.log.segment_age == Duration("1h")
    assert spec.log.tail_cache == ByteSize("64Mi")
    assert spec.log.retention.time == Duration("48h")
    assert spec.log.retention.size == ByteSize("20Gi")
    assert spec.writer.flush_interval == Duration("1s")
    assert spec.writer.batch_rows == 100_000
    assert spec.writer.batch_bytes == ByteSize("64Mi")
    assert spec.writer.max_memory == ByteSize("256Mi")
    assert spec.freshness == Duration("10s")
    assert spec.reader.poll_interval == Duration("500ms")
    assert (spec.reader.max_concurrent_reads, spec.reader.prefetch) == (5, 3)
    assert spec.schema_ is None
    assert spec.table == TableSpec(name=None, partition_by=["hour(tw_time)"], properties={})
    assert spec.retention is None
    assert spec.maintenance.schedule == "*/30 * * * *"
    assert spec.maintenance.target_file_size == ByteSize("128Mi")
    assert spec.maintenance.keep_snapshots == 50
    assert spec.maintenance.snapshot_age == Duration("1d")
    assert spec.maintenance.spark.executors == 2
    assert spec.deletion_policy == "Retain"


def test_json_uses_the_names_of_manifests_and_round_trips() -> None:
    spec = TopicSpec(
        schema_=SchemaSpec(fields=[FieldSpec(name="a", type="list<long>")]),
        partitions=5,
    )
    data = json.loads(spec.to_json())
    assert data["writer"]["flushInterval"] == "1s"
    assert data["schema"]["fields"][0]["name"] == "a"
    assert "retention" not in data
    assert TopicSpec.from_json(spec.to_json()) == spec


def test_values_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TopicSpec().partitions = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"partitions": 0}, "partitions: must be greater than or equal to 1"),
        ({"partitions": 1001}, "partitions: must be less than or equal to 1000"),
        ({"partitions": "3"}, "partitions: must be a whole number, not '3'"),
        ({"partitions": True}, "partitions: must be a whole number, not True"),
        ({"dedicated": "yes"}, "dedicated: must be true or false, not 'yes'"),
        ({"partitons": 3}, "partitons: no such field; did you mean partitions?"),
        ({"log": {"syncinterval": "1s"}}, "log.syncinterval: no such field; did you mean"),
        ({"log": {"sync": "always"}}, "'always' is not one of 'Always', 'Periodic' or 'None'"),
        ({"log": {"segmentSize": "1Ki"}}, "log.segmentSize: 1Ki is not between 64Ki and 4Gi"),
        ({"log": {"retention": {"time": "2 days"}}}, "'2 days' is not a duration; write a number"),
        ({"writer": {"flushInterval": 5}}, "writer.flushInterval: 5 is not text with a unit"),
        ({"writer": {"flushInterval": "1ms"}}, "1ms is not between 50ms and 1h"),
        ({"writer": {"batchBytes": "1Gi"}}, "batchBytes (1Gi) must not be larger than maxMemory"),
        ({"writer": {"flushInterval": "20s"}}, "freshness (10s) must not be shorter than writer"),
        ({"pool": "My Pool"}, "pool 'My Pool' must be 1 to 63 characters of a-z"),
        ({"pool": "x", "dedicated": True}, "leave pool out"),
        ({"schema": {"fields": []}}, "schema.fields: must have at least 1 item"),
        ({"retention": {}}, "retention.time: is required"),
        ({"retention": {"time": "1s"}}, "is not between 1h and"),
        ({"table": {"name": "orders"}}, "'orders' must be NAMESPACE.TABLE"),
        ({"table": {"name": "a b.c"}}, "must be NAMESPACE.TABLE"),
        ({"table": {"properties": {"tidewater.x": "1"}}}, "names that begin with tidewater. are"),
        *(
            ({"table": {"properties": {key: "s3://wh/bank"}}}, "files stay below the table's")
            for key in (
                "write.data.path",
                "write.metadata.path",
                "write.object-storage.path",
                "write.folder-storage.path",
                "write.py-location-provider.impl",
                "write.location-provider.impl",
            )
        ),
        ({"table": {"partitionBy": ["hour(nope)"]}}, "no column 'nope'; there are tw_partition"),
        ({"table": {"partitionBy": ["hour(tw_key)"]}}, "cannot be applied to a column of type bin"),
        ({"table": {"partitionBy": ["week(tw_time)"]}}, "is not a partition field; write a column"),
        ({"table": {"partitionBy": ["tw_partition"] * 2}}, "the same partition field is listed"),
        ({"maintenance": {"schedule": "hourly"}}, "is not a schedule; write five fields"),
        ({"maintenance": {"keepSnapshots": 0}}, "must be greater than or equal to 1"),
        ({"deletionPolicy": "Keep"}, "'Keep' is not one of 'Retain' or 'Delete'"),
        ({"writer": 3}, "writer: must be a map of fields, not 3"),
    ],
)
def test_mistakes_are_told_in_plain_words(spec: dict[str, object], told: str) -> None:
    assert told in refusals(spec)


def test_all_mistakes_are_told_at_once() -> None:
    told = refusals({"partitions": 0, "writer": {"batchRows": 0}, "x": 1})
    assert told.count(";") >= 2


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ([{"name": "tw_a", "type": "int"}], "names that begin with tw_ are reserved"),
        ([{"name": "TW_a", "type": "int"}], "names that begin with tw_ are reserved"),
        ([{"name": "1a", "type": "int"}], "must be letters, digits and '_'"),
        ([{"name": "a b", "type": "int"}], "must be letters, digits and '_'"),
        ([{"name": "ä", "type": "int"}], "must be letters, digits and '_'"),
        ([{"name": "a", "type": "int32"}], "is not a column type; write one of binary, boolean"),
        ([{"name": "a"}], "fields[0].type: is required"),
        ([{"name": "a", "type": "int"}, {"name": "A", "type": "int"}], "could not tell them apart"),
        ([{"name": "a", "type": "int"}, {"name": "a", "type": "int"}], "could not tell them apart"),
    ],
)
def test_columns_are_checked(fields: list[dict[str, object]], told: str) -> None:
    assert told in refusals({"schema": {"fields": fields}})


def test_partitioning_by_own_columns() -> None:
    fields = [{"name": "region", "type": "string"}, {"name": "d", "type": "date"}]
    spec = TopicSpec.model_validate(
        {
            "schema": {"fields": fields},
            "table": {"partitionBy": ["bucket(16, region)", "day(d)", "region"]},
        }
    )
    assert spec.table.partition_by == ["bucket(16,region)", "day(d)", "identity(region)"]
    assert [t.argument for t in spec.table.transforms] == [16, None, None]


def test_table_identifier() -> None:
    topic = Topic.model_validate({"metadata": {"name": "orders", "namespace": "shop"}})
    assert topic.table_identifier == ("shop", "orders")
    assert topic.name == TopicName("shop", "orders")
    named = TopicSpec(table=TableSpec(name="lake.sales.orders"))
    assert table_identifier(topic.name, named) == ("lake", "sales", "orders")


def test_a_topic_from_the_api_server_is_read() -> None:
    topic = Topic.model_validate(
        {
            "apiVersion": "tidewater.dev/v1alpha1",
            "kind": "Topic",
            "metadata": {
                "name": "a", "uid": "u", "generation": 2, "resourceVersion": "1",
                "managedFields": [], "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"partitions": 1},
            "status": {"conditions": [], "observedGeneration": 1, "fromTheFuture": {}},
        }
    )  # fmt: skip
    assert topic.status is not None
    assert topic.metadata.generation == 2
