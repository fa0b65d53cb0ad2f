"""The Kubernetes API in memory, as far as the operator uses it; the real one is e2e's."""

import copy
import json
from collections.abc import Mapping
from typing import Any

from tidewater_operator.cluster.access import Access
from tidewater_operator.cluster.api import BY_NAME, Api, ApiRefused

CREATED = "2026-01-01T00:00:00Z"


class ApiServer(Api):
    """Answers calls from a dictionary: path of the object → object."""

    def __init__(self) -> None:
        super().__init__(Access("http://nowhere", None))
        self.objects: dict[str, dict[str, Any]] = {}
        self.refuse: dict[str, int] = {}
        """Part of a path → the status that writes there get."""
        self._version = 0

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: dict[str, Any] | None = None,
        content: str = "application/json",
    ) -> dict[str, Any]:
        if method == "GET":
            return self._get(path, dict(params or {}))
        self._note(method, path)
        for part, status in self.refuse.items():
            if part in path:
                raise ApiRefused(status, "Forbidden", f"{part} is refused")
        body = json.loads(json.dumps(body))
        live = self.objects.get(path.removesuffix("/status"))
        match method:
            case "POST":
                return self._create(f"{path}/{body['metadata']['name']}", body)
            case "DELETE":
                return self._delete(path, live, body["preconditions"]["uid"])
            case "PUT":
                return self._replace(path, live, body)
        if path.endswith("/status"):
            if live is None or body["metadata"].get("uid") != live["metadata"]["uid"]:
                raise ApiRefused(404 if live is None else 409, "NotFound", path)
            return self._store(path.removesuffix("/status"), {**live, "status": body["status"]})
        if live is None and content != "application/apply-patch+yaml":
            raise ApiRefused(404, "NotFound", path)
        return self._store(path, _merged(live or {}, body))

    def _create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path in self.objects:
            raise ApiRefused(409, "AlreadyExists", path)
        return self._store(path, body)

    def _delete(self, path: str, live: dict[str, Any] | None, uid: str) -> dict[str, Any]:
        if live is None or live["metadata"]["uid"] != uid:
            raise ApiRefused(409, "Conflict", path)
        self.remove(path)
        return {}

    def _replace(
        self, path: str, live: dict[str, Any] | None, body: dict[str, Any]
    ) -> dict[str, Any]:
        version = body["metadata"].get("resourceVersion")
        if live is None or live["metadata"]["resourceVersion"] != version:
            raise ApiRefused(409, "Conflict", path)
        return self._store(path, body)

    def _get(self, path: str, params: dict[str, str]) -> dict[str, Any]:
        plural = path.rpartition("/")[2]
        if not any(kind.plural == plural for kind in BY_NAME.values()):
            if path not in self.objects:
                raise ApiRefused(404, "NotFound", path)
            return copy.deepcopy(self.objects[path])
        wanted = dict(
            part.split("=") for part in params.get("labelSelector", "").split(",") if part
        )
        root = path.removesuffix(f"/{plural}")
        items = [
            copy.deepcopy(found)
            for place, found in sorted(self.objects.items())
            if place.startswith(root)
            and place.split("/")[-2] == plural
            and wanted.items() <= (found["metadata"].get("labels") or {}).items()
        ]
        return {"items": items}

    def _store(self, path: str, wanted: dict[str, Any]) -> dict[str, Any]:
        before = self.objects.get(path)
        if before == wanted:
            return copy.deepcopy(before)  # no write, no version
        meta = {**wanted["metadata"]}
        self._version += 1
        old = before["metadata"] if before else {}
        changed = before is None or before.get("spec") != wanted.get("spec")
        meta["uid"] = old.get("uid", f"uid-{self._version}")
        meta["creationTimestamp"] = old.get("creationTimestamp", CREATED)
        meta["generation"] = int(old.get("generation", 0)) + (1 if changed else 0)
        meta["resourceVersion"] = str(self._version)
        self.objects[path] = {**wanted, "metadata": meta}
        return copy.deepcopy(self.objects[path])

    def remove(self, path: str) -> None:
        """Remove an object, and what belongs to it alone."""
        uid = self.objects.pop(path)["metadata"]["uid"]
        for place, found in list(self.objects.items()):
            owners = {one["uid"] for one in found["metadata"].get("ownerReferences") or ()}
            if owners == {uid}:
                self.remove(place)

    def put(self, manifest: dict[str, Any]) -> str:
        """Put an object there as a person would; return its path."""
        kind, meta = BY_NAME[manifest["kind"]], manifest["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"])
        self._store(path, manifest)
        return path

    def find(self, kind: str, name: str, namespace: str = "shop") -> dict[str, Any] | None:
        """Return an object."""
        return self.objects.get(BY_NAME[kind].path(namespace, name))


def _merged(live: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    out = dict(live)
    for key, value in wanted.items():
        old = out.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        out[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return out
