"""Single requests to a worker; a connection that breaks is an `OSError` like any other."""

import http.client
import json
from dataclasses import dataclass, field, replace
from typing import Any

from tidewater_testing.web import Answer, request


@dataclass(frozen=True)
class Door:
    """Where to knock, and what to show."""

    address: str
    """`host:port`."""
    token: str = field(default="", repr=False)
    """Bearer token; empty: none is shown."""

    def with_token(self, token: str) -> "Door":
        """Return the same door for somebody else."""
        return replace(self, token=token)


def get(door: Door, path: str, timeout_s: float = 30.0) -> Answer:
    """GET a path."""
    return _send(door, "GET", path, None, timeout_s)


def post(door: Door, path: str, body: object = None, timeout_s: float = 90.0) -> Answer:
    """POST a JSON body."""
    return _send(door, "POST", path, None if body is None else json.dumps(body), timeout_s)


def _send(door: Door, method: str, path: str, body: str | None, timeout_s: float) -> Answer:
    headers = {} if body is None else {"Content-Type": "application/json"}
    if door.token:
        headers["Authorization"] = f"Bearer {door.token}"
    try:
        return request(door.address, method, path, body, headers, timeout_s)
    except http.client.HTTPException as error:
        raise ConnectionError(f"{method} {path}: {error!r}") from error


def expect(answer: Answer, status: int = 200) -> Any:
    """Return the decoded body of an answer that must have this status."""
    assert answer.status == status, f"{answer.status} instead of {status}: {answer.body[:500]!r}"
    return answer.json()
