"""The checkers see what they are there for; needs no cluster."""

import json
import socket
import subprocess
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from e2e import guarantees, kubectl, looking, truth
from e2e.history import History, Message, Snapshot
from e2e.kubectl import CommandError, wait_for
from e2e.leading import Beat, one_writer
from e2e.web import insist
from tidewater_testing.checker import AckedBatch, Range
from tidewater_testing.evidence import Evidence, Row, TableSide
from tidewater_testing.web import Answer

VALUES = (b"a", b"b", b"c")
ROWS = tuple(Row(offset, value) for offset, value in enumerate(VALUES))
GOOD = History(
    topic="shop/orders",
    acked=(AckedBatch(VALUES, (Range(0, 0, 3),)),),
    evidence=Evidence(table={0: TableSide(next=3, epoch=2, rows=ROWS)}),
    stream={0: tuple(Message(0, row.offset, row.payload) for row in ROWS)},
    snapshots=(Snapshot(1, {0: 1}), Snapshot(2, {0: 2})),
)


def _first(found: list[str]) -> str:
    assert found, "no violation was seen"
    return found[0]


def test_a_good_history_holds() -> None:
    guarantees.hold(GOOD)


def test_a_message_that_is_not_in_the_table() -> None:
    table = {0: TableSide(next=2, epoch=2, rows=ROWS[:2])}
    found = guarantees.violations(replace(GOOD, evidence=Evidence(table=table)))
    assert _first(found).startswith("G1 Durable: partition 0 offset 2")


def test_a_row_twice() -> None:
    table = {0: TableSide(next=3, epoch=2, rows=(*ROWS[:2], ROWS[1], ROWS[2]))}
    found = guarantees.violations(replace(GOOD, evidence=Evidence(table=table)))
    assert _first(found) == "G2 Once in the table: partition 0 offset 1 twice"


def test_a_message_that_is_not_read() -> None:
    stream = {0: (GOOD.stream[0][0], GOOD.stream[0][2])}
    found = guarantees.violations(replace(GOOD, stream=stream))
    assert _first(found) == "G3 One stream: partition 0 offsets 1 to 1 not seen"


def test_a_message_read_twice() -> None:
    stream = {0: (*GOOD.stream[0], GOOD.stream[0][2])}
    found = guarantees.violations(replace(GOOD, stream=stream))
    assert _first(found).startswith("G3 One stream: partition 0 offset 2 twice")


def test_another_value_read() -> None:
    stream = {0: (*GOOD.stream[0][:2], Message(0, 2, b"x"))}
    found = guarantees.violations(replace(GOOD, stream=stream))
    assert "is not what was acknowledged" in _first(found)


def test_a_zombie_commits() -> None:
    snapshots = (*GOOD.snapshots, Snapshot(3, {0: 1}))
    found = guarantees.violations(replace(GOOD, snapshots=snapshots))
    assert _first(found) == "G5 One owner: partition 0 has epoch 1 in snapshot 3, after epoch 2"


def test_deliveries() -> None:
    sent = GOOD.stream[0]
    again = [(sent[0], True), (sent[1], False), (sent[1], True), (sent[2], True)]
    assert not list(guarantees.delivered_until_acked(sent, again))
    after_ack = list(guarantees.delivered_until_acked(sent, [*again, (sent[0], True)]))
    assert after_ack[0].endswith("partition 0 offset 0 was delivered after its ack")
    missing = list(guarantees.delivered_until_acked(sent, again[:3]))
    assert missing[0].endswith("partition 0 offset 2 never delivered")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Answer(200, {}, b"{}"), "is 200"),
        (Answer(503, {"retry-after": "1"}, b"{}"), "gives no reason"),
        (Answer(429, {}, b'{"error": {"reason": "Busy"}}'), "does not say when"),
        (Answer(429, {"retry-after": "1"}, b'{"error": {"reason": "Busy"}}'), None),
        (Answer(413, {}, b'{"error": {"reason": "TooLarge"}}'), None),
    ],
)
def test_push_back(answer: Answer, complaint: str | None) -> None:
    found = list(guarantees.pushed_back(answer))
    if complaint is None:
        assert not found
    else:
        assert complaint in " ".join(found)


def test_stopped_partitions_and_strangers() -> None:
    silent = {0: {"state": "stopped"}, 1: {"state": "stopped", "reason": "RowsLost"}}
    assert list(guarantees.stopped_with_reason(silent)) == [
        "G7 Nothing is silently skipped: partition 0 is stopped without a reason"
    ]
    assert not list(guarantees.refused_stranger(Answer(403, {}, b"")))
    assert list(guarantees.refused_stranger(Answer(200, {}, b"")))


# ---- conditions

LEADER = "operator-a"
SECONDS = range(0, 120, 2)
TOLD = {
    "topic/watched": {"Ready": "True", "Assigned": "True", "Committing": "True",
                      "FreshnessMet": "True", "Maintained": "Unknown", "Degraded": "False",
                      "Paused": "False"},
    "subscription/watcher": {"Ready": "True", "Active": "True", "LagBounded": "True",
                             "Paused": "False"},
    "pool/default": {"Ready": "True", "Scaling": "False", "Degraded": "False",
                     "VolumeGrown": "True", "Paused": "False"},
}  # fmt: skip


def _object(kind: str, told: dict[str, str], generation: int = 1) -> dict[str, Any]:
    conditions = [
        {"type": type_, "status": status, "reason": "Why", "observedGeneration": 1,
         "lastTransitionTime": "1970-01-01T00:00:00Z"}
        for type_, status in told.items()
    ]  # fmt: skip
    return {
        "kind": kind,
        "metadata": {"generation": generation},
        "spec": {"replicas": 1},
        "status": {"conditions": conditions, "observedGeneration": 1},
    }


def _seen(
    told: dict[str, str] | None = None,
    *,
    name: str = "topic/watched",
    holders: tuple[str, ...] = (LEADER,),
    generation: int = 1,
    frontier: bool = True,
    sent: int = 200,
    why: str = "",
) -> truth.Seen:
    """Return two minutes in which all was well but for what is given."""
    says = {**TOLD, name: {**TOLD[name], **(told or {})}}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    objects = {each: _object(each, said, generation) for each, said in says.items()}
    objects["pod/tidewater-default-0"] = {"metadata": {}, "status": ready}
    objects["statefulset/tidewater-default"] = {"spec": {"replicas": 1}}
    report = {"topics": {"watched": {"0": "running", "1": "running", "2": "running"}},
              "subscriptions": ["watcher"]}  # fmt: skip
    looks = [truth.Look(at, objects, holders[at // 20 % len(holders)], at, at) for at in SECONDS]
    rounds = [
        truth.Round(at, {"0": report}, [(sent, why, at if sent == 200 else None)] * 3, pulled=True)
        for at in SECONDS
    ]
    place = {at: at + 1 if frontier else 0 for at in SECONDS}
    frontiers = [truth.Frontier(at + 1, dict.fromkeys(range(3), place[at])) for at in SECONDS]
    return truth.Seen(looks, rounds, frontiers)


def test_true_conditions_hold() -> None:
    assert truth.violations(_seen()) == []
    looks = [at for at in SECONDS if at >= truth.DELAY_S]
    assert truth.judged(_seen()) == len(looks)
    assert truth.judged(_seen(), since=looks[3]) == len(looks) - 3
    # All was well all the time: there is a verdict on each condition at each look.
    assert truth.decided(_seen()) == len(looks) * sum(map(len, truth.TYPES.values()))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("topic/watched", {"Ready": "False"}),
        ("topic/watched", {"Ready": "Unknown"}),
        ("topic/watched", {"Assigned": "False"}),
        ("topic/watched", {"Committing": "False"}),
        ("topic/watched", {"FreshnessMet": "Unknown"}),
        ("topic/watched", {"Maintained": "False"}),
        ("topic/watched", {"Degraded": "True"}),
        ("subscription/watcher", {"Active": "False"}),
        ("subscription/watcher", {"LagBounded": "False"}),
        ("pool/default", {"Ready": "False"}),
        ("pool/default", {"Scaling": "True"}),
        ("pool/default", {"VolumeGrown": "False"}),
    ],
)
def test_a_condition_that_lies(name: str, told: dict[str, str]) -> None:
    ((type_, status),) = told.items()
    claim = f"{truth.CLAIM}: {name} {type_}={status} (Why) while"
    assert _first(truth.violations(_seen(told, name=name))).startswith(claim)


def test_a_table_that_stands_still_and_messages_that_are_refused() -> None:
    found = "\n".join(truth.violations(_seen(frontier=False)))
    assert "Committing=True" in found
    assert "FreshnessMet=True" in found
    assert "Ready=True" in _first(truth.violations(_seen(sent=503)))


def test_whose_a_partition_is_while_its_worker_has_no_session_nobody_can_tell() -> None:
    """It reports the partition as its own, and refuses every message."""
    told = {"Ready": "False", "Assigned": "False", "Degraded": "True"}
    assert truth.violations(_seen(told, sent=503, why="SessionLost")) == []
    assert "Assigned=False" in _first(truth.violations(_seen(told, sent=503, why="Other")))


def test_a_message_that_was_stored_without_an_answer_may_be_the_oldest() -> None:
    frontiers = [truth.Frontier(at, {0: end}) for at, end in ((1, 1), (15, 1), (21, 3))]

    def ages(last: int) -> tuple[float, float]:
        sent = ((0, 200, 0), (10, 503, None), (20, 200, last))
        rounds = [truth.Round(at, {}, [(code, "", offset)], True) for at, code, offset in sent]
        return truth.Seen([], rounds, frontiers).ages(15)

    assert ages(1) == (0.0, 0.0)
    assert ages(2) == (0.0, 15.0), "offset 1 came at some time after the first"


def test_a_generation_that_is_not_observed() -> None:
    assert "observed generation 1 of 2" in _first(truth.violations(_seen(generation=2)))


def test_while_nobody_leads_conditions_may_be_old() -> None:
    seen = _seen({"Ready": "False"}, holders=(LEADER, "operator-b"))
    assert truth.violations(seen) == []
    assert truth.judged(seen) == 0


def test_a_change_that_is_dated_wrongly() -> None:
    before, after = _seen().looks, _seen({"Ready": "False"}).looks
    seen = truth.Seen([*before[:30], *after[30:]], ())
    (found,) = truth.transitions(seen)
    assert "topic/watched Ready changed between" in found


@pytest.mark.parametrize(
    ("holders", "late_s", "holds"),
    [
        ((LEADER,), 8, True),
        ((LEADER,), 20, False),
        ((LEADER, "operator-b"), 20, True),
        ((LEADER, "operator-b"), 40, False),
    ],
)
def test_a_pass_of_a_new_leader_may_last_longer(
    holders: tuple[str, ...], late_s: int, *, holds: bool
) -> None:
    before, after = _seen(holders=holders).looks, _seen({"Ready": "False"}, holders=holders).looks
    dated = datetime.fromtimestamp(before[29].at - late_s, UTC).isoformat()
    for each in after[0].conditions("topic/watched").values():
        each["lastTransitionTime"] = dated
    seen = truth.Seen([*before[:30], *after[30:]], ())
    assert (not list(truth.transitions(seen))) is holds


# ---- the tools


def test_waiting_outlasts_whatever_a_command_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    trouble = iter(
        [CommandError("no"), subprocess.TimeoutExpired("kubectl", 3), ConnectionError("broken")]
    )

    def looked() -> bool:
        for error in trouble:
            raise error
        return True

    wait_for(looked, 10, "the end of trouble")
    with pytest.raises(TimeoutError, match=r"waited 0 s for pears. none"):
        wait_for(lambda: _raise(CommandError("none")), 0, "pears")


def _raise(error: Exception) -> bool:
    raise error


@pytest.mark.parametrize(
    ("command", "said", "asked"),
    [
        ("get", "Get https://127.0.0.1:6443: net/http: TLS handshake timeout", kubectl.ATTEMPTS),
        ("get", "dial tcp 127.0.0.1:6443: connect: connection refused", kubectl.ATTEMPTS),
        ("get", 'Error from server (NotFound): pods "a" not found', 1),
        ("wait", "error: timed out waiting for the condition on topics/orders", 1),
        ("create token web", "connect: connection refused", kubectl.ATTEMPTS),
        ("create serviceaccount web", "connect: connection refused", 1),
        ("annotate topic a b=c --overwrite", "unexpected EOF", kubectl.ATTEMPTS),
        ("patch topic a --type=json", "unexpected EOF", 1),
        ("delete", "connect: connection refused", 1),
        ("exec", "unexpected EOF", 1),
    ],
)
def test_only_what_is_the_same_twice_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, command: str, said: str, asked: int
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    commands = []

    def run(command: list[str], **_: object) -> str:
        commands.append(command)
        raise CommandError(said)

    monkeypatch.setattr(kubectl, "run", run)
    with pytest.raises(CommandError):
        kubectl.Kubectl(Path("here"))(*command.split())
    assert len(commands) == asked


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        (("pods",), ["/api/v1/namespaces/shop/pods"]),
        (
            ("pods", "--selector=a/b=c"),
            ["/api/v1/namespaces/shop/pods?labelSelector=a/b%3Dc"],
        ),
        (("topic/orders",), ["/apis/tidewater.dev/v1alpha1/namespaces/shop/topics/orders"]),
        (("statefulset", "x"), ["/apis/apps/v1/namespaces/shop/statefulsets/x"]),
        (("pvc", "x"), ["/api/v1/namespaces/shop/persistentvolumeclaims/x"]),
        (("node", "x"), ["/api/v1/nodes/x"]),
        (("pods,namespaces",), ["/api/v1/namespaces/shop/pods", "/api/v1/namespaces"]),
        (("pods,endpoints",), None),
        (("pods", "--all-namespaces"), None),
        (("pods", "a", "b"), None),
        (("--raw", "/metrics"), None),
    ],
)
def test_looks_that_need_no_process(words: tuple[str, ...], paths: list[str] | None) -> None:
    question = looking.understood(words)
    if question is None:
        assert paths is None
    else:
        assert [question.path(each, "shop") for each in question.plurals] == paths


def test_a_look_says_what_kubectl_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal quotes the command; where nobody answers, kubectl is asked."""

    class Server:
        def get(self, path: str) -> Any:
            if path.endswith("/gone"):
                raise looking.RefusedError('Error from server (NotFound): pods "gone" not found')
            if path.endswith("/away"):
                raise looking.NoAnswerError
            return {"items": [{"metadata": {"name": path.rpartition("/")[2]}}]}

    monkeypatch.setattr(looking, "server_of", lambda _: Server())
    monkeypatch.setattr(kubectl, "run", lambda command, **_: json.dumps({"asked": command[-2]}))
    within = kubectl.Kubectl(Path("here"), "shop")
    with pytest.raises(CommandError, match=r"^kubectl .*here .*shop get pod gone ended.*\n.*NotF"):
        within.get("pod", "gone")
    assert within.get("pod", "away") == {"asked": "away"}
    found = within.get("statefulsets,topics")["items"]
    assert [(e["apiVersion"], e["kind"], e["metadata"]["name"]) for e in found] == [
        ("apps/v1", "StatefulSet", "statefulsets"),
        ("tidewater.dev/v1alpha1", "Topic", "topics"),
    ]


def test_a_request_is_repeated_until_somebody_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    answers = iter([Answer(503, {}, b""), Answer(429, {}, b""), Answer(403, {}, b"")])
    assert insist(lambda: next(answers)).status == 403
    only_broken = frozenset[int]()
    assert insist(lambda: Answer(503, {}, b""), again=only_broken).status == 503


def test_two_lead_only_if_both_did_at_once() -> None:
    """The first was asked again after the second: only if it still led, both did."""
    one_by_one = Beat(frozenset({"a", "b"}), frozenset({"b"}), {"a": 5, "b": 7})
    one_writer([one_by_one])
    together = Beat(frozenset({"a", "b"}), frozenset({"a", "b"}), {"a": 5, "b": 7})
    with pytest.raises(AssertionError, match="two lead"):
        one_writer([together])
    quiet = Beat(frozenset({"b"}), frozenset({"b"}), {"a": 5, "b": 9})
    one_writer([quiet, quiet])
    with pytest.raises(AssertionError, match="a wrote and did not lead"):
        one_writer([quiet, Beat(frozenset({"b"}), frozenset({"b"}), {"a": 6, "b": 9})])


def test_a_forwarded_port_that_swallows_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is what is looked for: an answer of any kind is one, and so is hanging up."""
    monkeypatch.setattr(kubectl, "FORWARD_ASK_S", 0.2)
    forward = kubectl.PortForward(kubectl.Kubectl(Path("here")), "app=none", 1)
    assert not forward._says_nothing(), "nobody listens: clients see that"
    with socket.create_server(("127.0.0.1", forward.port)) as server:
        assert forward._says_nothing()
        server.accept()[0].close()  # the one from before
        for answer in (b"HTTP/1.1 404 Not Found\r\n", b""):

            def serve(said: bytes = answer) -> None:
                taken, _ = server.accept()
                with taken:
                    taken.sendall(said)

            serving = threading.Thread(target=serve)
            serving.start()
            assert not forward._says_nothing(), answer
            serving.join()
