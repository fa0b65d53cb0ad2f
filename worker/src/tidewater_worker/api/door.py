"""The door of the application: every request is judged before any route sees it.

A user who may not gets the same answer whether a topic is there or not. An answer that goes on for
long is judged again while it does, and cut off when its user may no more.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from tidewater_core.errors import NotFound, TidewaterError, Unauthenticated
from tidewater_worker.api.errors import error_body, retry_after_seconds
from tidewater_worker.auth.access import Access, required
from tidewater_worker.auth.caller import working_for
from tidewater_worker.auth.guard import Guard
from tidewater_worker.auth.tokens import authorization_of
from tidewater_worker.node import Node

VISIBLE: Final = "tidewater.visible"
"""In a request's scope: the namespaces that a list may show; not there: all."""
CHALLENGE: Final = b'Bearer realm="tidewater"'
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Needs = tuple[Access, ...]
App = Callable[[Any, Receive, Send], Awaitable[None]]


class _Withdrawn(Exception):
    """The user of an answer that is under way may no more."""


class Door:
    """Stands before an application."""

    def __init__(self, app: App, guard: Guard, node: Node, home: str = "") -> None:
        """Stand before `app`; `home` is the namespace that this worker is in, if it is in one."""
        self._app, self._guard, self._node, self._home = app, guard, node, home

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Judge a request; let it through or answer it."""
        rule = required(scope["method"], scope["path"], self._home)
        if rule is not None and rule.is_open:
            scope[VISIBLE] = frozenset()
            await self._app(scope, receive, send)
            return
        authorization = authorization_of(scope["headers"])
        either: tuple[Needs, ...] = (rule.needs if rule is not None else (),)
        if rule is not None and rule.or_else:
            either += (rule.or_else,)
        try:
            await self._check(authorization, either)
            if rule is None:
                raise NotFound("NotFound", f"there is no {scope['method']} {scope['path']}")
            if rule.lists:
                names = {topic.name.namespace for topic in self._node.topics.values()}
                scope[VISIBLE] = await self._guard.visible(authorization, names)
        except TidewaterError as error:
            await refuse(error, send)
            return
        with working_for(authorization):
            await self._judged(scope, receive, send, authorization, either)

    async def _check(self, authorization: bytes | None, either: tuple[Needs, ...]) -> None:
        if len(either) == 1:
            await self._guard.check(authorization, either[0])
        else:
            await self._guard.check_any(authorization, either)

    async def _judged(
        self,
        scope: Any,
        receive: Receive,
        send: Send,
        authorization: bytes | None,
        either: tuple[Needs, ...],
    ) -> None:
        guard, now = self._guard, self._node.clock.monotonic
        again_at = now() + guard.recheck_s
        withdrawn = False

        async def sending(message: Message) -> None:
            nonlocal again_at, withdrawn
            is_start = message["type"] == "http.response.start"  # after a long poll, perhaps
            if (is_start or message.get("more_body")) and now() >= again_at:
                try:
                    await self._check(authorization, either)
                except TidewaterError as error:
                    withdrawn = True
                    if is_start:
                        await refuse(error, send)
                    raise _Withdrawn(str(error)) from error
                again_at = now() + guard.recheck_s
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            if not withdrawn:
                raise
            # An answer that had begun stays without an end, and the connection is closed.


async def refuse(error: TidewaterError, send: Send) -> None:
    """Answer with an error."""
    body = error_body(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", CHALLENGE))
    if error.retry_after_ms is not None:
        headers.append((b"retry-after", b"%d" % retry_after_seconds(error.retry_after_ms)))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
