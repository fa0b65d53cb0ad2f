"""One pass over one namespace: gather, plan, apply, report.

What fails for one object becomes that object's condition, and the rest goes on. Everything may
stop at any point: the next pass starts from what is there.
"""

import logging
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from tidewater_coordination.port import RegisteredTopic, Registry
from tidewater_core.clock import Clock
from tidewater_core.errors import Invalid, Retryable, TidewaterError
from tidewater_core.names import ANNOTATION_LEFTOVER
from tidewater_operator.cluster.api import CLAIM, POOL, SECRET, Api, ApiRefused
from tidewater_operator.cluster.events import Events
from tidewater_operator.cluster.gather import gather
from tidewater_operator.cluster.write import bind_reviewers, make, settle, settle_set
from tidewater_operator.last_words import LastWords
from tidewater_operator.life import AcceptLoss, BeginDeletion, Refusal, UnregisterTopic, ends
from tidewater_operator.maintenance.keep import Maintenance
from tidewater_operator.model.compare import RestartReason, digest
from tidewater_operator.model.credentials import sources
from tidewater_operator.model.images import image_problem
from tidewater_operator.model.names import ETCD_SECRET, Manifest
from tidewater_operator.model.settings_file import worker_settings
from tidewater_operator.model.workers import around, of_namespace, stateful_set
from tidewater_operator.observed import Observed, Snapshot
from tidewater_operator.plan import Plan, PoolCase, plan, takes_away
from tidewater_operator.registry import Registries, Standing
from tidewater_operator.settings import AuthMode, OperatorSettings
from tidewater_operator.tell import Teller
from tidewater_operator.times import from_us
from tidewater_operator.trust import Trust
from tidewater_operator.workers import Workers

GROWTH_AGAIN_S: Final = 600.0
"""A volume that could not grow is tried again after this time."""
log = logging.getLogger(__name__)


@dataclass
class Memory:
    """What a namespace's passes remember; losing it costs a little time and nothing else."""

    snapshot: Snapshot | None = None
    unused_since: dict[str, datetime] = field(default_factory=dict)
    deleting_since: dict[str, datetime] = field(default_factory=dict)
    refused_growth: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Volume → what the API server said, and when."""
    problems: dict[str, Refusal] = field(default_factory=dict)
    """Pool → what went wrong when it was applied."""
    written: set[str] = field(default_factory=set)
    """Pools whose workers were changed since the snapshot was taken."""
    last_words: LastWords = field(default_factory=LastWords)


@dataclass(frozen=True)
class Problem(Refusal):
    """What went wrong when objects were applied."""

    is_blocking: bool = False
    """Workers cannot run without it."""


@dataclass(frozen=True)
class Outcome:
    """How a pass ended."""

    is_empty: bool = False
    """Nothing of ours is in the namespace: it needs no looking after."""
    is_busy: bool = False
    """Something is under way that no watch tells of: look at everything at the next beat."""
    needs_full: bool = False
    """Objects must change, and this pass did not look at them."""
    is_silent: bool = False
    """A worker that is there gave no answer: ask again soon."""


class Reconciler:
    """Does passes."""

    def __init__(
        self,
        settings: OperatorSettings,
        api: Api,
        registries: Registries,
        workers: Workers,
        events: Events,
        clock: Clock,
        namespace: str,
    ) -> None:
        self._settings, self._api, self._registries = settings, api, registries
        self._workers, self._events, self._clock = workers, events, clock
        self._namespace = namespace
        self._teller = Teller(api, events)
        self._trust = Trust(api, settings.tls.secret_name)
        self._maintenance = Maintenance(settings, api, events)

    async def run(self, name: str, memory: Memory, *, full: bool, figures: bool) -> Outcome:
        """Bring a namespace to what its objects say, as far as it goes now."""
        if full or memory.snapshot is None:
            await self._look(name, memory)
        snapshot = memory.snapshot
        if snapshot is None or snapshot.is_terminating or _is_empty(snapshot):
            self._maintenance.forget(name)
            self._trust.forget(name)
        if snapshot is None:
            await self._forget(name)
            return Outcome(is_empty=True)
        now = from_us(self._clock.now_us())
        try:
            standing = await self._registries.standing(name, snapshot.uid)
            registry = await self._registries.read(name)
        except TidewaterError as error:
            memory.snapshot = await self._teller.registry_is_away(snapshot, now, error)
            raise
        if standing is Standing.LEFT and (_is_empty(snapshot) or snapshot.is_terminating):
            return Outcome(is_empty=True)  # nobody here asked for what is registered
        if _is_empty(snapshot) and _is_blank(registry):
            registry = await self._registries.ask(name)
        if _is_empty(snapshot) and _is_blank(registry):
            if standing is Standing.OURS and not registry.workers:
                await self._forget(name)
            return Outcome(is_empty=True)
        trust = await self._trust.of(name)
        reports = await self._workers.reports(name, registry.workers, trust.context)
        seen = Observed(
            cluster=snapshot,
            registry=registry,
            reports=reports,
            too_large=self._workers.too_large(name),
            now=now,
            registry_is_known=standing is not Standing.NEW,
            retained=memory.last_words.retained,
            unused_since=memory.unused_since,
            elsewhere=await self._elsewhere(name),
        )
        seen, decided = await self._decide(seen, memory, full=full)
        snapshot = seen.cluster
        _remember(memory, seen, decided)
        if full and not snapshot.is_terminating:
            await self._apply(seen, decided, memory)
        if standing is Standing.LEFT or (standing is Standing.NEW and decided.registry):
            await self._registries.note(name, snapshot.uid)
        await self._tell_registry(seen, decided)
        if snapshot.is_terminating:
            return Outcome()
        kept = await self._maintenance.keep(seen, decided, full=full)
        await self._tell_late_deletions(seen, memory)
        memory.snapshot = await self._teller.statuses(
            seen,
            decided,
            _problems(decided, memory, trust.problem),
            {claim: said for claim, (said, _) in memory.refused_growth.items()},
            kept,
            written=memory.written,
            figures=figures,
        )
        more = kept.is_due or _changes_objects(decided, memory)
        silent = registry.workers.keys() - seen.reports.keys() - seen.too_large
        is_silent = any(seen.is_up(worker) for worker in silent)
        return Outcome(is_busy=kept.is_busy, needs_full=more and not full, is_silent=is_silent)

    async def _look(self, name: str, memory: Memory) -> None:
        memory.snapshot = await gather(self._api, name, await self._secrets(name))
        memory.written = set()
        if memory.snapshot is not None:
            memory.last_words.see(memory.snapshot.topics)

    async def _decide(self, seen: Observed, memory: Memory, *, full: bool) -> tuple[Observed, Plan]:
        """Return the plan, and what it was made on.

        What cannot be undone is decided on etcd's own word, since a watch that is behind may show a
        worker without what it holds by now; and on the objects as they are after that: what is
        registered was there before it was, so that what is not there now is gone. Objects that were
        looked at before another operator led, or before we were stopped, do not say so.
        """
        decided = plan(seen, self._settings)
        if not takes_away(decided):
            return seen, decided
        name = seen.cluster.namespace
        seen = replace(seen, registry=await self._registries.ask(name))
        decided = plan(seen, self._settings)
        if not full and not ends(decided.registry):
            return seen, decided  # objects are not touched by this pass
        await self._look(name, memory)
        if memory.snapshot is None:
            raise Retryable("NamespaceGone", f"namespace {name} went meanwhile", 500)
        seen = replace(seen, cluster=memory.snapshot, retained=memory.last_words.retained)
        return seen, plan(seen, self._settings)

    async def _elsewhere(self, name: str) -> Mapping[str, RegisteredTopic]:
        """Return whose tables topics of this namespace could name besides their own."""
        return await self._registries.elsewhere(name) if self._settings.tables.allow_foreign else {}

    async def _forget(self, name: str) -> None:
        try:
            await self._registries.forget(name)
        except Invalid as error:  # another cluster's registry
            log.warning("namespace %s is not forgotten: %s", name, error)
        if self._settings.auth.mode is AuthMode.KUBERNETES:
            await self._bind_reviewers(name, wanted=False)

    async def _bind_reviewers(self, name: str, *, wanted: bool) -> None:
        try:
            binding = self._settings.auth.reviewers_binding
            await bind_reviewers(self._api, binding, name, wanted=wanted)
        except TidewaterError as error:  # another namespace's pass was first: the next one is
            log.info("the reviewers' binding could not be changed: %s", error)

    async def _secrets(self, namespace: str) -> dict[str, Mapping[str, str]]:
        """Return the Secrets to copy to a namespace."""
        found: dict[str, Mapping[str, str]] = {}
        for target, source in sources(self._settings, namespace, self._namespace).items():
            secret = await self._api.get(SECRET, self._namespace, source)
            found[target] = (secret or {}).get("data") or {}
        return found

    # ---- apply

    async def _apply(self, seen: Observed, decided: Plan, memory: Memory) -> None:
        """Objects first, then volumes: each pool for itself."""
        name = seen.cluster.namespace
        for manifest in decided.make_pools:
            pool = manifest["metadata"]["name"]
            await self._attempt(f"make pool {name}/{pool}", make(self._api, manifest))
        shared = await self._apply_shared(seen, decided)
        memory.problems = {}
        for case in decided.pools:
            if case.paused or case.pool is None:
                continue
            error = shared
            if shared is None or not shared.is_blocking:
                error = await self._apply_pool(seen, case, memory) or shared
            if error is not None:
                memory.problems[case.name] = Refusal(error.reason, error.message)
        for growth in decided.grow:
            await self._grow(seen, growth.claim, growth.size, memory)
        uids = {
            claim["metadata"]["name"]: claim["metadata"]["uid"] for claim in seen.cluster.claims
        }
        for claim, logs in decided.mark_claims.items():
            change: Manifest = {"metadata": {"annotations": {ANNOTATION_LEFTOVER: logs}}}
            what = f"note on volume {name}/{claim} that logs are left on it: {logs}"
            await self._attempt(what, self._api.merge(CLAIM, name, claim, change))
        for claim in decided.drop_claims:
            what = f"let volume {name}/{claim} go: nothing is left on it"
            await self._attempt(what, self._api.delete(CLAIM, name, claim, uids[claim]))
        for case in decided.pools:
            if case.name in decided.drop_pools:
                uid = case.manifest["metadata"]["uid"]
                what = f"remove pool {name}/{case.name}: no topic needs it"
                await self._attempt(what, self._api.delete(POOL, name, case.name, uid))

    async def _attempt(self, what: str, call: Awaitable[object]) -> None:
        """Do one thing; that it fails keeps nothing else from being done."""
        log.info("%s", what)
        try:
            await call
        except TidewaterError as error:
            log.warning("%s: %s", what, error)

    async def _settle_all(
        self, seen: Observed, manifests: Iterable[Manifest], needed: Collection[str]
    ) -> Problem | None:
        """Apply each of some objects; return the worst that happened: one of the needed kinds."""
        found: Problem | None = None
        for manifest in manifests:
            try:
                await settle(self._api, seen.cluster.objects, manifest)
            except TidewaterError as error:
                problem = Problem(error.reason, error.message, manifest["kind"] in needed)
                if found is None or (problem.is_blocking and not found.is_blocking):
                    found = problem
        return found

    async def _apply_shared(self, seen: Observed, decided: Plan) -> Problem | None:
        """Apply what all pools of the namespace need; return why it could not be."""
        pools = [case.manifest for case in decided.pools]
        if not pools:
            return None
        name = seen.cluster.namespace
        for secret, data in seen.cluster.secrets.items():
            if not data:
                source = sources(self._settings, name, self._namespace).get(secret)
                message = f"Secret {source}, to be copied as {secret}, is not there, or empty"
                return Problem("SecretNotFound", message, is_blocking=True)
        manifests = of_namespace(name, pools, self._settings, seen.cluster.secrets)
        found = await self._settle_all(seen, manifests, ("ServiceAccount", "Secret"))
        if self._settings.auth.mode is AuthMode.KUBERNETES:
            await self._bind_reviewers(name, wanted=True)
        return found

    async def _apply_pool(self, seen: Observed, case: PoolCase, memory: Memory) -> Problem | None:
        """Apply a pool; what is not needed to run keeps its workers from nothing."""
        pool = case.pool
        assert pool is not None
        if problem := image_problem(pool.spec, self._settings):
            return Problem("ImageNotAllowed", f"{problem}. It goes on as it was", is_blocking=True)
        etcd_keys = frozenset(seen.cluster.secrets.get(ETCD_SECRET, ()))
        settings_json = worker_settings(pool, self._settings, etcd_keys)
        manifests = around(pool, self._settings, settings_json)
        found = await self._settle_all(seen, manifests, ("ConfigMap", "Service"))
        if found is not None and found.is_blocking:
            return found
        secrets = {name: dict(data) for name, data in seen.cluster.secrets.items()}
        wanted = stateful_set(
            pool,
            self._settings,
            replicas=case.replicas,
            config_hash=digest([settings_json, secrets]),
            etcd_keys=etcd_keys,
        )
        try:
            written, reasons = await settle_set(self._api, seen.cluster.objects, wanted)
        except TidewaterError as error:
            return Problem(error.reason, error.message, is_blocking=True)
        if written is not None:
            memory.written.add(case.name)
            await self._tell_change(case, reasons)
        return found

    async def _tell_change(self, case: PoolCase, reasons: Iterable[RestartReason]) -> None:
        for reason in reasons:
            await self._events.tell(
                case.manifest, reason, "the workers are started anew, one at a time"
            )
        if case.live_replicas and case.replicas != case.live_replicas:
            word = "ScaledOut" if case.replicas > case.live_replicas else "ScaledIn"
            message = f"from {case.live_replicas} to {case.replicas} workers"
            await self._events.tell(case.manifest, word, message)

    async def _grow(self, seen: Observed, claim: str, size: str, memory: Memory) -> None:
        known = memory.refused_growth.get(claim)
        now = self._clock.monotonic()
        if known is not None and now - known[1] < GROWTH_AGAIN_S:
            return
        change: Manifest = {"spec": {"resources": {"requests": {"storage": size}}}}
        try:
            await self._api.merge(CLAIM, seen.cluster.namespace, claim, change)
            memory.refused_growth.pop(claim, None)
        except ApiRefused as error:
            memory.refused_growth[claim] = (error.message, now)
        except TidewaterError as error:
            log.warning("volume %s could not be asked to grow: %s", claim, error)

    # ---- registry

    async def _tell_registry(self, seen: Observed, decided: Plan) -> None:
        name = seen.cluster.namespace
        manifests = {case.name: case.manifest for case in decided.topics}
        for action in decided.registry:
            try:
                await self._registries.do(name, action)
            except TidewaterError as error:
                # One topic's trouble is not another's; its status shows where it stands.
                log.warning("%s/%s: %s: %s", name, action.name, type(action).__name__, error)
                continue
            if isinstance(action, UnregisterTopic):
                log.info("topic %s/%s is forgotten: %s", name, action.name, action.why)
            elif isinstance(action, BeginDeletion):
                log.info("topic %s/%s was deleted and is drained", name, action.name)
            elif isinstance(action, AcceptLoss) and action.name in manifests:
                for partition in action.give_up:
                    message = f"partition {partition} goes on behind a gap: {action.reason}"
                    manifest = manifests[action.name]
                    await self._events.tell(manifest, "VolumeGivenUp", message, warning=True)

    async def _tell_late_deletions(self, seen: Observed, memory: Memory) -> None:
        """Say of deleted topics that cannot be drained why they are not gone yet."""
        limit_s = self._settings.intervals.deletion_timeout.seconds
        pools = seen.cluster.pools
        for name, since in memory.deleting_since.items():
            if (seen.now - since).total_seconds() >= limit_s and pools:
                await self._events.tell(
                    pools[0],
                    "DeletionWaits",
                    f"topic {name} was deleted and waits for its workers to drain it",
                    warning=True,
                )


def _problems(decided: Plan, memory: Memory, of_all: Refusal | None) -> Mapping[str, Refusal]:
    """Return what is wrong with each pool; `of_all` is of the namespace."""
    if of_all is None:
        return memory.problems
    return {**dict.fromkeys([case.name for case in decided.pools], of_all), **memory.problems}


def _is_empty(snapshot: Snapshot) -> bool:
    return not (snapshot.topics or snapshot.subscriptions or snapshot.pools or snapshot.claims)


def _is_blank(registry: Registry) -> bool:
    return not (registry.topics or registry.subscriptions or registry.unreadable)


def _changes_objects(decided: Plan, memory: Memory) -> bool:
    """Tell whether more than the registry must change."""
    return bool(
        decided.make_pools
        or decided.drop_pools
        or decided.drop_claims
        or decided.mark_claims
        or any(growth.claim not in memory.refused_growth for growth in decided.grow)
        or any(
            case.replicas != case.live_replicas
            for case in decided.pools
            if not case.paused and case.pool is not None and case.name not in memory.problems
        )
    )


def _remember(memory: Memory, seen: Observed, decided: Plan) -> None:
    memory.unused_since = {
        name: memory.unused_since.get(name, seen.now) for name in decided.unused_pools
    }
    deleting = [
        full.partition("/")[2]
        for full, reg in seen.registry.topics.items()
        if reg.phase != "active"
    ]
    there = {topic["metadata"]["uid"] for topic in seen.cluster.topics}
    memory.last_words.keep({*there, *(reg.uuid for reg in seen.registry.topics.values())})
    memory.deleting_since = {name: memory.deleting_since.get(name, seen.now) for name in deleting}
