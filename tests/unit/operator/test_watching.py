"""The watches go on, whatever the API server says of one of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import kopf
import pytest
from aiohttp import web

from tidewater_operator.cluster.api import TOPIC, ApiRefused
from tidewater_operator.cluster.gather import everything
from tidewater_operator.handlers import marks
from tidewater_operator.hearing import Hearing
from tidewater_testing.api_server import ApiServer

KINDS = {
    "/api/v1": ["namespaces"],
    "/apis/apps/v1": ["statefulsets"],
    "/apis/tidewater.dev/v1alpha1": ["topics", "subscriptions", "pools"],
}


class Marks:
    """Notes which namespaces were marked."""

    def __init__(self) -> None:
        self.marked: list[str] = []

    def mark(self, namespace: str, *, full: bool = True, known_only: bool = False) -> None:
        self.marked.append(namespace)

    def hear(self, topic: Any, *, gone: bool) -> None:
        """Note nothing."""

    def gone(self, namespace: str) -> None:
        """Note nothing."""


class Server:
    """As much of an API server as watches need: a Topic is told of in each watch of Topics."""

    def __init__(self) -> None:
        self.refused = ""
        """Part of a path → 403."""
        self.breaks = 0
        """So many watches are told of an error of the server."""
        self.told = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if self.refused and self.refused in path:
            return web.json_response({"code": 403, "message": "no rights"}, status=403)
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            groups = [("apps", "v1"), ("tidewater.dev", "v1alpha1")]
            versions = [{"name": g, "preferredVersion": {"version": v}} for g, v in groups]
            listed = [{**one, "versions": [one["preferredVersion"]]} for one in versions]
            return web.json_response({"groups": listed})
        if path in KINDS:
            return web.json_response({"resources": [self._kind(name) for name in KINDS[path]]})
        if request.query.get("watch"):
            return await self._watch(request)
        return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})

    def _kind(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "kind": name.title(),
            "singularName": name,
            "namespaced": name != "namespaces",
            "verbs": ["get", "list", "watch"],
        }

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        if request.path.endswith("/topics"):
            self.told += 1
            meta = {
                "name": "orders",
                "namespace": request.path.split("/")[-2],
                "uid": str(self.told),
            }
            found: dict[str, Any] = {"type": "ADDED", "object": {"metadata": meta}}
            if self.breaks:
                self.breaks -= 1
                found = {"type": "ERROR", "object": {"code": 500, "message": "no leader"}}
            await stream.write(json.dumps(found).encode() + b"\n")
        await asyncio.sleep(0.3)
        return stream


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    found = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", found.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    info = kopf.ConnectionInfo(server=f"http://{host}:{port}")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: info)
    monkeypatch.setattr(marks, "BACKOFFS_S", (0.01,))
    monkeypatch.setattr(marks, "BACKOFF_S_MAX", 0.05)
    monkeypatch.setattr(marks, "AGAIN_S", 0.05)
    yield found
    await runner.cleanup()


async def until(marker: Marks, namespace: str, count: int) -> None:
    async with asyncio.timeout(20):
        while marker.marked.count(namespace) < count:
            await asyncio.sleep(0.02)


async def watched(marker: Marks) -> tuple["asyncio.Task[None]", asyncio.Event]:
    """Begin to watch two namespaces."""
    stop = asyncio.Event()
    registry = marks.watches(marker, Hearing(), clusterwide=False)
    return asyncio.create_task(marks.watch(registry, ["bank", "shop"], stop)), stop


async def test_a_namespace_that_is_gone_ends_no_others_watches(server: Server) -> None:
    server.refused = "/namespaces/bank/"
    marker = Marks()
    task, stop = await watched(marker)
    await until(marker, "shop", 3)
    assert not task.done(), "one namespace that may not be watched ends all watches"
    before = server.told
    assert "bank" not in marker.marked
    server.refused = ""
    await until(marker, "bank", 1)
    assert server.told > before, "what may be watched again is heard"
    stop.set()
    await task


async def test_watches_that_ended_begin_anew(server: Server) -> None:
    server.breaks = 2
    marker = Marks()
    task, stop = await watched(marker)
    await until(marker, "shop", 1)
    await until(marker, "bank", 1)
    assert not task.done()
    stop.set()
    await task


async def test_a_stop_that_kopf_was_told_of_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ends(**_: Any) -> None:
        """Do what kopf does on SIGTERM: it takes the signal's handler for itself."""

    monkeypatch.setattr(kopf, "operator", ends)
    task, stop = await watched(Marks())
    await asyncio.wait_for(task, 5)
    assert stop.is_set()


async def test_a_namespace_that_is_gone_keeps_no_other_from_being_listed() -> None:
    class Refusing(ApiServer):
        async def _call(self, method: str, path: str, **more: Any) -> dict[str, Any]:
            if "/namespaces/bank/" in path:
                raise ApiRefused(403, "Forbidden", path)
            return await super()._call(method, path, **more)

    api = Refusing()
    api.put({**_topic("orders"), "kind": "Topic"})
    found = await everything(api, TOPIC, ["bank", "shop"])
    assert [item["metadata"]["name"] for item in found] == ["orders"]


def _topic(name: str) -> dict[str, Any]:
    return {"apiVersion": "tidewater.dev/v1alpha1", "metadata": {"name": name, "namespace": "shop"}}
