"""Streams and their requests: cut the same way each time, sent until stored, never twice."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidewater_core.errors import Corrupt, Invalid
from tidewater_core.names import TopicName
from tidewater_pipeline import deliver
from tidewater_pipeline.deliver import (
    REQUEST_BYTES_MAX,
    Access,
    Batch,
    Sender,
    Sent,
    Target,
    cut_by_offset,
    cut_in_order,
)
from tidewater_pipeline.jobs.ingest import (
    ImportOptions,
    Pinned,
    expressions,
    plan_files,
    plan_import,
    plan_pin,
    plan_through,
    what_of,
)
from tidewater_pipeline.jobs.ingest import batches as import_batches
from tidewater_pipeline.jobs.replay import ReplayOptions, ends_of, payload_expression, plan_replay
from tidewater_pipeline.jobs.replay import batches as replay_batches

TARGET = Target("http://127.0.0.1:1", "a/b", 10, "run")


def numbered(numbers: Iterable[int]) -> list[tuple[int, int, bytes]]:
    return [(n, 0, str(n).encode()) for n in numbers]


def in_order(messages: Iterable[bytes], batch_rows: int) -> list[Batch]:
    return list(cut_in_order("s", ((0, message) for message in messages), batch_rows))


def offsets(batches: Iterable[Batch]) -> list[tuple[int, list[int]]]:
    return [(each.sequence, [int(message) for message in each.messages]) for each in batches]


def test_cuts_are_at_multiples_whatever_a_filter_leaves() -> None:
    rows = numbered((3, 9, 10, 31, 32))
    assert offsets(cut_by_offset("s", rows, 10)) == [(0, [3, 9]), (10, [10]), (30, [31, 32])]
    assert offsets(in_order([b"0", b"1", b"2", b"3", b"4"], 2)) == [
        (0, [0, 1]),
        (2, [2, 3]),
        (4, [4]),
    ]


def test_a_request_ends_before_it_is_too_large() -> None:
    """A thousand rows of 25 KB were 33 MB as base64, which no worker takes."""
    message = deliver.message_of(None, {}, bytes(25_000), typed=False)
    made = in_order([message] * 2_500, 1_000)
    assert sum(len(batch.messages) for batch in made) == 2_500
    assert all(sum(map(len, batch.messages)) <= REQUEST_BYTES_MAX for batch in made)
    sequences = [batch.sequence for batch in made]
    assert sequences == sorted(set(sequences)), "each is one of its own, in order"
    assert {1_000, 2_000} <= set(sequences), "the cuts by rows stay where they are"
    huge = [b"x" * (REQUEST_BYTES_MAX + 1)] * 3
    assert [(b.sequence, len(b.messages)) for b in in_order(huge, 10)] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]


def message(key: Any, headers: Any, value: Any, *, typed: bool = False) -> Any:
    return json.loads(deliver.message_of(key, headers, value, typed=typed))


def test_messages_keep_bytes_and_structure() -> None:
    assert message(b"\xff", {"h": "1"}, b"\x00") == {
        "value_b64": "AA==",
        "key_b64": "/w==",
        "headers": {"h": "1"},
    }
    assert message(None, {}, None) == {"value": None}, "a tombstone"
    assert message(None, {}, '{"id": 1}', typed=True) == {"value": {"id": 1}}
    assert message(None, {}, '{"id": 1}') == {"value": '{"id": 1}'}, "text to store as it is"


@pytest.mark.parametrize("typed", [True, False])
def test_json_is_passed_on_unread(typed: bool) -> None:
    """A decimal became a float on its way."""
    text = '{"amount":12345678901234567890.123456789}'
    made = deliver.message_of(None, {}, text, typed).decode()
    assert "12345678901234567890.123456789" in made


def row(partition: int, offset: int, value: object = b"v") -> dict[str, Any]:
    return {
        "tw_partition": partition,
        "tw_offset": offset,
        "tw_key": None,
        "tw_headers": None,
        "v": value,
    }


def test_replay_streams_are_partitions() -> None:
    rows = [row(0, 8), row(0, 9), row(0, 10), row(2, 11, '{"id": 1}')]
    made = list(replay_batches(rows, replace(TARGET, typed=True), "shop/x", keep_partition=True))
    assert [(b.stream, b.sequence, b.partitions) for b in made] == [
        ("shop/x/0", 0, (0, 0)),
        ("shop/x/0", 10, (0,)),
        ("shop/x/2", 10, (2,)),
    ]
    assert json.loads(made[2].messages[0])["value"] == {"id": 1}
    assert json.loads(made[0].messages[1])["headers"] == {"tw-replayed-from": "shop/x/0/9"}
    assert list(replay_batches([], TARGET, "shop/x", keep_partition=True)) == []


def test_headers_without_a_value_do_not_stop_a_replay() -> None:
    """Older tables hold them; workers refuse them."""
    old = {**row(0, 8), "tw_headers": {"a": None, "b": "1"}}
    (made,) = replay_batches([old], TARGET, "shop/x", keep_partition=True)
    headers = json.loads(made.messages[0])["headers"]
    assert headers == {"b": "1", "tw-replayed-from": "shop/x/0/8"}


def test_import_streams_are_files() -> None:
    rows = [{"stream": name, "k": None, "v": b"x"} for name in ("f1", "f1", "f1", "f2")]
    made = list(import_batches(rows, replace(TARGET, batch_rows=2)))
    assert [(b.stream, b.sequence, len(b.messages)) for b in made] == [
        ("f1", 0, 2),
        ("f1", 2, 1),
        ("f2", 0, 1),
    ]


def test_the_same_run_has_the_same_id() -> None:
    options = ReplayOptions(to=TopicName("a", "b"), url="http://x")
    one = plan_replay(options, "a/c", {0: 5})
    assert one == plan_replay(options, "a/c", {0: 5})
    assert one.run_id != plan_replay(options, "a/d", {0: 5}).run_id
    assert len(deliver.producer_id("x" * 500, "stream")) <= 128


def test_a_longer_range_is_another_run() -> None:
    """The last request of the first one stood in its way (409 SequenceReused)."""
    options = ReplayOptions(to=TopicName("a", "b"), url="http://x", end=25)
    grown = {0: 30, 1: 12}
    assert ends_of(options, grown) == {0: 25, 1: 12}
    assert ends_of(replace(options, end=None), grown) == grown
    ids = {
        plan_replay(each, "a/c", ends_of(each, frontiers)).run_id
        for each in (options, replace(options, end=28), replace(options, end=None))
        for frontiers in (grown, {0: 30, 1: 20})
    }
    assert len(ids) == 6


def test_wrong_plans_are_refused() -> None:
    to = TopicName("a", "b")
    with pytest.raises(Invalid, match="itself"):
        plan_replay(ReplayOptions(to=to, url=""), "a/b", {})
    with pytest.raises(Invalid, match="nothing"):
        plan_replay(ReplayOptions(to=to, url="", begin=5, end=5), "a/c", {})
    with pytest.raises(Invalid, match="no column 'id'"):
        plan_import(ImportOptions(source="x", key="id"), "a/b", ["name"])
    with pytest.raises(Invalid, match="xml"):
        plan_import(ImportOptions(source="x", format="xml"), "a/b", [])
    for url in ("ftp://x", "http://[::1", "http://[x]", "http://h:99999", "http://h:x", "h:80"):
        with pytest.raises(Invalid, match="not the address"):
            Sender(Target(url, "a/b"))


def test_payloads() -> None:
    assert payload_expression(["tw_offset", "value"]) == "`value`"
    typed = payload_expression(["tw_offset", "id", "a b"])
    assert typed.startswith("to_json(struct(`id`, `a b`), map('timestampFormat', ")


def test_a_columns_name_is_never_sql() -> None:
    """A key of an imported file's JSON ended its quotes and ran as SQL with the driver's rights."""
    evil = "x`, reflect('java.lang.System', 'getenv', 'SECRET_KEY') AS `y"
    inert = "`" + evil.replace("`", "``") + "`"
    assert payload_expression([evil, "b"]).startswith(f"to_json(struct({inert}, `b`), ")
    options = ImportOptions(source="x", format="json", key=evil, value=evil)
    *_, key, value = expressions(options, [evil])
    assert key == f"CAST(CAST({inert} AS STRING) AS BINARY) AS k"
    assert value == f"CAST(CAST({inert} AS STRING) AS BINARY) AS v"
    *_, value = expressions(replace(options, key=None, value=None), [evil])
    assert value.startswith(f"to_json(struct({inert}), ")


class Answers:
    """A connection that gives prepared answers."""

    def __init__(self, *answers: tuple[int, object] | OSError) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, str]] = []
        self.status = 0

    def request(self, _method: str, _path: str, _body: object, headers: dict[str, str]) -> None:
        self.asked.append(headers)

    def getresponse(self) -> "Answers":
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        self.status, self.body = answer
        return self

    def read(self) -> bytes:
        return json.dumps(self.body).encode()

    def close(self) -> None:
        pass


def send(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, object] | OSError) -> Sent:
    monkeypatch.setattr("tidewater_pipeline.deliver.time.sleep", lambda _s: None)
    sender = Sender(TARGET)
    connection = Answers(*answers)
    monkeypatch.setattr(sender, "_connection", connection)
    sent = Sent()
    sender.send(Batch("s", 4, (b'{"value":1}', b'{"value":2}'), (0, 0)), sent)
    assert len({tuple(sorted(asked.items())) for asked in connection.asked}) == 1, "the same again"
    return sent


def test_a_request_is_sent_until_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = (503, {"error": {"reason": "Busy", "message": "later"}})
    acked = (200, {"acks": [{"partition": 0, "offset": 0, "count": 2}]})
    sent = send(monkeypatch, busy, OSError("reset"), (429, {}), acked)
    assert (sent.messages, sent.requests, sent.known) == (2, 1, 0)


def test_what_was_stored_before_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    again = (200, {"acks": [{"partition": 0, "offset": 0, "count": 2, "duplicate": True}]})
    assert send(monkeypatch, again).known == 2
    old = (409, {"error": {"reason": "SequenceTooOld", "message": "older than the window"}})
    assert send(monkeypatch, old).known == 2


def test_what_no_repetition_changes_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Invalid, match="SequenceReused"):
        send(monkeypatch, (409, {"error": {"reason": "SequenceReused", "message": "other"}}))


@pytest.mark.parametrize("token", ["geheim€", "secret\nx"])
def test_what_no_header_may_have_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """It was taken for a worker that is away, for minutes."""
    monkeypatch.setattr("tidewater_pipeline.deliver.time.sleep", lambda _s: pytest.fail("again"))
    sender = Sender(replace(TARGET, access=Access(token)))
    with pytest.raises(Invalid, match="InvalidRequest: the token") as caught:
        sender.topic()
    assert token[:6] not in str(caught.value)


def test_an_import_of_many_files_goes_on_after_those_that_are_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker remembers 10,000 producers: of more files the first ones were stored again."""
    monkeypatch.setattr("tidewater_pipeline.jobs.ingest.FILES_AT_ONCE", 2)
    files = ["a", "b", "c", "d", "e"]
    lake = ImportOptions(source="lake")
    new = plan_through(None, lake, 3)
    steps = plan_files(new, files)
    assert [(first, step.files) for first, step in steps] == [(0, 2), (2, 4), (4, 5)]
    stored = plan_through(steps[0][1].to_json(), lake, 3)
    assert plan_files(stored, files) == steps[1:]
    through = steps[-1][1]
    assert plan_files(through, files) == []
    assert [first for first, _ in plan_files(through, [*files, "f"])] == [5], "a new one"
    for changed in (["a0", *files], files[1:], files[:1]):
        with pytest.raises(Invalid, match="FilesChanged"):
            plan_files(through, changed)
    with pytest.raises(Invalid, match="IdTaken"):
        plan_through(through.to_json(), ImportOptions(source="other"), 3)
    with pytest.raises(Corrupt):
        plan_through("{}", lake, 3)
    assert plan_files(new, []) == []


def test_a_table_of_many_files_is_few_streams() -> None:
    stream, file, position, *_ = expressions(ImportOptions(source="x", format="table"), ["id"])
    assert stream == "CAST(pmod(xxhash64(_file), 1000) AS STRING) AS stream"
    assert (file, position) == ("_file AS file", "_pos AS pos")


def test_an_import_from_a_table_keeps_to_the_version_it_began_with() -> None:
    events = ImportOptions(source="lake.events", format="table")
    begun = plan_pin(None, events, 7, 3)
    assert begun == Pinned("lake.events", what_of(events), 7, 3)
    later = plan_pin(begun.to_json(), events, 9, 6)
    assert later == begun, "the source has gone on since, and the topic has grown"
    done = replace(begun, done=True)
    assert plan_pin(done.to_json(), events, 9, 3).done
    with pytest.raises(Invalid, match="choose another"):
        plan_pin(begun.to_json(), replace(events, source="lake.other"), 9, 3)
    with pytest.raises(Corrupt):
        plan_pin("{}", events, 9, 3)


@pytest.mark.parametrize(
    "change", [{"batch_rows": 10}, {"key": "id"}, {"value": "v"}, {"format": "json"}]
)
def test_an_id_is_one_import(change: dict[str, Any]) -> None:
    """With another --batch the worker knew none of the requests, and stored all rows again."""
    options = ImportOptions(source="lake", run_id="mine")
    other = replace(options, **change)
    begun: list[tuple[Any, str]] = [
        (plan_through, plan_through(None, options, 3).to_json()),
        (lambda *args: plan_pin(args[0], args[1], 7, 3), plan_pin(None, options, 7, 3).to_json()),
    ]
    for go_on, stored in begun:
        assert go_on(stored, options, 3).source == "lake"
        with pytest.raises(Invalid, match=r"IdTaken.*--batch"):
            go_on(stored, other, 3)
    columns = ["id", "v"]
    ids = {
        plan_import(replace(each, run_id=None), "a/b", columns).run_id for each in (options, other)
    }
    assert len(ids) == 2, "without --id it is another run"


def test_who_we_are_travels_as_values(tmp_path: Path) -> None:
    """Executors have no files; where there is one, it may be written anew."""
    file = tmp_path / "token"
    file.write_text("first\n")
    access = Access.of(None, str(file), None)
    file.write_text("second\n")
    assert access.headers() == {"Authorization": "Bearer second"}
    file.unlink()
    assert access.headers() == {"Authorization": "Bearer first"}
    assert Access.of("given", None, None).headers() == {"Authorization": "Bearer given"}
    assert Access.of(None, None, None).headers() == {}
    assert "first" not in repr(access)
    with pytest.raises(Invalid, match="cannot read"):
        Access.of(None, str(file), None)
    ca = tmp_path / "ca.pem"
    for text in ("no certificate", "# Főtanúsítvány", "\n"):
        ca.write_text(text)
        with pytest.raises(Invalid, match="BadCa"):
            Sender(Target("https://x", "a/b", access=Access.of(None, None, str(ca))))
