"""Compiling in the background: nobody waits, the numbers stay, a hang is given up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import torpor
from tests.comparison import Put
from torpor.backend import Computation
from torpor.backend.registry import make, register
from torpor.backends.reference.compile import ReferenceBackend
from torpor.compiling.background import COMPILER
from torpor.errors import TorporWarning
from torpor.execute.sync import PLANS


class Slow(ReferenceBackend):
    """The reference, once somebody has opened the gate."""

    name = "gated"
    gate = threading.Event()
    fails = False
    runs = 0

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        assert Slow.gate.wait(60)
        if Slow.fails:
            raise RuntimeError("no such instruction")
        return list(computations)

    def execute(self, *args: Any) -> Any:
        Slow.runs += 1
        return super().execute(*args)


register("gated", Slow)


@pytest.fixture(autouse=True)
def in_background(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torpor.config, "compile_async", True)
    Slow.gate.clear()
    Slow.fails, Slow.runs = False, 0
    torpor.metrics.reset()
    with torpor.using("gated"):
        yield
        Slow.gate.set()
        COMPILER.wait()
    PLANS.clear()


def step(put: Put, size: int = 3) -> torch.Tensor:
    x = torch.arange(float(size))
    y = put(x) * 2 + 1
    torpor.sync(wait=True)
    assert torch.equal(y.cpu(), x * 2 + 1)
    return y


def counters() -> dict[str, int]:
    return dict(torpor.metrics.counters())


def test_steps_go_on_while_it_compiles(put: Put) -> None:
    for _ in range(3):
        step(put)
    assert Slow.runs == 0
    assert counters()["UncachedCompile"] == 1  # asked for once
    Slow.gate.set()
    COMPILER.wait()
    step(put)
    assert Slow.runs == 1
    assert counters()["UncachedCompile"] == 1


def test_a_failure_is_told_and_the_reference_stays(put: Put) -> None:
    Slow.fails = True
    step(put)
    Slow.gate.set()
    COMPILER.wait()
    with pytest.warns(TorporWarning, match="no such instruction"):
        step(put)
    step(put)
    assert Slow.runs == 0
    assert counters()["CompileFailed"] == 1


def test_a_compile_that_hangs_is_given_up(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "compile_timeout", 0.05)
    step(put)
    time.sleep(0.2)
    with pytest.warns(TorporWarning, match="took longer than 0.05 s"):
        step(put)
    assert counters()["CompileAbandoned"] == 1
    monkeypatch.setattr(torpor.config, "compile_timeout", 60.0)
    Slow.gate.set()  # another graph has a thread of its own
    for _ in range(3):
        step(put, 5)
        COMPILER.wait()
    assert Slow.runs


def test_what_is_compiled_for_another_backend_is_dropped(put: Put) -> None:
    step(put)
    with torpor.using("reference"):
        step(put)
        Slow.gate.set()
        COMPILER.wait()
        step(put)
    assert Slow.runs == 0


def test_random_numbers_are_not_disturbed(put: Put) -> None:
    torch.manual_seed(0)
    expected = [torch.rand(3) for _ in range(4)]
    torch.manual_seed(0)
    drawn = []
    for turn in range(4):
        drawn.append(torch.rand(3))
        step(put)
        if turn == 1:
            Slow.gate.set()
    assert all(torch.equal(a, b) for a, b in zip(expected, drawn, strict=True))


def test_backends_say_whether_they_may() -> None:
    assert make("reference").compiles_in_background
    assert not make("inductor", max_autotune=True).compiles_in_background


PROGRAM = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
import torch, torpor
from tests.laziness.test_compile_async import Slow
torpor.config.compile_async = True
torpor.use("gated")
x = torch.ones(3).to("lazy")
torpor.sync()
y = x + 1
torpor.sync(wait=True)
print(y.tolist(), flush=True)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupt_ends_it_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split("\n")[:2] == ["[2.0, 2.0, 2.0]", "interrupted"]
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
