"""Glue's commits: two owners at once, and answers that get lost, over real HTTP.

Glue is a stand-in of AWS's API, `moto`, to which Glue's documented check of an update's `VersionId`
was added (`parts/aws_server.py`): what is tested is the commit protocol on top of that lock, and
not AWS. A relay between the worker's table side and it does to answers what networks do.
"""

import json
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from scripted_http import HANG_UP, RESET, SILENCE, Request, Server, answer
from table_fakes import CountingIds, HandLog, SteppedClock, assignment, message_batch
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.settings import CatalogSettings
from tidewater_testing.parts.aws import Aws
from tidewater_worker.ports import Phase
from tidewater_worker.table.catalog import TableCatalog, open_catalog
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.topic import TopicRun

SPEC = TopicSpec()
UPDATE = "AWSGlue.UpdateTable"


class Relay:
    """Passes Glue's calls on; does to the next update's answer what the test says."""

    def __init__(self, aws: Aws) -> None:
        self._authority = aws.uri.partition("://")[2]
        self.fault: tuple[bool, bytes] | None = None
        """Whether the next update is carried out, and what comes instead of its answer."""
        self.before_update: Callable[[], None] | None = None
        self.updates = 0
        self.server = Server(self._handle)

    def _handle(self, request: Request) -> bytes:
        if request.headers.get("x-amz-target") != UPDATE:
            return self._pass_on(request)
        self.updates += 1
        assert json.loads(request.body)["VersionId"], "G5 One owner: an update without the lock"
        if (meanwhile := self.before_update) is not None:
            self.before_update = None
            meanwhile()
        fault, self.fault = self.fault, None
        if fault is None:
            return self._pass_on(request)
        applied, instead = fault
        if applied:
            self._pass_on(request)
        return instead

    def _pass_on(self, request: Request) -> bytes:
        connection = HTTPConnection(self._authority, timeout=30)
        try:
            connection.request(request.method, request.target, request.body, request.headers)
            got = connection.getresponse()
            kind = f"Content-Type: {got.headers.get('Content-Type', '')}\r\n"
            return answer(got.read(), got.status, kind)
        finally:
            connection.close()


class Owner:
    """A topic's table side over Glue, with a log of its own."""

    def __init__(
        self, catalog: TableCatalog, directory: Path, topic: str, epoch: int = 1, first: int = 0
    ) -> None:
        self.log = HandLog(directory / topic / "0", 0, first)
        self.clock = SteppedClock()
        self.run = TopicRun(
            assignment(SPEC, [self.log], epoch=epoch, topic=topic),
            lambda: catalog,
            self.clock,
            CountingIds(epoch),
            lambda _: None,
            RangeIndex(),
        )

    def append(self, text: str) -> None:
        self.log.append(message_batch(SPEC, [f"{text}{i}".encode() for i in range(3)]))
        self.run.inbox.durable({0: self.log.end})

    def settle(self) -> None:
        """Go on until all is in the table, or the partition has stopped."""
        for _ in range(60):
            again = self.run.step()
            state = self.run.state.partitions[0].state
            if state is Phase.STOPPED or (self.run.drained and state is Phase.RUNNING):
                return
            assert again is not None
            self.clock.advance(max(0.0, again - self.clock.monotonic()))
        pytest.fail(f"never settled: {self.run.state}")


@pytest.fixture
def relay(aws: Aws) -> Iterator[Relay]:
    made = Relay(aws)
    yield made
    made.server.close()


def open_by(aws: Aws, **other: str) -> TableCatalog:
    # Long: on a busy machine an answer that is only slow must not be taken for a lost one.
    properties = {**aws.properties, "tidewater.read-timeout-s": "60", **other}
    return open_catalog(CatalogSettings(properties=properties))


def table_of(aws: Aws, topic: str) -> Table:
    namespace, _, name = topic.partition("/")
    return load_catalog("tidewater", **aws.properties).load_table((namespace, name))


def rows_of(aws: Aws, topic: str) -> list[tuple[int, bytes]]:
    rows = table_of(aws, topic).scan().to_arrow()
    found: list[Any] = sorted(
        zip(rows["tw_offset"].to_pylist(), rows["value"].to_pylist(), strict=True)
    )
    return found


def test_an_old_owner_that_has_checked_already_is_refused(
    tmp_path: Path, aws: Aws, relay: Relay
) -> None:
    """The new owner's commit lands between the old one's look at the table and its update.

    The requirements of the old owner's commit held when they were checked: Glue's version is all
    that refuses it, and the frontier, read again, then tells it that it is fenced.
    """
    topic = "glue-race/orders"
    old_catalog = open_by(aws, **{"glue.endpoint": relay.server.url})
    new_catalog = open_by(aws)
    old = Owner(old_catalog, tmp_path / "old", topic)
    old.append("first")
    old.settle()

    def take_over() -> None:
        new = Owner(new_catalog, tmp_path / "new", topic, epoch=2, first=3)
        new.append("owner")
        new.settle()
        assert new.run.state.partitions[0].next == 6

    relay.before_update = take_over
    old.append("zombie")
    old.settle()
    state = old.run.state.partitions[0]
    assert (state.state, state.reason) == (Phase.STOPPED, "Fenced"), "G5 One owner"
    assert old.run.counters()["conflicts"] == 1, "Glue refused the update"
    values = [value for _, value in rows_of(aws, topic)]
    assert values == [f"{who}{i}".encode() for who in ("first", "owner") for i in range(3)]
    frontier = json.loads(table_of(aws, topic).properties["tidewater.partition.0"])
    assert frontier == {"next": 6, "epoch": 2}, "G5 One owner: the epoch never goes back"
    for catalog in (old_catalog, new_catalog):
        catalog.close()


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("fault", [RESET, HANG_UP, SILENCE], ids=["reset", "hang-up", "silence"])
def test_an_answer_that_is_lost_is_read_back(
    tmp_path: Path, aws: Aws, relay: Relay, applied: bool, fault: bytes
) -> None:
    """An update is sent once: AWS's client, left to itself, would send it again unasked."""
    topic = f"glue-lost-{fault[1:].decode()}-{applied}/orders".lower()
    limits = {"tidewater.read-timeout-s": "5"} if fault == SILENCE else {}
    catalog = open_by(aws, **{"glue.endpoint": relay.server.url, **limits})
    owner = Owner(catalog, tmp_path, topic)
    owner.append("a")
    owner.settle()
    before = relay.updates
    relay.fault = (applied, fault)
    owner.append("b")
    owner.settle()
    assert relay.updates == before + (1 if applied else 2)
    assert owner.run.counters()["unknown_outcomes"] == 1
    offsets = [offset for offset, _ in rows_of(aws, topic)]
    assert offsets == list(range(6)), f"G2 Once in the table: {offsets}"
    catalog.close()
