"""Instructions of a piece of work: a measure that a busy machine does not change.

A hardware counter is asked first (what ``perf stat -e instructions:u`` reads, here around the work
itself). Virtual machines often have none; then the process runs under valgrind, which counts
instructions one by one, and the counter is started and stopped by valgrind's client requests.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from benchmarks.worker import ROOT, environment


class Counter(Protocol):
    """Counts the instructions that a call executes."""

    def count(self, work: Callable[[], object]) -> int: ...


class Unavailable(Exception):
    """Why instructions cannot be counted here."""


# -- the hardware counter --------------------------------------------------------------------------

_SYSCALLS = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _INSTRUCTIONS = 0, 1
_EXCLUDE_KERNEL_AND_HYPERVISOR = 1 << 5 | 1 << 6
_ATTRIBUTE_SIZE = 64  # the first version of `struct perf_event_attr`


class HardwareCounter:
    """User-mode instructions of this thread, as the processor counts them."""

    def __init__(self) -> None:
        number = _SYSCALLS.get(platform.machine())
        if number is None or not sys.platform.startswith("linux"):
            raise Unavailable(f"no hardware counters on {platform.system()} {platform.machine()}")
        attribute = struct.pack(
            "IIQQQQQ", _HARDWARE, _ATTRIBUTE_SIZE, _INSTRUCTIONS, 0, 0, 0,
            _EXCLUDE_KERNEL_AND_HYPERVISOR,
        ).ljust(_ATTRIBUTE_SIZE, b"\0")  # fmt: skip
        libc = ctypes.CDLL(None, use_errno=True)
        self.file = libc.syscall(number, attribute, 0, -1, -1, 0)
        if self.file < 0:
            raise Unavailable(f"no hardware counter: {os.strerror(ctypes.get_errno())}")

    def count(self, work: Callable[[], object]) -> int:
        before = self._read()
        work()
        return self._read() - before

    def _read(self) -> int:
        (value,) = struct.unpack("q", os.read(self.file, 8))
        return int(value)


# -- valgrind ----------------------------------------------------------------------------------

_SWITCH = """
#include <valgrind/callgrind.h>
int inside(void) { return RUNNING_ON_VALGRIND; }
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""
_FOLDER = "TORPOR_BENCH_VALGRIND"  # where valgrind and the process in it leave their files


class ValgrindCounter:
    """All instructions of this process between two client requests; slow, and exact."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[_FOLDER])
        self.switch = ctypes.CDLL(str(self.folder / "switch.so"))
        self.dumps = 0
        if not self.switch.inside():
            raise Unavailable("not run by valgrind")
        work = int  # the first dump also counts what start and stop themselves cost
        self.base = 0
        self.count(work)
        self.base = self.count(work)

    def count(self, work: Callable[[], object]) -> int:
        self.switch.start()
        work()
        self.switch.stop()
        self.dumps += 1
        text = (self.folder / f"counts.{self.dumps}").read_text()
        found = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if found is None:
            raise Unavailable("valgrind wrote no total")
        return int(found[1]) - self.base


def counter() -> Counter:
    """A counter for this process."""
    return ValgrindCounter() if _FOLDER in os.environ else HardwareCounter()


def run(module: str, *arguments: str) -> tuple[str, str]:
    """Run a module that uses `counter`; its output, and which counter it had."""
    try:
        HardwareCounter()
    except Unavailable as missing:
        return _run_in_valgrind(module, arguments, str(missing)), "valgrind"
    return _run([sys.executable, "-m", module, *arguments], {}), "hardware counter"


def _run_in_valgrind(module: str, arguments: tuple[str, ...], why: str) -> str:
    for tool in ("valgrind", "cc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{why}; and there is no {tool}")
    with tempfile.TemporaryDirectory() as folder:
        _compile_switch(folder, why)
        command = [
            "valgrind", "--tool=callgrind", "--instr-atstart=no", "-q",
            f"--callgrind-out-file={folder}/counts",
            sys.executable, "-m", module, *arguments,
        ]  # fmt: skip
        return _run(command, {_FOLDER: folder})


def _compile_switch(folder: str, why: str) -> None:
    source = Path(folder, "switch.c")
    source.write_text(_SWITCH)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", f"{folder}/switch.so", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        first = (done.stderr.splitlines() or ["cc failed"])[0]
        raise Unavailable(f"{why}; and valgrind's header is missing ({first})")


def _run(command: list[str], extra: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment(threads=1) | extra, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise Unavailable(f"the counting process failed: {last}")
    return done.stdout
