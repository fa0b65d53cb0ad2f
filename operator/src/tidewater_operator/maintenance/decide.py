"""Whether a table needs a Spark job now, and what became of the last one. Pure.

A schedule is an opportunity, not an order: a session costs a minute of a core, so a scheduled job
is only started for a table that changed enough to be worth it, for rows that are past their
retention, and once a day for what only a job can find (files that nothing names). Health asks
between schedules when much has piled up. A failure that a second try cannot mend waits longer each
time; a person's annotation waits for nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.names import ANNOTATION_MAINTAIN, TW_TIME
from tidewater_operator.conditions import Told, fails, holds, unknown
from tidewater_operator.maintenance.cron import next_after
from tidewater_operator.model.names import Manifest
from tidewater_operator.report import TableReport
from tidewater_operator.settings import MaintenanceSettings
from tidewater_operator.times import format_time, parse_time

WORTH_FILES: Final = 5
"""Files to be joined that make a scheduled job worth its session: fewer are left alone."""
RETIRE_EVERY: Final = timedelta(hours=1)
RETIRE_SHARE: Final = 8
"""Rows stay an eighth longer than `retention`, or this long, before they alone are worth a job."""
HEALTH_EVERY: Final = timedelta(minutes=15)
"""Health asks at most this often: a job that could not help once does not help at once."""
BEHIND_FACTOR: Final = 4
"""A table with this many times the files that ask for a job is behind."""
_WAITS: Final = {  # first wait and longest one
    False: (timedelta(hours=1), timedelta(days=1)),
    True: (timedelta(minutes=5), timedelta(hours=6)),
}
"""By whether a second try may help."""


REMOVED_FILES: Final = ("rewritten_files", "retired_files", "orphans")
IDLE_WAIT: Final = timedelta(hours=1)
"""After a job that health asked for and that changed nothing: the next one would not, either. The
same of files of deleted rows that a job left. Also the longest wait after a failure of a part
alone: what was done is needed again."""
DRIVER_LATE: Final = timedelta(minutes=1)
"""A driver's pod that does not run after this time is told of: nodes and images take a moment."""
DRIVER_WAIT_MAX: Final = timedelta(minutes=10)
"""After this the job counts as failed: it holds a place that others wait for."""
LOOK_GAP_MAX: Final = timedelta(minutes=5)
"""Looks at a job that runs are closer than this, unless nobody led or etcd was away."""
RETENTION_REFUSED: Final = "retention: refused"
RETENTION_IDLE: Final = "retention: nothing-to-do"
PERIODS: Final = {
    "day": timedelta(days=1), "month": timedelta(days=31), "year": timedelta(days=366),
}  # fmt: skip
"""Transforms of time whose periods are longer than an hour."""
ANNOTATION_TRIGGER: Final = "tidewater.dev/trigger"
"""On a Job: why it was started."""


class Trigger(StrEnum):
    """Why a job is started."""

    MANUAL = "Manual"
    SCHEDULE = "Schedule"
    HEALTH = "Health"


@dataclass(frozen=True)
class Table:
    """What a decision is made on."""

    spec: TopicSpec
    created: datetime
    report: TableReport | None
    annotations: Mapping[str, str]
    before: Mapping[str, Any]
    """`status.maintenance` as it stands."""

    @property
    def last(self) -> Mapping[str, Any]:
        """The last run that ended."""
        found: Mapping[str, Any] = self.before.get("last") or {}
        return found

    @property
    def manual(self) -> str:
        """A person's word that has not been acted on."""
        word = self.annotations.get(ANNOTATION_MAINTAIN, "")
        return "" if word == self.before.get("manual", "") else word

    @property
    def debt_files(self) -> int:
        """Files that a job would join; without a worker's word, those since the last run."""
        if self.report is None:
            return 0
        if self.report.debt_files is not None:
            return self.report.debt_files
        return max(self.report.files - int(self.last.get("filesAfter", 0)), 0)


def due(table: Table, settings: MaintenanceSettings, now: datetime) -> Trigger | None:
    """Return why a job should be started now; None if none should."""
    if table.report is None or table.report.snapshot_id is None:
        return None  # there is no table yet
    if table.manual:
        return Trigger.MANUAL
    not_before = parse_time(table.before.get("notBefore"))
    if not_before is not None and now < not_before:
        return None
    last = parse_time(table.last.get("started"))
    if _is_unwell(table, settings, now) and (last is None or now - last >= HEALTH_EVERY):
        return Trigger.HEALTH
    at = next_after(table.spec.maintenance.schedule, last or table.created)
    if at is not None and at <= now and _is_worth_it(table, settings, now):
        return Trigger.SCHEDULE
    return None


def _is_unwell(table: Table, settings: MaintenanceSettings, now: datetime) -> bool:
    assert table.report is not None
    return (
        table.debt_files >= settings.small_files
        or _has_deletes(table, now)
        or table.report.manifests >= settings.manifests
        or table.report.snapshots
        >= settings.snapshots_factor * table.spec.maintenance.keep_snapshots
    )


def _has_deletes(table: Table, now: datetime) -> bool:
    """Tell whether files of deleted rows wait: history cannot be read until they are applied.

    Some that the last job left are not asked for again at once.
    """
    assert table.report is not None
    ended_at = parse_time(table.before.get("lastSuccess"))
    is_rest = bool(table.last.get("deleteFilesAfter"))
    may_help = not is_rest or ended_at is None or now - ended_at >= IDLE_WAIT
    return table.report.delete_files > 0 and may_help


def _is_worth_it(table: Table, settings: MaintenanceSettings, now: datetime) -> bool:
    if table.debt_files >= WORTH_FILES:
        return True
    success = parse_time(table.before.get("lastSuccess")) or table.created
    return now - success >= min(timedelta(seconds=settings.orphans_every.seconds), _aged(table))


def _aged(table: Table) -> timedelta:
    """Return after what time rows may be past their retention by enough to be worth a session."""
    retention, steps = table.spec.retention, str(table.last.get("steps", ""))
    if retention is None or table.report is None or not table.report.table_rows:
        return timedelta.max
    if RETENTION_REFUSED in steps:
        return timedelta.max  # a subscription needs them: it is told of, and a day is soon enough
    time = timedelta(milliseconds=retention.time.ms)
    if RETENTION_IDLE in steps:
        # All that is there now was younger then, and goes by whole periods of time.
        units = {each.name for each in table.spec.table.transforms if each.column == TW_TIME}
        return time + max((PERIODS.get(unit, RETIRE_EVERY) for unit in units), default=RETIRE_EVERY)
    return max(time / RETIRE_SHARE, RETIRE_EVERY)


# ---- what became of a job


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    run: Manifest
    """As `status.maintenance.last` shows it."""
    ok: bool
    retry: bool
    """The same run may succeed later."""


def ended(job: Manifest, pods: list[Manifest], topic: str) -> Ended | None:
    """Read what became of a job from its own status and its driver's last words; None: it runs."""
    status = job.get("status") or {}
    over = {
        condition["type"]: condition
        for condition in status.get("conditions") or ()
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed")
    }
    if not over:
        return None
    said = _last_words(pods)
    try:
        return _told(job, over, said, topic)
    except (ValueError, TypeError, AttributeError, OverflowError):
        # Whoever makes pods in the namespace can say anything there.
        return _told(job, over, {"message": json.dumps(said)[:500]}, topic)


def _told(
    job: Manifest, over: Mapping[str, Mapping[str, Any]], said: Mapping[str, Any], topic: str
) -> Ended:
    found: Mapping[str, Any] = next(
        (one for one in said.get("topics") or () if one.get("topic") == topic), {}
    )
    ok = "Complete" in over and bool(said.get("ok", True))
    message = str(found.get("message") or said.get("message") or "")
    if not ok and not message:
        message = str(over.get("Failed", {}).get("message", ""))
    annotations = job["metadata"].get("annotations") or {}
    before, after = found.get("before") or {}, found.get("after") or {}
    removed = found.get("removed") or {}
    done = list(found.get("steps") or ())
    steps = ", ".join(f"{step.get('job')}: {step.get('outcome')}" for step in done)
    refused = [str(step.get("message", "")) for step in done if step.get("outcome") == "refused"]
    run: Manifest = {
        "job": job["metadata"]["uid"],
        "trigger": annotations.get(ANNOTATION_TRIGGER, ""),
        "steps": steps[:1_000],
        "outcome": "Succeeded" if ok else "Failed",
        "started": job["metadata"].get("creationTimestamp"),
        "seconds": round(float(said.get("seconds") or 0)),
        "coreSeconds": round(float(said.get("core_seconds") or 0)),
        "filesBefore": int(before.get("files") or 0),
        "filesAfter": int(after.get("files") or 0),
        "filesRemoved": sum(int(removed.get(kind) or 0) for kind in REMOVED_FILES),
        "snapshotsExpired": int(removed.get("expired_snapshots") or 0),
        "deleteFilesAfter": int(after.get("delete_files") or 0),
        "message": (message or "; ".join(refused))[:1_000],
    }
    run = {key: value for key, value in run.items() if value not in ("", None)}
    return Ended(run, ok, bool(said.get("retry", True)))


def is_podless(job: Manifest, pods: list[Manifest]) -> bool:
    """Tell whether a job has begun, and there is no driver of it nor one on its way.

    That is so for a moment between two tries, too. One that Kubernetes holds back (`suspend`) has
    not begun.
    """
    status = job.get("status") or {}
    return not pods and not status.get("active") and bool(status.get("startTime"))


@dataclass(frozen=True)
class Podless:
    """A job that had no driver at each look of late."""

    since: datetime
    seen: datetime
    """The last look."""

    def again(self, now: datetime) -> "Podless":
        """Look again; a time in which nobody looked does not count: a driver may have come."""
        return Podless(self.since if now - self.seen < LOOK_GAP_MAX else now, now)


def driver_wait(
    pods: list[Manifest], podless: Podless | None
) -> tuple[datetime, Manifest | None] | None:
    """Return since when a job waits for its driver to run, and the pod, if there is one.

    None if it does not. When the job began says nothing: it may have had drivers that ended.
    """
    newest = max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), default=None)
    if newest is None:
        since = None if podless is None else podless.since
    elif (newest.get("status") or {}).get("phase") == "Pending":
        since = parse_time(newest["metadata"].get("creationTimestamp"))
    else:
        since = None
    return None if since is None else (since, newest)


def stuck(job: Manifest, message: str) -> Ended:
    """Return the end of a job whose driver never began."""
    limit_min = round(DRIVER_WAIT_MAX.total_seconds() / 60)
    annotations = job["metadata"].get("annotations") or {}
    run: Manifest = {
        "job": job["metadata"]["uid"],
        "trigger": annotations.get(ANNOTATION_TRIGGER, ""),
        "outcome": "Failed",
        "started": job["metadata"].get("creationTimestamp"),
        "message": f"its driver did not start within {limit_min} minutes: {message}"[:1_000],
    }
    return Ended({k: v for k, v in run.items() if v not in ("", None)}, ok=False, retry=True)


def refused(table: Table, trigger: Trigger, message: str, now: datetime) -> Ended:
    """Return the end of a job that the API server did not take: a failure like any other."""
    run: Manifest = {
        # Of the last one that was: it has been told of, and what it left still counts.
        "job": table.last.get("job"),
        "filesAfter": table.last.get("filesAfter"),
        "trigger": str(trigger),
        "outcome": "Refused",
        "started": format_time(now),
        "message": message[:1_000],
    }
    run = {key: value for key, value in run.items() if value not in ("", None)}
    return Ended(run, ok=False, retry=True)


def _last_words(pods: list[Manifest]) -> Mapping[str, Any]:
    """Return what the driver that ended last left behind."""
    words: list[tuple[str, str]] = []
    for pod in pods:
        for container in (pod.get("status") or {}).get("containerStatuses") or ():
            over = (container.get("state") or {}).get("terminated") or {}
            if over.get("message"):
                words.append((str(over.get("finishedAt", "")), str(over["message"])))
    if not words:
        return {}
    try:
        found = json.loads(max(words)[1])
    except ValueError:
        return {"message": max(words)[1][-500:]}
    return found if isinstance(found, dict) else {}


def after_end(before: Mapping[str, Any], end: Ended, now: datetime) -> Manifest:
    """Return the status after a job has ended."""
    found = {**before, "last": end.run, "running": "", "waiting": ""}
    if end.ok:
        wait_for = None
        if end.run.get("trigger") == Trigger.HEALTH and not _changed(end.run):
            wait_for = format_time(now + IDLE_WAIT)
        found |= {"failures": 0, "notBefore": wait_for, "lastSuccess": format_time(now)}
    else:
        failures = int(before.get("failures", 0)) + 1
        first, longest = _WAITS[end.retry]
        if _changed(end.run):
            longest = min(longest, IDLE_WAIT)
        wait = min(first * 2 ** min(failures - 1, 16), longest)
        found |= {"failures": failures, "notBefore": format_time(now + wait)}
    return found


def _changed(run: Mapping[str, Any]) -> bool:
    return ": done" in str(run.get("steps", ""))


def maintained(table: Table, status: Mapping[str, Any], settings: MaintenanceSettings) -> Told:
    """Say whether the table is looked after."""
    last = status.get("last") or {}
    if last.get("outcome") == "Failed":
        message = str(last.get("message", "")) or "the last job failed"
        return fails("Maintained", "JobFailed", message)
    if last.get("outcome") == "Refused":
        message = f"the API server refuses the job: {last.get('message', '')}"
        return fails("Maintained", "JobRefused", message)
    if status.get("waiting"):
        return fails("Maintained", "DriverPending", str(status["waiting"]))
    if RETENTION_REFUSED in str(last.get("steps", "")):
        message = str(last.get("message", "")) or "a subscription still needs what is past it"
        return fails("Maintained", "RetentionRefused", message)
    if table.debt_files >= BEHIND_FACTOR * settings.small_files:
        return fails("Maintained", "Behind", "files pile up faster than jobs join them")
    if not last:
        return unknown("Maintained", "NotYet", "no job was needed so far")
    return holds("Maintained", "Maintained")
