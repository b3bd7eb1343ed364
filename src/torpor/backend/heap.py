"""The C allocator's free memory: what one step frees, the next one reuses.

By default, glibc returns large free buffers to the system, depending on where they happen to be.
The next step has to map them again, and the system zeroes every page, which is most of the time of
a memory-bound step.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Final

from torpor import config

_TRIM_THRESHOLD: Final = -1  # constants of malloc.h
_MMAP_THRESHOLD: Final = -3
_LARGEST_IN_HEAP: Final = 1 << 25  # glibc rejects larger thresholds
_OF_THE_USER: Final = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES",
)  # fmt: skip


@functools.cache
def retain_free_memory() -> bool:
    """Make the C allocator keep up to `config.keep_bytes` of free memory; whether it does.

    It does not if the C library is not glibc, or if the user has configured the allocator.
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
