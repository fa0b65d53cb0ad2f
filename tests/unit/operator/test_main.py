"""How the operator's process begins and ends."""

import asyncio
import os
import signal
import socket

import aiohttp
import pytest

from tidewater_core.errors import Invalid, Retryable
from tidewater_operator import main
from tidewater_operator.cluster.access import Access
from tidewater_testing.namespace import SETTINGS


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


async def test_an_operator_that_starts_before_the_api_server_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be started again after minutes. It is alive meanwhile, and ends when it is told."""
    away, port = free_port(), free_port()
    monkeypatch.setattr(main, "find_access", lambda: Access(f"http://127.0.0.1:{away}", None))
    running = asyncio.create_task(main._run(SETTINGS, "tidewater", "a", "127.0.0.1", port))
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        for _ in range(100):
            await asyncio.sleep(0.05)
            if running.done():
                break
            try:
                async with (
                    session.get(f"{url}/healthz") as alive,
                    session.get(f"{url}/readyz") as r,
                ):
                    assert (alive.status, r.status) == (200, 503)
                    assert "waiting for the API server" in await r.text()
                    break
            except aiohttp.ClientConnectorError:
                continue
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 10) == 0


async def test_it_goes_on_with_the_first_answer() -> None:
    answers: list[object] = [
        Retryable("ApiAway", "refused"),
        Retryable("NoClusterId", "not yet"),
        "found",
    ]

    async def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, str)
        return answer

    assert await main.patiently(ask, asyncio.Event(), 0.01) == "found"
    answers = [Invalid("SecretNotFound", "a person must act")]
    with pytest.raises(Invalid, match="SecretNotFound"):
        await main.patiently(ask, asyncio.Event(), 0.01)
