"""Nobody waits for himself: kernels, finalizers, forks, neighbours; in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120

BEFORE = """
import gc, os, sys, threading, time
import torch, torpor
torpor.config.compile_after = 0
g = torch.ones(4).to("lazy") * 2

def op(kernel, fake=torch.empty_like):
    @torch.library.custom_op("hangs::f", mutates_args=())
    def f(x: torch.Tensor) -> torch.Tensor:
        return kernel(x)
    f.register_fake(fake)
    return f
"""


def run(program: str, backend: str = "reference", status: int = 0) -> str:
    reported = {"TORPOR_BACKEND": backend, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(
        [sys.executable, "-c", BEFORE + program],
        env=os.environ | reported, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert ran.returncode == status, ran.stderr[-3000:]
    return ran.stdout.strip() if status == 0 else ran.stderr


USES = {
    "reads": "(g + 1).sum().item()",
    "records": "g + 1",
    "cuts": "torpor.sync()",
    "waits": "torpor.sync(wait=True)",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_a_kernel_may_use_lazy_tensors(use: str, backend: str) -> None:
    program = f"""
def kernel(x):
    {USES[use]}
    return x * 1
f = op(kernel)
x = torch.ones(4).to("lazy")
for i in range(4):
    x = f(x * 3) + 1
    torpor.sync(x, wait=True) if i == 0 else torpor.sync()  # `g` is pending in the first
print(x.tolist(), g.tolist())
"""
    assert run(program, backend) == "[121.0, 121.0, 121.0, 121.0] [2.0, 2.0, 2.0, 2.0]"


@pytest.mark.parametrize(
    ("use", "backend"), [*((use, "reference") for use in USES), ("waits", "inductor")]
)
def test_a_fake_kernel_may_use_lazy_tensors(use: str, backend: str) -> None:
    program = f"""
def fake(x):
    {USES[use]}
    return torch.empty_like(x)
f = op(lambda x: x * 1, fake)
x = torch.ones(4).to("lazy")
for _ in range(3):
    x = f(x * 3) + 1
    torpor.sync()
print(x.tolist(), g.tolist())
"""
    assert run(program, backend) == "[40.0, 40.0, 40.0, 40.0] [2.0, 2.0, 2.0, 2.0]"


def test_a_kernel_that_reads_a_result_of_its_own_step_is_refused() -> None:
    program = """
other = []
f = op(lambda x: x * other[0].sum().item())
x = torch.ones(4).to("lazy")
y = f(x)
other.append(y * 2)
torpor.sync()
try:
    y.tolist()
except torpor.errors.StepError as error:
    print("own result" if "a result of its own step" in str(error) else error)
print(x.tolist())
"""
    assert run(program) == "own result\n[1.0, 1.0, 1.0, 1.0]"


def test_a_finalizer_in_the_middle_of_anything_breaks_nothing() -> None:
    program = """
gc.set_threshold(7, 2, 2)
class Last:
    def __del__(self):
        (g + 1).sum().item()
        torpor.sync()
for i in range(40):
    a = [Last()]; a.append(a); del a
    x = torch.ones(4).to("lazy")
    for k in range(12):
        x = x * 2 + k
        x.add_(1)
    if i % 3 == 0:
        torpor.sync()
    assert x.tolist() == [12274.0] * 4, x
gc.set_threshold(0)
gc.collect()
print("right")
"""
    assert run(program) == "right"


def test_finalizers_on_several_threads_break_nothing() -> None:
    program = """
gc.set_threshold(5, 2, 2)
class Last:
    def __del__(self):
        (g + 1).sum().item()
wrong = []
def work(j):
    for i in range(15):
        a = [Last()]; a.append(a); del a
        x = torch.ones(4).to("lazy") + j
        for k in range(8):
            x = x * 2 + k
        if x.sum().item() != 4 * ((1 + j) * 256 + 247):
            wrong.append((i, j))
threads = [threading.Thread(target=work, args=(j,)) for j in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
gc.set_threshold(0)
gc.collect()
print(wrong)
"""
    assert run(program) == "[]"


SLOW = """
from torpor.backend import register
from torpor.backends.reference import ReferenceBackend
compiled = []
class Slow(ReferenceBackend):
    def compile(self, lowered):
        if len(lowered[0].graph.nodes) > 20:
            compiled.append(1)
            time.sleep(2)
        return super().compile(lowered)
register("slow", Slow)
torpor.use("slow")
def long(first=None):
    x = first = torch.ones(3).to("lazy") if first is None else first
    for i in range(30):
        x = x + 1
    assert (x - first).tolist() == [30.0] * len(x)
"""


def test_recording_does_not_wait_for_a_compile() -> None:
    program = """
thread = threading.Thread(target=long)
thread.start()
while not compiled: time.sleep(0.01)
start = time.perf_counter()
y = torch.ones(2).to("lazy") + 1
for _ in range(10): y = y * 2
torpor.sync()
z = y + 1
took = time.perf_counter() - start
assert not thread.join(0) and thread.is_alive(), "the compile was over too early"
print(took < 1, z.tolist())
thread.join()
"""
    assert run(SLOW + program) == "True [2049.0, 2049.0]"


def test_a_neighbour_does_not_end_the_trace_of_an_op_that_waits_while_it_is_recorded() -> None:
    """It waits without the lock; the op has taken its operands from the trace already."""
    program = """
def fake(x):
    long(g)
    return torch.empty_like(x)
f = op(lambda x: x + 1, fake)
def neighbour():
    for _ in range(1000):
        if not compiled: time.sleep(0.01)
    torpor.sync()
    ended.append((torch.ones(2).to("lazy") + 1).tolist())
ended = []
thread = threading.Thread(target=neighbour)
thread.start()
y = f(torch.ones(4).to("lazy") * 3)
thread.join()
print(y.tolist(), ended)
"""
    assert run(SLOW + program) == "[4.0, 4.0, 4.0, 4.0] [[2.0, 2.0]]"


def test_a_graph_that_two_threads_meet_is_compiled_once() -> None:
    program = """
for _ in range(2):
    thread = threading.Thread(target=long)
    thread.start()
    thread.join()
print(len(compiled))
"""
    assert run(SLOW + program) == "1"


def test_graphs_of_several_threads_are_compiled_by_inductor_one_by_one() -> None:
    """Inductor's state is the process's: two at once end in an AssertionError of its own."""
    program = """
torpor.config.strict, torpor.config.cache = True, False
results = {}
def work(n):
    x = torch.full((n,), 2.0).to("lazy")
    results[n] = (x.exp().log() * n + x.sin()).sum().item()
threads = [threading.Thread(target=work, args=(n,)) for n in range(2, 6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sorted(results))
"""
    assert run(program, "inductor") == "[2, 3, 4, 5]"


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_a_child_forked_while_steps_run_reads_records_and_trains(backend: str) -> None:
    program = """
model = torch.nn.Linear(4, 4).to("lazy")
x = torch.ones(4).to("lazy") * 3
y = x + 1
z = torch.ones(3).to("lazy") + 1
torpor.sync()
pid = os.fork()
if pid == 0:
    ok = y.tolist() == [4.0] * 4 and z.tolist() == [2.0] * 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    torpor.sync(wait=True)
    os._exit(0 if ok else 3)
print(os.waitpid(pid, 0)[1], y.tolist(), g.tolist())
"""
    assert run(program, backend) == "0 [4.0, 4.0, 4.0, 4.0] [2.0, 2.0, 2.0, 2.0]"


def test_a_child_forked_while_a_graph_is_compiled_beside_compiles_it_itself() -> None:
    program = """
from torpor.compiling.background import COMPILER
gate = threading.Event()
job = COMPILER.submit("", lambda: (gate.wait(30), os.getpid())[1])
while COMPILER.current is not job: time.sleep(0.01)
pid = os.fork()
if pid == 0:
    gate = threading.Event()
    gate.set()
    while not job.is_over(): time.sleep(0.01)
    os._exit(0 if job.result() == os.getpid() else 3)
gate.set()
print(os.waitpid(pid, 0)[1])
"""
    assert run(program) == "0"


FAILS = """
y = torch.ones(3, 2).to("lazy")[torch.tensor([7]).to("lazy")]
torpor.sync()
"""


def test_a_failed_graph_that_nobody_read_ends_the_process_with_a_status_and_a_reason() -> None:
    said = run(
        "import atexit; atexit.register(print, 'handled', file=sys.stderr)" + FAILS, status=1
    )
    assert "a graph failed and nobody asked" in said
    assert "index 7 is out of bounds" in said
    assert "handled" in said


def test_a_failed_graph_that_somebody_was_told_of_does_not() -> None:
    program = FAILS.replace("torpor.sync()", "try: torpor.sync(wait=True)\nexcept IndexError: ...")
    run(program + "print('on')")


def test_a_child_does_not_answer_for_what_failed_in_its_parent() -> None:
    program = """
pid = os.fork()
if pid == 0:
    sys.exit(0)
print(os.waitpid(pid, 0)[1])
try: y.tolist()
except IndexError: print("told")
"""
    assert run(FAILS + program) == "0\ntold"


def test_finalizers_that_are_due_at_the_end_of_the_process_may_use_lazy_tensors() -> None:
    program = """
import gc, threading
gc.set_threshold(5, 2, 2)
g = torch.ones(4).to("lazy") * 2

class Held:
    def __del__(self):
        (g + 1).sum().item()

def work(number):
    for _ in range(60):
        cycle = [Held()]
        cycle.append(cycle)
        x = torch.ones(4).to("lazy") + number
        for k in range(10):
            x = x * 1.01 + k
        x.sum().item()

threads = [threading.Thread(target=work, args=(j,)) for j in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("on")
"""
    assert run(program) == "on"


GARBAGE = """
torpor.use("reference")
read, kept = [], []
class Uses:
    def __init__(self):
        self.itself, self.pending = self, g + 1
    def __del__(self):
        torpor.sync()  # ends the trace that the pending tensors of the others are of
        torch.ones(2, 3).to("lazy").sum().item()  # takes their slots in the next one
        self.pending.add_(1)
        read.append((self.pending * 2).sum().item())
        kept.append(self.pending)
gc.disable()
for _ in range(3):
    Uses()
gc.collect()
print(read == [32.0] * 3, [t.tolist() for t in kept] == [[4.0] * 4] * 3)
"""


@pytest.mark.parametrize("native", ["on", "off"])
def test_finalizers_find_what_garbage_holds_after_a_cut(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_NATIVE", native)
    assert run(GARBAGE) == "True True"


RINGS = """
import signal
class Alarm(Exception): pass
def ring(*_): raise Alarm
signal.signal(signal.SIGALRM, ring)
heap = [[number] for number in range(1_000_000)]  # a collection takes longer than the timer
try:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    gc.collect()
    for _ in range(10_000_000): pass
    print("lost")
except Alarm:
    print("raised")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no timers that send signals")
def test_a_signal_that_arrives_in_a_garbage_collection_is_not_lost() -> None:
    assert run(RINGS) == "raised"
