"""Streams and their requests: cut the same way each time, sent until stored, never twice."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tidewater_core.errors import Corrupt, Invalid
from tidewater_core.names import TopicName
from tidewater_pipeline import deliver
from tidewater_pipeline.deliver import Batch, Sender, Sent, Target, cut_by_offset, cut_in_order
from tidewater_pipeline.jobs.ingest import ImportOptions, Pinned, plan_import, plan_pin
from tidewater_pipeline.jobs.ingest import batches as import_batches
from tidewater_pipeline.jobs.replay import ReplayOptions, payload_expression, plan_replay
from tidewater_pipeline.jobs.replay import batches as replay_batches

TARGET = Target("http://127.0.0.1:1", "a/b", 10, "run")


def offsets(batches: list[Batch]) -> list[tuple[int, list[int]]]:
    return [(each.sequence, [message["n"] for message in each.messages]) for each in batches]


def test_cuts_are_at_multiples_whatever_a_filter_leaves() -> None:
    rows = [(n, {"n": n}) for n in (3, 9, 10, 31, 32)]
    assert offsets(list(cut_by_offset("s", rows, 10, 0))) == [(0, [3, 9]), (1, [10]), (3, [31, 32])]
    assert offsets(list(cut_in_order("s", [{"n": n} for n in range(5)], 2))) == [
        (0, [0, 1]),
        (1, [2, 3]),
        (2, [4]),
    ]


def test_messages_keep_bytes_and_structure() -> None:
    assert deliver.message_of(b"\xff", {"h": "1"}, b"\x00") == {
        "value_b64": "AA==",
        "key_b64": "/w==",
        "headers": {"h": "1"},
    }
    assert deliver.message_of(None, {}, {"id": 1}) == {"value": {"id": 1}}
    assert deliver.message_of(None, {}, None) == {}


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
    made = list(replay_batches(rows, TARGET, "shop/x", keep_partition=True))
    assert [(b.stream, b.sequence, len(b.messages), b.partition) for b in made] == [
        ("shop/x/0", 0, 2, 0),
        ("shop/x/0", 1, 1, 0),
        ("shop/x/2", 1, 1, 2),
    ]
    assert made[2].messages[0]["value"] == {"id": 1}
    assert made[0].messages[1]["headers"] == {"tw-replayed-from": "shop/x/0/9"}
    assert list(replay_batches([], TARGET, "shop/x", keep_partition=True)) == []


def test_import_streams_are_files() -> None:
    rows = [{"stream": name, "k": None, "v": b"x"} for name in ("f1", "f1", "f1", "f2")]
    made = list(import_batches(rows, 2))
    assert [(b.stream, b.sequence, len(b.messages)) for b in made] == [
        ("f1", 0, 2),
        ("f1", 1, 1),
        ("f2", 0, 1),
    ]


def test_the_same_run_has_the_same_id() -> None:
    options = ReplayOptions(to=TopicName("a", "b"), url="http://x")
    one, _ = plan_replay(options, "a/c", same_partitions=True)
    two, _ = plan_replay(options, "a/c", same_partitions=True)
    other, _ = plan_replay(options, "a/d", same_partitions=True)
    assert one == two
    assert one.run_id != other.run_id
    assert len(deliver.producer_id("x" * 500, "stream")) <= 128


def test_wrong_plans_are_refused() -> None:
    to = TopicName("a", "b")
    with pytest.raises(Invalid, match="itself"):
        plan_replay(ReplayOptions(to=to, url=""), "a/b", same_partitions=True)
    with pytest.raises(Invalid, match="nothing"):
        plan_replay(ReplayOptions(to=to, url="", begin=5, end=5), "a/c", same_partitions=True)
    with pytest.raises(Invalid, match="no column 'id'"):
        plan_import(ImportOptions(source="x", key="id"), "a/b", ["name"])
    with pytest.raises(Invalid, match="xml"):
        plan_import(ImportOptions(source="x", format="xml"), "a/b", [])
    with pytest.raises(Invalid, match="not the address"):
        Sender(Target("ftp://x", "a/b"))


def test_payloads() -> None:
    assert payload_expression(["tw_offset", "value"]) == "`value`"
    assert payload_expression(["tw_offset", "id", "a b"]) == "to_json(struct(`id`, `a b`))"


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
    sender.send(Batch("s", 4, ({"value": 1}, {"value": 2})), sent)
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


def test_an_import_from_a_table_keeps_to_the_version_it_began_with() -> None:
    begun = plan_pin(None, "lake.events", 7)
    assert begun == Pinned("lake.events", 7)
    assert plan_pin(begun.to_json(), "lake.events", 9) == begun, "the source has gone on since"
    done = replace(begun, done=True)
    assert plan_pin(done.to_json(), "lake.events", 9).done
    with pytest.raises(Invalid, match="choose another"):
        plan_pin(begun.to_json(), "lake.other", 9)
    with pytest.raises(Corrupt):
        plan_pin("{}", "lake.events", 9)
