"""Two workers, a and b, that know of each other; partition 1 of every topic is b's."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tidewater_testing.parts.worker import Worker
from tidewater_testing.process import free_ports, wait_until

WAIT_S = 60.0


@contextmanager
def two_workers(
    directory: Path, manifests: Sequence[str], topics: Sequence[str], *, flight: bool = False
) -> Iterator[dict[str, Worker]]:
    """Start both with one catalog and one coordination store; `topics` have two partitions."""
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
    }
    with ExitStack() as stack:
        found: dict[str, Worker] = {}
        for name, port in zip("ab", free_ports(2), strict=True):
            worker = Worker(
                directory / name,
                list(manifests) if name == "a" else [],
                catalog=catalog,
                coordination=str(directory / "coordination.db"),
                worker_id=name,
            )
            if flight:
                worker.settings = replace(worker.settings, flight_port=port)
                (worker.directory / "settings.json").write_text(worker.settings.to_json())
            found[name] = stack.enter_context(worker)
        for topic in topics:
            move(found["a"], topic, 1, "b")
        yield found


def move(worker: Worker, topic: str, number: int, to: str) -> None:
    """Have a partition handed over, and wait until its new owner serves it."""
    path = f"/v1/{topic}/partitions/{number}/move"
    assert worker.post(path, json.dumps({"to": to})).status == 202

    def there() -> bool:
        part = worker.get(f"/v1/{topic}").json()["partitions"][number]
        return bool(part["owner"] == to and part["state"] == "running")

    wait_until(there, WAIT_S, f"partition {number} on {to}", 0.1)
