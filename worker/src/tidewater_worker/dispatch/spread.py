"""A subscription of a topic whose partitions are spread over workers: any worker serves all of it.

Each owner delivers the messages of its partitions and keeps their progress. Whoever is asked takes
what is here, asks the other owners for what they have, and sends acks to where a message came from.
A forwarded request is never forwarded again. Consumers that ask the owners themselves save a step.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidewater_core.crd.subscription import StartFrom, SubscriptionSpec, SubscriptionType
from tidewater_core.errors import (
    Conflict,
    Invalid,
    OutcomeUnknown,
    Retryable,
    TidewaterError,
)
from tidewater_worker.dispatch.ackid import AckId
from tidewater_worker.dispatch.part import Delivered
from tidewater_worker.dispatch.report import Refusal, Report
from tidewater_worker.dispatch.subscription import Subscription
from tidewater_worker.node import Node
from tidewater_worker.topic import Topic

POLL_S: Final = 0.25
"""How often a waiting consumer's worker asks the other owners."""
CALL_S: Final = 10.0
ARROW: Final = b"application/vnd.apache.arrow.stream"
HERE: Final = ""


class Spread:
    """A subscription as consumers see it, wherever its partitions are."""

    def __init__(self, node: Node, local: Subscription) -> None:
        self.local = local
        self._node = node
        self._turn = 0

    @property
    def name(self) -> str:
        """`namespace/name`."""
        return self.local.name

    @property
    def spec(self) -> SubscriptionSpec:
        """What it should be."""
        return self.local.spec

    @property
    def topic(self) -> Topic:
        """Its topic."""
        return self.local.topic

    def _owners(self) -> list[str]:
        """Return the workers that have partitions, by their lowest one; `HERE` is this one."""
        topic = self.topic
        if not topic.is_spread:
            return [HERE]
        urls: dict[str, None] = {}
        for number in sorted(topic.partitions):
            partition = topic.partitions[number]
            if not partition.is_elsewhere:
                urls[HERE] = None
            elif partition.remote_url:
                urls[partition.remote_url] = None
        return list(urls) or [HERE]

    def _target(self, verb: str = "") -> str:
        short = self.name.partition("/")[2]
        return f"/v1/{self.local.topic_name}/subscriptions/{short}{verb}"

    # ---- pull

    async def pull(
        self, consumer: str, limit: int, wait_s: float, bytes_max: int
    ) -> list[Delivered]:
        """Return the consumer's next messages; wait for some if there are none."""
        now = self._node.clock.monotonic
        deadline = now() + wait_s
        while True:
            owners = self._owners()
            if owners == [HERE]:
                left = max(deadline - now(), 0.0)
                return await self.local.pull(consumer, limit, left, bytes_max)
            found = await self._ask_all(owners, consumer, limit, bytes_max)
            left = deadline - now()
            if found or left <= 0:
                return found
            if HERE in owners:
                found = await self.local.pull(consumer, limit, min(left, POLL_S), bytes_max)
                if found:
                    return found
            else:
                await asyncio.sleep(min(left, POLL_S))

    async def _ask_all(
        self, owners: list[str], consumer: str, limit: int, bytes_max: int
    ) -> list[Delivered]:
        if self.spec.type is not SubscriptionType.EXCLUSIVE:
            # Exclusive: always the same one first, so that all agree who was first.
            self._turn += 1
            at = self._turn % len(owners)
            owners = owners[at:] + owners[:at]
        errors: list[TidewaterError] = []
        for url in owners:
            try:
                if url == HERE:
                    found = await self.local.pull(consumer, limit, 0, bytes_max)
                else:
                    found = await self._pull_from(url, consumer, limit)
            except (Retryable, OutcomeUnknown) as error:
                errors.append(error)
                continue
            if found:
                return found
        if len(errors) == len(owners):
            raise errors[0]
        return []

    async def _pull_from(self, url: str, consumer: str, limit: int) -> list[Delivered]:
        if limit <= 0:
            return []
        body = msgspec.json.encode({"max": limit, "consumer": consumer})
        headers = [(b"accept", ARROW), (b"content-type", b"application/json")]
        reply = await self._node.forwarding.proxy(
            url, "POST", self._target("/pull"), headers, body, CALL_S
        )
        data = await reply.read()
        if reply.status != 200:
            raise TidewaterError.from_json(msgspec.json.decode(data), reply.status)
        return decode_delivered(data)

    # ---- ack, nack, extend

    async def ack(self, ack_ids: Iterable[str]) -> Report:
        """Acknowledge deliveries; returns when that is stored."""
        here, away = self._sort(ack_ids)
        report = await self.local.ack(here)
        return await self._settle(report, "/ack", "acked", away, {})

    async def nack(self, ack_ids: Iterable[str], delay_s: float | None) -> Report:
        """Give messages back."""
        here, away = self._sort(ack_ids)
        report = await self.local.nack(here, delay_s)
        more = {} if delay_s is None else {"delay_ms": round(delay_s * 1000)}
        return await self._settle(report, "/nack", "nacked", away, more)

    async def extend(self, ack_ids: Iterable[str], deadline_s: float | None) -> Report:
        """Hold messages longer."""
        here, away = self._sort(ack_ids)
        report = await self.local.extend(here, deadline_s)
        more = {} if deadline_s is None else {"deadline_ms": max(round(deadline_s * 1000), 1)}
        return await self._settle(report, "/extend", "extended", away, more)

    def _sort(self, ack_ids: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
        """Divide ids by the worker that has their partition."""
        topic = self.topic
        if not topic.is_spread:
            return list(ack_ids), {}
        here: list[str] = []
        away: dict[str, list[str]] = {}
        for text in ack_ids:
            number = AckId.parse(text).partition
            if number in topic.partitions and topic.is_elsewhere(number):
                away.setdefault(topic.partitions[number].remote_url, []).append(text)
            else:
                here.append(text)
        return here, away

    async def _settle(
        self,
        report: Report,
        verb: str,
        done: str,
        away: dict[str, list[str]],
        more: dict[str, Any],
    ) -> Report:
        """Let the other owners do their part; what cannot be done is reported by id."""
        for url, ids in away.items():
            body = msgspec.json.encode({"ack_ids": ids, **more})
            try:
                if not url:
                    raise Retryable("OwnerAway", "the owner of its partition is away", 1_000)
                said = await self._node.forwarding.call(
                    url, "POST", self._target(verb), body, CALL_S
                )
            except Invalid:
                raise
            except TidewaterError as error:
                report.refused += (Refusal(text, error.reason, error.message) for text in ids)
                continue
            report.done += said[done]
            report.refused += (
                Refusal(each["ack_id"], each["reason"], each["message"]) for each in said["refused"]
            )
        return report

    # ---- seek, leave, status

    async def seek(self, start: StartFrom) -> dict[int, int]:
        """Move to another place; returns where each partition is now, when that is stored."""
        for partition in self.topic.partitions.values():
            if partition.is_elsewhere and not partition.remote_url:
                partition.ready()  # raises who has it: it is moved as a whole or not at all
        offsets: dict[int, int] = {}
        body = start.model_dump_json(by_alias=True, exclude_none=True).encode()
        for url in self._owners():
            if url == HERE:
                offsets.update(await self.local.seek(start))
            else:
                said = await self._node.forwarding.call(
                    url, "POST", self._target("/seek"), body, CALL_S
                )
                offsets.update({int(number): at for number, at in said["offsets"].items()})
        return dict(sorted(offsets.items()))

    def leave(self, consumer: str) -> None:
        """Forget a consumer; its messages go to others at once."""
        self.local.leave(consumer)
        try:
            owners = self._owners()
        except TidewaterError:
            return  # it, or its topic, is gone: so are its consumers
        for url in owners:
            if url != HERE:
                self._node.spawn(self._leave(url, consumer))

    async def _leave(self, url: str, consumer: str) -> None:
        body = msgspec.json.encode({"consumer": consumer})
        try:
            await self._node.forwarding.call(url, "POST", self._target("/leave"), body, CALL_S)
        except TidewaterError:
            return  # it is forgotten there when its time is over

    def touch(self, consumer: str) -> None:
        """Note a sign of life of a consumer."""
        self.local.touch(consumer)

    def check_replay(self) -> None:
        """Refuse to replay where an original may be elsewhere."""
        if self.topic.is_spread:
            raise Conflict(
                "TopicIsSpread",
                "replaying needs all partitions of the topic on one worker; "
                "read the dead-letter topic with a subscription of its own instead",
            )

    async def status(self) -> dict[str, Any]:
        """Describe the subscription over all its owners; those away are not in it."""
        said = await self.local.status()
        for url in self._owners():
            if url == HERE:
                continue
            try:
                other = await self._node.forwarding.call(url, "GET", self._target(), b"", CALL_S)
            except TidewaterError:
                continue
            said["partitions"] += other["partitions"]
            said["lag"] += other["lag"]
            said["unacked"] += other["unacked"]
            held = {each["name"]: each for each in said["consumers"]}
            for each in other["consumers"]:
                known = held.setdefault(each["name"], {"name": each["name"], "unacked": 0})
                known["unacked"] += each["unacked"]
            said["consumers"] = list(held.values())
        said["partitions"].sort(key=lambda part: part["partition"])
        return said


def decode_delivered(data: bytes) -> list[Delivered]:
    """Read a pull's answer in Arrow: the last two columns are ack id and delivery."""
    found: list[Delivered] = []
    with pa.ipc.open_stream(data) as reader:
        for batch in reader:
            columns = batch.schema.names[:-2]
            found.append(
                Delivered(
                    batch.select(columns),
                    batch.column(len(columns)).to_pylist(),
                    batch.column(len(columns) + 1).to_pylist(),
                )
            )
    return found
