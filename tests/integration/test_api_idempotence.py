"""A request sent again with the same producer and sequence is stored once (G8)."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.web import Answer

TOPIC = "shop/orders"
SINGLE = "shop/single"


def _send(
    worker: Worker,
    producer: str,
    sequence: int,
    messages: list[dict[str, Any]],
    topic: str = SINGLE,
) -> Answer:
    headers = {"Tidewater-Producer": producer, "Tidewater-Sequence": str(sequence)}
    body = json.dumps({"messages": messages})
    return worker.post(f"/v1/{topic}/messages", body, headers=headers)


def _acks(answer: Answer) -> list[tuple[int, int, int, bool]]:
    assert answer.status == 200, answer.body
    return [
        (ack["partition"], ack["offset"], ack["count"], ack.get("duplicate", False))
        for ack in answer.json()["acks"]
    ]


def test_a_re_send_gets_the_same_offsets(worker: Worker) -> None:
    """The second answer says that it is a duplicate."""
    messages = [{"value": "a"}, {"value": "b"}]
    ((_, offset, count, duplicate),) = _acks(_send(worker, "p1", 0, messages))
    assert (count, duplicate) == (2, False)
    assert _acks(_send(worker, "p1", 0, messages)) == [(0, offset, 2, True)]
    ((_, after, _, _),) = _acks(_send(worker, "p1", 1, messages))
    assert after == offset + 2


def test_producers_do_not_mix(worker: Worker) -> None:
    """Same sequence, other producer: another request."""
    first = _acks(_send(worker, "p2", 7, [{"value": "a"}]))
    other = _acks(_send(worker, "p2/7", 7, [{"value": "a"}]))
    assert first[0][1] != other[0][1]
    assert not other[0][3]


def test_a_sequence_used_for_another_request_is_refused(worker: Worker) -> None:
    """Two messages under the number of one: a mistake of the producer, not a re-send."""
    _acks(_send(worker, "p3", 0, [{"value": "a"}]))
    answer = _send(worker, "p3", 0, [{"value": "a"}, {"value": "b"}])
    assert answer.status == 409
    assert answer.reason == "SequenceReused"


def test_a_sequence_too_old_to_tell_is_refused(worker: Worker) -> None:
    """Past the window nobody knows: neither stored again nor acknowledged."""
    for sequence in range(10, 300):
        _acks(_send(worker, "p4", sequence, [{"value": "a"}]))
    answer = _send(worker, "p4", 10, [{"value": "a"}])
    assert answer.status == 409
    assert answer.reason == "SequenceTooOld"


def test_the_same_request_at_the_same_time_is_stored_once(worker: Worker) -> None:
    """A client that timed out sends again while the first is still under way."""
    for sequence in range(20):
        messages = [{"value": f"race {sequence}"}] * 3
        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(_send, worker, "p5", sequence, messages) for _ in range(4)]
            answers = [_acks(each.result()) for each in sent]
        assert len({answer[0][1] for answer in answers}) == 1, answers


def test_a_request_over_partitions_is_stored_once(worker: Worker) -> None:
    """Each partition knows its share."""
    messages = [{"key": f"k{i}", "value": f"v{i}"} for i in range(30)]
    first = _acks(_send(worker, "p6", 0, messages, TOPIC))
    assert len(first) == 3, "thirty keys reach all partitions"
    again = _acks(_send(worker, "p6", 0, messages, TOPIC))
    assert [ack[:3] for ack in again] == [ack[:3] for ack in first]
    assert all(ack[3] for ack in again)


def test_requests_without_a_key_find_their_partition_again(worker: Worker) -> None:
    """An idempotent producer without keys always goes the same way."""
    big = [{"value": "x" * 200_000}]
    for sequence in range(6):
        first = _acks(_send(worker, "p7", sequence, big, TOPIC))
        again = _acks(_send(worker, "p7", sequence, big, TOPIC))
        assert [ack[:3] for ack in again] == [ack[:3] for ack in first]


def test_it_is_remembered_over_a_restart(tmp_path: Path) -> None:
    """Kill -9, then a stop in good order, with segments turning over in between."""
    spec = {"partitions": 1, "log": {"segmentSize": "64Ki"}}
    with Worker(tmp_path / "w", [topic_manifest(SINGLE, spec)]) as worker:
        first = [
            _acks(_send(worker, "p", sequence, [{"value": "x" * 9_000}]))[0][1]
            for sequence in range(40)
        ]
        worker.kill(Victim.EDGE)
        worker.wait_ready()
        again = [
            _acks(_send(worker, "p", sequence, [{"value": "x" * 9_000}]))[0]
            for sequence in range(40)
        ]
        assert [ack[1] for ack in again] == first
        assert all(ack[3] for ack in again)
        assert worker.stop() == 0
        worker.start()
        (ack,) = _acks(_send(worker, "p", 39, [{"value": "x" * 9_000}]))
        assert ack == (0, first[39], 1, True)
