"""A soak: produce, read, compact, expire and kill at once for a while, then ask what still holds.

A worker commits every second; Spark compacts and expires every minute; one reader walks through the
history over and over, others follow the live end; and every so often something is killed: the Spark
driver, its JVM, the table process, the edge. Once a minute it is measured what must stay flat. At
the end the checkers say whether G1, G2 and G3 held.

    make soak MINUTES=20
"""

import argparse
import asyncio
import http.client
import itertools
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
from tools.soak_judge import failures, judge_work

from tidewater_testing.checker import make_payload, verify
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.traffic import Load, Traffic

TOPIC: Final = "soak/orders"
PARTITIONS: Final = 2
SPEC: Final = {
    "partitions": PARTITIONS,
    "writer": {"flushInterval": "1s"},
    # Segments go as soon as they are in the table, so that readers need its history.
    "log": {"segmentSize": "64Ki", "retention": {"time": "0s", "size": "0"}},
    # More than the commits of some rounds: what is older than a round or two is left to Spark's
    # expiry, and the writer's own is there if no round comes through.
    "maintenance": {"keepSnapshots": 300, "snapshotAge": "10m"},
}
KILLS: Final = ("table", "jvm", "edge", "table", "driver", "edge")
"""In turns. A driver serves many rounds: to start one costs more than a round."""
ROUND_S_MAX: Final = 150.0
WARM_S: Final = 15.0
PROBES: Final = itertools.count()
PAGE_PAUSE_S: Final = 0.1
"""Readers pause after each page: without it two of them take both cores from Spark and worker."""
QUIET_S: Final = 10.0
"""How long the reader of history pauses while CPU per commit is measured."""


class Upkeep:
    """The Spark driver as a child process; started again whenever it is gone."""

    def __init__(self, data: Path, log: Path) -> None:
        self._data, self._log = data, log
        self._child: subprocess.Popen[str] | None = None
        self.outcomes: dict[str, int] = {}
        self.failed: list[str] = []
        """What went wrong though we had killed nothing that it needs."""
        self.rewritten = 0
        self.restarts = -1
        self._was_killed = False
        """By us, since it was started."""

    def ask(self, word: str) -> dict[str, Any] | None:
        """Send one line and return the answer; None if the driver died or failed meanwhile."""
        answer = self._ask(word)
        if not self._was_killed:
            self.failed += failures(answer)
        return None if answer is None or "error" in answer else answer

    def _ask(self, word: str) -> dict[str, Any] | None:
        child = self._running()
        if child is None:
            return None
        assert child.stdin is not None
        try:
            child.stdin.write(word + "\n")
            child.stdin.flush()
        except OSError:
            return None
        answer = self._line(child)
        if answer is not None and "JVM is gone" in answer.get("error", ""):
            self.end()
        for report in (answer or {}).get("reports", []):
            name = f"{report['job']} {report['outcome']}"
            self.outcomes[name] = self.outcomes.get(name, 0) + 1
            self.rewritten += sum(each["rewritten_files"] for each in report.get("ranges", []))
        return answer

    def _running(self) -> "subprocess.Popen[str] | None":
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.restarts += 1
        self._was_killed = False
        script = Path(__file__).with_name("soak_upkeep.py")
        with self._log.open("a") as log:
            self._child = subprocess.Popen(
                [sys.executable, str(script), str(self._data), TOPIC],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self._child if self._line(self._child) is not None else None

    def _line(self, child: "subprocess.Popen[str]") -> dict[str, Any] | None:
        """Read one answer; a driver that does not answer in time is ended."""
        assert child.stdout is not None
        watch = threading.Timer(ROUND_S_MAX, child.kill)
        watch.start()
        try:
            line = child.stdout.readline()
        finally:
            watch.cancel()
        return json.loads(line) if line.endswith("\n") else None

    def kill(self, *, jvm: bool) -> bool:
        """Kill the driver, or only the JVM under it; tell whether there was one."""
        child = self._child
        if child is None or child.poll() is not None:
            return False
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            below = psutil.Process(child.pid).children(recursive=True)
            java = [each.pid for each in below if each.name() == "java"]
            pid = java[0] if jvm and java else child.pid
            self._was_killed = True
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def end(self) -> None:
        """End the driver and its JVM."""
        child = self._child
        if child is None:
            return
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(child.pid).children(recursive=True)
            child.kill()
            for each in below:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        child.wait()


class Reader(threading.Thread):
    """Reads a topic and notes every break in the order of offsets (G3)."""

    def __init__(self, worker: Worker, partition: int, *, live: bool) -> None:
        super().__init__(daemon=True)
        self._worker, self._partition, self._live = worker, partition, live
        self.halt, self.pause = threading.Event(), threading.Event()
        self.wrong: list[str] = []
        self.rounds = self.messages = self.retries = 0

    def run(self) -> None:
        """Read until told to stop; a reader that ends by itself has something to say."""
        try:
            self._walk()
        except Exception as error:
            self.wrong.append(f"reader of partition {self._partition} ended: {error!r}")
            raise

    def _walk(self) -> None:
        """Walk from the beginning to the end, again and again; a live one stays at the end."""
        while not self.halt.is_set() and not self.wrong:
            offset = self._end() if self._live else 0
            while not self.halt.is_set() and not self.wrong:
                if self.pause.is_set():
                    time.sleep(0.1)
                    continue
                page = self._page(offset)
                if page is None:
                    continue
                offset = self._check(page, offset)
                if not self._live and offset >= page["end_offset"]:
                    break
            self.rounds += 1
            self.halt.wait(1.0)

    def _end(self) -> int:
        while not self.halt.is_set():
            page = self._page(0)
            if page is not None:
                return int(page["end_offset"])
        return 0

    def _check(self, page: dict[str, Any], offset: int) -> int:
        offsets = [message["offset"] for message in page["messages"]]
        if offsets != list(range(offset, offset + len(offsets))):
            self.wrong.append(
                f"G3 One stream: partition {self._partition} from {offset}: {offsets[:5]} …"
            )
        self.messages += len(offsets)
        return int(page["next_offset"])

    def _page(self, offset: int) -> dict[str, Any] | None:
        wait = "&wait_ms=1000" if self._live else ""
        path = f"/v1/{TOPIC}/messages?partition={self._partition}&offset={offset}&limit=2000{wait}"
        page: dict[str, Any] | None = None
        try:
            answer = self._worker.get(path)
            if answer.status == 200:
                page = answer.json()
        except (OSError, http.client.HTTPException, ValueError):
            answer = None  # a worker that is killed in the middle of an answer
        if answer is None or answer.status in (429, 503):
            self.retries += 1
            time.sleep(0.1)
            return None
        if page is None:
            self.wrong.append(f"G3 One stream: {answer.status} {answer.body[:200]!r}")
            return None
        time.sleep(PAGE_PAUSE_S)
        return page


class Table:
    """What the catalog and the disk say of the table, without asking anyone."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def metadata(self) -> tuple[dict[str, Any], int]:
        """Return the current metadata and the size of its file."""
        where = f"file:{self._data / 'catalog.db'}?mode=ro"
        with sqlite3.connect(where, uri=True, timeout=30) as db:
            namespace, _, name = TOPIC.partition("/")
            (location,) = db.execute(
                "SELECT metadata_location FROM iceberg_tables "
                "WHERE table_namespace = ? AND table_name = ?",
                (namespace, name),
            ).fetchone()
        db.close()
        path = Path(location.removeprefix("file://").removeprefix("file:"))
        data = path.read_bytes()
        return json.loads(data), len(data)

    def sample(self) -> dict[str, Any]:
        """Count what must stay flat."""
        metadata, nbytes = self.metadata()
        head = metadata["current-snapshot-id"]
        summary = next(s for s in metadata["snapshots"] if s["snapshot-id"] == head)["summary"]
        root = Path(metadata["location"].removeprefix("file://").removeprefix("file:"))
        return {
            "files": int(summary["total-data-files"]),
            "rows": int(summary["total-records"]),
            "snapshots": len(metadata["snapshots"]),
            "metadata_kib": round(nbytes / 1024, 1),
            "sequence": metadata["last-sequence-number"],
            "disk_data_files": sum(1 for _ in _files(root / "data")),
            "disk_metadata_files": sum(1 for _ in _files(root / "metadata")),
            "disk_kib": sum(_size(each) for each in _files(root)) // 1024,
        }


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def measure_commits(worker: Worker, table: Table, readers: list[Reader]) -> dict[str, Any]:
    """Measure commits while the readers of history pause: their work is not the commit's."""
    for reader in readers:
        reader.pause.set()
    try:
        with suppress(psutil.NoSuchProcess, TimeoutError, OSError):
            process = psutil.Process(worker.pid(Victim.TABLE))
            # One that has just been started again still has its start to pay for.
            time.sleep(max(0.0, WARM_S - (time.time() - process.create_time())))
            before, first = sum(process.cpu_times()[:2]), table.metadata()[0]
            time.sleep(QUIET_S)
            after, last = sum(process.cpu_times()[:2]), table.metadata()[0]
            commits = last["last-sequence-number"] - first["last-sequence-number"]
            cpu_ms = 1000 * (after - before) / max(1, commits)
            flushes = []
            for _ in range(5):
                began = time.monotonic()
                payload = make_payload("probe", next(PROBES)).decode()
                body = json.dumps({"messages": [{"value": payload}]})
                produced = worker.post(f"/v1/{TOPIC}/messages?partition=0", body)
                if produced.status == 200:
                    worker.flush(TOPIC)
                    flushes.append(1000 * (time.monotonic() - began))
            return {
                "commits_in_window": commits,
                "cpu_ms_per_commit": round(cpu_ms, 1),
                "flush_ms": round(statistics.median(flushes), 1) if flushes else None,
            }
        return {}
    finally:
        for reader in readers:
            reader.pause.clear()


class Soak:
    """One run."""

    def __init__(self, minutes: float, data: Path, worker: Worker) -> None:
        self.minutes, self.worker = minutes, worker
        self.upkeep = Upkeep(data, data / "upkeep.log")
        self.table = Table(data)
        self.history = [Reader(worker, partition, live=False) for partition in range(PARTITIONS)]
        self.live = [Reader(worker, partition, live=True) for partition in range(PARTITIONS)]
        self.samples: list[dict[str, Any]] = []
        self.kills: list[dict[str, Any]] = []
        self.began = time.monotonic()

    def minute(self) -> float:
        """Return how far the run is."""
        return round((time.monotonic() - self.began) / 60, 2)

    def kill(self, what: str) -> None:
        """Kill one thing."""
        done = True
        if what in ("jvm", "driver"):
            done = self.upkeep.kill(jvm=what == "jvm")
        else:
            self.worker.kill(Victim(what))
        if done:
            self.kills.append({"minute": self.minute(), "what": what})
            say(f"{self.minute():5.1f} min: killed {what}")

    def rounds(self) -> None:
        """Run the minutes: upkeep with a kill in it, then the measurement."""
        number, took_s = 0, 10.0
        while self.minute() < self.minutes:
            due = time.monotonic() + 60
            peak = self.table.sample()["files"]
            began = time.monotonic()
            answer = self._kept(number, took_s)
            took_s = (answer or {}).get("seconds", took_s)
            sample = {
                "minute": self.minute(),
                "upkeep_s": round(time.monotonic() - began, 1),
                "steps_s": (answer or {}).get("steps_s"),
                "files_peak": peak,
                **self.table.sample(),
                **measure_commits(self.worker, self.table, self.history),
            }
            self.samples.append(sample)
            say(f"{sample['minute']:5.1f} min: {json.dumps(sample)}")
            time.sleep(max(0.0, due - time.monotonic()))
            number += 1

    def _kept(self, number: int, took_s: float) -> dict[str, Any] | None:
        """Do a round of upkeep with a kill in it; one that was killed is begun anew at once."""
        # Somewhere in the time that Spark is at work; where it was faster, the next round.
        what = KILLS[len(self.kills) % len(KILLS)]
        share = 0.15 + 0.15 * (number % 5)
        killer = threading.Timer(took_s * share, self.kill, (what,))
        if number > 0:
            killer.start()
        try:
            answer = self.upkeep.ask(str(number))
        finally:
            killer.cancel()
        return answer if answer is not None else self.upkeep.ask(str(number))

    def readers(self) -> list[Reader]:
        """Return all of them."""
        return [*self.history, *self.live]


def say(text: str) -> None:
    """Tell how it goes."""
    print(text, file=sys.stderr, flush=True)


async def run(minutes: float, data: Path) -> dict[str, Any]:
    """Soak, then check; returns everything that was seen."""
    with Worker(data, [topic_manifest(TOPIC, SPEC)]) as worker:
        soak = Soak(minutes, data, worker)
        load = Load(worker.address, TOPIC, senders=4, partitions=PARTITIONS, pause_s=0.4)
        try:
            async with Traffic(load) as traffic:
                await asyncio.sleep(3)
                for reader in soak.readers():
                    reader.start()
                await asyncio.to_thread(soak.rounds)
            for reader in soak.readers():
                reader.halt.set()
            for reader in soak.readers():
                await asyncio.to_thread(reader.join, 90)
            await asyncio.to_thread(worker.flush, TOPIC)
            audited = await asyncio.to_thread(soak.upkeep.ask, "audit")
            if audited is None:  # killed in the last round
                audited = await asyncio.to_thread(soak.upkeep.ask, "audit")
        finally:
            soak.upkeep.end()
        return judge(soak, worker, traffic, audited)


def silent(soak: Soak) -> list[str]:
    """Name the readers that got nothing, or nowhere."""
    history = [f"history {n}" for n, each in enumerate(soak.history) if not each.rounds]
    return history + [f"live {n}" for n, each in enumerate(soak.live) if not each.messages]


def judge(
    soak: Soak, worker: Worker, traffic: Traffic, audited: dict[str, Any] | None
) -> dict[str, Any]:
    """Ask the checkers, and put everything together."""
    wrong = [text for reader in soak.readers() for text in reader.wrong]
    try:
        verify(
            worker.catalog_properties,
            worker.settings.log_root,
            TOPIC,
            traffic.record.acked,
            flushed=True,
        )
    except AssertionError as error:
        wrong.append(str(error))
    report = ((audited or {}).get("reports") or [{}])[0]
    if report.get("outcome") != "done":
        wrong.append(f"audit: {report.get('outcome')} {report.get('message')} {audited}"[:500])
    record = traffic.record
    seen = {
        "minutes": round(soak.minute(), 1),
        "wrong": wrong,
        "messages": record.messages,
        "requests_resent": record.resent,
        "audit": {key: report.get(key) for key in ("rows_read", "missing", "twice")},
        "readers": {
            "history": {
                "walks": sum(each.rounds for each in soak.history),
                "messages": sum(each.messages for each in soak.history),
            },
            "live": {"messages": sum(each.messages for each in soak.live)},
            "retries": sum(each.retries for each in soak.readers()),
            "silent": silent(soak),
        },
        "upkeep": {
            "outcomes": soak.upkeep.outcomes,
            "failed": soak.upkeep.failed,
            "rewritten_files": soak.upkeep.rewritten,
            "driver_restarts": soak.upkeep.restarts,
        },
        "kills": soak.kills,
        "samples": soak.samples,
    }
    wrong += judge_work(seen, sum(each.is_alive() for each in soak.readers()))
    return seen


def main() -> int:
    """Run it; exit code 1 if a promise was broken."""
    from tools.soak_plot import draw  # a second for matplotlib, which no test of this needs

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the results go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidewater-soak-") as folder:
        raw = asyncio.run(run(args.minutes, Path(folder)))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "soak.json").write_text(json.dumps(raw, indent=1) + "\n")
    draw(raw, args.out / "soak.png")
    for text in raw["wrong"]:
        say(text)
    say("G1, G2 and G3 held" if not raw["wrong"] else "a promise was broken")
    return 1 if raw["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
