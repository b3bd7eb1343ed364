"""Memory that is free stays with the process, unless the user wants it otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from torpor.backend.heap import retain_free_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = retain_free_memory()
for _ in range(8):  # until free pieces have found together
    before = faults()
    blocks = [torch.ones(6 << 20) for _ in range(6)]  # 24 MB each
    del blocks
print(kept, faults() - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")


def run(**variables: str) -> tuple[str, int]:
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=kept | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said, faults = done.stdout.split()
    return said, int(faults)


@glibc
def test_free_memory_is_kept() -> None:
    said, faults = run()
    assert said == "True"
    assert faults < 5_000


@glibc
def test_what_the_user_has_told_the_c_library_holds() -> None:
    said, faults = run(MALLOC_TOP_PAD_="4096")
    assert said == "False"
    assert faults > 15_000


@glibc
def test_it_can_be_switched_off() -> None:
    assert run(TORPOR_KEEP_BYTES="0")[0] == "False"
