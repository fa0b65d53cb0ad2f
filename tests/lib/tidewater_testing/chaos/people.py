"""Producers and consumers that live through the chaos, and write down what they saw."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from tidewater_testing.chaos.history import Ack, Delivery, History, Story
from tidewater_testing.web import Answer, Connection, NoAnswerError, NotSentError

CALL_S: Final = 8.0
WAIT_MS: Final = 500
BATCH: Final = 4
PULL_MAX: Final = 20
KEYS: Final = 8
"""Keys of a producer; nobody else uses them."""
JSON: Final = {"Content-Type": "application/json"}


class _Person:
    """Somebody who asks one worker, and another one when that does not answer."""

    def __init__(self, addresses: Sequence[str], draw: random.Random) -> None:
        self.draw = draw
        self._addresses = list(addresses)
        self._connection = Connection(draw.choice(self._addresses), CALL_S)

    async def call(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        data = json.dumps(body).encode()
        return await self._connection.request("POST", path, data, {**JSON, **(headers or {})})

    async def go_elsewhere(self) -> None:
        await self._connection.close()
        self._connection = Connection(self.draw.choice(self._addresses), CALL_S)

    async def close(self) -> None:
        await self._connection.close()


class Producer(_Person):
    """Sends keyed messages, each request until it is acknowledged (idempotent)."""

    def __init__(
        self, history: History, topic: str, addresses: Sequence[str], number: int, seed: int
    ) -> None:
        super().__init__(addresses, random.Random(f"{seed}/producer/{number}"))
        self._history, self._topic, self._name = history, topic, f"p{number}"
        self.resent = 0

    async def run(self, over: asyncio.Event, pause_s: float) -> None:
        """Send until it is over."""
        counts = [0] * KEYS
        sequence = 0
        while not over.is_set():
            # One key a request: it goes to one partition, and an ack's offsets are its messages'.
            which = self.draw.randrange(KEYS)
            key = f"{self._name}-k{which}"
            values = [f"{key}-{counts[which] + i}" for i in range(self.draw.randint(1, BATCH))]
            counts[which] += len(values)
            sequence += 1
            await self._send(key, values, sequence)
            await asyncio.sleep(self.draw.uniform(0, 2 * pause_s))
        await self.close()

    async def _send(self, key: str, values: list[str], sequence: int) -> None:
        body = {"messages": [{"key": key, "value": value} for value in values]}
        headers = {"Tidewater-Producer": f"{self._name}-{key}", "Tidewater-Sequence": str(sequence)}
        while True:
            try:
                answer = await self.call(f"/v1/{self._topic}/messages", body, headers)
            except (NotSentError, NoAnswerError):
                answer = None
            if answer is not None and answer.status == 200:
                (ack,) = answer.json()["acks"]
                for i, value in enumerate(values):
                    place = (ack["partition"], ack["offset"] + i)
                    self._history.note_produced(place, key, value)
                return
            assert answer is None or answer.status in (409, 429, 503), answer.body
            self.resent += 1
            await asyncio.sleep(self.draw.uniform(0.05, 0.3))
            await self.go_elsewhere()


class Consumer(_Person):
    """Pulls, works, acknowledges; now and then it fails, disappears or says goodbye.

    Where the order matters it acts as a careful consumer must: after the first message that fails
    it does nothing about those after it in the same group, and when it cannot know what a pull has
    brought it goes on under another name. Its old name keeps what it may have got until the
    deadline, so that nothing overtakes it.
    """

    def __init__(
        self, story: Story, path: str, addresses: Sequence[str], number: int, seed: int
    ) -> None:
        super().__init__(addresses, random.Random(f"{seed}/{path}/{number}"))
        self._story, self._path, self._number = story, path, number
        self._life = 0
        self.is_steady = False
        """From now on everything is acknowledged."""

    @property
    def name(self) -> str:
        """The name it goes by."""
        return f"c{self._number}.{self._life}"

    async def run(self, over: asyncio.Event) -> None:
        """Consume until it is over."""
        while not over.is_set():
            try:
                messages = await self._pull()
                if messages:
                    await self._work_or_let_go(messages)
                elif messages is None:
                    await asyncio.sleep(self.draw.uniform(0.05, 0.3))
                if self.draw.random() < 0.02:
                    await self.go_elsewhere()
            except (NotSentError, NoAnswerError):
                await asyncio.sleep(self.draw.uniform(0.05, 0.3))
                await self.go_elsewhere()
        await self.close()

    async def _pull(self) -> list[dict[str, Any]] | None:
        asked_at = time.monotonic()
        body = {"max": PULL_MAX, "wait_ms": WAIT_MS, "consumer": self.name}
        try:
            answer = await self.call(f"{self._path}/pull", body)
        except NoAnswerError:
            self._be_reborn()
            raise
        if answer.status != 200:
            if answer.reason == "OwnerSilent":
                self._be_reborn()
            assert answer.status in (409, 429, 503), answer.body
            return None
        messages: list[dict[str, Any]] = answer.json()["messages"]
        for each in messages:
            place = (each["partition"], each["offset"])
            self._story.deliveries.append(
                Delivery(place, each["key"], each["value"], asked_at, self.name)
            )
        return messages

    def _be_reborn(self) -> None:
        self._story.unknown += 1
        self._life += 1

    async def _work_or_let_go(self, messages: list[dict[str, Any]]) -> None:
        try:
            await self._work(messages)
        except (NotSentError, NoAnswerError):
            # It does not know what became of these: it must not go on with what follows them.
            self._life += 1
            raise

    async def _work(self, messages: list[dict[str, Any]]) -> None:
        await asyncio.sleep(self.draw.uniform(0, 0.02))
        fate = 1.0 if self.is_steady else self.draw.random()
        if fate < 0.01:
            self._be_reborn()  # as if it had crashed: its messages come back by themselves
            return
        if fate < 0.02:
            with suppress(NoAnswerError):
                await self.call(f"{self._path}/leave", {"consumer": self.name})
            self._life += 1
            return
        good, bad = messages, None
        if fate < 0.08:
            at = self.draw.randrange(len(messages))
            bad = messages[at]
            good = messages[:at]
        if good:
            await self._ack(good)
        if bad is not None:
            ids = {"ack_ids": [bad["ack_id"]], "consumer": self.name}
            await self.call(f"{self._path}/nack", ids)
            # The rest of the batch is let go of: what is after it in its group must not be done.
            self._life += 1

    async def _ack(self, messages: list[dict[str, Any]]) -> None:
        sent_at = time.monotonic()
        ids = {each["ack_id"]: (each["partition"], each["offset"]) for each in messages}
        try:
            answer = await self.call(
                f"{self._path}/ack", {"ack_ids": list(ids), "consumer": self.name}
            )
        except NoAnswerError:
            self._story.acks += (Ack(place, sent_at) for place in ids.values())
            raise
        if answer.status != 200:
            assert answer.status in (409, 429, 503), answer.body
            self._story.acks += (Ack(place, sent_at) for place in ids.values())
            return
        stored_at = time.monotonic()
        refused = {each["ack_id"] for each in answer.json()["refused"]}
        self._story.refused += len(refused)
        for ack_id, place in ids.items():
            if ack_id not in refused:
                self._story.acks.append(Ack(place, sent_at, stored_at))
            else:
                self._story.acks.append(Ack(place, sent_at))
