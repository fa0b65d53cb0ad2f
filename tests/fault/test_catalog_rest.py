"""A REST catalog whose tokens end and whose answers get lost, over real HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from pyiceberg.catalog.sql import SqlCatalog

from rest_catalog import CREDENTIAL, RestCatalogServer
from table_fakes import CountingIds, HandLog, SteppedClock, assignment, message_batch
from tidewater_core.clock import SystemClock
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Retryable
from tidewater_core.settings import CatalogSettings
from tidewater_worker.ports import Phase
from tidewater_worker.table.catalog import TableCatalog, open_catalog
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.rest import RenewingToken
from tidewater_worker.table.topic import TopicRun

SPEC = TopicSpec()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestCatalogServer]:
    catalog = SqlCatalog(
        "tidewater",
        uri=f"sqlite:///{tmp_path}/catalog.db",
        warehouse=(tmp_path / "warehouse").as_uri(),
    )
    with RestCatalogServer(catalog) as started:
        yield started
    catalog.close()


def client(server: RestCatalogServer, tmp_path: Path, **properties: str) -> TableCatalog:
    return open_catalog(
        CatalogSettings(
            properties={
                "type": "rest",
                "uri": server.uri,
                "warehouse": (tmp_path / "warehouse").as_uri(),
                "credential": CREDENTIAL,
                "oauth2-server-uri": f"{server.uri}/v1/oauth/tokens",
                "tidewater.read-timeout-s": "1",
                **properties,
            }
        )
    )


class Side:
    """A topic's table side over a REST catalog."""

    def __init__(self, server: RestCatalogServer, tmp_path: Path) -> None:
        self.server = server
        self.log = HandLog(tmp_path / "log" / "shop" / "orders" / "0", 0)
        self.catalog = client(server, tmp_path)
        self.clock = SteppedClock()
        self.run = TopicRun(
            assignment(SPEC, [self.log]),
            lambda: self.catalog,
            self.clock,
            CountingIds(),
            lambda _: None,
            RangeIndex(),
        )

    def commit(self) -> None:
        """Add rows and bring them into the table."""
        values = [str(self.log.end + i).encode() for i in range(3)]
        self.log.append(message_batch(SPEC, values))
        self.run.inbox.durable({0: self.log.end})
        for _ in range(60):
            again = self.run.step()
            if self.run.drained and self.run.state.partitions[0].state is Phase.RUNNING:
                return
            assert again is not None
            self.clock.advance(max(0.0, again - self.clock.monotonic()))
        pytest.fail(f"G2 Once in the table: never committed: {self.run.state}")

    def check(self) -> None:
        rows = self.server.catalog.load_table("shop.orders").scan().to_arrow()
        offsets = sorted(rows["tw_offset"].to_pylist())
        assert offsets == list(range(self.log.end)), f"G2 Once in the table: {offsets}"


@pytest.fixture
def side(server: RestCatalogServer, tmp_path: Path) -> Iterator[Side]:
    made = Side(server, tmp_path)
    yield made
    made.catalog.close()


def test_a_token_that_the_catalog_ends_is_replaced(side: Side) -> None:
    for _ in range(3):
        side.commit()
        given = side.server.tokens_given
        side.server.revoke()
        side.commit()
        assert side.server.tokens_given == given + 1
    side.check()
    assert side.run.counters()["unknown_outcomes"] == 0


def test_a_token_is_renewed_before_it_ends(server: RestCatalogServer) -> None:
    clock = SteppedClock()
    server.token_life_s = 100
    with requests.Session() as session:
        url = f"{server.uri}/v1/oauth/tokens"
        token = RenewingToken(session, url, CREDENTIAL, {"scope": "catalog"}, clock)
        first = token.auth_header()
        clock.advance(70)
        assert token.auth_header() == first
        clock.advance(6)
        second = token.auth_header()
        assert second != first
        assert token.auth_header() == second
        assert server.tokens_given == 2
        token.discard()
        assert token.auth_header() != second


def test_a_wrong_secret_is_said_and_tried_again(server: RestCatalogServer, tmp_path: Path) -> None:
    with pytest.raises(Retryable, match=r"CatalogRejected|CatalogUnreachable"):
        client(server, tmp_path, credential="worker:wrong")


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("answer", [500, 502, 503, 504, 409, 429, 400, "hang", "reset"])
def test_an_answer_that_says_little_or_lies(side: Side, applied: bool, answer: int | str) -> None:
    """Even a refusal of a commit that was carried out (a proxy sent it twice) is seen through."""
    side.commit()
    side.server.commit_faults = [(applied, answer)]
    side.server.hang_s = 1.5
    side.commit()
    side.commit()
    side.check()


def test_a_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    settings = CatalogSettings(properties={"type": "rest", "uri": "http://127.0.0.1:9"})
    with pytest.raises(Retryable, match="CatalogUnreachable"):
        open_catalog(settings)
    log = HandLog(tmp_path / "log" / "shop" / "orders" / "0", 0)
    run = TopicRun(
        assignment(SPEC, [log]),
        lambda: open_catalog(settings),
        SystemClock(),
        CountingIds(),
        lambda _: None,
        RangeIndex(),
    )
    again = run.step()
    assert again is not None
    part = run.state.partitions[0]
    assert (part.state, part.reason) == (Phase.RETRYING, "CatalogUnreachable")
