"""Start Spark jobs and collect what became of them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from tidewater_coordination.port import TopicPhase
from tidewater_core.errors import Invalid, TidewaterError
from tidewater_core.names import ANNOTATION_MAINTAIN
from tidewater_operator.cluster.api import JOB, Api, ApiRefused
from tidewater_operator.cluster.events import Events
from tidewater_operator.cluster.gather import OURS
from tidewater_operator.cluster.write import settle
from tidewater_operator.conditions import Told, unknown
from tidewater_operator.life import TopicCase, pool_of, registered_spec
from tidewater_operator.maintenance.cron import next_after
from tidewater_operator.maintenance.decide import (
    DRIVER_LATE,
    DRIVER_WAIT_MAX,
    Ended,
    Podless,
    Table,
    Trigger,
    after_end,
    driver_wait,
    due,
    ended,
    is_podless,
    maintained,
    refused,
    stuck,
)
from tidewater_operator.maintenance.job import account, job, job_name, wants_executors
from tidewater_operator.model.names import (
    ETCD_SECRET,
    PIPELINE_ACCOUNT,
    Manifest,
    owners,
    shared_labels,
)
from tidewater_operator.model.workers import role_binding
from tidewater_operator.observed import Observed
from tidewater_operator.other_status import pod_trouble
from tidewater_operator.plan import Plan
from tidewater_operator.report import topic_facts
from tidewater_operator.settings import OperatorSettings
from tidewater_operator.times import format_time, parse_time

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """What is to be said of each topic's maintenance."""

    statuses: Mapping[str, tuple[Mapping[str, Any] | None, Told]] = field(default_factory=dict)
    is_busy: bool = False
    """A job runs, or will soon: look again before long."""
    is_due: bool = False
    """One should be started, and this pass did not look at the jobs that there are."""
    is_enabled: bool = True
    """Tables are looked after at all."""

    def of(self, topic: str) -> tuple[Mapping[str, Any] | None, Told]:
        """Return a topic's maintenance status and condition."""
        reason = "NotServed" if self.is_enabled else "Disabled"
        return self.statuses.get(topic, (None, unknown("Maintained", reason)))


class Maintenance:
    """Looks after the tables of all namespaces; at most so many jobs at a time."""

    def __init__(self, settings: OperatorSettings, api: Api, events: Events) -> None:
        self._settings, self._api, self._events = settings, api, events
        self._running: Counter[str] = Counter()
        """Namespace → jobs that run, as far as they were looked at."""
        self._replacing: set[str] = set()
        """Namespaces where an old job has to go before the next one can have its name."""
        self._starting = asyncio.Lock()
        """Jobs are counted and started one after the other, or two would take the last place."""
        self._podless: dict[str, dict[str, Podless]] = {}
        """Namespace → uid of a job → how long it has had no driver; lost, it counts anew."""

    def forget(self, namespace: str) -> None:
        """Give back the places of a namespace's jobs: they end with its topics."""
        self._running.pop(namespace, None)
        self._replacing.discard(namespace)
        self._podless.pop(namespace, None)

    async def keep(self, seen: Observed, decided: Plan, *, full: bool) -> Kept:
        """Collect what has ended, then start what is due."""
        if not self._settings.maintenance.enabled or not self._settings.pipeline_image:
            return Kept(is_enabled=False)
        jobs = {one["metadata"]["name"]: one for one in seen.cluster.jobs}
        if full:  # else what there is of jobs may be from before we started one
            self._running[seen.cluster.namespace] = sum(map(_runs, jobs.values()))
            self._replacing.discard(seen.cluster.namespace)
            self._note_podless(seen)
        statuses: dict[str, tuple[Mapping[str, Any] | None, Told]] = {}
        is_due = False
        for case in decided.topics:
            table = _table(seen, case)
            if table is None:
                continue
            told = maintained(table, table.before, self._settings.maintenance)
            statuses[case.name] = (table.before, told)  # stands unless more is found out
            if not full:  # what there is of jobs may be old: nothing is said or done by it
                is_due = is_due or self._is_due(case, table, seen)
                continue
            try:
                statuses[case.name] = await self._topic(seen, decided, case, table, jobs)
            except TidewaterError as error:
                log.warning("%s: maintenance: %s", case.name, error)
        name = seen.cluster.namespace
        busy = bool(self._running[name]) or name in self._replacing
        return Kept(statuses, is_busy=busy, is_due=is_due)

    def _note_podless(self, seen: Observed) -> None:
        """Note which jobs have no driver; those that have one again, or are gone, are forgotten."""
        before = self._podless.get(seen.cluster.namespace, {})
        uids = [
            str(one["metadata"]["uid"])
            for one in seen.cluster.jobs
            if is_podless(one, _pods_of(seen, one))
        ]
        first = Podless(seen.now, seen.now)
        self._podless[seen.cluster.namespace] = {
            uid: before.get(uid, first).again(seen.now) for uid in uids
        }

    def _is_due(self, case: TopicCase, table: Table, seen: Observed) -> bool:
        return (
            not case.paused
            and not table.before.get("running")
            and due(table, self._settings.maintenance, seen.now) is not None
            and self._has_room(seen.cluster.namespace)
        )

    async def _topic(
        self,
        seen: Observed,
        decided: Plan,
        case: TopicCase,
        table: Table,
        jobs: Mapping[str, Manifest],
    ) -> tuple[Mapping[str, Any], Told]:
        status: Manifest = {**table.before, "running": "", "waiting": ""}
        found = jobs.get(job_name(case.name))
        pods = [] if found is None else _pods_of(seen, found)
        end = None
        if found is not None:
            end = ended(found, pods, f"{seen.cluster.namespace}/{case.name}")
            podless = self._podless.get(seen.cluster.namespace, {}).get(found["metadata"]["uid"])
            if end is None and (wait := driver_wait(pods, podless)) is not None:
                status["waiting"] = _trouble(wait, seen.now)
                if seen.now - wait[0] >= DRIVER_WAIT_MAX and not case.paused:
                    end = stuck(found, status.pop("waiting"))
        is_news = end is None or end.run["job"] != table.last.get("job")
        if found is not None and is_news:
            # Said again from the Job itself: we may have been stopped after we made it.
            word = (found["metadata"].get("annotations") or {}).get(ANNOTATION_MAINTAIN, "")
            status["manual"] = word or status.get("manual", "")
            status["running"] = job_name(case.name) if end is None else ""
            table = replace(table, before=status)
        if found is not None and end is not None and is_news:
            if _runs(found):  # its place is given to others
                meta = found["metadata"]
                await self._api.delete(JOB, seen.cluster.namespace, meta["name"], meta["uid"])
            status = after_end(status, end, seen.now)
            await self._tell_end(case, end)
        elif not case.paused and (found is None or end is not None):
            status |= await self._start(seen, decided, case, table, found)
        at = next_after(table.spec.maintenance.schedule, seen.now)
        status["next"] = None if at is None else format_time(at)
        status = {key: value for key, value in status.items() if value not in ("", None)}
        return status, maintained(table, status, self._settings.maintenance)

    async def _start(
        self,
        seen: Observed,
        decided: Plan,
        case: TopicCase,
        table: Table,
        old: Manifest | None,
    ) -> Mapping[str, Any]:
        """Start a job if one is due; return what that changes in the status."""
        trigger = due(table, self._settings.maintenance, seen.now)
        if trigger is None or not self._has_room(seen.cluster.namespace):
            return {}
        word = table.manual[:1_000] or table.before.get("manual", "")
        try:
            async with self._starting:
                await self._count()
                if not self._has_room(seen.cluster.namespace):
                    return {}
                if not await self._make(seen, decided, case, table, trigger, old):
                    return {}
        except Invalid as error:
            if (
                isinstance(error, ApiRefused) and error.code == 409
            ):  # it is there, or not as we saw it: the next pass looks again
                raise
            end = refused(table, trigger, error.message, seen.now)
            await self._tell_end(case, end)
            return {**after_end(table.before, end, seen.now), "manual": word}
        return {"running": job_name(case.name), "manual": word}

    async def _make(
        self,
        seen: Observed,
        decided: Plan,
        case: TopicCase,
        table: Table,
        trigger: Trigger,
        old: Manifest | None,
    ) -> bool:
        """Make a job; False while its predecessor has to go first."""
        namespace = seen.cluster.namespace
        if old is not None:  # its name is needed; the next pass starts the new one
            uid = old["metadata"]["uid"]
            await self._api.delete(JOB, namespace, old["metadata"]["name"], uid)
            self._replacing.add(namespace)
            return False
        assert table.report is not None
        report = table.report
        work_bytes = report.bytes if report.debt_bytes is None else report.debt_bytes
        spread = wants_executors(table.spec, work_bytes)
        await self._prepare(seen, decided, spread=spread)
        manifest = job(
            case.manifest,
            table.spec,
            pool_of(case.name, table.spec),
            trigger,
            self._settings,
            work_bytes=work_bytes,
            word=table.manual[:1_000],
            etcd_keys=frozenset(seen.cluster.secrets.get(ETCD_SECRET, ())),
        )
        await self._api.create(JOB, namespace, manifest)
        self._running[namespace] += 1
        where = "with executors" if spread else "in one pod"
        message = f"{table.report.files} files, {table.report.snapshots} snapshots, {where}"
        await self._events.tell(case.manifest, f"Maintenance{trigger}", message)
        return True

    async def _count(self) -> None:
        """Count the jobs of all namespaces, also of those that no pass has looked at yet.

        Whoever led before us may have started some there.
        """
        watched = self._settings.watch_namespaces
        namespaces: list[str | None] = [*watched] or [None]
        jobs: list[Manifest] = []
        for namespace in namespaces:
            try:
                jobs += await self._api.list(JOB, namespace, OURS)
            except ApiRefused as error:  # it is gone, with our rights in it, or is not ours to see
                log.info("the jobs of %s are not counted: %s", namespace or "all", error)
        self._running = Counter(job["metadata"]["namespace"] for job in jobs if _runs(job))

    def _has_room(self, namespace: str) -> bool:
        """Tell whether another job may run: half of the places are kept from any one namespace."""
        most = self._settings.maintenance.max_jobs
        mine = self._running[namespace]
        return self._running.total() < most and mine < (most + 1) // 2

    async def _prepare(self, seen: Observed, decided: Plan, *, spread: bool) -> None:
        head = {
            "namespace": seen.cluster.namespace,
            "labels": shared_labels(),
            "ownerReferences": owners(case.manifest for case in decided.pools),
        }
        await settle(self._api, seen.cluster.objects, account(head))
        if spread:
            role = self._settings.maintenance.role
            binding = role_binding(head, PIPELINE_ACCOUNT, role, PIPELINE_ACCOUNT)
            await settle(self._api, seen.cluster.objects, binding)

    async def _tell_end(self, case: TopicCase, end: Ended) -> None:
        run = end.run
        if end.ok:
            message = (
                f"{run.get('filesBefore', 0)} files became {run.get('filesAfter', 0)} "
                f"({run.get('filesRemoved', 0)} removed, {run.get('snapshotsExpired', 0)} "
                f"snapshots expired) in {run.get('seconds', 0)} s "
                f"({run.get('coreSeconds', 0)} core seconds)"
            )
            await self._events.tell(case.manifest, "MaintenanceDone", message)
        else:
            message = str(run.get("message") or "the job failed")
            await self._events.tell(case.manifest, "MaintenanceFailed", message, warning=True)


def _table(seen: Observed, case: TopicCase) -> Table | None:
    """Return what is known of a topic's table; None if the topic is not served."""
    reg = seen.registered(case.name)
    if reg is None or reg.uuid != case.uid or reg.phase != TopicPhase.ACTIVE:
        return None
    spec = registered_spec(reg)
    if spec is None:
        return None
    meta = case.manifest["metadata"]
    return Table(
        spec=spec,
        created=parse_time(meta.get("creationTimestamp")) or seen.now,
        report=topic_facts(case.name, case.uid, seen.told).table,
        annotations=meta.get("annotations") or {},
        before=(case.manifest.get("status") or {}).get("maintenance") or {},
    )


def _runs(job: Manifest) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return not any(
        one["type"] in ("Complete", "Failed") and one["status"] == "True" for one in conditions
    )


def _pods_of(seen: Observed, job: Manifest) -> list[Manifest]:
    """Return the drivers of a job."""
    return [
        pod
        for pod in seen.cluster.pods
        if pod["metadata"].get("labels", {}).get("job-name") == job["metadata"]["name"]
    ]


def _trouble(wait: tuple[datetime, Manifest | None], now: datetime) -> str:
    """Say why a driver does not run; nothing while it has only just been asked for."""
    since, pod = wait
    if now - since < DRIVER_LATE:
        return ""
    if pod is None:
        return "no pod could be made for the job; its events say why"
    found = pod_trouble(pod)
    return "its pod is Pending" if found is None else f"{found.reason}: {found.message}"[:1_000]
