"""Giving memory back to the system, so that a process that was busy once is not large for ever."""

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any, Final

import pyarrow as pa

_M_ARENA_MAX: Final = -8
ARENAS_MAX: Final = 2
"""glibc keeps one heap per thread by default, each with its own garbage."""


@cache
def _libc() -> Any:
    with suppress(OSError):
        return ctypes.CDLL("libc.so.6")
    return None


def set_up() -> None:
    """Bound the number of heaps. Call once, before threads start."""
    libc = _libc()
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, ARENAS_MAX)


def give_back() -> None:
    """Return what is free to the system. Takes milliseconds: for quiet moments."""
    pa.default_memory_pool().release_unused()
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
