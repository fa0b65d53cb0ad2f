"""All subscriptions of a worker, kept like the registry."""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

from pydantic import ValidationError

from tidewater_coordination.port import RegisteredSubscription
from tidewater_coordination.rules import unreadable_subscriptions
from tidewater_core.crd.explain import problems
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_core.errors import Corrupt, Invalid, NotFound, Retryable, TidewaterError
from tidewater_worker.dispatch.bell import Bell
from tidewater_worker.dispatch.deadletter import DeadLetters
from tidewater_worker.dispatch.idle import Idle
from tidewater_worker.dispatch.ports import ProgressPort
from tidewater_worker.dispatch.spread import Spread
from tidewater_worker.dispatch.store import ProgressStore
from tidewater_worker.dispatch.subscription import Subscription
from tidewater_worker.node import Node

WORKER_CHARS_MAX: Final = 64
"""Of a worker's id in a name that is made up; the whole has to be a consumer's name."""
CHANGED_WAIT_S: Final = 30.0
FAILED_WAIT_S: Final = 2.0
OPEN_SOON_S: Final = 0.005
OPEN_RETRY_S: Final = 0.2
OPEN_RETRY_S_MAX: Final = 5.0
log = logging.getLogger(__name__)


def _spec_of(registered: RegisteredSubscription) -> SubscriptionSpec:
    try:
        return SubscriptionSpec.from_json(registered.spec)
    except ValidationError as error:
        said = "; ".join(problems(error, SubscriptionSpec))
        raise Invalid("InvalidSpec", f"this worker cannot read the spec: {said}") from error


class Dispatch:
    """Serves the subscriptions of a node's topics."""

    def __init__(self, node: Node, port: ProgressPort) -> None:
        self._node, self._port = node, port
        self.store = ProgressStore(port)
        self.bell = Bell()
        self.idle = Idle(node.clock)
        self.dead_letters = DeadLetters(node, self.store, port)
        self._by_name: dict[str, Subscription] = {}
        self._registered: dict[str, RegisteredSubscription] = {}
        self._by_topic: dict[str, dict[str, Subscription]] = {}
        self.refused: dict[str, TidewaterError] = {}
        """Subscriptions whose registered spec is not served, and why."""
        self._failed: dict[str, TidewaterError] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._unopened: set[str] = set()
        self._open_wake = asyncio.Event()

    def made_up_name(self, kind: str) -> str:
        """Name a consumer that has no name of its own.

        Nobody has the name on another worker or had it before a restart: what one of them holds
        is not another's to take, nor to give back (G4).
        """
        worker = self._node.settings.worker_id[:WORKER_CHARS_MAX]  # for people who look
        return f"{kind}-{worker}-{self._node.ids.uuid().hex}"

    # ---- life cycle

    async def start(self) -> None:
        """Take the registry's subscriptions and begin to follow it."""
        self._node.state_listeners.append(self._on_state)
        self._node.subscriptions = self.report
        self._node.refused_subscriptions = self.refused
        version = await self._sync()
        self._tasks = [
            asyncio.create_task(self._follow(version)),
            asyncio.create_task(self._open_all()),
        ]

    async def close(self) -> None:
        """Send waiting consumers away and store what is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._by_name.values():
            subscription.end(Retryable("ShuttingDown", "this worker is shutting down", 500))
        await self.idle.close()
        await self.bell.close()
        await self.store.close()

    def _on_state(self, topic: str) -> None:
        """Hear from the table process: more may be committed, or a partition has opened."""
        self.bell.ring(topic)
        if self._unopened:
            self._open_wake.set()

    async def _follow(self, version: int) -> None:
        while True:
            # What was refused may have waited for something else: a column that its topic gets.
            wait_s = FAILED_WAIT_S if self._failed else CHANGED_WAIT_S
            try:
                if await self._port.changed(version, wait_s) != version or self._failed:
                    version = await self._sync()
            except TidewaterError as error:
                log.warning("subscriptions are not in step with the registry: %s", error)
                await asyncio.sleep(1.0)
            except Exception:
                # Whatever it is: without this, nobody hears of a subscription any more.
                log.exception("subscriptions are not in step with the registry")
                await asyncio.sleep(1.0)

    async def _sync(self) -> int:
        registry = await self._port.registry()
        unreadable = unreadable_subscriptions(registry)  # they go on by what they were last
        for name in self._by_name.keys() - registry.subscriptions.keys() - unreadable:
            self._drop(name)
        failed: dict[str, TidewaterError] = {}
        for registered in registry.subscriptions.values():
            try:
                await self._sync_one(registered, registry.version)
            except TidewaterError as error:
                # One bad subscription never stands in the way of another.
                failed[registered.name] = error
                if str(error) != str(self._failed.get(registered.name)):
                    log.warning("subscription %s: %s", registered.name, error)
            except Exception as error:
                failed[registered.name] = Retryable("Internal", f"a fault of the worker: {error!r}")
                log.exception("subscription %s", registered.name)
        self._failed = failed
        self.refused.clear()
        self.refused.update((n, error) for n, error in failed.items() if isinstance(error, Invalid))
        for name in unreadable:
            said = f"the registry has something unreadable at subscriptions/{name}"
            self.refused[name] = Corrupt("RecordUnreadable", said)
        # Topics and partitions may have come, too.
        self._unopened = set(self._by_name)
        self._open_wake.set()
        return registry.version

    async def _sync_one(self, registered: RegisteredSubscription, version: int) -> None:
        known = self._registered.get(registered.name)
        subscription = self._by_name.get(registered.name)
        if known == registered:
            if subscription is not None:
                subscription.version = version
            return
        spec = _spec_of(registered)
        same = subscription is not None and subscription.uuid == registered.uuid
        if subscription is not None and same and subscription.spec.topic == spec.topic:
            await subscription.change(spec, version)
        else:
            self._drop(registered.name)
            subscription = Subscription(
                self._node, self.store, self.bell, self.dead_letters, self.idle,
                self._port.load_cursors, registered.name, registered.uuid, spec,
                version,
            )  # fmt: skip
            self._by_name[registered.name] = subscription
            topic = self._by_topic.setdefault(subscription.topic_name, {})
            topic[registered.name.partition("/")[2]] = subscription
        self._registered[registered.name] = registered

    def _drop(self, name: str) -> None:
        subscription = self._by_name.pop(name, None)
        self._registered.pop(name, None)
        if subscription is not None:
            self._by_topic[subscription.topic_name].pop(name.partition("/")[2], None)
            subscription.forget(
                NotFound("UnknownSubscription", f"there is no subscription {name} any more")
            )

    async def _open_all(self) -> None:
        """Give every subscription its place in every partition, as soon as both are there.

        `latest` means the moment at which the subscription came, not its first pull.
        """
        wait_s = OPEN_RETRY_S
        while True:
            self._open_wake.clear()
            before = len(self._unopened)
            for name in list(self._unopened):
                subscription = self._by_name.get(name)
                if subscription is None or await self._opened(subscription):
                    self._unopened.discard(name)
            wait_s = OPEN_RETRY_S if len(self._unopened) < before else wait_s * 2
            timeout = min(wait_s, OPEN_RETRY_S_MAX) if self._unopened else None
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._open_wake.wait()
                    wait_s = OPEN_RETRY_S
                    await asyncio.sleep(OPEN_SOON_S)  # the partition itself opens first

    async def _opened(self, subscription: Subscription) -> bool:
        try:
            return await subscription.open()
        except TidewaterError as error:
            log.debug("subscription %s is not open yet: %s", subscription.name, error)
            return False
        except Exception:
            log.exception("subscription %s is not open yet", subscription.name)
            return False

    # ---- what there is

    def report(self) -> list[dict[str, Any]]:
        """Count what each subscription has here, for the operator and for metrics."""
        return [subscription.report() for subscription in self._by_name.values()]

    def find(self, namespace: str, topic: str, name: str) -> Spread:
        """Return a subscription with all its partitions, or raise that there is none."""
        return Spread(self._node, self.local(namespace, topic, name))

    def local(self, namespace: str, topic: str, name: str) -> Subscription:
        """Return a subscription with the partitions that are here, or raise that there is none."""
        found = self._by_topic.get(f"{namespace}/{topic}", {}).get(name)
        if found is None:
            self._node.topic(namespace, topic)
            if (refused := self.refused.get(f"{namespace}/{name}")) is not None:
                raise refused.with_traceback(None)
            raise NotFound(
                "UnknownSubscription",
                f"topic {namespace}/{topic} has no subscription {name[:80]!r}",
            )
        return found

    def of_topic(self, namespace: str, topic: str) -> list[Spread]:
        """Return the subscriptions of a topic, by name."""
        self._node.topic(namespace, topic)
        found = self._by_topic.get(f"{namespace}/{topic}", {})
        return [Spread(self._node, found[name]) for name in sorted(found)]
