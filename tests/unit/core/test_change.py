"""Which changes of a spec are allowed."""

import pytest

from tidewater_core.crd.change import subscription_change_problems, topic_change_problems
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_core.crd.topic import TopicSpec

A: dict[str, object] = {"name": "a", "type": "int"}


def typed(*fields: dict[str, object]) -> dict[str, object]:
    return {"schema": {"fields": list(fields)}}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        ({"partitions": 1}, {"partitions": 5}),
        ({}, {"writer": {"flushInterval": "2s"}, "log": {"sync": "None"}}),
        (typed(A), typed(A, {"name": "b", "type": "string"})),
        (typed(A), typed({**A, "type": "long"})),
        (typed({**A, "required": True}), typed(A)),
        (typed(A), typed({**A, "doc": "said"})),
        ({"table": {"partitionBy": ["hour( tw_time )"]}}, {}),
    ],
)
def test_allowed(old: dict[str, object], new: dict[str, object]) -> None:
    assert topic_change_problems(TopicSpec.model_validate(old), TopicSpec.model_validate(new)) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({"partitions": 3}, {"partitions": 2}, "never shrink (3 to 2)"),
        ({}, {"table": {"name": "a.b"}}, "table.name: cannot change"),
        ({}, {"table": {"partitionBy": []}}, "table.partitionBy: is fixed"),
        ({}, typed(A), "stays raw or typed"),
        (typed(A), {}, "stays raw or typed"),
        (typed(A), typed({"name": "b", "type": "int"}), "'a' cannot be removed"),
        (typed(A), typed({**A, "type": "string"}), "from int to string"),
        (typed({**A, "type": "long"}), typed(A), "from long to int"),
        (typed(A), typed({**A, "required": True}), "cannot become required"),
        (typed(A), typed(A, {"name": "b", "type": "int", "required": True}), "cannot be required"),
    ],
)
def test_refused(old: dict[str, object], new: dict[str, object], told: str) -> None:
    found = topic_change_problems(TopicSpec.model_validate(old), TopicSpec.model_validate(new))
    assert told in "; ".join(found)


@pytest.mark.parametrize(
    ("new", "told"),
    [
        ({"topic": "t"}, None),
        ({"topic": "t", "maxUnacked": 5}, None),
        ({"topic": "t", "startFrom": {"offset": 3}, "resetToken": "2"}, None),
        ({"topic": "t", "startFrom": {"offset": 3}, "resetToken": "1"}, "with a new resetToken"),
        ({"topic": "t", "startFrom": {"offset": 3}}, "with a new resetToken"),
        ({"topic": "u"}, "stays with its topic"),
    ],
)
def test_subscription(new: dict[str, object], told: str | None) -> None:
    old = SubscriptionSpec(topic="t", reset_token="1")
    found = subscription_change_problems(old, SubscriptionSpec.model_validate(new))
    assert (told in "; ".join(found)) if told else found == []
