"""A worker's report, moving partitions, a person's word about a lost volume: admin calls."""

import asyncio
from typing import Annotated, Final

import msgspec
from fastapi import Body, FastAPI
from fastapi.responses import Response

from tidewater_coordination.port import Coordination, Registry
from tidewater_core.errors import Invalid, NotFound
from tidewater_worker.cluster.handover import left
from tidewater_worker.node import Node
from tidewater_worker.report import Reporter
from tidewater_worker.topic import Topic

REASON_CHARS_MAX: Final = 1_000


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def add_cluster(app: FastAPI, node: Node, coordination: Coordination) -> None:
    """Add the calls."""

    @app.get("/v1/workers")
    async def workers() -> Response:
        """List the workers that are there."""
        registry = await coordination.registry()
        return _json({"workers": [registry.workers[name] for name in sorted(registry.workers)]})

    reporter = Reporter(node)

    @app.get("/v1/{namespace}")
    async def report(namespace: str) -> Response:
        """Report on all that this worker owns of a namespace, for the operator."""
        return _json(await reporter.of(namespace))

    @app.post("/v1/{namespace}/{name}/partitions/{partition}/move")
    async def move(
        namespace: str, name: str, partition: int, to: Annotated[str, Body(embed=True)]
    ) -> Response:
        """Have a partition drained and handed to another worker; answers before it is done."""
        await _assign(node, coordination, f"{namespace}/{name}", partition, to)
        return _json({"partition": partition, "to": to}, 202)

    @app.get("/v1/{namespace}/{name}/partitions/{partition}/handover")
    async def handover(namespace: str, name: str, partition: int) -> Response:
        """Tell the next owner of a partition that this worker has drained what it must know."""
        directory = node.topic(namespace, name).partition(partition).directory
        return _json(await asyncio.to_thread(left, directory))

    @app.post("/v1/{namespace}/{name}/partitions/{partition}/give-up")
    async def give_up(
        namespace: str,
        name: str,
        partition: int,
        reason: Annotated[str, Body(embed=True, max_length=REASON_CHARS_MAX)],
        to: Annotated[str, Body(embed=True)],
    ) -> Response:
        """Say that a partition's volume is lost: another worker goes on past a recorded gap.

        Messages that were acknowledged and not yet in the table are lost by this.
        """
        topic = f"{namespace}/{name}"
        # Before anything is done: what is given up cannot be taken back.
        _check_worker(await coordination.registry(), node, topic, partition, to)
        record = await coordination.give_up(topic, partition, reason)
        await _assign(node, coordination, topic, partition, to)
        return _json({"partition": partition, "given_up": record.volume, "to": to}, 202)


async def _assign(
    node: Node, coordination: Coordination, topic: str, partition: int, to: str
) -> None:
    registry = await coordination.registry()
    found = _check_worker(registry, node, topic, partition, to)
    # What is assigned to nobody stays where it is.
    owners = registry.owners.get(topic, {})
    others = {n: owners[n].worker_id for n in range(found.spec.partitions) if n in owners}
    await coordination.assign(topic, partition, to, others)


def _check_worker(registry: Registry, node: Node, topic: str, partition: int, to: str) -> Topic:
    """Return the topic if a worker may be given its partition."""
    if topic not in registry.topics:
        raise NotFound("UnknownTopic", f"there is no topic {topic}")
    found = node.topic(*topic.split("/"))
    found.partition(partition)
    if to not in registry.workers:
        live = ", ".join(sorted(registry.workers))
        raise Invalid("UnknownWorker", f"no worker {to!r} is there; there are: {live}")
    return found
