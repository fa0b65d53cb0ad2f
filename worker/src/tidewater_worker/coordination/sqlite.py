"""Coordination in one SQLite file: the embedded store, for workers of one machine."""

import sqlite3
from pathlib import Path
from typing import Final

from tidewater_worker.coordination.port import RegisteredTopic

BUSY_TIMEOUT_MS: Final = 10_000
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS topics (
    topic TEXT PRIMARY KEY, uuid TEXT NOT NULL, spec TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS owners (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, owner TEXT NOT NULL, epoch INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)
) STRICT;
CREATE TABLE IF NOT EXISTS registry_version (one INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL) STRICT;
INSERT OR IGNORE INTO registry_version VALUES (1, 0);
"""


class SqliteCoordination:
    """Registry and epochs in an SQLite file; every change is fsynced."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        self._db.execute("PRAGMA journal_mode = WAL")
        # An epoch that is given out must never be given again, not even after a power cut.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)

    def register(self, topic: str, spec: str, uuid: str) -> RegisteredTopic:
        """Add a topic or change its spec; an existing one keeps its uuid."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            changed = self._db.execute(
                "INSERT INTO topics VALUES (?, ?, ?) ON CONFLICT (topic) "
                "DO UPDATE SET spec = excluded.spec WHERE spec IS NOT excluded.spec",
                (topic, uuid, spec),
            ).rowcount
            if changed:
                self._db.execute("UPDATE registry_version SET version = version + 1")
            row = self._db.execute(
                "SELECT topic, uuid, spec FROM topics WHERE topic = ?", (topic,)
            ).fetchone()
        return RegisteredTopic(*row)

    def topics(self) -> list[RegisteredTopic]:
        """Return every topic."""
        rows = self._db.execute("SELECT topic, uuid, spec FROM topics ORDER BY topic")
        return [RegisteredTopic(*row) for row in rows]

    def version(self) -> int:
        """Return a number that changes with every change of the registry."""
        return int(self._db.execute("SELECT version FROM registry_version").fetchone()[0])

    def owner(self, topic: str, partition: int) -> str | None:
        """Return who owns a partition, or None."""
        row = self._db.execute(
            "SELECT owner FROM owners WHERE topic = ? AND partition = ?", (topic, partition)
        ).fetchone()
        return None if row is None else str(row[0])

    def acquire(self, topic: str, partition: int, owner: str) -> int:
        """Take a partition; return its new epoch, higher than any before."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            row = self._db.execute(
                "INSERT INTO owners VALUES (?, ?, ?, 1) ON CONFLICT (topic, partition) "
                "DO UPDATE SET owner = excluded.owner, epoch = epoch + 1 RETURNING epoch",
                (topic, partition, owner),
            ).fetchone()
        return int(row[0])

    def close(self) -> None:
        """Close the file."""
        self._db.close()
