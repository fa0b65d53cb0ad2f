"""The tables of the embedded store, and what several of its calls do to them."""

import sqlite3
from collections.abc import Mapping
from typing import Final

import msgspec

from tidewater_coordination import rules
from tidewater_coordination.port import Ownership, RegisteredTopic, TopicPhase

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS topics (
    topic TEXT PRIMARY KEY, uuid TEXT NOT NULL, spec TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS topic_phases (topic TEXT PRIMARY KEY, phase TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS subscriptions (
    name TEXT PRIMARY KEY, uuid TEXT NOT NULL, spec TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS assignments (topic TEXT PRIMARY KEY, workers TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS partitions (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (topic, partition)
) STRICT;
CREATE TABLE IF NOT EXISTS sessions (
    worker_id TEXT PRIMARY KEY, session TEXT NOT NULL, info TEXT NOT NULL, boot TEXT NOT NULL,
    expires REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS leases (name TEXT PRIMARY KEY, session TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS cursors (
    subscription TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL,
    value BLOB NOT NULL, PRIMARY KEY (subscription, topic, partition)
) STRICT;
CREATE TABLE IF NOT EXISTS registry_version (one INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL) STRICT;
INSERT OR IGNORE INTO registry_version VALUES (1, 0);
"""
TOPICS: Final = (
    "SELECT topics.topic, uuid, spec, coalesce(phase, 'active') "
    "FROM topics LEFT JOIN topic_phases ON topics.topic = topic_phases.topic"
)


def topic_of(row: tuple[str, str, str, str]) -> RegisteredTopic:
    """Read a row of `TOPICS`."""
    return RegisteredTopic(row[0], row[1], row[2], TopicPhase(row[3]))


def bump(db: sqlite3.Connection) -> None:
    """Note that the registry has changed."""
    db.execute("UPDATE registry_version SET version = version + 1")


def put_owner(db: sqlite3.Connection, topic: str, record: Ownership) -> None:
    """Write who has a partition."""
    db.execute(
        "INSERT OR REPLACE INTO partitions VALUES (?, ?, ?)",
        (topic, record.partition, rules.record_of(record).decode()),
    )
    bump(db)


def assignment_of(db: sqlite3.Connection, topic: str) -> dict[int, str]:
    """Read which worker should have which partition of a topic."""
    query = "SELECT workers FROM assignments WHERE topic = ?"
    row = db.execute(query, (topic,)).fetchone()
    return {} if row is None else msgspec.json.decode(row[0], type=dict[int, str])


def put_assignment(db: sqlite3.Connection, topic: str, partitions: Mapping[int, str]) -> None:
    """Write an assignment; one that is there already is no change."""
    workers = msgspec.json.encode(dict(sorted(partitions.items()))).decode()
    changed = db.execute(
        "INSERT INTO assignments VALUES (?, ?) ON CONFLICT (topic) DO UPDATE "
        "SET workers = excluded.workers WHERE workers IS NOT excluded.workers",
        (topic, workers),
    ).rowcount
    if changed:
        bump(db)
