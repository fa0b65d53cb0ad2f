"""The few calls of the Kubernetes API that we use, as plain dictionaries.

Not a generated client: it would be a hundred times this size in memory, and none of it types what
we apply. Every call has a time limit; a refusal carries what the API server said.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from tidewater_core.errors import Invalid, Retryable, TidewaterError
from tidewater_core.names import GROUP, VERSION
from tidewater_operator.cluster.access import Access
from tidewater_operator.model.names import MANAGER, Manifest

TIMEOUT_S: Final = 15.0
PAGE: Final = 500
CONNECTIONS_MAX: Final = 32
TEXT_BYTES_MAX: Final = 1_000
"""Of an answer that is no JSON, in an error."""


@dataclass(frozen=True)
class Kind:
    """A kind of object and where the API has it."""

    api: str
    """`v1` or `group/version`."""
    plural: str
    name: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str = "", sub: str = "") -> str:
        """Return the path of objects or of one."""
        root = f"/api/{self.api}" if "/" not in self.api else f"/apis/{self.api}"
        within = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        parts = "".join(f"/{part}" for part in (name, sub) if part)
        return f"{root}{within}/{self.plural}{parts}"


TOPIC: Final = Kind(f"{GROUP}/{VERSION}", "topics", "Topic")
SUBSCRIPTION: Final = Kind(f"{GROUP}/{VERSION}", "subscriptions", "Subscription")
POOL: Final = Kind(f"{GROUP}/{VERSION}", "pools", "Pool")
STATEFUL_SET: Final = Kind("apps/v1", "statefulsets", "StatefulSet")
SERVICE: Final = Kind("v1", "services", "Service")
CONFIG_MAP: Final = Kind("v1", "configmaps", "ConfigMap")
SERVICE_ACCOUNT: Final = Kind("v1", "serviceaccounts", "ServiceAccount")
SECRET: Final = Kind("v1", "secrets", "Secret")
CLAIM: Final = Kind("v1", "persistentvolumeclaims", "PersistentVolumeClaim")
POD: Final = Kind("v1", "pods", "Pod")
EVENT: Final = Kind("v1", "events", "Event")
NAMESPACE: Final = Kind("v1", "namespaces", "Namespace", namespaced=False)
BUDGET: Final = Kind("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICY: Final = Kind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy")
ROLE_BINDING: Final = Kind("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding")
CLUSTER_ROLE_BINDING: Final = Kind(
    "rbac.authorization.k8s.io/v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False
)
JOB: Final = Kind("batch/v1", "jobs", "Job")
LEASE: Final = Kind("coordination.k8s.io/v1", "leases", "Lease")

BY_NAME: Final = {kind.name: kind for kind in list(globals().values()) if isinstance(kind, Kind)}


class ApiRefused(Invalid):
    """The API server said no; the status tells how."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        """Keep the HTTP status beside reason and message."""
        super().__init__(reason, message)
        self.code = code


class Api:
    """A connection to the API server."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None
        self.writes = 0
        """Calls that may have changed something, since the start; renewals of the lease aside."""
        self.may_write: Callable[[], bool] = lambda: True
        """Whether we lead; asked before each such call."""
        self.lease_paths: frozenset[str] = frozenset()
        """Where the lease itself is written: whoever does not lead must be able to take it."""

    async def __aenter__(self) -> Self:
        """Open the connections."""
        connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX, ssl=self._access.ssl or True)
        self._session = aiohttp.ClientSession(
            self._access.server,
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close them."""
        if self._session is not None:
            await self._session.close()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content: str = "application/json",
    ) -> Manifest:
        assert self._session is not None, "used before it was opened"
        self._note(method, path)
        headers = {**self._access.authorization(), "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content
        try:
            async with self._session.request(
                method, path, params=params, json=body, headers=headers
            ) as answer:
                return _object(answer.status, await answer.read(), f"{method} {path}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Retryable("ApiAway", f"{method} {path}: {error!r}", 1_000) from error

    def _note(self, method: str, path: str) -> None:
        """Count a call that changes something; refuse it if it is not ours to make."""
        if method == "GET" or path in self.lease_paths:
            return
        if not self.may_write():
            raise Retryable("NotLeading", f"{method} {path}: another operator may lead", 1_000)
        self.writes += 1

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Manifest | None:
        """Return an object, None if it is not there."""
        try:
            return await self._call("GET", kind.path(namespace, name))
        except ApiRefused as error:
            if error.code == 404:
                return None
            raise

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: str = ""
    ) -> list[Manifest]:
        """Return all objects of a kind, in pages."""
        found: list[Manifest] = []
        params = {"limit": str(PAGE)} | ({"labelSelector": labels} if labels else {})
        while True:
            page = await self._call("GET", kind.path(namespace), params=params)
            for item in page.get("items") or ():
                found.append({"apiVersion": kind.api, "kind": kind.name, **item})
            token = page.get("metadata", {}).get("continue")
            if not token:
                return found
            params = {**params, "continue": token}

    async def apply(self, manifest: Manifest, sub: str = "") -> Manifest:
        """Apply on the server: what we name is ours, the rest stays as it is."""
        kind = BY_NAME[manifest["kind"]]
        meta = manifest["metadata"]
        return await self._call(
            "PATCH",
            kind.path(meta.get("namespace"), meta["name"], sub),
            params={"fieldManager": MANAGER, "force": "true"},
            body=manifest,
            content="application/apply-patch+yaml",
        )

    async def merge(
        self, kind: Kind, namespace: str | None, name: str, change: Manifest
    ) -> Manifest:
        """Change some fields of an object."""
        return await self._call(
            "PATCH",
            kind.path(namespace, name),
            params={"fieldManager": MANAGER},
            body=change,
            content="application/merge-patch+json",
        )

    async def create(self, kind: Kind, namespace: str | None, manifest: Manifest) -> Manifest:
        """Create an object."""
        params = {"fieldManager": MANAGER}
        return await self._call("POST", kind.path(namespace), params=params, body=manifest)

    async def replace(self, kind: Kind, namespace: str | None, manifest: Manifest) -> Manifest:
        """Replace an object; refused (409) if it is not as it was read."""
        path = kind.path(namespace, manifest["metadata"]["name"])
        return await self._call("PUT", path, params={"fieldManager": MANAGER}, body=manifest)

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, uid: str, policy: str = "Background"
    ) -> None:
        """Delete the object of this identity; one that is gone or another is no error."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": policy}
        try:
            await self._call("DELETE", kind.path(namespace, name), body=body)
        except ApiRefused as error:
            if error.code not in (404, 409):
                raise


def _object(code: int, body: bytes, what: str) -> Manifest:
    """Return what was answered; a proxy, or a server that has too much to do, says it as text."""
    found: Any = None
    try:
        found = json.loads(body) if body else {}
    except ValueError as error:
        if code < 400:
            raise Retryable("ApiAway", f"{what}: the answer is no JSON", 1_000) from error
        found = {"message": body[:TEXT_BYTES_MAX].decode(errors="replace").strip()}
    if code < 400:
        return found if isinstance(found, dict) else {}
    raise _refusal(code, found)


def _refusal(code: int, said: Any) -> TidewaterError:
    reason, message = "Refused", f"HTTP {code}"
    if isinstance(said, dict):
        reason = str(said.get("reason") or reason)
        message = str(said.get("message") or message)
    if code == 429 or code >= 500:
        return Retryable(reason, message, 1_000)
    return ApiRefused(code, reason, message)
