"""Subscriptions for tests: their manifests, and a consumer over plain HTTP."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidewater_core.crd.subscription import Subscription
from tidewater_testing import web


def subscription_manifest(name: str, topic: str, **spec: Any) -> str:
    """Write the manifest of a subscription `ns/name`; JSON is YAML."""
    namespace, _, short = name.partition("/")
    subscription = Subscription.model_validate(
        {
            "apiVersion": "tidewater.dev/v1alpha1",
            "kind": "Subscription",
            "metadata": {"name": short, "namespace": namespace},
            "spec": {"topic": topic, **spec},
        }
    )
    return subscription.model_dump_json(by_alias=True, exclude_unset=True)


@dataclass
class Consumer:
    """One consumer of a subscription."""

    address: str
    topic: str
    """`namespace/name`."""
    subscription: str
    name: str = "c1"

    @property
    def path(self) -> str:
        """Where the subscription is."""
        return f"/v1/{self.topic}/subscriptions/{self.subscription}"

    def call(self, verb: str, **body: Any) -> web.Answer:
        """POST to the subscription."""
        return web.request(
            self.address, "POST", f"{self.path}/{verb}", json.dumps(body),
            {"Content-Type": "application/json"},
        )  # fmt: skip

    def ok(self, verb: str, **body: Any) -> Any:
        """POST, and see that it went well."""
        answer = self.call(verb, **body)
        assert answer.status == 200, (verb, body, answer.status, answer.body)
        return answer.json()

    def pull(self, limit: int = 100, wait_ms: int = 0) -> list[dict[str, Any]]:
        """Take messages."""
        messages: list[dict[str, Any]] = self.ok(
            "pull", max=limit, wait_ms=wait_ms, consumer=self.name
        )["messages"]
        return messages

    def ack(self, messages: Sequence[dict[str, Any]]) -> Any:
        """Acknowledge messages."""
        return self.ok("ack", ack_ids=[m["ack_id"] for m in messages], consumer=self.name)

    def nack(self, messages: Sequence[dict[str, Any]], **more: Any) -> Any:
        """Give messages back."""
        return self.ok("nack", ack_ids=[m["ack_id"] for m in messages], **more)

    def status(self) -> Any:
        """Return what the worker says about the subscription."""
        answer = web.request(self.address, "GET", self.path)
        assert answer.status == 200, answer.body
        return answer.json()


def values(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the messages' values."""
    return [message["value"] for message in messages]
