"""The C library's memory: what a step frees, the next step takes again.

By default glibc gives large buffers that are free back to the system, depending on where they
happen to lie. The next step takes them anew and the system clears every page: for a step that does
little but read and write memory that is most of its time.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Final

from torpor import config

_TRIM_THRESHOLD: Final = -1  # names of malloc.h
_MMAP_THRESHOLD: Final = -3
_LARGEST_IN_HEAP: Final = 1 << 25  # glibc refuses more
_OF_THE_USER: Final = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES",
)  # fmt: skip


@functools.cache
def retain_free_memory() -> bool:
    """Let the C library keep free memory, as `config.keep_bytes` says; whether it does.

    It does not if it is not glibc, or if the user has configured it otherwise.
    """
    if not config.keep_bytes or any(name in os.environ for name in _OF_THE_USER):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    most = min(config.keep_bytes, 2**31 - 1)
    return bool(
        library.mallopt(_TRIM_THRESHOLD, most)
        and library.mallopt(_MMAP_THRESHOLD, min(most, _LARGEST_IN_HEAP))
    )
