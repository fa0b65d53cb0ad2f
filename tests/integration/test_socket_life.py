"""How a WebSocket begins and ends."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import websocket

from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.sockets import Dialled

SINGLE = "shop/single"


def _refused(worker: Worker, path: str, **options: Any) -> tuple[int, str]:
    with pytest.raises(websocket.WebSocketBadStatusException) as caught:
        websocket.create_connection(f"ws://{worker.address}{path}", timeout=10, **options)
    body = json.loads(caught.value.resp_body or b"{}")
    return caught.value.status_code, body.get("error", {}).get("reason", "")


def test_who_gets_no_socket(worker: Worker) -> None:
    assert _refused(worker, "/v1/shop/nowhere/socket") == (404, "UnknownTopic")
    assert _refused(worker, "/v1/shop/single/messages") == (404, "NoSocket")
    path = f"/v1/{SINGLE}/socket"
    other = {"origin": "https://evil.example"}
    assert _refused(worker, path, **other) == (403, "ForbiddenOrigin")
    assert _refused(worker, path, origin="http://[") == (403, "ForbiddenOrigin")
    assert _refused(worker, path, subprotocols=["chat"]) == (400, "UnknownSubprotocol")
    answer = worker.get(path)
    assert (answer.status, answer.reason) == (426, "UpgradeRequired")


def test_a_page_of_the_same_host(worker: Worker) -> None:
    with Dialled(
        worker, SINGLE, origin="http://127.0.0.1:3000", subprotocols=["tidewater.v1"]
    ) as ws:
        assert ws.raw.getsubprotocol() == "tidewater.v1"
        assert ws.welcome["frame_bytes_max"] == 2 * 1024 * 1024


def test_pings_and_a_good_bye(worker: Worker) -> None:
    with Dialled(worker, SINGLE) as ws:
        ws.raw.ping("are you there")
        opcode, data = ws.raw.recv_data(control_frame=True)
        assert (opcode, data) == (websocket.ABNF.OPCODE_PONG, b"are you there")
        ws.raw.send_close(1000, b"bye")
        assert ws.close_code() == 1000


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x02hi", 1002),  # not masked
        (b"\x82\xff\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00", 1009),  # 256 MiB to come
        (b"\xf1\x80\x00\x00\x00\x00", 1002),
    ],
)
def test_who_breaks_the_protocol_is_told(worker: Worker, data: bytes, code: int) -> None:
    with Dialled(worker, SINGLE) as ws:
        ws.send_bytes(data)
        assert ws.close_code() == code


def test_bytes_that_never_become_a_message(worker: Worker) -> None:
    """G6: half a message is counted, and given back when its sender goes."""
    with Dialled(worker, SINGLE) as ws:
        ws.send_bytes(b"\x82\xfe\xff\xff\x00\x00\x00\x00" + b"x" * 60_000)
        with Dialled(worker, SINGLE) as other:
            other.ask(produce={"id": 1, "messages": [{"value": "x"}]})
        assert _inflight(worker) >= 60_000
    for _ in range(100):
        if _inflight(worker) == 0:
            return
        threading.Event().wait(0.05)
    pytest.fail(f"{_inflight(worker)} bytes are still counted")


def _inflight(worker: Worker) -> int:
    lines = worker.get("/metrics").body.decode().splitlines()
    (found,) = [line for line in lines if line.startswith("tidewater_inflight_bytes ")]
    return int(found.split()[1])


def test_a_shutdown_finishes_what_was_taken(tmp_path: Path) -> None:
    """Every command before the end has an answer; the end says that the worker goes away."""
    with Worker(tmp_path / "w", [topic_manifest(SINGLE, {"partitions": 1})]) as worker:
        with Dialled(worker, SINGLE) as ws:
            ws.ask(read={"id": 1, "credit": 0})
            stopping = threading.Thread(target=worker.stop)
            answers = 0
            for i in range(200):
                ws.say(produce={"id": i, "messages": [{"value": f"v{i}"}]})
                if i == 100:
                    stopping.start()
            try:
                while True:
                    opcode, data = ws.raw.recv_data(control_frame=True)
                    if opcode == websocket.ABNF.OPCODE_CLOSE:
                        break
                    said = json.loads(data)
                    reason = said.get("error", {}).get("reason")
                    assert "ack" in said or reason == "ShuttingDown", said
                    answers += 1
            finally:
                stopping.join()
        assert int.from_bytes(data[:2], "big") == 1001
        assert answers >= 100
        worker.start()
        stored = worker.get(f"/v1/{SINGLE}/messages?limit=1000").json()["messages"]
        assert [m["value"] for m in stored[:100]] == [f"v{i}" for i in range(100)]
