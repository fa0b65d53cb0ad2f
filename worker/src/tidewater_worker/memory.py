"""What a process asks of the system's allocator: batches quickly, and back what nobody needs."""

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any, Final

import pyarrow as pa

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
MAPPED_BYTES_MIN: Final = 4 * 1024 * 1024
"""Blocks from this size on are had from the kernel and given back, each with all its pages to be
cleared. By default that is from 128 KiB on: a batch of a thousand messages, a tenth of what the
edge spends on one."""
KEPT_BYTES_MAX: Final = 16 * 1024 * 1024
"""What a heap keeps at its end for the next batch."""


@cache
def _libc() -> Any:
    with suppress(OSError):
        return ctypes.CDLL("libc.so.6")
    return None


def set_up(heaps_max: int) -> None:
    """Set the allocator up. Call once, before threads start.

    glibc keeps one heap per thread by default, each with its own garbage.
    """
    libc = _libc()
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, heaps_max)
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


def give_back() -> None:
    """Return what is free to the system. Takes milliseconds: for quiet moments."""
    pa.default_memory_pool().release_unused()
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
