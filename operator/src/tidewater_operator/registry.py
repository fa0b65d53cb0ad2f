"""The registry in etcd: one prefix for each namespace, and a list of those that were ever used.

    <prefix>/.namespaces/<namespace>     made when the first thing is registered; no namespace of
                                         Kubernetes begins with a dot
    <prefix>/<namespace>/…               as tidewater_coordination has it

The list is how an operator that was away learns of namespaces that are gone, and how an empty
registry is told from one that was lost.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from tidewater_coordination.etcd import wire
from tidewater_coordination.etcd.client import EtcdClient
from tidewater_coordination.etcd.login import Login
from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.port import Registry, TopicPhase
from tidewater_core.errors import Retryable
from tidewater_operator.life import (
    Action,
    Assign,
    BeginDeletion,
    GiveUp,
    RegisterSubscription,
    RegisterTopic,
    UnregisterSubscription,
    UnregisterTopic,
)

_LIST: Final = ".namespaces"
log = logging.getLogger(__name__)


class Registries:
    """Opens the registry of each namespace once."""

    def __init__(self, endpoints: Sequence[str], prefix: str, login: Login) -> None:
        self._endpoints, self._prefix, self._login = list(endpoints), prefix.strip("/"), login
        self._client = EtcdClient(self._endpoints, login)
        self._client.open()
        self._open: dict[str, EtcdCoordination] = {}
        self.may_write: Callable[[], bool] = lambda: True
        """Whether we lead; asked before each change."""

    async def close(self) -> None:
        """Hang up."""
        for store in self._open.values():
            await store.close()
        await self._client.close()

    async def namespaces(self) -> list[str]:
        """Return the namespaces that something was ever registered in."""
        start = f"{self._prefix}/{_LIST}/".encode()
        answer = await self._client.range(start, wire.prefix_end(start), keys_only=True)
        return [kv.key.decode().rpartition("/")[2] for kv in answer.kvs]

    async def is_known(self, namespace: str) -> bool:
        """Tell whether a namespace was ever used; raises while etcd does not answer."""
        return bool((await self._client.range(self._key(namespace))).kvs)

    async def note(self, namespace: str) -> None:
        """Put a namespace on the list."""
        self._check_leading()
        await self._client.txn([], [wire.put(self._key(namespace), b"{}")])

    async def forget(self, namespace: str) -> None:
        """Remove everything of a namespace that is gone."""
        self._check_leading()
        await self.release(namespace)
        start = f"{self._prefix}/{namespace}/".encode()
        await self._client.txn(
            [],
            [wire.delete(start, wire.prefix_end(start)), wire.delete(self._key(namespace))],
        )

    def _check_leading(self) -> None:
        if not self.may_write():
            raise Retryable("NotLeading", "another operator may lead", 1_000)

    def _key(self, namespace: str) -> bytes:
        return f"{self._prefix}/{_LIST}/{namespace}".encode()

    async def store(self, namespace: str) -> EtcdCoordination:
        """Return the open registry of a namespace."""
        found = self._open.get(namespace)
        if found is None:
            found = EtcdCoordination(
                tuple(self._endpoints), f"{self._prefix}/{namespace}", self._login
            )
            try:
                await found.start()
            except BaseException:
                await found.close()
                raise
            self._open[namespace] = found
        return found

    async def release(self, namespace: str) -> None:
        """Close the registry of a namespace that needs no looking after."""
        found = self._open.pop(namespace, None)
        if found is not None:
            await found.close()

    async def read(self, namespace: str) -> Registry:
        """Return a namespace's registry as it is."""
        return await (await self.store(namespace)).registry()

    async def changed(self, namespace: str, since: int, timeout_s: float) -> int:
        """Wait until a namespace's registry has changed; return its version."""
        return await (await self.store(namespace)).changed(since, timeout_s)

    async def do(self, namespace: str, action: Action) -> None:
        """Tell the registry one thing. All of them may be told twice."""
        self._check_leading()
        store = await self.store(namespace)
        full = f"{namespace}/{action.name}"
        match action:
            case RegisterTopic():
                await store.register_topic(full, action.spec, action.uid)
            case BeginDeletion():
                await store.set_topic_phase(full, action.uuid, TopicPhase.DELETING)
            case UnregisterTopic():
                await store.unregister_topic(full)
            case GiveUp():
                await store.give_up(full, action.partition, action.reason)
            case Assign():
                await store.set_assignment(full, dict(action.workers))
            case RegisterSubscription():
                await store.register_subscription(full, action.spec, action.uid)
            case UnregisterSubscription():
                await store.unregister_subscription(full)
