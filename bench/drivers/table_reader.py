"""A reader of the table: learns from the catalog alone what is visible, and when.

It looks at the catalog's pointer as any engine does before a query; when that has moved it reads
the metadata that it points to. What it notes is the moment at which the metadata was read, so a
row counts as visible only when a reader could have planned a scan that holds it.
"""

import sqlite3
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
from pyiceberg.catalog.sql import SqlCatalog

from bench import driver
from tidewater_core.names import TW_OFFSET, TW_PARTITION, frontier_property

POLL_S = 0.01
QUERY = "select metadata_location from iceberg_tables where table_namespace = ? and table_name = ?"


class _Frontier(msgspec.Struct):
    next: int


class _Metadata(msgspec.Struct):
    properties: dict[str, str] = {}
    snapshots: list[msgspec.Raw] = []


_metadata = msgspec.json.Decoder(_Metadata)
_frontier = msgspec.json.Decoder(_Frontier)


class Reader:
    """The orders of a reader process."""

    def __init__(self, catalog: str, warehouse: str) -> None:
        self._catalog = catalog
        self._warehouse = warehouse
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: list[tuple[float, int]] = []

    def watch(self, namespace: str, name: str) -> dict[str, Any]:
        """Begin to note what becomes visible in partition 0 of a table."""
        self._stop.clear()
        self._seen = []
        self._thread = threading.Thread(target=self._watch, args=(namespace, name), daemon=True)
        self._thread.start()
        return {}

    def wait(self, upto: int, timeout_s: float) -> dict[str, Any]:
        """Wait until offsets below `upto` are visible; return everything noted."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._seen and self._seen[-1][1] >= upto:
                break
            time.sleep(POLL_S)
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        return {"seen": self._seen}

    def frontier(self, namespace: str, name: str) -> dict[str, Any]:
        """Return how far partition 0 is visible now."""
        with sqlite3.connect(f"file:{self._catalog}?mode=ro", uri=True) as connection:
            row = connection.execute(QUERY, (namespace, name)).fetchone()
        return {"next": _read(row[0])[0] if row else 0}

    def count(self, namespace: str, name: str) -> dict[str, Any]:
        """Read the table's offsets: how many rows, how many different ones."""
        catalog = SqlCatalog(
            "tidewater", uri=f"sqlite:///{self._catalog}", warehouse=self._warehouse
        )
        scan = catalog.load_table((namespace, name)).scan(selected_fields=(TW_PARTITION, TW_OFFSET))
        rows, low, high, total = 0, None, None, 0
        for batch in scan.to_arrow_batch_reader():
            offsets = batch.column(TW_OFFSET).to_numpy()
            if len(offsets):
                rows += len(offsets)
                total += int(offsets.sum())
                low = int(offsets.min()) if low is None else min(low, int(offsets.min()))
                high = int(offsets.max()) if high is None else max(high, int(offsets.max()))
        catalog.engine.dispose()
        expected = 0 if high is None or low is None else (low + high) * (high - low + 1) // 2
        once = high is None or low is None or (rows == high - low + 1 and total == expected)
        return {"rows": rows, "low": low, "high": high, "once": once}

    def _watch(self, namespace: str, name: str) -> None:
        known = None
        connection = sqlite3.connect(f"file:{self._catalog}?mode=ro", uri=True, timeout=5)
        while not self._stop.wait(POLL_S):
            row = connection.execute(QUERY, (namespace, name)).fetchone()
            if row is None or row[0] == known:
                continue
            known = row[0]
            upto, _ = _read(known)
            self._seen.append((time.time(), upto))
        connection.close()


def _read(location: str) -> tuple[int, int]:
    with open(urlsplit(location).path, "rb") as file:
        metadata = _metadata.decode(file.read())
    text = metadata.properties.get(frontier_property(0))
    return (_frontier.decode(text).next if text else 0), len(metadata.snapshots)


def main(catalog: str, warehouse: str) -> None:
    """Serve."""
    reader = Reader(catalog, warehouse)
    names = ("watch", "wait", "frontier", "count")
    driver.serve({name: getattr(reader, name) for name in names})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
