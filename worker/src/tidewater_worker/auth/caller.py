"""For whom the worker is working right now.

What is done for a user's request may have to be done by another worker: that one judges the
user's token again. It travels with the task, so that no function on the way has to pass it on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

CALLER: Final[ContextVar[bytes | None]] = ContextVar("tidewater_caller", default=None)
"""The user's Authorization header; None: nobody's, the worker works for itself."""


@contextmanager
def working_for(authorization: bytes | None) -> Iterator[None]:
    """Work for a user; tasks that begin inside go on to."""
    before = CALLER.set(authorization)
    try:
        yield
    finally:
        CALLER.reset(before)
