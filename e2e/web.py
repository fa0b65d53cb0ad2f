"""Single requests to a worker; a connection that breaks is an `OSError` like any other."""

import http.client
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from e2e.kubectl import CommandError, wait_for
from tidewater_testing.web import Answer, request

AGAIN = frozenset({429, 503})
"""Nobody took the request: it may be sent again."""
ANSWER_S_MAX = 60.0


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


def post(
    door: Door,
    path: str,
    body: object = None,
    timeout_s: float = 90.0,
    more: Mapping[str, str] | None = None,
) -> Answer:
    """POST a JSON body; `more` are further headers."""
    text = None if body is None else json.dumps(body)
    return _send(door, "POST", path, text, timeout_s, more)


def insist(
    ask: Callable[[], Answer],
    timeout_s: float = ANSWER_S_MAX,
    again: frozenset[int] = AGAIN,
) -> Answer:
    """Repeat a request while connections break or the answer is "not now"; return the answer.

    Only for what may be repeated: a read, a flush, a message with a producer's number.
    """
    answers: list[Answer] = []

    def answered() -> bool:
        answer = ask()
        if answer.status in again:
            raise CommandError(f"the answer is {answer.status} {answer.reason}")
        answers.append(answer)
        return True

    wait_for(answered, timeout_s, "an answer")
    return answers[-1]


def produce(
    door: Door,
    topic: str,
    messages: Sequence[Mapping[str, str]],
    partition: int | None = None,
    timeout_s: float = ANSWER_S_MAX,
) -> list[dict[str, Any]]:
    """Send messages until they are taken, which is once, however often (G8); return the acks."""
    route = "" if partition is None else f"?partition={partition}"
    number = {"Tidewater-Producer": f"e2e-{secrets.token_hex(8)}", "Tidewater-Sequence": "0"}
    path, body = f"/v1/{topic}/messages{route}", {"messages": list(messages)}
    answer = insist(lambda: post(door, path, body, more=number), timeout_s)
    acks: list[dict[str, Any]] = expect(answer)["acks"]
    return acks


def _send(
    door: Door,
    method: str,
    path: str,
    body: str | None,
    timeout_s: float,
    more: Mapping[str, str] | None = None,
) -> Answer:
    headers = {} if body is None else {"Content-Type": "application/json"}
    headers.update(more or {})
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
