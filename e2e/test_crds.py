"""What the API server itself refuses, with words a person understands, and what `kubectl` shows."""

from typing import Any

import pytest

from e2e.kubectl import CommandError, Kubectl, Object
from e2e.tenant import manifest, topic

pytestmark = pytest.mark.timeout(180)

COLUMNS = {"fields": [{"name": "id", "type": "long", "required": True}]}
NEW_REQUIRED = {"name": "extra", "type": "int", "required": True}
BAD: dict[str, tuple[Object, str]] = {
    "no partitions": (topic("t", partitions=0), "spec.partitions"),
    "a name with a dot": (topic("a.b"), "at most 63 characters of a-z, 0-9 and '-'"),
    "a unit nobody knows": (topic("t", freshness="10 parsecs"), "spec.freshness"),
    "a duration out of bounds": (topic("t", log={"syncInterval": "5h"}), "must be between"),
    "a duration in days, too": (topic("t", log={"syncInterval": "1d"}), "must be between"),
    "a size out of bounds": (topic("t", log={"segmentSize": "1Ki"}), "must be between"),
    "a sync mode nobody knows": (topic("t", log={"sync": "Sometimes"}), "Unsupported value"),
    "fresher than it is flushed": (
        topic("t", freshness="1s", writer={"flushInterval": "5s"}),
        "freshness must not be shorter than writer.flushInterval",
    ),
    "more in a batch than in memory": (
        topic("t", writer={"batchBytes": "1Gi", "maxMemory": "1Mi"}),
        "batchBytes",
    ),
    "dedicated, in a pool": (
        topic("t", dedicated=True, pool="other"),
        "a dedicated topic has workers of its own",
    ),
    "a column with our prefix": (
        topic("t", schema={"fields": [{"name": "tw_mine", "type": "long"}]}),
        "tw_",
    ),
    "an unknown field": (topic("t", partition=3), ".spec.partition: field not declared"),
    "a subscription without a topic": (manifest("Subscription", "s"), "spec.topic"),
    "its own dead letters": (
        manifest("Subscription", "s", topic="t", deadLetter={"topic": "t"}),
        "another topic than the one subscribed to",
    ),
    "two places to start from": (
        manifest("Subscription", "s", topic="t", startFrom={"offset": 1, "tag": "x"}),
        "spec.startFrom",
    ),
    "a tiny volume": (manifest("Pool", "p", storage={"size": "1Mi"}), "must be between"),
}


@pytest.fixture(scope="module")
def made(namespace: Kubectl) -> Kubectl:
    """Give a namespace with objects that are paused: nobody has to run them."""
    paused = {"tidewater.dev/paused": "true"}
    objects = [
        topic("raw", partitions=3),
        topic("typed", schema=COLUMNS, table={"name": "e2e.fixed"}),
        manifest("Subscription", "reader", topic="raw", startFrom={"position": "earliest"}),
        manifest("Pool", "pool", storage={"size": "2Gi", "storageClass": "one"}),
    ]
    for each in objects:
        each["metadata"]["annotations"] = paused
    namespace.apply(objects)
    return namespace


def _refused(kubectl: Kubectl, each: Object) -> str:
    with pytest.raises(CommandError) as caught:
        kubectl.apply([each])
    return str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_manifests_are_refused(made: Kubectl, case: str) -> None:
    bad, reason = BAD[case]
    assert reason in _refused(made, bad)


@pytest.mark.parametrize(
    ("name", "kind", "spec", "reason"),
    [
        ("raw", "Topic", {"partitions": 2}, "partitions may grow, never shrink"),
        ("raw", "Topic", {"schema": COLUMNS}, "stays raw or typed"),
        ("typed", "Topic", {"schema": {"fields": [{"name": "id", "type": "string"}]}}, "id"),
        (
            "typed",
            "Topic",
            {"schema": {"fields": [*COLUMNS["fields"], NEW_REQUIRED]}},
            "a new column cannot be required",
        ),
        ("typed", "Topic", {"schema": COLUMNS, "table": {"name": "e2e.moved"}}, "spec.table"),
        ("raw", "Topic", {"table": {"partitionBy": ["day(tw_time)"]}}, "partitionBy is fixed"),
        ("reader", "Subscription", {"topic": "typed"}, "a subscription stays with its topic"),
        (
            "reader",
            "Subscription",
            {"topic": "raw", "startFrom": {"position": "latest"}},
            "only applies again with a new resetToken",
        ),
        ("pool", "Pool", {"storage": {"size": "2Gi", "storageClass": "two"}}, "storageClass"),
    ],
)  # fmt: skip
def test_changes_that_would_lose_something_are_refused(
    made: Kubectl, name: str, kind: str, spec: dict[str, Any], reason: str
) -> None:
    assert reason in _refused(made, manifest(kind, name, **spec))


def test_what_kubectl_shows(made: Kubectl) -> None:
    head, *rows = made("get", "topics").splitlines()
    columns = ["NAME", "READY", "PARTITIONS", "RATE", "FRESHNESS", "COMMITTED", "LAG", "AGE"]
    assert head.split() == columns
    assert len(rows) == 2
    wide = made("get", "topics", "--output=wide").splitlines()[0].split()
    assert set(wide) > set(columns)
    assert made("get", "twt", "--output=name") == made("get", "topics", "--output=name")
    assert made("get", "tws", "--output=name").split() == ["subscription.tidewater.dev/reader"]
    everything = made("get", "tidewater", "--output=name").split()
    assert {each.partition(".")[0] for each in everything} == {"topic", "subscription", "pool"}
    said = made("explain", "topic.spec.log.sync")
    assert "DESCRIPTION" in said
    assert "<empty>" not in said
