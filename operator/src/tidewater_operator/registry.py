"""The registry in etcd: one prefix for each namespace, and a list of those that were ever used.

    <prefix>/.cluster                    whose registry it is: {"uid"}, by the cluster's id
    <prefix>/.namespaces/<namespace>     made when the first thing is registered: {"cluster", "uid"}
                                         of who wrote it, and of the namespace; no namespace of
                                         Kubernetes begins with a dot
    <prefix>/<namespace>/…               as tidewater_coordination has it

The list is how an operator that was away learns of namespaces that are gone, and how an empty
registry is told from one that was lost. A namespace that is not here may be another cluster's: only
what this cluster's operator wrote is ever forgotten, and the registry of another one is not
touched at all.
"""

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, NamedTuple, TypeVar

import msgspec

from tidewater_coordination.etcd import wire
from tidewater_coordination.etcd.client import EtcdClient
from tidewater_coordination.etcd.login import Login
from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.port import RegisteredTopic, Registry, TopicPhase
from tidewater_core.errors import Invalid, Retryable
from tidewater_operator.life import (
    AcceptLoss,
    Action,
    Assign,
    BeginDeletion,
    RegisterSubscription,
    RegisterTopic,
    UnregisterSubscription,
    UnregisterTopic,
)

FOREIGN: Final = "ForeignRegistry"
_LIST: Final = ".namespaces"
_CLUSTER: Final = ".cluster"
ROUNDS_MAX: Final = 5
"""Looks at whose registry it is, against others that write it at the same time."""
log = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True):
    """What the list has of a namespace."""

    cluster: str = ""
    """Whose operator wrote it; empty: one that did not say yet."""
    uid: str = ""
    """Of the namespace; empty: unknown."""


class Owner(msgspec.Struct, frozen=True):
    """Whose registry it is."""

    uid: str = ""


class Standing(Enum):
    """What a namespace of this cluster is to the registry."""

    NEW = "new"
    """It was never used."""
    OURS = "ours"
    LEFT = "left"
    """Another cluster's operator, or one of an earlier version, used a namespace of this name."""


class _Found(NamedTuple):
    entry: Entry | None
    conditions: list[bytes]
    """That nothing of it has changed since."""


class Registries:
    """Opens the registry of each namespace once."""

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        login: Login,
        *,
        cluster: str,
        take_over_from: str = "",
    ) -> None:
        self._endpoints, self._prefix, self._login = list(endpoints), prefix.strip("/"), login
        self._cluster, self._take_over_from = cluster, take_over_from
        self._cluster_key = f"{self._prefix}/{_CLUSTER}".encode()
        self._client = EtcdClient(self._endpoints, login)
        self._client.open()
        self._open: dict[str, EtcdCoordination] = {}
        self._replaced: list[EtcdClient | EtcdCoordination] = []
        self._left: set[str] = set()
        """Namespaces that were told of as not ours to forget."""
        self.may_write: Callable[[], bool] = lambda: True
        """Whether we lead; asked before each change."""

    async def close(self) -> None:
        """Hang up."""
        for one in (*self._open.values(), *self._replaced, self._client):
            await one.close()

    async def log_in(self, login: Login) -> None:
        """Be somebody else from now on, if it is somebody else; told again and again.

        Certificates that were replaced in their files are the connections' own to notice.
        """
        for one in self._replaced:  # calls that were under way then are over
            await one.close()
        self._replaced = []
        if login == self._login:
            return
        log.warning("etcd is asked with another user or password from now on")
        client = EtcdClient(self._endpoints, login)
        client.open()
        self._replaced = [self._client, *self._open.values()]
        self._client, self._open, self._login = client, {}, login

    # ---- whose it is

    async def _owned(self, found: Sequence[wire.KeyValue]) -> bytes:
        """Return the condition that the registry is this cluster's; it is, if it was nobody's.

        `found` is what stands there of it. An operator that starts finds nothing in many passes at
        once: one of them writes, and the others look again at what it wrote.
        """
        for _ in range(ROUNDS_MAX):
            if (condition := await self._claim(found)) is not None:
                return condition
            found = (await self._client.range(self._cluster_key)).kvs
        raise _changed()

    async def _claim(self, found: Sequence[wire.KeyValue]) -> bytes | None:
        """Return the condition that the registry is ours; None if that changed at this moment."""
        key = self._cluster_key
        holder = _read(found[0].value, Owner, Owner("unreadable")).uid if found else ""
        if found and holder == self._cluster:
            return wire.is_at(key, found[0].mod_revision)
        if found and (not self._take_over_from or holder != self._take_over_from):
            raise Invalid(
                FOREIGN,
                f"what etcd has below {self._prefix!r} is the registry of cluster {holder}, this "
                f"one is {self._cluster}: nothing is touched. Give each its own etcd.prefix; if "
                f"that cluster is gone for good, take over with etcd.takeOverFrom={holder}",
            )
        self._check_leading()
        condition = wire.is_at(key, found[0].mod_revision if found else 0)
        value = msgspec.json.encode(Owner(self._cluster))
        answer = await self._client.txn([condition], [wire.put(key, value)])
        if not answer.succeeded:
            return None
        log.warning("the registry is cluster %s's now, it was %s", self._cluster, holder or "new")
        return wire.is_at(key, answer.revision)

    async def _look(self, namespace: str) -> _Found:
        key = self._key(namespace)
        cluster, found = await self._client.get_all(wire.get(self._cluster_key), wire.get(key))
        owned = await self._owned(cluster)
        entry = _read(found[0].value, Entry, Entry()) if found else None
        return _Found(entry, [owned, wire.is_at(key, found[0].mod_revision if found else 0)])

    # ---- the list

    async def namespaces(self) -> list[str]:
        """Return the namespaces that this cluster's operators ever registered something in."""
        await self._owned((await self._client.range(self._cluster_key)).kvs)
        start = f"{self._prefix}/{_LIST}/".encode()
        answer = await self._client.range(start, wire.prefix_end(start))
        return [
            kv.key.decode().rpartition("/")[2]
            for kv in answer.kvs
            if _read(kv.value, Entry, Entry()).cluster == self._cluster
        ]

    async def standing(self, namespace: str, uid: str) -> Standing:
        """Say what a namespace is to the registry; raises while etcd does not answer.

        What is left of an earlier namespace of the name, as its uid tells, is forgotten first.
        """
        entry = (await self._look(namespace)).entry
        if entry is None:
            return Standing.NEW
        if entry.cluster != self._cluster:
            return Standing.LEFT
        if uid and entry.uid and entry.uid != uid:
            log.warning("namespace %s is another one than before: that one is forgotten", namespace)
            await self.forget(namespace)
            return Standing.NEW
        return Standing.OURS

    async def note(self, namespace: str, uid: str) -> None:
        """Put a namespace on the list, as this cluster's."""
        self._check_leading()
        found = await self._look(namespace)
        value = msgspec.json.encode(Entry(self._cluster, uid))
        answer = await self._client.txn(found.conditions, [wire.put(self._key(namespace), value)])
        if not answer.succeeded:
            raise _changed()

    async def forget(self, namespace: str) -> None:
        """Remove everything of a namespace that is gone, if it was this cluster's."""
        self._check_leading()
        found = await self._look(namespace)
        await self.release(namespace)
        if found.entry is None:
            return
        if found.entry.cluster != self._cluster:
            if namespace not in self._left:
                log.warning("namespace %s is in the registry and not here: it stays", namespace)
                self._left.add(namespace)
            return
        start = f"{self._prefix}/{namespace}/".encode()
        answer = await self._client.txn(
            found.conditions,
            [wire.delete(start, wire.prefix_end(start)), wire.delete(self._key(namespace))],
        )
        if not answer.succeeded:
            raise _changed()

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
            if (first := self._open.get(namespace)) is not None:  # somebody else was as quick
                await found.close()
                return first
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

    async def ask(self, namespace: str) -> Registry:
        """Return a namespace's registry by a read of etcd's majority, not as the watch told it."""
        return await (await self.store(namespace)).ask_registry()

    async def elsewhere(self, namespace: str) -> dict[str, RegisteredTopic]:
        """Return the topics of this cluster's other namespaces, by full name."""
        others = [name for name in await self.namespaces() if name != namespace]
        stores = [await self.store(name) for name in others]
        return {found.topic: found for store in stores for found in await store.topics()}

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
                await store.unregister_topic(full, keep_cursors=action.keeps_table)
            case AcceptLoss():
                await store.accept_loss(
                    full, action.uuid, action.accepted, action.give_up, action.reason
                )
            case Assign():
                await store.set_assignment(full, dict(action.workers))
            case RegisterSubscription():
                await store.register_subscription(full, action.spec, action.uid)
            case UnregisterSubscription():
                await store.unregister_subscription(full)


Record = TypeVar("Record", Entry, Owner)


def _read(value: bytes, kind: type[Record], otherwise: Record) -> Record:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError:
        return otherwise


def _changed() -> Retryable:
    return Retryable("RegistryChanged", "somebody else changed the registry at once", 500)
