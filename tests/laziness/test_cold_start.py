"""A short program does not pay for compiles that it does not win back, and never waits for one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import torpor
from tests.comparison import Put
from torpor.backend import Computation
from torpor.backend.registry import make, register
from torpor.backends.reference.compile import ReferenceBackend
from torpor.compiling import draft, remote, worth
from torpor.compiling.background import COMPILER
from torpor.compiling.remote import WORKER, CompileReply, NotCompiled, Request
from torpor.execute.sync import PLANS


class Weighing(ReferenceBackend):
    """The reference with a compiler that is said to be slow; counts what is compiled where."""

    compile_after = 2
    weighs_compiles = True
    compiled = 0
    loaded = 0

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        Weighing.compiled += 1
        return list(computations)

    def cache_key(self) -> str | None:
        return "weighing"

    def load(self, computation: Computation, saved: bytes) -> Computation:
        if saved != b"saved":
            raise ValueError("these are not its bytes")
        Weighing.loaded += 1
        return computation


register("weighing", Weighing)


class Elsewhere:
    """In the place of the other process."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answer: CompileReply | None = CompileReply(b"saved", 1.0)
        self.pays: dict[bool, bool] = {True: True, False: False}  # in the other process; in this

    def compile(self, request: Request) -> CompileReply:
        self.requests.append(request)
        if self.answer is None:
            raise NotCompiled("it could not")
        return self.answer

    def is_worth_it(self, spent: float, nodes: int, *, in_background: bool) -> bool:
        return self.pays[in_background]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    made = Elsewhere()
    monkeypatch.setattr(torpor.config, "compile_after", -1)
    monkeypatch.setattr(WORKER.__class__, "compile", lambda self, request: made.compile(request))
    monkeypatch.setattr(draft, "is_worth_it", made.is_worth_it)
    monkeypatch.setattr(draft, "cores", lambda: 2)
    Weighing.compiled = Weighing.loaded = 0
    torpor.metrics.reset()
    with torpor.using("weighing"):
        yield made
        COMPILER.wait()
    PLANS.clear()


def steps(put: Put, number: int) -> None:
    for _ in range(number):
        x = torch.arange(5.0)
        y = put(x) * 2 + 1
        torpor.sync(wait=True)
        assert torch.equal(y.cpu(), x * 2 + 1)
        COMPILER.wait()


def test_what_pays_is_compiled_by_another_process(put: Put, elsewhere: Elsewhere) -> None:
    steps(put, 8)
    (request,) = elsewhere.requests
    assert "aten.mul.Tensor" in request.graph
    assert (Weighing.compiled, Weighing.loaded) == (0, 1)
    counters = torpor.metrics.counters()
    assert counters["UncachedCompile"] == 1
    assert counters["CachedCompile"] > 0


def test_what_does_not_pay_is_not_compiled(put: Put, elsewhere: Elsewhere) -> None:
    elsewhere.pays[True] = False
    steps(put, 8)
    assert (elsewhere.requests, Weighing.compiled) == ([], 0)
    assert "UncachedCompile" not in torpor.metrics.counters()
    elsewhere.pays[True] = True  # it has run long enough by now
    steps(put, 3)
    assert Weighing.loaded == 1


def test_on_one_core_it_is_compiled_here_if_that_pays(
    put: Put, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "cores", lambda: 1)
    steps(put, 6)
    assert Weighing.compiled == 0
    elsewhere.pays[False] = True
    steps(put, 2)
    assert (Weighing.compiled, elsewhere.requests) == (1, [])


@pytest.mark.parametrize("answer", [None, CompileReply(b"nonsense", 1.0)])
def test_what_the_other_process_cannot_compile_this_one_may(
    answer: CompileReply | None, put: Put, elsewhere: Elsewhere
) -> None:
    elsewhere.answer = answer
    steps(put, 8)
    assert (len(elsewhere.requests), Weighing.compiled, Weighing.loaded) == (1, 0, 0)
    elsewhere.pays[False] = True
    steps(put, 3)
    assert (len(elsewhere.requests), Weighing.compiled) == (1, 1)


@pytest.mark.parametrize("wish", [False, True])
def test_a_number_of_runs_is_taken_at_its_word(
    wish: bool, put: Put, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", 1)
    monkeypatch.setattr(torpor.config, "compile_async", wish)
    elsewhere.pays[True] = False
    steps(put, 4)
    assert (len(elsewhere.requests), Weighing.compiled) == ((1, 0) if wish else (0, 1))


def test_graphs_that_another_process_would_not_understand_are_not_sent() -> None:
    device = make("weighing").backend_device(torch.device("cpu"))
    x = torch.ones(3).to("lazy")
    y = (x + 1).sin()
    graph = draft.Graph.of([y._lazy_storage.value], ())  # type: ignore[attr-defined]  # a lazy tensor's
    sent = remote.request(graph, "graph", make("weighing"), device, {})
    assert sent is not None
    assert sent.threads == torch.get_num_threads()
    assert remote.request(graph, "graph", make("reference"), device, {}) is None  # keeps nothing


def test_the_longer_a_graph_runs_the_more_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "COSTS", worth.CompileCosts())
    assert not worth.is_worth_it(0.05, 300, in_background=True)
    assert worth.is_worth_it(5.0, 300, in_background=True)
    assert not worth.is_worth_it(5.0, 300, in_background=False)
    assert worth.is_worth_it(1000.0, 300, in_background=False)
    worth.COSTS.note(10_000.0, 100)
    assert not worth.is_worth_it(1000.0, 300, in_background=False)


# -- the other process -----------------------------------------------------------------------------


def test_inductor_compiles_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "compile_async", True)
    torpor.metrics.reset()
    torch.manual_seed(0)
    w, x = torch.randn(4, 4), torch.randn(4, 4)
    expected = torch.tanh(x @ w).sum(0)
    with torpor.using("inductor", compile_after=1):
        for _ in range(5):
            y = torch.tanh(x.to("lazy") @ w.to("lazy")).sum(0)
            torpor.sync(wait=True)
            torch.testing.assert_close(y.cpu(), expected)
            COMPILER.wait()
        counters = torpor.metrics.counters()
        assert WORKER.process is not None
    WORKER.stop()
    assert counters["UncachedCompile"] == 1
    assert counters["CachedCompile"] > 0
    assert "Compile" not in torpor.metrics.timers()  # nothing was compiled here


PROGRAM = """
import sys, time, torch, torpor
from torpor.compiling.remote import WORKER
torpor.config.compile_async = True
torpor.use("inductor", compile_after=0)
x = torch.ones(3, device="lazy")
torpor.sync()
y = x + 1
torpor.sync(wait=True)
while WORKER.process is None:
    time.sleep(0.01)
print(y.tolist(), WORKER.process.process.pid, flush=True)
{end}
"""

ENDS = {
    "it ends": "",
    "it fails": "raise SystemExit(3)",
    "it is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "a child goes on": "import os\nos.fork() and os.kill(os.getpid(), 9)\ntime.sleep(20)",
}

STATUS = {"it ends": 0, "it fails": 3, "it is killed": -9, "a child goes on": -9}


@pytest.mark.parametrize("how", ENDS)
def test_the_other_process_ends_with_the_program(how: str, tmp_path: Path) -> None:
    program = PROGRAM.format(end=ENDS[how])
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", program]
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    with started:
        reported = str(started.stdout and started.stdout.readline())
        assert started.wait(120) == STATUS[how]
        result, pid = reported.rsplit(maxsplit=1)
        await_end(int(pid))
    assert errors.read_text() == ""
    assert result == "[2.0, 2.0, 2.0]"


def await_end(pid: int) -> None:
    end = time.monotonic() + 15  # before the child ends
    while is_there(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_there(pid)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_dies_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CODE", "import sys; sys.stdin.buffer.read(1); os._exit(1)")
    request = Request("", "", "", {}, None, {}, "", torch.float32, 1, "highest", 0)  # type: ignore[arg-type]  # is not looked at
    worker = remote.CompileWorker()
    with pytest.raises(NotCompiled, match="has ended"):
        worker.compile(request)
    assert worker.process is None
