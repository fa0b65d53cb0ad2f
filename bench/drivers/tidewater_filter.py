"""A topic with a long history, and consumers that want little of it."""

import json
import sys
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench import driver
from tidewater import Client

BATCH_ROWS = 20_000
NOTE_BYTES = 80
SHOPS = 1_000
PULL_MAX = 10_000


class Filters:
    """The orders of the process."""

    def __init__(self, url: str) -> None:
        self._client = Client(url, timeout_s=300)
        self._random = np.random.default_rng(7)

    def fill(self, topic: str, rows: int) -> dict[str, Any]:
        """Produce rows: a number that rises, a shop drawn from a thousand, and some text."""
        producer = self._client.producer(topic)
        began = time.perf_counter()
        for first in range(0, rows, BATCH_ROWS):
            producer.send_arrow(self._batch(first, min(BATCH_ROWS, rows - first)))
        return {"rows": rows, "elapsed_s": time.perf_counter() - began}

    def _batch(self, first: int, rows: int) -> pa.RecordBatch:
        ends = np.arange(0, (rows + 1) * NOTE_BYTES, NOTE_BYTES, dtype=np.int32)
        digits = self._random.integers(97, 113, rows * NOTE_BYTES, dtype=np.uint8)
        notes = pa.Array.from_buffers(
            pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(digits.tobytes())]
        )
        return pa.RecordBatch.from_arrays(
            [
                pa.array(np.arange(first, first + rows)),
                pa.array(self._random.integers(0, SHOPS, rows, dtype=np.int32)),
                notes,
            ],
            names=["number", "shop", "note"],
        )

    def pull(self, topic: str, subscription: str) -> dict[str, Any]:
        """Pull and acknowledge until nothing is left."""
        path = f"/v1/{topic}/subscriptions/{subscription}"
        rows = pulls = 0
        began = time.perf_counter()
        while True:
            messages = self._post(f"{path}/pull", max=PULL_MAX, wait_ms=100)["messages"]
            pulls += 1
            if messages:
                self._post(f"{path}/ack", ack_ids=[message["ack_id"] for message in messages])
                rows += len(messages)
            elif json.loads(self._client.transport.request("GET", path).body)["lag"] == 0:
                break
        return {"rows": rows, "pulls": pulls, "elapsed_s": time.perf_counter() - began}

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._client.transport.request(
            "POST", path, json.dumps(body).encode(), content_type="application/json"
        )
        return json.loads(answer.body)

    def read_all(self, topic: str, rows: int, shop: int, limit: int) -> dict[str, Any]:
        """Read every row as Arrow and keep those of one shop: a consumer that filters itself."""
        reader = self._client.reader(topic)
        began = time.perf_counter()
        found = seen = 0
        for batch in reader.arrow_range(0, 0, rows, limit=limit):
            found += pc.sum(pc.equal(batch.column("shop"), shop)).as_py()
            seen += batch.num_rows
        return {"rows": seen, "found": found, "elapsed_s": time.perf_counter() - began}


def main(url: str) -> None:
    """Serve."""
    filters = Filters(url)
    driver.serve({name: getattr(filters, name) for name in ("fill", "pull", "read_all")})


if __name__ == "__main__":
    main(sys.argv[1])
