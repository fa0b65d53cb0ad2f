"""Tidewater's own Python client as a reader that catches up."""

import sys
import time
from typing import Any

from bench import driver
from tidewater import Client, wire
from tidewater.reader import LIMIT


class Readers:
    """The orders of a reader process."""

    def __init__(self, url: str) -> None:
        self._client = Client(url, timeout_s=300)

    def arrow(self, topic: str, start: int, stop: int, limit: int) -> dict[str, Any]:
        """Read [start, stop) as Arrow batches and check that no offset is missing."""
        reader = self._client.reader(topic)
        began = time.perf_counter()
        rows = 0
        nbytes = 0
        following = start
        for batch in reader.arrow_range(0, start, stop, limit=limit):
            offsets = batch.column("tw_offset")
            if offsets[0].as_py() != following:
                raise AssertionError(f"offset {offsets[0]} where {following} was expected")
            following += batch.num_rows
            rows += batch.num_rows
            nbytes += batch.nbytes
        elapsed_s = time.perf_counter() - began
        return {"rows": rows, "bytes": nbytes, "elapsed_s": elapsed_s}

    def ndjson(self, topic: str, start: int, stop: int, limit: int) -> dict[str, Any]:
        """Read [start, stop) as NDJSON; lines are counted, not decoded."""
        reader = self._client.reader(topic)
        began = time.perf_counter()
        at = start
        nbytes = 0
        while at < stop:
            body = reader.response(0, at, limit=min(limit, stop - at), accept=wire.NDJSON).body
            lines = body.count(b"\n")
            if not lines:
                break
            at += lines
            nbytes += len(body)
        elapsed_s = time.perf_counter() - began
        return {"rows": at - start, "bytes": nbytes, "elapsed_s": elapsed_s}

    def json(self, topic: str, start: int, stop: int) -> dict[str, Any]:
        """Read [start, stop) as pages of JSON, decoded into messages."""
        reader = self._client.reader(topic)
        began = time.perf_counter()
        at = start
        while at < stop:
            page = reader.page(0, at, limit=LIMIT)
            if not page.messages:
                break
            at = page.next_offset
        return {"rows": at - start, "elapsed_s": time.perf_counter() - began}


def main(url: str) -> None:
    """Serve."""
    readers = Readers(url)
    driver.serve({name: getattr(readers, name) for name in ("arrow", "ndjson", "json")})


if __name__ == "__main__":
    main(sys.argv[1])
