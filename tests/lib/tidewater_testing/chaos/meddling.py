"""What happens beside the workers: the store goes away, somebody else works on the table."""

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.table import Table
from sqlalchemy.exc import OperationalError

from table_faults import compact
from tidewater_testing.evidence import load_table
from tidewater_testing.parts.etcd import Etcd

LOCK_S = 5.0
LOST = (CommitFailedException, ValidationException, OperationalError)
"""Somebody was faster, or stands still on the catalog's lock: nothing has changed."""


def be_away(store: Etcd | Path, seconds: float) -> None:
    """Let nobody reach the store for a while; sessions run out meanwhile."""
    if isinstance(store, Path):
        db = sqlite3.connect(store, timeout=LOCK_S, isolation_level=None)
        try:
            db.execute("BEGIN EXCLUSIVE")
            time.sleep(seconds)
            db.execute("ROLLBACK")
        finally:
            db.close()
        return
    pids = [server.pid for server in store.servers]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class Meddler:
    """Rewrites the table as another engine might, expires snapshots, deletes what is unused."""

    def __init__(self, properties: Mapping[str, str], topic: str) -> None:
        self._properties, self._topic = dict(properties), topic
        self._doomed: set[str] = set()
        self.rewrites = self.expired = self.deleted = 0

    def meddle(self) -> None:
        """Do one round; files that the last round made unused go in this one."""
        with contextlib.suppress(*LOST):
            table = load_table(self._properties, self._topic)
            before = _files(table)
            compact(table)
            self.rewrites += 1
            table = load_table(self._properties, self._topic)
            now = _files(table)
            for path in self._doomed - now:
                with contextlib.suppress(FileNotFoundError):
                    table.io.delete(path)
                    self.deleted += 1
            self._doomed = before - now
        with contextlib.suppress(*LOST):
            table = load_table(self._properties, self._topic)
            table.maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()
            self.expired += 1


def _files(table: Table) -> set[str]:
    return {task.file.file_path for task in table.scan().plan_files()}
