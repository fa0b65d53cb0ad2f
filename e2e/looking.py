"""Looks at objects without a process for each: what `kubectl get` asks, over one kept connection.

A run looks at the cluster thousands of times; a `kubectl get` is a tenth of a second of CPU, on the
cores that the tested cluster needs. Here are only the kinds that are looked at all the time. For
whatever else (another kind, a kubeconfig with a plugin, nobody answered) there is no answer here,
and kubectl is asked, which knows the words for it.
"""

import atexit
import http.client
import json
import queue
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

import yaml

from tidewater_operator.cluster.access import from_kubeconfig

ANSWER_S_MAX = 20.0
SELECTOR = "--selector="
GROUPS = {
    "api/v1": {
        "configmaps": "ConfigMap",
        "namespaces": "Namespace",
        "nodes": "Node",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apis/apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "apis/batch/v1": {"jobs": "Job"},
    "apis/coordination.k8s.io/v1": {"leases": "Lease"},
    "apis/rbac.authorization.k8s.io/v1": {"rolebindings": "RoleBinding"},
    "apis/tidewater.dev/v1alpha1": {
        "pools": "Pool",
        "subscriptions": "Subscription",
        "topics": "Topic",
    },
}
KINDS = {plural: (group, kind) for group, kinds in GROUPS.items() for plural, kind in kinds.items()}
OF_THE_CLUSTER = frozenset({"namespaces", "nodes"})
SHORT = {"pvc": "persistentvolumeclaims"}
CREDENTIALS = frozenset({"client-certificate-data", "token"})
KNOWN = CREDENTIALS | {"server", "certificate-authority-data", "client-key-data"}
"""Words of a kubeconfig that are understood here."""


class NoAnswerError(Exception):
    """Nobody answered, or not as an API server does: kubectl shall be asked."""


class RefusedError(Exception):
    """The API server answered that it cannot be; the message is as kubectl has it."""


@dataclass(frozen=True)
class Question:
    """What `kubectl get` is asked, as far as it is understood here."""

    plurals: tuple[str, ...]
    name: str = ""
    selector: str = ""

    def path(self, plural: str, namespace: str) -> str:
        """Return where the API server has it."""
        group, _ = KINDS[plural]
        place = "" if plural in OF_THE_CLUSTER else f"/namespaces/{namespace}"
        last = f"/{quote(self.name)}" if self.name else ""
        query = f"?labelSelector={quote(self.selector)}" if self.selector else ""
        return f"/{group}{place}/{plural}{last}{query}"


def understood(words: Sequence[str]) -> Question | None:
    """Read the words after `kubectl get`; None: something that is not known here."""
    selector = ""
    plain = []
    for word in words:
        if word.startswith(SELECTOR) and not selector:
            selector = word.removeprefix(SELECTOR)
        elif word.startswith("-"):
            return None
        else:
            plain.append(word)
    if len(plain) == 1:
        plain = plain[0].split("/")
    kinds = tuple(_plural(word) for word in plain[0].split(",")) if plain else ()
    name = plain[1] if len(plain) == 2 else ""
    is_odd = len(plain) > 2 or (name and (len(kinds) > 1 or selector))
    return None if is_odd or "" in kinds or not kinds else Question(kinds, name, selector)


def _plural(word: str) -> str:
    """Return the plural of a kind, or nothing for one that is not known here."""
    return next((each for each in (SHORT.get(word, word), f"{word}s") if each in KINDS), "")


@dataclass(frozen=True)
class Server:
    """An API server, and the connections to it that nobody uses just now. For many threads."""

    host: str
    port: int
    trust: ssl.SSLContext
    headers: dict[str, str] = field(repr=False)
    idle: queue.LifoQueue[http.client.HTTPSConnection] = field(default_factory=queue.LifoQueue)

    def get(self, path: str) -> Any:
        """GET a path; raise `RefusedError` or `NoAnswerError`."""
        status, body = self._ask(path)
        try:
            said = json.loads(body)
        except ValueError as error:
            raise NoAnswerError(f"{status} {body[:200]!r}") from error
        if status != 200:
            _refuse(status, said)
        return said

    def _ask(self, path: str) -> tuple[int, bytes]:
        while True:
            try:
                connection, is_kept = self.idle.get_nowait(), True
            except queue.Empty:
                connection, is_kept = self._connection(), False
            try:
                connection.request("GET", path, headers=self.headers)
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # One that was kept may have been closed by the other side; silence is silence.
                if not is_kept or isinstance(error, TimeoutError):
                    raise NoAnswerError(repr(error)) from error
            else:
                self.idle.put(connection)
                return answer.status, body

    def _connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            self.host, self.port, timeout=ANSWER_S_MAX, context=self.trust
        )

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while not self.idle.empty():
            self.idle.get_nowait().close()


def _refuse(status: int, said: Any) -> NoReturn:
    """Tell a refusal from an answer that means: ask again."""
    if status not in {400, 403, 404, 422}:
        raise NoAnswerError(f"{status} {said}")
    raise RefusedError(f"Error from server ({said.get('reason')}): {said.get('message')}")


@cache
def server_of(kubeconfig: Path) -> Server | None:
    """Return the API server of a kubeconfig; None if only kubectl knows how to reach it."""
    config = yaml.safe_load(kubeconfig.read_text())
    parts = [each for kind in ("cluster", "user") for each in config.get(f"{kind}s", ())]
    words = {word for part in parts for kind in ("cluster", "user") for word in part.get(kind, ())}
    if len(parts) != 2 or not words <= KNOWN or not words & CREDENTIALS:
        return None
    access = from_kubeconfig(config)
    address = urlsplit(access.server)
    if access.ssl is None or address.hostname is None or address.scheme != "https":
        return None
    headers = {"Accept": "application/json", **access.authorization()}
    server = Server(address.hostname, address.port or 443, access.ssl, headers)
    atexit.register(server.close)
    return server


def look(kubeconfig: Path, namespace: str, words: Sequence[str]) -> Any:
    """Return what `kubectl get … --output=json` would; None: kubectl must be asked.

    Raise `RefusedError` if the API server says that it cannot be, such as that it is not there.
    """
    question = understood(words)
    server = server_of(kubeconfig) if question is not None else None
    if question is None or server is None:
        return None
    try:
        found = [(p, server.get(question.path(p, namespace))) for p in question.plurals]
    except NoAnswerError:
        return None
    if question.name:
        return found[0][1]
    items = []
    for plural, listed in found:
        group, kind = KINDS[plural]
        same = {"apiVersion": group.partition("/")[2], "kind": kind}
        items += [{**same, **each} for each in listed["items"]]
    return {"apiVersion": "v1", "kind": "List", "items": items}
