"""Subscription: defaults, where it starts, and what is refused."""

import pytest
from pydantic import ValidationError

from tidewater_core.crd.explain import problems
from tidewater_core.crd.subscription import StartFrom, Subscription, SubscriptionSpec
from tidewater_core.names import TopicName
from tidewater_core.units import Duration


def test_defaults() -> None:
    spec = SubscriptionSpec(topic="orders")
    assert spec.type == "Shared"
    assert spec.start_from == StartFrom(position="earliest")
    assert spec.isolation == "acknowledged"
    assert spec.ack_deadline == Duration("30s")
    assert (spec.max_unacked, spec.max_deliveries) == (1_000, 5)
    assert (spec.backoff.initial, spec.backoff.max) == (Duration("1s"), Duration("5m"))
    assert spec.dead_letter is None
    assert spec.filter is None
    assert SubscriptionSpec.from_json(spec.to_json()) == spec


def test_its_topic_is_in_the_same_namespace() -> None:
    subscription = Subscription.model_validate(
        {"metadata": {"name": "billing", "namespace": "shop"}, "spec": {"topic": "orders"}}
    )
    assert subscription.topic == TopicName("shop", "orders")


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:01.5Z", 1_500_000),
        ("1970-01-01T01:00:00+01:00", 0),
        ("2026-01-31T12:00:00.000001z", 1_769_860_800_000_001),
    ],
)
def test_timestamps(text: str, us: int) -> None:
    assert StartFrom(timestamp=text).timestamp_us == us


def test_no_timestamp() -> None:
    assert StartFrom(offset=0).timestamp_us is None


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({}, "topic: is required"),
        ({"topic": "a/b"}, "topic 'a/b' must be 1 to 63 characters"),
        ({"topic": "a", "startFrom": {}}, "takes exactly one of position, offset"),
        ({"topic": "a", "startFrom": {"offset": 1, "tag": "t"}}, "not 2"),
        ({"topic": "a", "startFrom": {"offset": -1}}, "greater than or equal to 0"),
        ({"topic": "a", "startFrom": {"offset": 1 << 63}}, "less than or equal to 9223372036854"),
        ({"topic": "a", "startFrom": {"position": "first"}}, "'first' is not one of 'earliest'"),
        ({"topic": "a", "startFrom": {"timestamp": "yesterday"}}, "is not a time; write it as"),
        ({"topic": "a", "startFrom": {"timestamp": "2026-01-01T00:00:00"}}, "zone included"),
        ({"topic": "a", "startFrom": {"timestamp": "2026-13-01T00:00:00Z"}}, "is not a time"),
        ({"topic": "a", "type": "shared"}, "'shared' is not one of 'Exclusive'"),
        ({"topic": "a", "ackDeadline": "1ms"}, "1ms is not between 100ms and 1d"),
        ({"topic": "a", "deadLetter": {"topic": "a"}}, "must be another topic"),
        ({"topic": "a", "backoff": {"initial": "10m"}}, "must not be longer than max"),
        ({"topic": "a", "filter": {"wher": "x"}}, "did you mean where?"),
    ],
)
def test_mistakes_are_told_in_plain_words(spec: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SubscriptionSpec.model_validate(spec)
    assert told in "; ".join(problems(caught.value, SubscriptionSpec))
