from collections.abc import Callable, Iterator

import pytest

from scripted_http import Handler, Server


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], Server]]:
    """Start servers that end with the test."""
    servers: list[Server] = []

    def start(handler: Handler) -> Server:
        servers.append(Server(handler))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
