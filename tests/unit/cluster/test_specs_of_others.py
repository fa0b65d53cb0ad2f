"""Specs that another version wrote, or nobody: each is refused alone, and none stops a worker."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from owner_fakes import TOPIC, World
from tidewater_coordination.port import RegisteredSubscription, Registry
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid
from tidewater_worker.dispatch.manager import Dispatch
from tidewater_worker.report import Reporter
from tidewater_worker.table.opening import topic_table

OTHER = "shop/other"


def newer(spec: str) -> str:
    """Return a spec as a version writes it that has fields which this one does not know."""
    found = json.loads(spec)
    found["fieldOfTheNextVersion"] = True
    for part in found.values():
        if isinstance(part, dict):
            part["another"] = {"of": ["it"]}
    return json.dumps(found)


@pytest.mark.parametrize("bad", ["{", "null", '{"partitions": "three"}', '{"partitions": 0}'])
async def test_one_spec_that_cannot_be_read_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    world = World(tmp_path, monkeypatch)
    await world.start()
    await world.store.register_topic(OTHER, bad, str(UUID(int=8)))
    await world.assign("a")
    worker = await world.settle("a")  # started beside it, and takes messages
    await worker.append(b"one", 1)
    report = await Reporter(worker.node).of("shop")
    assert [(one["topic"], one["reason"]) for one in report["refused"]] == [(OTHER, "InvalidSpec")]
    assert "this worker cannot read the spec" in report["refused"][0]["message"]
    # And the spec of one that is served: it goes on with the one that it has.
    await world.store.register_topic(TOPIC, bad, str(UUID(int=7)))
    await worker.round()
    await worker.append(b"two", 2)
    refused = worker.node.owning.refused
    assert {name: error.reason for name, error in refused.items()} == {
        TOPIC: "InvalidSpec",
        OTHER: "InvalidSpec",
    }
    # Mended, both are served by what is registered.
    for number, name in ((7, TOPIC), (8, OTHER)):
        await world.store.register_topic(name, '{"partitions":2}', str(UUID(int=number)))
    await worker.round()
    assert refused == {}
    assert {len(topic.partitions) for topic in worker.node.topics.values()} == {2}
    await world.close()


async def test_fields_of_a_newer_version_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    await world.start()
    wanted = TopicSpec(partitions=1)
    await world.store.register_topic(TOPIC, newer(wanted.to_json()), str(UUID(int=7)))
    await world.assign("a")
    worker = await world.settle("a")
    await worker.append(b"one", 1)
    topic = worker.node.topics[TOPIC]
    assert topic.spec == wanted
    assert worker.node.owning.refused == {}
    # The table process reads the same text.
    assert topic_table(topic.assignment()).spec == wanted
    await world.close()


def test_people_may_not_write_unknown_fields() -> None:
    with pytest.raises(ValueError, match="fieldOfTheNextVersion"):
        TopicSpec.model_validate_json(newer(TopicSpec().to_json()))


async def test_subscriptions_as_well() -> None:
    good = SubscriptionSpec(topic="orders").to_json()
    found = {
        name: RegisteredSubscription(name, name, spec)
        for name, spec in (("shop/a", newer(good)), ("shop/b", "{"), ("shop/c", good))
    }

    async def registry() -> Registry:
        return Registry(1, {}, found, {}, {}, {})

    port: Any = SimpleNamespace(registry=registry, load_cursors=None)
    topics = SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: 0.0), topic=lambda *_: None)
    dispatch = Dispatch(topics, port)  # type: ignore[arg-type]
    await dispatch._sync()
    assert dispatch.local("shop", "orders", "a").spec == SubscriptionSpec(topic="orders")
    assert dispatch.local("shop", "orders", "c")
    assert {name: error.reason for name, error in dispatch.refused.items()} == {
        "shop/b": "InvalidSpec"
    }
    with pytest.raises(Invalid, match="cannot read the spec"):
        dispatch.local("shop", "orders", "b")
    # One that is served keeps the spec that it has.
    found["shop/c"] = RegisteredSubscription("shop/c", "shop/c", '{"topic": 3}')
    await dispatch._sync()
    assert dispatch.local("shop", "orders", "c").spec == SubscriptionSpec(topic="orders")
    assert set(dispatch.refused) == {"shop/b", "shop/c"}
