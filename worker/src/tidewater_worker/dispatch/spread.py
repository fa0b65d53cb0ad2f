"""A subscription of a topic whose partitions are spread over workers: any worker serves all of it.

Each owner delivers the messages of its partitions and keeps their progress. Whoever is asked waits
at all owners at once until one has news for the consumer, pulls there, and sends acks to where
a message came from. Waiting takes no message along, so it can be broken off at any moment; what is
pulled for a consumer that went away meanwhile is given back. A forwarded request is never forwarded
again. Consumers that ask the owners themselves save a step.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidewater_core.crd.subscription import StartFrom, SubscriptionSpec, SubscriptionType
from tidewater_core.errors import Invalid, OutcomeUnknown, Overloaded, Retryable, TidewaterError
from tidewater_worker.dispatch.ackid import AckId
from tidewater_worker.dispatch.part import Delivered
from tidewater_worker.dispatch.report import Refusal, Report
from tidewater_worker.dispatch.subscription import Origin, Subscription
from tidewater_worker.node import Node
from tidewater_worker.topic import Topic

ROUND_S: Final = 2.0
"""How long the owners are waited for before looking anew who they are."""
PAUSE_S_MIN: Final = 0.02
PAUSE_S_MAX: Final = 0.5
CALL_S: Final = 10.0
GRACE_S: Final = 5.0
"""How much longer than asked for an owner may take to say that it has nothing."""
ARROW: Final = b"application/vnd.apache.arrow.stream"
HERE: Final = ""
PASSING: Final = (Retryable, Overloaded, OutcomeUnknown)
"""What a caller tries again by itself."""


class Spread:
    """A subscription as consumers see it, wherever its partitions are."""

    def __init__(self, node: Node, local: Subscription) -> None:
        self.local = local
        self._node = node
        self._touched: dict[str, str] = {}
        """Who gives a sign of life with this request: told to the other owners."""

    @property
    def name(self) -> str:
        """`namespace/name`."""
        return self.local.name

    @property
    def uuid(self) -> str:
        """Its identity."""
        return self.local.uuid

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

    def target(self, verb: str = "") -> str:
        """Return the path of a call of this subscription."""
        short = self.name.partition("/")[2]
        return f"/v1/{self.local.topic_name}/subscriptions/{short}{verb}"

    # ---- pull

    async def pull(
        self, consumer: str, limit: int, wait_s: float, bytes_max: int
    ) -> list[Delivered]:
        """Return the consumer's next messages; wait for some if there are none."""
        now = self._node.clock.monotonic
        deadline = now() + wait_s
        pause_s = PAUSE_S_MIN
        while True:
            owners = self._owners()
            left = max(deadline - now(), 0.0)
            if owners == [HERE]:
                return await self.local.pull(consumer, limit, left, bytes_max)
            asked_at = now()
            found = await self._pull_ready(owners, consumer, limit, min(left, ROUND_S), bytes_max)
            if found or now() >= deadline:
                return found
            if now() - asked_at < PAUSE_S_MAX:
                # Who had news and gave nothing cannot read it just now, or another was quicker.
                await asyncio.sleep(min(pause_s, max(deadline - now(), 0.0)))
                pause_s = min(pause_s * 2, PAUSE_S_MAX)

    async def _pull_ready(
        self, owners: list[str], consumer: str, limit: int, wait_s: float, bytes_max: int
    ) -> list[Delivered]:
        """Pull from the first owner that has something."""
        if self.spec.type is SubscriptionType.EXCLUSIVE:
            await self._claim(owners, consumer)
        self.local.turn += 1
        at = self.local.turn % len(owners)
        asked = {
            asyncio.create_task(self._has_news(url, consumer, wait_s)): url
            for url in owners[at:] + owners[:at]
        }
        errors: list[TidewaterError] = []
        pending = set(asked)
        try:
            while pending and limit > 0:
                done, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
                for task in [task for task in asked if task in done]:
                    try:
                        if not task.result():
                            continue
                    except TidewaterError as error:
                        errors.append(error)
                        continue
                    found = await self._pull_or_note(
                        asked[task], consumer, limit, bytes_max, errors
                    )
                    if found:
                        return found
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        _raise(errors, len(owners))
        return []

    async def _claim(self, owners: list[str], consumer: str) -> None:
        """Be the one consumer, or raise who is: the first owner that answers decides for all."""
        for url in owners:
            try:
                await self._has_news(url, consumer, 0)
            except (Retryable, OutcomeUnknown):
                continue
            return

    async def _has_news(self, url: str, consumer: str, wait_s: float) -> bool:
        if url == HERE:
            return await self.local.has_news(consumer, wait_s)
        body = msgspec.json.encode({"consumer": consumer, "wait_ms": round(wait_s * 1000)})
        said = await self._node.forwarding.call(
            url, "POST", self.target("/news"), body, wait_s + GRACE_S
        )
        return bool(said["news"])

    async def _pull_or_note(
        self, url: str, consumer: str, limit: int, bytes_max: int, errors: list[TidewaterError]
    ) -> list[Delivered]:
        try:
            return await self._pull_from(url, consumer, limit, bytes_max)
        except OutcomeUnknown:
            # It may hold messages for the consumer that this one never sees. Who needs their
            # order has to know that.
            raise
        except TidewaterError as error:
            errors.append(error)
            return []

    async def _pull_from(
        self, url: str, consumer: str, limit: int, bytes_max: int
    ) -> list[Delivered]:
        if url == HERE:
            return await self.local.pull(consumer, limit, 0, bytes_max)
        pulling = asyncio.ensure_future(self._pull_there(url, consumer, limit))
        try:
            return await asyncio.shield(pulling)
        except asyncio.CancelledError:
            self._node.spawn(self._nobody_hears(pulling, consumer))
            raise

    async def _pull_there(self, url: str, consumer: str, limit: int) -> list[Delivered]:
        body = msgspec.json.encode({"max": limit, "consumer": consumer})
        headers = [(b"accept", ARROW), (b"content-type", b"application/json")]
        reply = await self._node.forwarding.proxy(
            url, "POST", self.target("/pull"), headers, body, CALL_S
        )
        data = await reply.read()
        if reply.status != 200:
            raise TidewaterError.from_json(msgspec.json.decode(data), reply.status)
        return decode_delivered(data)

    async def _nobody_hears(
        self, pulling: "asyncio.Future[list[Delivered]]", consumer: str
    ) -> None:
        """Give back what comes for a consumer that has gone meanwhile."""
        try:
            found = await pulling
            await self.give_back(consumer, [text for piece in found for text in piece.ack_ids])
        except TidewaterError:
            return  # it comes back when its deadline has passed

    async def give_back(self, consumer: str, ack_ids: Iterable[str]) -> None:
        """Take back what did not reach its consumer, as if it had not been delivered."""
        here, away = self._sort(ack_ids)
        await self.local.give_back(consumer, here)
        for url, ids in away.items():
            if url:
                body = msgspec.json.encode({"ack_ids": ids, "consumer": consumer})
                await self._node.forwarding.call(
                    url, "POST", self.target("/give-back"), body, CALL_S
                )

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
        """Let the other owners do their part; what some cannot do is reported by id.

        If nothing was done or judged at all, their error is the answer: a caller is told the same
        whichever worker it asked.
        """
        calls = [self._settle_at(url, verb, ids, more) for url, ids in away.items()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed: list[TidewaterError] = []
        refused: list[Refusal] = []
        for ids, said in zip(away.values(), answers, strict=True):
            if isinstance(said, TidewaterError) and not isinstance(said, Invalid):
                failed.append(said)
                refused += (Refusal(text, said.reason, said.message) for text in ids)
            elif isinstance(said, BaseException):
                raise said
            else:
                report.done += said[done]
                report.refused += (
                    Refusal(each["ack_id"], each["reason"], each["message"])
                    for each in said["refused"]
                )
        if failed and not report.done and not report.refused:
            unknown = [error for error in failed if isinstance(error, OutcomeUnknown)]
            if unknown or all(isinstance(error, PASSING) for error in failed):
                raise (unknown or failed)[0]
        report.refused += refused
        return report

    async def _settle_at(self, url: str, verb: str, ids: list[str], more: dict[str, Any]) -> Any:
        if not url:
            raise Retryable("OwnerAway", "the owner of its partition is away", 1_000)
        body = msgspec.json.encode({"ack_ids": ids, **self._touched, **more})
        return await self._node.forwarding.call(url, "POST", self.target(verb), body, CALL_S)

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
                    url, "POST", self.target("/seek"), body, CALL_S
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
            await self._node.forwarding.call(url, "POST", self.target("/leave"), body, CALL_S)
        except TidewaterError:
            return  # it is forgotten there when its time is over

    def touch(self, consumer: str) -> None:
        """Note a sign of life of a consumer."""
        self._touched = {"consumer": consumer}
        self.local.touch(consumer)

    async def restore(self, origins: Iterable[Origin]) -> tuple[int, int]:
        """Deliver acknowledged messages again, wherever they are; count them and the rest."""
        topic = self.topic
        here: list[Origin] = []
        away: dict[str, list[Origin]] = {}
        for origin in origins:
            partition = topic.partitions.get(origin[0])
            if partition is None or not partition.is_elsewhere:
                here.append(origin)
                continue
            if not partition.remote_url:
                partition.ready()  # raises who has it: none of these is replayed now
            away.setdefault(partition.remote_url, []).append(origin)
        restored, refused = await self.local.restore(here)
        for url, some in away.items():
            body = msgspec.json.encode({"origins": some})
            said = await self._node.forwarding.call(
                url, "POST", self.target("/restore"), body, CALL_S
            )
            restored, refused = restored + said["restored"], refused + said["refused"]
        return restored, refused

    async def status(self) -> dict[str, Any]:
        """Describe the subscription over all its owners; those away are not in it."""
        said = await self.local.status()
        for url in self._owners():
            if url == HERE:
                continue
            try:
                other = await self._node.forwarding.call(url, "GET", self.target(), b"", CALL_S)
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


def _raise(errors: list[TidewaterError], owners: int) -> None:
    """Say why there is nothing, unless it passes by itself and others are fine."""
    lasting = [error for error in errors if not isinstance(error, (Retryable, OutcomeUnknown))]
    if lasting:
        raise lasting[0]
    if errors and len(errors) >= owners:
        raise errors[0]


GAPS_METADATA: Final = b"tidewater.gaps"
"""Of the schema of a pull's answer in Arrow: what was lost just before its messages."""


def decode_delivered(data: bytes) -> list[Delivered]:
    """Read a pull's answer in Arrow: the last two columns are ack id and delivery."""
    found: list[Delivered] = []
    with pa.ipc.open_stream(data) as reader:
        gaps = msgspec.json.decode((reader.schema.metadata or {}).get(GAPS_METADATA, b"[]"))
        for batch in reader:
            columns = batch.schema.names[:-2]
            found.append(
                Delivered(
                    batch.select(columns),
                    batch.column(len(columns)).to_pylist(),
                    batch.column(len(columns) + 1).to_pylist(),
                    gaps=[] if found else gaps,  # once: they name their partition
                )
            )
    return found
