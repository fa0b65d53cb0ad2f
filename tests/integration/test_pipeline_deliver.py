"""Import and replay through a worker that asks who one is: rows arrive once, and as they were."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidewater_core.errors import Invalid, Retryable
from tidewater_core.names import TopicName
from tidewater_core.security import TlsSettings
from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize
from tidewater_pipeline.cli import options as given
from tidewater_pipeline.cli.arguments import build_parser
from tidewater_pipeline.jobs import ingest, replay
from tidewater_pipeline.report import Outcome
from tidewater_pipeline.session import Session, TopicTable
from tidewater_pipeline.state import Size
from tidewater_testing.parts.kubernetes import Account, Reviews, Role
from tidewater_testing.parts.secured import SecuredWorker
from tidewater_testing.parts.worker import topic_manifest
from tidewater_testing.spark import SPARK_MARKS, small_spark
from tidewater_testing.subscriptions import subscription_manifest

pytestmark = [*SPARK_MARKS]

ROLE = Role("loader", ("produce", "consume", "admin"), ("topics", "subscriptions"), "shop")
TOKEN = "loader-token"
FIELDS = {
    "id": "long",
    "amount": "decimal(38,10)",
    "at": "timestamptz",
    "local": "timestamp",
    "day": "date",
    "share": "double",
    "blob": "binary",
    "tags": "list<string>",
    "sums": "map<string,decimal(20,5)>",
}
RAW: dict[str, Any] = {"partitions": 1, "writer": {"flushInterval": "100ms"}}
TYPED = {
    **RAW,
    "schema": {"fields": [{"name": name, "type": type_} for name, type_ in FIELDS.items()]},
}
TOPICS = {
    **dict.fromkeys(("typed", "typed-copy", "typed-json", "typed-csv"), TYPED),
    **dict.fromkeys(
        ("as-text", "loaded", "raw", "raw-copy", "grown", "dead", "files", "typo"), RAW
    ),
    **dict.fromkeys(("csv", "json", "cut"), RAW),
    "many": {**RAW, "partitions": 3},
    "many-copy": {**RAW, "partitions": 3},
}
ROWS = """SELECT id,
  CAST(concat(id + 10, '34567890123456789012345678.0123456789') AS DECIMAL(38,10)) AS amount,
  timestamp_micros(1700000000123457 + id) AS at,
  CAST('2026-01-31 12:00:00.000123' AS TIMESTAMP_NTZ) AS local, DATE '2026-02-28' AS day,
  0.1D + id AS share, CAST(concat('b', id) AS BINARY) AS blob, array('x', NULL, 'y') AS tags,
  map('sum', CAST(12345678.90123 AS DECIMAL(20,5))) AS sums FROM range(20)"""


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reviews]:
    with Reviews(tmp_path_factory.mktemp("api"), {TOKEN: Account("loader")}, [ROLE]) as part:
        yield part


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, reviews: Reviews) -> Iterator[SecuredWorker]:
    pair = reviews.authority.sign("worker")
    manifests = [topic_manifest(f"shop/{name}", spec) for name, spec in TOPICS.items()]
    policy = {"maxDeliveries": 1, "deadLetter": {"topic": "dead"}}
    manifests.append(subscription_manifest("shop/picky", "raw", **policy))
    with SecuredWorker(
        tmp_path_factory.mktemp("worker"),
        manifests,
        limits=Limits(request_bytes_max=ByteSize("8Mi"), message_bytes_max=ByteSize("4Mi")),
        auth=reviews.settings(),
        tls=TlsSettings(cert=pair.cert, key=pair.key, ca=reviews.authority.ca),
    ) as part:
        yield part


@pytest.fixture(scope="module")
def session(worker: SecuredWorker) -> Iterator[Session]:
    """Start Spark on the worker's catalog."""
    with small_spark(
        worker.settings.catalog, lambda: worker.ask("GET", "/readyz").status == 200
    ) as part:
        yield part


@pytest.fixture
def words(worker: SecuredWorker, reviews: Reviews, tmp_path: Path) -> list[str]:
    """Return what a command line says of the worker, and of who we are."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    url = f"https://{worker.address.replace('127.0.0.1', 'localhost')}"
    return ["--url", url, "--token-file", str(token), "--ca", str(reviews.authority.ca)]


def import_options(words: list[str], *more: str) -> ingest.ImportOptions:
    whole = ["import", "--topic", "shop/x", *words, *more]
    return given.import_options(build_parser().parse_args(whole))


def replay_options(words: list[str], to: str, *more: str) -> replay.ReplayOptions:
    whole = ["replay", "--topic", "shop/x", "--to", f"shop/{to}", *words, *more]
    return given.replay_options(build_parser().parse_args(whole))


def table_of(session: Session, name: str) -> TopicTable:
    return session.table(TopicName("shop", name))


def ask(worker: SecuredWorker, method: str, path: str, body: Any = None) -> Any:
    answer = worker.ask(method, path, TOKEN, body)
    assert answer.status == 200, answer.body
    return answer.json()


def flush(worker: SecuredWorker, name: str) -> None:
    ask(worker, "POST", f"/v1/shop/{name}/flush")


def read(worker: SecuredWorker, name: str, partition: int = 0) -> list[dict[str, Any]]:
    path = f"/v1/shop/{name}/messages?partition={partition}&offset=0&limit=5000"
    messages: list[dict[str, Any]] = ask(worker, "GET", path)["messages"]
    return messages


def rows_of(session: Session, source: str) -> list[Any]:
    """Return rows in order, as text with every digit: pyspark's own times would be local ones."""
    columns = ", ".join(f"CAST({name} AS STRING) AS {name}" for name in FIELDS if name != "id")
    return session.spark.sql(f"SELECT id, {columns} FROM {source} ORDER BY id").collect()


def test_typed_rows_arrive_as_they_were(
    worker: SecuredWorker, session: Session, words: list[str], tmp_path: Path
) -> None:
    """Parquet to a typed topic, on to another one, and to a raw one: every digit is there."""
    source = tmp_path / "rows"
    session.spark.sql(ROWS).repartition(2).write.parquet(str(source))
    options = import_options(words, "--from", str(source), "--batch", "7")
    typed = table_of(session, "typed")
    done = ingest.run(session, typed, options)
    assert done.details["messages"] == 20
    assert (done.before, done.after is None) == (Size(), False)
    flush(worker, "typed")
    expected = rows_of(session, f"parquet.`{source}`")
    assert len(expected) == 20
    assert "0123456789" in expected[0].amount
    assert rows_of(session, typed.full_name) == expected

    sent = replay.run(session, typed, replay_options(words, "typed-copy"))
    assert sent.details["messages"] == 20
    flush(worker, "typed-copy")
    assert rows_of(session, table_of(session, "typed-copy").full_name) == expected

    replay.run(session, typed, replay_options(words, "as-text"))
    first = next(m["value"] for m in read(worker, "as-text") if '"id":0,' in m["value"])
    assert '"amount":1034567890123456789012345678.0123456789,' in first
    assert '"at":"2023-11-14T22:13:20.123457Z","local":"2026-01-31T12:00:00.000123"' in first


def test_what_spark_refuses_takes_no_id(
    worker: SecuredWorker, session: Session, words: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "rows"
    session.spark.sql(ROWS).write.parquet(str(source))
    target = table_of(session, "typo")
    options = import_options(words, "--from", str(source), "--value", "day", "--id", "mine")
    with pytest.raises(Invalid, match="SparkRefused"):
        ingest.run(session, target, options)
    done = ingest.run(session, target, replace(options, value="blob"))
    assert done.details["messages"] == 20
    flush(worker, "typo")
    wrong = replay_options(words, "files", "--where", "bolb IS NULL", "--id", "mine")
    with pytest.raises(Invalid, match="SparkRefused"):
        replay.run(session, target, wrong)
    right = replace(wrong, where="value IS NULL")
    assert replay.run(session, target, right).outcome is Outcome.DONE


def test_text_files_take_the_types_of_the_topic(
    worker: SecuredWorker, session: Session, words: list[str], tmp_path: Path
) -> None:
    """A decimal of a JSON or CSV file was guessed to be a float."""
    exact = "1234567890123456789012345678.0123456789"
    at = "2026-01-31T12:00:00.000123Z"
    (tmp_path / "rows.json").write_text(f'{{"id": 1, "amount": {exact}, "at": "{at}"}}\n')
    (tmp_path / "rows.csv").write_text(f"id,amount,at\n1,{exact},{at}\n")
    for kind in ("json", "csv"):
        source = str(tmp_path / f"rows.{kind}")
        options = import_options(words, "--from", source, "--format", kind)
        ingest.run(session, table_of(session, f"typed-{kind}"), options)
        flush(worker, f"typed-{kind}")
        (row,) = rows_of(session, table_of(session, f"typed-{kind}").full_name)
        assert (row.id, row.amount, row.at) == (1, exact, "2026-01-31 12:00:00.000123")
    (tmp_path / "bad.csv").write_text("id,amount,at\n1,many,\n")
    options = import_options(words, "--from", str(tmp_path / "bad.csv"), "--format", "csv")
    with pytest.raises(Invalid):
        ingest.run(session, table_of(session, "typed-csv"), options)


def test_a_column_named_like_sql_is_data(
    worker: SecuredWorker, session: Session, words: list[str], tmp_path: Path
) -> None:
    evil = "x`, reflect('java.lang.System', 'getenv', 'PATH') AS `y"
    (tmp_path / "rows.json").write_text(json.dumps({evil: 1}) + "\n")
    source = str(tmp_path / "rows.json")
    options = import_options(words, "--from", source, "--format", "json")
    ingest.run(session, table_of(session, "loaded"), options)
    (message,) = read(worker, "loaded")
    assert json.loads(message["value"]) == {evil: 1}


def test_an_import_goes_on_file_by_file(
    worker: SecuredWorker,
    session: Session,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some are sent, it is cut; the rest is; then one more file. Names with anything in them."""
    monkeypatch.setattr(ingest, "FILES_AT_ONCE", 2)
    folder = tmp_path / "files"
    folder.mkdir()
    for number, name in enumerate(("a b", "c%20d", "e'f", "g+ä", "h")):
        (folder / f"{name}.json").write_text(json.dumps({"n": number}) + "\n")
    options = import_options(words, "--from", str(folder), "--format", "json", "--id", "files")
    target = table_of(session, "files")
    with monkeypatch.context() as cut:
        sent: list[Any] = []
        send = ingest._send

        def once(*args: Any) -> Any:
            if sent:
                raise Retryable("Cut", "here")
            sent.append(send(*args))
            return sent[0]

        cut.setattr(ingest, "_send", once)
        with pytest.raises(Retryable, match="Cut"):
            ingest.run(session, target, options)
    assert len(read(worker, "files")) == 2
    assert ingest.run(session, target, options).details["messages"] == 3, "not what is through"
    assert ingest.run(session, target, options).outcome is Outcome.NOTHING
    with pytest.raises(Invalid, match="IdTaken"):
        ingest.run(session, target, replace(options, batch_rows=2))
    (folder / "i.json").write_text('{"n": 5}\n')
    assert ingest.run(session, target, options).details["messages"] == 1
    assert sorted(json.loads(m["value"])["n"] for m in read(worker, "files")) == list(range(6))
    (folder / "0.json").write_text('{"n": 6}\n')
    with pytest.raises(Invalid, match="FilesChanged"):
        ingest.run(session, target, options)


def test_tombstones_large_rows_and_dead_letters_come_back(
    worker: SecuredWorker, session: Session, words: list[str]
) -> None:
    """A message without a value was refused, and so was a batch of large ones (413)."""
    ask(worker, "POST", "/v1/shop/raw/messages", {"messages": [{"key": "k", "value": None}]})
    large = [{"value": str(n) * 30_000} for n in range(10)]
    for _ in range(30):
        ask(worker, "POST", "/v1/shop/raw/messages", {"messages": large})
    flush(worker, "raw")
    sent = replay.run(session, table_of(session, "raw"), replay_options(words, "raw-copy"))
    assert (sent.details["messages"], sent.details["requests"]) == (301, 3)
    copied = read(worker, "raw-copy")
    assert copied[0]["key"] == "k"
    assert copied[0]["value"] is None
    assert [m["value"] for m in copied[1:]] == [each["value"] for each in large] * 30

    subscription = "/v1/shop/raw/subscriptions/picky"
    body = {"max": 3, "consumer": "c", "wait_ms": 5000}
    pulled = ask(worker, "POST", f"{subscription}/pull", body)["messages"]
    ids = [message["ack_id"] for message in pulled]
    ask(worker, "POST", f"{subscription}/nack", {"ack_ids": ids, "consumer": "c"})
    while len(dead := read(worker, "dead")) < len(ids):
        ask(worker, "POST", f"{subscription}/pull", {**body, "max": 1, "wait_ms": 100})
    flush(worker, "dead")
    before = len(read(worker, "raw"))
    replay.run(session, table_of(session, "dead"), replay_options(words, "raw"))
    back = read(worker, "raw")[before:]
    assert [m["value"] for m in back] == [m["value"] for m in dead]
    assert back[0]["headers"]["tw-replayed-from"] == "shop/dead/0/0"


def test_a_longer_range_can_be_replayed_after_a_shorter_one(
    worker: SecuredWorker, session: Session, words: list[str]
) -> None:
    """The frontier of two partitions does not exist yet: messages keep theirs all the same."""
    source = table_of(session, "many")
    again = None
    for _ in range(2):
        body = {"messages": [{"value": str(n)} for n in range(15)]}
        ask(worker, "POST", "/v1/shop/many/messages?partition=1", body)
        flush(worker, "many")
        replay.run(session, source, replay_options(words, "many-copy"))
        again = replay.run(session, source, replay_options(words, "many-copy"))
    assert again is not None
    assert (again.outcome, again.details["messages"]) == (Outcome.NOTHING, 0)
    short = replay_options(words, "grown", "--end", "5", "--batch", "10")
    assert replay.run(session, source, short).details["messages"] == 5
    assert replay.run(session, source, replace(short, end=8)).details["messages"] == 8
    assert len(read(worker, "many-copy", 1)) == 15 + 30
    assert read(worker, "many-copy", 0) == []


def test_a_replay_goes_on_with_what_it_began(
    worker: SecuredWorker,
    session: Session,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All is sent, it is cut before it says so; meanwhile the source grows and loses its start."""

    def cut(*_args: object) -> None:
        raise Retryable("Cut", "here")

    source, held = table_of(session, "cut"), list[str]()

    @contextmanager
    def hold(name: str) -> Iterator[None]:
        held.append(name)
        yield

    options = replay_options(words, "loaded", "--id", "once")
    body = {"messages": [{"key": str(n), "value": str(n)} for n in range(9)]}
    ask(worker, "POST", "/v1/shop/cut/messages", body)
    flush(worker, "cut")
    with monkeypatch.context() as patch:
        patch.setattr("tidewater_pipeline.records.Record.write", cut)
        with pytest.raises(Retryable, match="Cut"):
            replay.run(session, source, options)
    ask(worker, "POST", "/v1/shop/cut/messages", body)
    flush(worker, "cut")
    with monkeypatch.context() as patch:
        patch.setattr("tidewater_pipeline.state.parse_starts", lambda _properties: {0: 4})
        with pytest.raises(Invalid, match="SourceGone"):
            replay.run(session, source, options)
    done = replay.run(session, source, options, hold)
    assert (done.details["messages"], done.details["stored_before"]) == (9, 9)
    assert held == ["replay/shop/cut/once"]


def test_text_files_reach_a_raw_topic_as_they_are(
    worker: SecuredWorker, session: Session, words: list[str], tmp_path: Path
) -> None:
    """Types were guessed from the whole: 007 was 7, and what did not fit was null."""
    folder = tmp_path / "cells"
    folder.mkdir()
    cells = {"id": "007", "at": "2026-01-31", "n": "1e3", "text": 'a "b", c\nd\\', "b": "True"}
    for name, order in (("1.csv", list(cells)), ("2.csv", list(cells))):
        with (folder / name).open("w", newline="") as file:
            table = csv.writer(file)
            table.writerows((order, [cells[column] for column in order]))
    options = import_options(words, "--from", str(folder), "--format", "csv", "--key", "id")
    target = table_of(session, "csv")
    ingest.run(session, target, options)
    first, second = read(worker, "csv")
    assert json.loads(first["value"]) == json.loads(second["value"]) == cells
    assert first["key"] == "007"

    number = "12345678901234567.0123456789"
    lines = [f'{{"big":9007199254740993,"id":"007","mixed":1,"n":{number},"x":null}}']
    lines.append('{"id":"8","mixed":"a","n":0.1}')
    (tmp_path / "rows.json").write_text("\n".join(lines))
    source = str(tmp_path / "rows.json")
    whole = ("--from", source, "--format", "json")
    ingest.run(session, table_of(session, "json"), import_options(words, *whole, "--key", "id"))
    ingest.run(session, table_of(session, "json"), import_options(words, *whole, "--value", "n"))
    made = read(worker, "json")
    assert [m["value"] for m in made] == [*lines, number, "0.1"]
    assert [m["key"] for m in made] == ["007", "8", None, None]

    for name, text in (
        ("order.csv", ""),
        ("short.csv", "id,b\n1\n"),
        ("bad.json", '{"id": 1}\n{"id": \n'),
        ("zeros.json", '{"id": 007}\n'),
        ("list.json", "[1]\n"),
    ):
        bad = tmp_path / name
        if name == "order.csv":
            bad.mkdir()
            (bad / "1.csv").write_text("id,b\n1,2\n")
            (bad / "2.csv").write_text("b,id\n2,1\n")
        else:
            bad.write_text(text)
        more = ("--from", str(bad), "--format", name.partition(".")[2])
        with pytest.raises(Invalid, match="BadData"):
            ingest.run(session, target, import_options(words, *more))


def test_nobody_gets_in(session: Session, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"id": 1}\n')
    options = import_options(words, "--from", str(tmp_path / "rows.json"), "--format", "json")
    stranger = replace(options, access=replace(options.access, token="", token_file=""))
    with pytest.raises(Invalid, match="Unauthenticated"):
        ingest.run(session, table_of(session, "loaded"), stranger)
