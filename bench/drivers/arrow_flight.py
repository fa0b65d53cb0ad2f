"""A client of Arrow Flight, and a server of it that throws everything away.

`put` counts rows whose batch was acknowledged (by Tidewater: as durable); `get` reads a partition
from its first kept message to its end and checks that every offset came once. The server is the
floor: what Flight itself takes from the same client, in the same language, with an ack a batch.
"""

import json
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from bench import driver

IN_FLIGHT = 256


def batch_of(rows: int, size: int) -> pa.RecordBatch:
    """Make a batch of messages without keys."""
    values = pa.array([f"{i}-".ljust(size, "x").encode() for i in range(rows)], pa.binary())
    return pa.record_batch({"value": values})


def put(address: str, topic: str, rows: int, size: int, seconds: float) -> dict[str, Any]:
    """Write batches with a bounded number in flight; return the rate of acknowledged rows."""
    client = flight.connect(f"grpc://{address}")
    batch = batch_of(rows, size)
    descriptor = flight.FlightDescriptor.for_path(*topic.split("/"))
    writer, reader = client.do_put(descriptor, batch.schema)
    room = threading.Semaphore(IN_FLIGHT)
    acked = 0
    ends: list[float] = []

    def take_acks() -> None:
        nonlocal acked
        while (buffer := reader.read()) is not None:
            said = json.loads(buffer.to_pybytes())
            if "acks" not in said:
                raise SystemExit(f"refused: {said}")
            acked += sum(ack["count"] for ack in said["acks"])
            ends.append(time.perf_counter())
            room.release()

    acks = threading.Thread(target=take_acks)
    acks.start()
    cpu = time.process_time()
    started = time.perf_counter()
    sent = 0
    while time.perf_counter() - started < seconds:
        room.acquire()
        writer.write_batch(batch)
        sent += 1
    writer.done_writing()
    acks.join()
    writer.close()
    elapsed = ends[-1] - started
    assert acked == sent * rows, f"{sent * rows} sent, {acked} acknowledged"
    return {
        "rows_per_s": round(acked / elapsed),
        "batches": sent,
        "client_cpu_share": round((time.process_time() - cpu) / elapsed, 2),
    }


def get(address: str, topic: str) -> dict[str, Any]:
    """Read the first partition; return the rate."""
    client = flight.connect(f"grpc://{address}")
    started = time.perf_counter()
    rows = nbytes = 0
    following: int | None = None
    for chunk in client.do_get(flight.Ticket(f"{topic}@0:".encode())):
        offsets = chunk.data.column("tw_offset").to_numpy()
        assert following in (None, offsets[0]), f"{offsets[0]} follows where {following} should"
        assert (np.diff(offsets) == 1).all(), "offsets are not contiguous"
        following = int(offsets[-1]) + 1
        rows += len(offsets)
        nbytes += chunk.data.nbytes
    elapsed = time.perf_counter() - started
    return {"rows_per_s": round(rows / elapsed), "rows": rows, "mb_per_s": nbytes / elapsed / 1e6}


class Void(flight.FlightServerBase):  # type: ignore[misc]
    """Acknowledges every batch and keeps none."""

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Read to the end."""
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            said = b'{"acks":[{"partition":0,"offset":0,"count":%d}]}' % chunk.data.num_rows
            writer.write(pa.py_buffer(said))


def main() -> None:
    """Serve."""
    servers: list[Void] = []

    def void() -> dict[str, Any]:
        """Start the server of this process; the same one again."""
        if not servers:
            servers.append(Void("grpc://127.0.0.1:0"))
        return {"address": f"127.0.0.1:{servers[0].port}"}

    driver.serve({"put": put, "get": get, "void": void})


if __name__ == "__main__":
    main()
