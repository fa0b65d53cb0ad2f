"""What stands between us and the API server may answer in its stead, and not in JSON."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tidewater_core.errors import Retryable
from tidewater_operator.cluster.access import Access
from tidewater_operator.cluster.api import NAMESPACE, Api, ApiRefused


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async def answer(request: web.Request) -> web.Response:
        code = int(request.path.rpartition("/")[2])
        return web.Response(status=code, text="Too many requests, please try again later.\n")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    async with Api(Access(f"http://{host}:{port}", None)) as found:
        yield found
    await runner.cleanup()


@pytest.mark.parametrize("code", [429, 502, 503])
async def test_words_of_a_proxy_are_passing_troubles(api: Api, code: int) -> None:
    with pytest.raises(Retryable, match="please try again later"):
        await api.get(NAMESPACE, None, str(code))


async def test_a_page_where_an_object_was_due_is_one_too(api: Api) -> None:
    with pytest.raises(Retryable, match="is no JSON"):
        await api.get(NAMESPACE, None, "200")


async def test_a_refusal_in_words_is_a_refusal(api: Api) -> None:
    with pytest.raises(ApiRefused, match="please try again later"):
        await api.get(NAMESPACE, None, "403")
    assert await api.get(NAMESPACE, None, "404") is None
