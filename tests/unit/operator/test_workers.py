"""How workers are asked: with which token, at which address, and how much of it is heard."""

import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from tidewater_coordination.port import WorkerInfo
from tidewater_core.crd.pool import Pool
from tidewater_operator import main, workers
from tidewater_operator.keepers import PASSES_MAX
from tidewater_operator.model.settings_file import worker_settings
from tidewater_operator.report import WorkerReport
from tidewater_operator.settings import OperatorSettings
from tidewater_operator.workers import (
    PASS_BYTES_MAX,
    REPORT_BYTES_MAX,
    Workers,
    is_a_workers,
    pass_bytes,
)
from tidewater_testing.namespace import SETTINGS

ROOT = Path(__file__).resolve().parents[3]
Say = Callable[[web.Request], Awaitable[web.StreamResponse]]


def with_auth(**auth: Any) -> OperatorSettings:
    given = SETTINGS.model_dump(by_alias=True, mode="json", exclude_none=True)
    return OperatorSettings.model_validate({**given, "auth": auth})


class Door:
    """A pod of a namespace that says what a test has it say, and notes what it is shown."""

    def __init__(self) -> None:
        self.shown: list[str | None] = []
        self.paths: list[str] = []
        self.say: Say = self.report
        self.port = 0

    async def report(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"worker": "w", "ready": True})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.shown.append(request.headers.get("Authorization"))
        self.paths.append(request.path)
        return await self.say(request)


@pytest.fixture
async def door(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    found, app = Door(), web.Application()
    app.router.add_get("/{path:.*}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.port = runner.addresses[0][1]
    monkeypatch.setattr(workers, "is_a_workers", lambda *_: True)
    yield found
    await runner.cleanup()


def crew(door: Door, count: int = 1) -> dict[str, WorkerInfo]:
    url = f"http://127.0.0.1:{door.port}"
    return {f"tidewater-p-{n}": WorkerInfo(f"tidewater-p-{n}", url) for n in range(count)}


# ---- who we are to them


async def test_workers_are_shown_the_token_for_workers(door: Door, tmp_path: Path) -> None:
    """Whoever controls a pod of a namespace sees it: it must be worth nothing elsewhere."""
    path = tmp_path / "token"
    settings = with_auth(mode="kubernetes", workerTokenPath=str(path))
    asking = Workers(main._shown_to_workers(settings))
    assert await asking.reports("shop", crew(door)), "without a token they may say nothing"
    for token in ("one", "two"):
        path.write_text(f"{token}\n")  # as the kubelet replaces it
        assert await asking.reports("shop", crew(door))
    assert door.shown == [None, "Bearer one", "Bearer two"]
    await asking.close()


def test_without_auth_no_token_is_shown() -> None:
    assert main._shown_to_workers(with_auth(mode="none"))() == {}


def test_the_chart_mounts_the_token_where_it_is_read() -> None:
    template = (ROOT / "charts/tidewater/templates/operator.yaml").read_text()
    mount = str(Path(with_auth(mode="kubernetes").auth.worker_token_path).parent)
    assert f"mountPath: {mount}," in template
    assert "serviceAccountToken: {path: token, audience: tidewater," in template


# ---- where they are


@pytest.mark.parametrize(
    ("url", "name", "asked"),
    [
        ("http://tidewater-p-0.tidewater-p-workers.shop.svc:8080", "tidewater-p-0", True),
        ("https://tidewater-p-0.tidewater-p-workers.shop.svc:8080", "tidewater-p-0", True),
        ("https://tidewater-a-b-12.tidewater-a-b-workers.shop.svc:8080", "tidewater-a-b-12", True),
        ("http://tidewater-p-0.tidewater-p-workers.bank.svc:8080", "tidewater-p-0", False),
        ("http://tidewater-p-1.tidewater-p-workers.shop.svc:8080", "tidewater-p-0", False),
        ("http://tidewater-p-0.tidewater-p-workers.shop.svc:2379", "tidewater-p-0", False),
        ("http://evil.example.com", "tidewater-p-0", False),
        ("", "tidewater-p-0", False),
        (
            "http://tidewater-x@evil/-0.tidewater-x@evil/-workers.shop.svc:8080",
            "tidewater-x@evil/-0",
            False,
        ),
    ],
)
def test_the_registry_sends_us_to_workers_alone(url: str, name: str, asked: bool) -> None:
    assert is_a_workers(url, "shop", name) is asked


@pytest.mark.parametrize("tls", ["", "tidewater-tls"])
def test_workers_say_the_address_at_which_they_are_asked(tls: str) -> None:
    given = SETTINGS.model_dump(by_alias=True, mode="json", exclude_none=True)
    settings = OperatorSettings.model_validate({**given, "tls": {"secretName": tls}})
    pool = Pool.model_validate({"metadata": {"name": "fast", "namespace": "shop", "uid": "u"}})
    url = json.loads(worker_settings(pool, settings))["advertise_url"]
    url = url.replace("${POD_NAME}", "tidewater-fast-3")
    assert is_a_workers(url, "shop", "tidewater-fast-3")


async def test_a_worker_cannot_send_us_elsewhere(door: Door) -> None:
    async def elsewhere(_: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/elsewhere")

    door.say = elsewhere
    asking = Workers(dict)
    assert await asking.reports("shop", crew(door)) == {}
    assert door.paths == ["/v1/shop"]
    await asking.close()


async def test_a_report_without_a_name_is_heard_whole(door: Door) -> None:
    """G7: logs that are left over on its volume above all."""

    async def nameless(_: web.Request) -> web.StreamResponse:
        refused = [{"topic": "shop/orders", "reason": "InvalidSpec"}]
        return web.json_response({"leftovers": [{"topic": "shop/old"}], "refused": refused})

    door.say = nameless
    asked = Workers(dict)
    (found,) = (await asked.reports("shop", crew(door))).values()
    await asked.close()
    assert found.worker == "tidewater-p-0"
    assert "shop/old" in found.evidence
    assert [one.reason for one in found.refused] == ["InvalidSpec"]


# ---- how much is heard


async def test_all_workers_of_a_namespace_together_are_bounded(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, taken = 1_000_000, list[int]()
    body = json.dumps({"worker": "", "more": "x" * (limit // 4)}).encode()
    monkeypatch.setattr(workers, "pass_bytes", lambda _: limit)

    async def large(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    def read(text: bytes) -> Any:
        taken.append(len(text))
        return WorkerReport("w")

    monkeypatch.setattr(workers, "read_report", read)
    door.say = large
    asking = Workers(dict)
    found = await asking.reports("shop", crew(door, 40))
    assert sum(taken) <= limit
    assert len(found) == len(taken) == 3
    assert asking.too_large("shop") == crew(door, 40).keys() - found.keys(), "they are not silent"
    assert len(await asking.reports("shop", crew(door, 2))) == 2, "the next pass hears again"
    assert asking.too_large("shop") == frozenset()
    await asking.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"worker": "w", "more": "' + b"x" * REPORT_BYTES_MAX + b'"}',
        # Small as text, and large in memory.
        b'{"worker": "w", "topics": [' + b",".join([b'{"name":""}'] * 200_000) + b"]}",
        b'{"worker": "w", "more": [' + b",".join([b"[]"] * 200_000) + b"]}",
        b"[" * 100_000,
    ],
    ids=["long", "many objects", "many lists", "deep"],
)
async def test_one_that_says_too_much_is_not_heard(door: Door, body: bytes) -> None:
    async def much(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    door.say = much
    asking = Workers(dict)
    assert await asking.reports("shop", crew(door)) == {}
    assert asking.too_large("shop") <= {"tidewater-p-0"}
    await asking.close()


async def test_what_is_packed_is_not_unpacked(door: Door) -> None:
    """A few kilobytes could be any number of them."""
    packed = gzip.compress(b'{"worker": "w"}')

    async def bomb(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    door.say = bomb
    asking = Workers(dict)
    assert await asking.reports("shop", crew(door)) == {}
    await asking.close()


def test_all_passes_together_leave_the_operator_room() -> None:
    values = yaml.safe_load((ROOT / "charts/tidewater/values.yaml").read_text())
    limit = values["operator"]["resources"]["limits"]["memory"]
    assert limit.endswith("Mi")
    limit_bytes = int(limit.removesuffix("Mi")) * 1024**2
    assert limit_bytes / 4 >= PASSES_MAX * pass_bytes(8)
    assert limit_bytes * 3 / 4 >= PASSES_MAX * PASS_BYTES_MAX, "however many workers they have"
    assert pass_bytes(100_000) == PASS_BYTES_MAX


async def test_a_namespace_of_many_partitions_is_heard_whole(door: Door) -> None:
    """G7: by who answers first it would be Ready, and not, for ever."""
    part = {"state": "running", "epoch": 1, "committed": 10**9, "end": 10**9, "lag": 0}
    part |= {"open": True, "start": 0, "durable_end": 10**9, "segments": 3, "log_bytes": 10**8}
    parts = [{"partition": n, "oldest_uncommitted_ms": 512, **part} for n in range(1_000)]
    body = json.dumps({"worker": "w", "topics": [{"name": "t", "partitions": parts}]}).encode()

    async def full(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    door.say = full
    asking = Workers(dict)
    assert len(await asking.reports("shop", crew(door, 80))) == 80
    assert asking.too_large("shop") == frozenset()
    await asking.close()
