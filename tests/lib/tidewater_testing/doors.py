"""The doors of a worker, to be knocked at with a token: HTTP, WebSocket, Flight."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
import websocket
from pyarrow import flight

from tidewater_testing.parts.secured import SecuredWorker

REASONS = {"Forbidden": 403, "Unauthenticated": 401}
Door = Callable[[SecuredWorker, str, str | None], tuple[int, str]]
"""Knocks with a token at a topic's door; returns the status and what was said."""


def http(method: str, path: str, body: Any = None) -> Door:
    def knock(worker: SecuredWorker, topic: str, token: str | None) -> tuple[int, str]:
        answer = worker.ask(method, path.format(topic=topic), token, body)
        return answer.status, answer.body.decode("utf-8", "replace")

    return knock


def dial(worker: SecuredWorker, topic: str, token: str | None) -> websocket.WebSocket:
    header = [f"Authorization: Bearer {token}"] if token is not None else []
    return websocket.create_connection(
        f"wss://{worker.address}/v1/{topic}/socket",
        timeout=20,
        header=header,
        sslopt={"ca_certs": str(worker.tls.ca)},  # type: ignore[union-attr]
    )


def socket(**command: Any) -> Door:
    """Open a socket and say something; the answer's reason stands for a status."""

    def knock(worker: SecuredWorker, topic: str, token: str | None) -> tuple[int, str]:
        try:
            opened = dial(worker, topic, token)
        except websocket.WebSocketBadStatusException as error:
            return error.status_code, (error.resp_body or b"").decode()
        try:
            json.loads(opened.recv())
            if not command:
                return 200, ""
            opened.send(json.dumps(command))
            said = json.loads(opened.recv())
        finally:
            opened.close()
        if "error" not in said:
            return 200, json.dumps(said)
        return REASONS[said["error"]["reason"]], json.dumps(said)

    return knock


def flown(call: Callable[[flight.FlightClient, str, flight.FlightCallOptions], object]) -> Door:
    def knock(worker: SecuredWorker, topic: str, token: str | None) -> tuple[int, str]:
        headers = [(b"authorization", f"Bearer {token}".encode())] if token is not None else []
        options = flight.FlightCallOptions(headers=headers, timeout=20)
        with worker.fly() as client:
            try:
                return 200, str(call(client, topic, options))
            except flight.FlightUnauthenticatedError as error:
                return 401, str(error)
            except flight.FlightUnauthorizedError as error:
                return 403, str(error)
            except pa.ArrowKeyError as error:
                return 404, str(error)
            except pa.ArrowException as error:
                # The library has no status for a refusal of GetSchema; its text is the same.
                text = str(error)
                found = [code for reason, code in REASONS.items() if reason in text]
                return found[0], text

    return knock


def do_put(client: Any, topic: str, options: Any) -> bytes:
    batch = pa.record_batch({"value": pa.array([b"flown"], pa.binary())})
    descriptor = flight.FlightDescriptor.for_path(*topic.split("/"))
    writer, reader = client.do_put(descriptor, batch.schema, options)
    writer.write_batch(batch)
    writer.done_writing()
    said = reader.read()
    writer.close()  # raises what was wrong
    return bytes(said.to_pybytes())


def do_get(client: Any, topic: str, options: Any) -> int:
    return int(client.do_get(flight.Ticket(f"{topic}@0:0-1".encode()), options).read_all().num_rows)


def do_exchange(client: Any, topic: str, options: Any) -> int:
    descriptor = flight.FlightDescriptor.for_command(
        json.dumps({"topic": topic, "position": "earliest"}).encode()
    )
    writer, reader = client.do_exchange(descriptor, options)
    try:
        note = json.loads(reader.read_chunk().app_metadata.to_pybytes())
        return int(note["next_offset"])
    finally:
        reader.cancel()
        with suppress(pa.ArrowException):
            writer.close()  # cancelled


def describe(client: Any, topic: str, options: Any) -> str:
    descriptor = flight.FlightDescriptor.for_path(*topic.split("/"))
    return str(client.get_flight_info(descriptor, options).schema)


def schema_of(client: Any, topic: str, options: Any) -> str:
    descriptor = flight.FlightDescriptor.for_path(*topic.split("/"))
    return str(client.get_schema(descriptor, options).schema)
