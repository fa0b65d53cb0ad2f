"""One binding lets the workers of all namespaces ask who somebody is."""

import asyncio
from typing import Any

from tidewater_operator.cluster.api import ApiRefused
from tidewater_operator.cluster.write import bind_reviewers
from tidewater_operator.keepers import PASSES_MAX
from tidewater_testing.api_server import ApiServer


class Careful(ApiServer):
    """Takes no change of what is not as it was read, as the real one."""

    async def _call(
        self, method: str, path: str, *, body: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        await asyncio.sleep(0)
        version = ((body or {}).get("metadata") or {}).get("resourceVersion")
        live = self.objects.get(path)
        if live and version and version != live["metadata"]["resourceVersion"]:
            raise ApiRefused(409, "Conflict", "the object has been modified")
        return await super()._call(method, path, body=body, **more)


async def test_namespaces_that_come_at_once_are_all_bound() -> None:
    """Workers of one that was left out refuse everybody until the next full pass."""
    api = Careful()
    meta = {"name": "tidewater-workers"}
    path = api.put({"kind": "ClusterRoleBinding", "metadata": meta})
    names = [f"shop-{number}" for number in range(PASSES_MAX)]
    await asyncio.gather(
        *(bind_reviewers(api, "tidewater-workers", name, wanted=True) for name in names)
    )
    bound = [one["namespace"] for one in api.objects[path]["subjects"]]
    assert sorted(bound) == names
    await asyncio.gather(
        *(bind_reviewers(api, "tidewater-workers", name, wanted=False) for name in names[1:])
    )
    assert [one["namespace"] for one in api.objects[path]["subjects"]] == names[:1]
