"""Single requests to a worker; a connection that breaks is an `OSError` like any other."""

import http.client
import json
from typing import Any

from tidewater_testing.web import Answer, request


def get(address: str, path: str, timeout_s: float = 30.0) -> Answer:
    """GET a path."""
    return _send(address, "GET", path, None, timeout_s)


def post(address: str, path: str, body: object = None, timeout_s: float = 90.0) -> Answer:
    """POST a JSON body."""
    return _send(address, "POST", path, None if body is None else json.dumps(body), timeout_s)


def _send(address: str, method: str, path: str, body: str | None, timeout_s: float) -> Answer:
    headers = {} if body is None else {"Content-Type": "application/json"}
    try:
        return request(address, method, path, body, headers, timeout_s)
    except http.client.HTTPException as error:
        raise ConnectionError(f"{method} {path}: {error!r}") from error


def expect(answer: Answer, status: int = 200) -> Any:
    """Return the decoded body of an answer that must have this status."""
    assert answer.status == status, f"{answer.status} instead of {status}: {answer.body[:500]!r}"
    return answer.json()
