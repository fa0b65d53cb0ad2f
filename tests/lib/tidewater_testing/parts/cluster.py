"""Three workers of one topic, which know of each other through one coordination store."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until

TOPIC = "shop/orders"
SPEC = {"partitions": 3, "writer": {"flushInterval": "200ms"}}
NAMES = ("a", "b", "c")
WAIT_S = 60.0


class Cluster:
    """Three workers with logs of their own, one catalog and one coordination store."""

    def __init__(self, directory: Path, coordination: str, ttl: str = "3s") -> None:
        catalog = {
            "type": "sql",
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
        }
        self.workers = {
            name: Worker(
                directory / name,
                [topic_manifest(TOPIC, SPEC)] if name == "a" else [],
                catalog=catalog,
                coordination=coordination,
                worker_id=name,
                session_ttl=ttl,
            )
            for name in NAMES
        }

    def owners(self, via: str = "a") -> dict[int, str | None]:
        found = self.workers[via].get(f"/v1/{TOPIC}")
        if found.status != 200:
            return {}
        return {p["partition"]: p["owner"] for p in found.json()["partitions"]}

    def describe(self, number: int, via: str = "a") -> dict[str, Any]:
        answer = self.workers[via].get(f"/v1/{TOPIC}")
        found: dict[str, Any] = answer.json()["partitions"][number]
        return found

    def move(self, number: int, to: str, via: str = "a") -> None:
        path = f"/v1/{TOPIC}/partitions/{number}/move"
        assert self.workers[via].post(path, json.dumps({"to": to})).status == 202
        self.wait_owner(number, to, via)

    def wait_owner(self, number: int, owner: str, via: str = "a") -> None:
        def there() -> bool:
            part = self.describe(number, via)
            return bool(part["owner"] == owner and part["state"] == "running")

        wait_until(there, WAIT_S, f"partition {number} on {owner}", 0.1)

    def produce(
        self, via: str, values: list[str], number: int | None = None, keys: bool = False
    ) -> tuple[int, Any]:
        query = "" if number is None else f"?partition={number}"
        messages = [{"value": v, **({"key": v} if keys else {})} for v in values]
        answer = self.workers[via].post(
            f"/v1/{TOPIC}/messages{query}", json.dumps({"messages": messages})
        )
        return answer.status, answer.json()

    def produced(self, via: str, values: list[str], number: int | None = None) -> Any:
        """Produce, asking again while a partition is on its way."""
        answers: list[Any] = []

        def done() -> bool:
            status, body = self.produce(via, values, number)
            answers.append(body)
            assert status in (200, 503), body
            return status == 200

        wait_until(done, WAIT_S, "messages to be taken", 0.1)
        return answers[-1]

    def read(self, via: str, number: int, offset: int = 0) -> list[tuple[int, str]]:
        path = f"/v1/{TOPIC}/messages?partition={number}&offset={offset}&limit=1000"
        answer = self.workers[via].get(path)
        assert answer.status == 200, answer.body
        return [(m["offset"], m["value"]) for m in answer.json()["messages"]]


@contextmanager
def running_cluster(directory: Path, store: str) -> Iterator[Cluster]:
    """Start a cluster on `etcd` or `sqlite`; it is gone at the end."""
    with ExitStack() as stack:
        if store == "etcd":
            coordination = stack.enter_context(Etcd(directory / "etcd")).coordination
        else:
            coordination = str(directory / "coordination.db")
        made = Cluster(directory, coordination)
        stack.enter_context(made.workers["a"])
        for name in NAMES[1:]:
            stack.push(made.workers[name])
            made.workers[name].start(wait=False)
        for name in NAMES[1:]:
            made.workers[name].wait_ready()
        yield made
