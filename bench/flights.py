"""What one worker takes and gives over Arrow Flight.

    tidewater dev --flight 8081
    python -m bench.flights put --address 127.0.0.1:8081 --topic default/quickstart
    python -m bench.flights get --address 127.0.0.1:8081 --topic default/quickstart

`put` counts rows whose batch was acknowledged as durable; `get` reads a partition from its first
kept message to its end and checks that every offset came once.
"""

import argparse
import json
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

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


def get(address: str, topic: str, partition: int, ticket: str | None) -> dict[str, Any]:
    """Read a partition; return the rate."""
    client = flight.connect(f"grpc://{address}")
    text = ticket or f"{topic}@{partition}:"
    started = time.perf_counter()
    rows = nbytes = 0
    following: int | None = None
    for chunk in client.do_get(flight.Ticket(text.encode())):
        offsets = chunk.data.column("tw_offset").to_numpy()
        assert following in (None, offsets[0]), f"{offsets[0]} follows where {following} should"
        assert (np.diff(offsets) == 1).all(), "offsets are not contiguous"
        following = int(offsets[-1]) + 1
        rows += len(offsets)
        nbytes += chunk.data.nbytes
    elapsed = time.perf_counter() - started
    return {"rows_per_s": round(rows / elapsed), "rows": rows, "mb_per_s": nbytes / elapsed / 1e6}


def main() -> None:
    """Measure and print a line a round."""
    parser = argparse.ArgumentParser(description="Measure Arrow Flight.")
    parser.add_argument("what", choices=["put", "get"])
    parser.add_argument("--address", default="127.0.0.1:8081")
    parser.add_argument("--topic", default="default/quickstart")
    parser.add_argument("--partition", type=int, default=0)
    parser.add_argument("--ticket", help="instead of all of the partition")
    parser.add_argument("--rows", type=int, default=1000, help="rows of a batch")
    parser.add_argument("--size", type=int, default=100, help="bytes of a message's value")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.rounds):
        if args.what == "put":
            measured = put(args.address, args.topic, args.rows, args.size, args.seconds)
        else:
            measured = get(args.address, args.topic, args.partition, args.ticket)
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
