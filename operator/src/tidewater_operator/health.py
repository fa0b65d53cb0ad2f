"""`/healthz`, `/readyz` and `/metrics`: whether the operator hears, thinks and leads."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from tidewater_core.clock import Clock
from tidewater_operator.cluster.api import Api
from tidewater_operator.cluster.lease import Leadership
from tidewater_operator.hearing import Hearing
from tidewater_operator.keepers import PASS_S_MAX, Keepers

LEASE_SILENCE_S: Final = 120.0
"""So long may the API server say nothing about the lease before we are taken for broken."""


class Health:
    """Says whether this process is of use."""

    def __init__(
        self, keepers: Keepers, leadership: Leadership, hearing: Hearing, api: Api, clock: Clock
    ) -> None:
        self._keepers, self._leadership, self._hearing = keepers, leadership, hearing
        self._api, self._clock = api, clock

    def trouble(self) -> str:
        """Return what a restart would help against; empty if nothing."""
        if self._hearing.is_deaf:
            return "watches are deaf: listings show what they never told"
        if self._keepers.slowest_s() > 2 * PASS_S_MAX:
            return "a pass over a namespace does not end"
        if self._clock.monotonic() - self._leadership.asked_at > LEASE_SILENCE_S:
            return "the API server has not answered about the lease"
        return ""

    def metrics(self) -> str:
        """Return the figures in Prometheus' text form."""
        counters = self._keepers.counters
        rows = [
            ("passes_total", "counter", counters.passes),
            ("pass_failures_total", "counter", counters.failures),
            ("pass_seconds_total", "counter", round(counters.seconds, 3)),
            ("api_writes_total", "counter", self._api.writes),
            ("namespaces", "gauge", len(self._keepers.names)),
            ("is_leader", "gauge", int(self._leadership.is_ours)),
            ("is_deaf", "gauge", int(self._hearing.is_deaf)),
        ]
        return "".join(
            f"# TYPE tidewater_operator_{name} {kind}\ntidewater_operator_{name} {value}\n"
            for name, kind, value in rows
        )

    async def serve(self, host: str, port: int) -> web.AppRunner:
        """Begin to answer."""

        async def healthz(_: web.Request) -> web.Response:
            trouble = self.trouble()
            return web.Response(text=trouble or "ok\n", status=500 if trouble else 200)

        async def readyz(_: web.Request) -> web.Response:
            leader = self._leadership.leader
            text = f"{leader} leads\n" if leader else "nobody leads yet\n"
            return web.Response(text=text, status=200 if leader else 503)

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=self.metrics(), content_type="text/plain")

        return await _listen(
            host, port, {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}
        )


@asynccontextmanager
async def not_ready(host: str, port: int, why: str) -> AsyncIterator[None]:
    """Answer while there is nothing to tell yet: this process waits, and a restart is no help."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text=f"{why}\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text=f"{why}\n", status=503)

    runner = await _listen(host, port, {"/healthz": healthz, "/readyz": readyz})
    try:
        yield
    finally:
        await runner.cleanup()


async def _listen(
    host: str, port: int, routes: dict[str, Callable[[web.Request], Awaitable[web.Response]]]
) -> web.AppRunner:
    app = web.Application()
    app.add_routes([web.get(path, answer) for path, answer in routes.items()])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
