"""Where a subscription goes on, begins, or begins anew in a partition (G4)."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tidewater_coordination.port import CursorKey
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt, Retryable
from tidewater_worker.dispatch.ackid import AckId
from tidewater_worker.dispatch.cursor import Begun, Progress, decode_progress, decode_ranges
from tidewater_worker.dispatch.deadletter import _position
from tidewater_worker.dispatch.opening import Opener
from tidewater_worker.dispatch.part import Part
from tidewater_worker.dispatch.policy import Outcome
from tidewater_worker.partition import Partition
from tidewater_worker.ports import PartitionState, TopicState


class Log:
    """As far as subscriptions look at a log."""

    def __init__(self, end: int, durable_end: int | None = None) -> None:
        self.start, self.end = 0, end
        self.durable_end = end if durable_end is None else durable_end
        self.syncs = 0
        self.error: Exception | None = None

    async def make_durable(self) -> None:
        self.syncs += 1
        if self.error is not None:
            raise self.error
        self.durable_end = self.end


class Scene:
    """A topic on one worker, and what is stored of one subscription."""

    def __init__(self, folder: Path, *logs: Log) -> None:
        self.stored: dict[int, bytes] = {}
        self.topic: Any = SimpleNamespace(
            spec=TopicSpec(), uuid="t", name="shop/orders", counters=Counter(), state=None,
            partitions={},
        )  # fmt: skip
        for log in logs:
            self.grow(folder, log)
        clock = SimpleNamespace(now_us=lambda: 1_000, monotonic=lambda: 0.0)
        node: Any = SimpleNamespace(clock=clock, link=None)
        self.opener = Opener(
            node, self, self._load, "shop/s", "u", "shop/orders", lambda *_: None  # type: ignore[arg-type]
        )  # fmt: skip
        self.version = 1
        self.loads = 0

    def grow(self, folder: Path, log: Log) -> None:
        number = len(self.topic.partitions)
        partition = Partition(
            "shop/orders", number, folder, epoch=1, table=PartitionState(), is_open=True
        )
        partition.appender = log  # type: ignore[assignment]
        self.topic.partitions[number] = partition
        self.topic.spec = TopicSpec(partitions=number + 1)

    async def _load(self, _subscription: str, _topic: str) -> dict[int, bytes]:
        self.loads += 1
        return self.stored

    async def save(self, items: dict[CursorKey, Any]) -> None:
        self.stored |= {key.partition: encode()[0] for key, encode in items.items()}

    async def open(self, *numbers: int, **spec: Any) -> dict[int, Part]:
        parts: dict[int, Part] = {}
        wanted = SubscriptionSpec.model_validate({"topic": "orders", **spec})
        chosen = [self.topic.partitions[number] for number in numbers]
        await self.opener.open(wanted, self.version, self.topic, chosen, parts)
        return parts

    async def place(self, number: int, **spec: Any) -> int:
        return (await self.open(number, **spec))[number].delivery.cursor.next


LATEST: dict[str, Any] = {"startFrom": {"position": "latest"}}


async def test_a_partition_that_came_later_is_read_from_its_first_message(tmp_path: Path) -> None:
    """All that it has came after the subscription, also what came before this worker looked."""
    scene = Scene(tmp_path, Log(5), Log(5))
    assert await scene.place(0, **LATEST) == 5
    assert await scene.place(1, **LATEST) == 5, "it was there, whoever begins first"
    scene.grow(tmp_path, Log(16))
    assert await scene.place(2, **LATEST) == 0
    scene.grow(tmp_path, Log(7))
    assert await scene.place(3, startFrom={"offset": 3}) == 0
    again = {**LATEST, "resetToken": "again"}
    scene.version = 2
    assert await scene.place(2, **again) == 16, "now it is moved, by a person's word"
    assert await scene.place(3, **again) == 7


async def test_one_that_an_earlier_subscription_left_tells_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Log(5), Log(5))
    scene.stored = {0: msgspec.json.encode(Progress("another", "t", 1, partitions=1)), 2: b"{"}
    assert await scene.place(1, **LATEST) == 5
    scene.grow(tmp_path, Log(5))
    with pytest.raises(Corrupt, match="CursorCorrupt"):
        await scene.place(2)


async def test_progress_that_cannot_be_read_stops_its_own_partition(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Log(5), Log(5), Log(5))
    scene.stored = {1: b"{"}
    parts: dict[int, Part] = {}
    spec = SubscriptionSpec(topic="orders")
    for _ in range(2):
        with pytest.raises(Corrupt, match="CursorCorrupt"):
            await scene.opener.open(
                spec, 1, scene.topic, [scene.topic.partitions[n] for n in (0, 1, 2)], parts
            )
        assert sorted(parts) == [0, 2]
    scene.loads = 0
    with pytest.raises(Corrupt, match="CursorCorrupt"):
        await scene.opener.open(spec, 1, scene.topic, [scene.topic.partitions[1]], parts)
    assert not scene.loads, "not everybody who pulls looks again"
    assert await scene.place(0) == 0


async def test_an_owner_that_lags_behind_the_registry_resets_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Log(5))
    scene.version = 10
    assert await scene.place(0, resetToken="a") == 0
    scene.version = 20
    assert await scene.place(0, resetToken="b", **LATEST) == 5
    scene.version = 15  # the next owner, which has yet to hear of "b"
    late = (await scene.open(0, resetToken="a"))[0]
    assert late.delivery.cursor.next == 5
    assert late.begun == Begun("b", 20, 1), "and which knows that it need not act on it again"
    scene.version = 21
    assert await scene.place(0, resetToken="b", startFrom={"offset": 1}) == 5
    scene.version = 30
    assert await scene.place(0, resetToken="a") == 0, "a token may come again"


async def test_progress_that_outlived_its_log_is_cut_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path, Log(3))
    old = Progress("u", "t", 2, [3, 4], generation=7, failed=[0, 2, 2, 1])
    scene.stored[0] = msgspec.json.encode(old)  # 5..8 are acknowledged; 2 and 4 have failed
    part = (await scene.open(0))[0]
    assert (part.delivery.cursor.next, part.delivery.cursor.ranges) == (2, [])
    assert part.delivery.failures() == {2: 2}
    assert part.status()["cut_back"] == 6
    assert "acknowledged messages were lost" in caplog.text
    assert scene.topic.counters["subscriptions_cut_back"] == 1
    # Ids of before name messages that are lost; others have, or get, their offsets.
    part.epoch = 2
    assert part.delivery.generation > 7
    for offset in (0, 3, 9):
        assert part.lease_of(AckId(1, 0, 7, offset, 1)) is Outcome.STALE
    scene.topic.partitions[0].appender.end = 9
    assert part.lease_of(AckId(1, 0, part.delivery.generation, 5, 1)) is Outcome.STALE


# ---- topics that were made again


def has_table(scene: Scene, uuid: str) -> None:
    scene.topic.state = TopicState("shop/orders", {}, table_uuid=uuid)


async def made_again(scene: Scene, table: str, begins_at: int, ends_at: int) -> None:
    """Delete the topic and make it again, on a table that has rows up to an offset."""
    scene.topic.uuid = "t2"
    log = scene.topic.partitions[0].appender
    log.start, log.end, log.durable_end = begins_at, ends_at, ends_at
    has_table(scene, table)


@pytest.mark.parametrize("start", [{}, LATEST])
async def test_a_topic_made_again_on_its_table_goes_on(tmp_path: Path, start: Any) -> None:
    """G4: neither everything again nor nothing of what lay between."""
    scene = Scene(tmp_path, Log(0))
    has_table(scene, "table-1")
    part = (await scene.open(0, **start))[0]
    scene.topic.partitions[0].appender.end = scene.topic.partitions[0].appender.durable_end = 9
    part.delivery.cursor.add(0, 4)
    part.delivery.cursor.add(6, 7)
    await scene.save({CursorKey("shop/s", "shop/orders", 0): part.encode})
    await made_again(scene, "table-1", begins_at=9, ends_at=12)
    again = (await scene.open(0, **start))[0]
    assert (again.delivery.cursor.next, again.delivery.cursor.ranges) == (4, [(6, 7)])
    assert again.delivery.generation > part.delivery.generation, "ids of before are stale"
    assert decode_progress(scene.stored[0]).topic == "t2", "it is this topic's from now on"
    assert (await scene.open(0, **start))[0].delivery.generation == again.delivery.generation


async def test_progress_of_a_table_that_is_gone_hides_nothing(tmp_path: Path) -> None:
    """G4: the new table's offsets begin at 0, and are other messages."""
    scene = Scene(tmp_path, Log(9))
    scene.stored[0] = msgspec.json.encode(Progress("u", "t", 9, table="table-1"))
    await made_again(scene, "table-2", begins_at=0, ends_at=3)
    assert await scene.place(0) == 0
    scene.stored[0] = msgspec.json.encode(Progress("u", "t", 9))  # of before tables were noted
    assert await scene.place(0) == 0


async def test_what_was_given_up_with_the_earlier_topic_is_not_acknowledged(tmp_path: Path) -> None:
    """G4: its volume was lost with 5 to 8; the new topic gives these offsets again."""
    scene = Scene(tmp_path, Log(9))
    old = Progress("u", "t", 4, [1, 3], table="table-1", failed=[0, 1, 2, 1])
    scene.stored[0] = msgspec.json.encode(old)
    await made_again(scene, "table-1", begins_at=6, ends_at=20)
    part = (await scene.open(0))[0]
    assert (part.delivery.cursor.next, part.delivery.cursor.ranges) == (4, [(5, 6)])
    assert part.delivery.failures() == {4: 1}


@pytest.mark.parametrize(
    ("progress", "begins_at"),
    [
        (Progress("u", "t", 5), 5),
        (Progress("u", "t2", 5, table="table-1"), 5),
        (Progress("u", "t2", 9, table="table-1"), 7),
        (Progress("u", "t2", 5, table="table-2"), 0),
        (Progress("u", "t2", 5), 0),
        (Progress("another", "t", 5, table="table-1"), 0),
    ],
)
def test_dead_letters_are_replayed_on_from_where_they_were(
    tmp_path: Path, progress: Progress, begins_at: int
) -> None:
    scene = Scene(tmp_path, Log(9))
    has_table(scene, "table-1")
    partition = scene.topic.partitions[0]
    partition.appender.start = 7
    found = _position(msgspec.json.encode(progress), "u", scene.topic, partition)
    assert found == begins_at


async def test_nothing_begins_while_the_table_is_not_known(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Log(9))
    scene.stored[0] = msgspec.json.encode(Progress("u", "t", 5, table="table-1"))
    scene.topic.uuid = "t2"
    for state in (None, TopicState("shop/orders", {})):
        scene.topic.state = state
        with pytest.raises(Retryable, match="PartitionOpening"):
            await scene.open(0)
    assert decode_progress(scene.stored[0]).next == 5


async def test_the_table_is_remembered_while_it_is_away(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Log(9))
    has_table(scene, "table-1")
    await scene.open(0)
    scene.topic.state = TopicState("shop/orders", {})  # the table process was started anew
    part = (await scene.open(0))[0]
    encoded = part.encode()
    assert encoded is not None
    assert decode_progress(encoded[0]).table == "table-1"


async def test_what_a_power_cut_may_take_is_not_stored_as_acknowledged(tmp_path: Path) -> None:
    log = Log(5, durable_end=2)
    scene = Scene(tmp_path, log)
    part = (await scene.open(0))[0]
    for offset in (0, 1, 3):
        part.delivery.cursor.add(offset, offset + 1)

    def kept() -> list[tuple[int, int]]:
        encoded = part.encode()
        assert encoded is not None
        progress = decode_progress(encoded[0])
        return [(0, progress.next), *decode_ranges(progress.next, progress.beyond).ranges]

    assert kept() == [(0, 2)]
    log.error = OSError("the disk is gone")
    with pytest.raises(Retryable, match="LogSyncFailed"):
        await part.make_durable()
    assert kept() == [(0, 2)]
    log.error = None
    await part.make_durable()
    assert kept() == [(0, 2), (3, 4)]
    assert log.syncs == 2
    await part.make_durable()
    assert log.syncs == 2, "nothing is synced twice"


async def test_latest_is_durable_before_it_is_stored(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Log(5, durable_end=2))
    assert await scene.place(0, **LATEST) == 5
    assert decode_progress(scene.stored[0]).next == 5
