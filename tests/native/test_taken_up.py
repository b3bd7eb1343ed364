"""A library that is built while the program runs is taken up at a cut, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# what each program has: `appear()` puts the library where a build would have put it
BEGIN = """
import os, shutil, sys, threading, time
import torch, torpor
from torpor.native import build
from torpor.native.attach import NATIVE_RECORDER
started = []
build.start = lambda: started.append(1)

def appear():
    path = build.library()
    os.makedirs(path.parent, mode=0o700, exist_ok=True)
    shutil.copy(sys.argv[1], path.with_suffix(".tmp"))
    os.chmod(path.with_suffix(".tmp"), 0o700)
    os.replace(path.with_suffix(".tmp"), path)
    NATIVE_RECORDER._next = 0.0  # the disk is looked at now

def recorded():
    return 0 if NATIVE_RECORDER.library is None else NATIVE_RECORDER.library.counts()[0]
"""


BUILDS = """
import os, sys, time, torch, torpor
from torpor.native.attach import NATIVE_RECORDER
x = torch.ones(3, device="lazy")
end = time.monotonic() + 200
while NATIVE_RECORDER.library is None and time.monotonic() < end:
    assert (x + 1).tolist() == [2, 2, 2]
    torpor.sync()
    time.sleep(0.2)
for _ in range(3):
    assert (x + 1).tolist() == [2, 2, 2]
print(NATIVE_RECORDER.library.counts()[0] > 0)
"""


def test_processes_build_it_once_and_all_take_it_up(library_path: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(f"""#!/bin/sh
echo called >> {tmp_path}/calls
while [ "$1" != -o ]; do shift; done
cp {library_path} "$2"
""")
    compiler.chmod(0o700)
    environment = {
        **os.environ, "TORPOR_NATIVE": "auto", "TORPOR_CACHE": "1", "CXX": str(compiler),
        "TORPOR_BACKEND": "reference", "TORPOR_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip
    programs = [
        subprocess.Popen([sys.executable, "-c", BUILDS], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [program.communicate(timeout=240)[0] for program in programs] == [b"True\n"] * 2
    assert (tmp_path / "calls").read_text() == "called\n"
    left = {path.suffix for path in (tmp_path / "cache" / "native").iterdir()}
    assert left == {".so", ".lock", ".started"}


def run(
    program: str, library: Path, cache: Path, backend: str = "reference", **settings: str
) -> list[str]:
    environment = {
        **os.environ, "TORPOR_NATIVE": "auto", "TORPOR_CACHE": "1", "TORPOR_BACKEND": backend,
        "TORPOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **settings,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, library],
        env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TRAINING = """
def train(lazily):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4),
    )
    if lazily:
        net = torpor.lazy(net)
    calls = []
    net[0].weight.register_hook(lambda grad: calls.append("grad"))
    net[4].register_forward_hook(lambda module, args, out: calls.append("forward"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    objects = [id(p) for p in net.parameters()]
    seen, how = [], []
    for step in range(12):
        if lazily and step == 5:
            appear()
        before = recorded()
        x = torch.randn(6, 8)
        loss = torch.nn.functional.mse_loss(net(x), x[:, :4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        how.append(recorded() > before)
    assert objects == [id(p) for p in net.parameters()]
    assert calls == ["forward", "grad"] * 12
    state = [*net.parameters(), *net.buffers()]
    return seen, [t.detach().cpu().clone() for t in state], how

eager, state, _ = train(False)
lazy, lazy_state, how = train(True)
"""


def test_a_training_begins_in_python_and_goes_on_in_c(library_path: Path, tmp_path: Path) -> None:
    program = (
        TRAINING
        + """
assert eager == lazy
assert all(torch.equal(a, b) for a, b in zip(state, lazy_state))
assert not any(how[:5]) and all(how[6:]), how
assert started == [1]
print(torpor.native.status())
"""
    )
    assert run(program, library_path, tmp_path) == ["C++"]


def test_steps_compiled_before_get_their_tapes(library_path: Path, tmp_path: Path) -> None:
    program = (
        TRAINING
        + """
from torpor.backends.inductor.taped import Taped
from torpor.execute.sync import PLANS
programs = [p.computation.program for p in PLANS.plans.values() if p.source is not None]
assert programs and all(type(p.replayed) is Taped for p in programs)
torch.testing.assert_close(torch.tensor(eager), torch.tensor(lazy), rtol=1e-4, atol=1e-5)
print("taped")
"""
    )
    settings = {"TORPOR_COMPILE_AFTER": "2", "TORPOR_COMPILE_ASYNC": "0"}
    assert run(program, library_path, tmp_path, "inductor", **settings) == ["taped"]


def test_threads_that_record_meanwhile_do_not_notice(library_path: Path, tmp_path: Path) -> None:
    program = """
def work(number, results):
    torch.manual_seed(number)
    w = torch.full((5, 5), 0.1 * number).to("lazy").requires_grad_()
    for step in range(60):
        if number == 1 and step == 20:
            appear()
        y = torch.tanh(torch.ones(3, 5).to("lazy") @ w + step)
        y.sum().backward()
        with torch.no_grad():
            w -= 0.01 * w.grad
        w.grad = None
        torpor.sync()
    results[number] = w.detach().cpu()

def plain(number):
    w = torch.full((5, 5), 0.1 * number).requires_grad_()
    for step in range(60):
        y = torch.tanh(torch.ones(3, 5) @ w + step)
        y.sum().backward()
        with torch.no_grad():
            w -= 0.01 * w.grad
        w.grad = None
    return w.detach()

results = {}
threads = [threading.Thread(target=work, args=(n, results)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
for n in range(4):
    assert torch.equal(results[n], plain(n)), n
assert recorded() > 0
print("equal")
"""
    assert run(program, library_path, tmp_path) == ["equal"]


CUTS = {
    "inside a module": """
class Inner(torch.nn.Module):
    def forward(self, x):
        y = torch.relu(x) * 2
        torpor.sync()
        return y.exp()
class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = Inner(), torch.nn.Parameter(torch.ones(3))
    def forward(self, x):
        return self.inner(x * self.scale) + self.inner(x)

def body(x):
    net = Outer().to(x.device)
    out = net(x)
    out.sum().backward()
    return net.scale.grad
""",
    "between forward and backward": """
def body(x):
    w = x.clone().requires_grad_()
    y = torch.nn.functional.layer_norm(w.tanh() @ w, (3,)).pow(2)
    torpor.sync()
    y.sum().backward()
    return w.grad
""",
    "in inference mode": """
def body(x):
    with torch.inference_mode():
        y = torch.softmax(x @ x, -1)
        torpor.sync()
        return (y[0] + 1).clone()
""",
    "under autocast": """
def body(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x
        torpor.sync()
        return (y @ x).float()
""",
    "with a stale view": """
def body(x):
    x = x.clone()
    row, column = x[1], x[:, 0]
    row.mul_(3)
    torpor.sync()
    column.add_(1)
    return row + column
""",
}


@pytest.mark.parametrize(("where", "device"), list(zip(CUTS, ["lazy", "cpu"] * 3)))
def test_any_cut_will_do(where: str, device: str, library_path: Path, tmp_path: Path) -> None:
    program = (
        CUTS[where]
        + f"""
x = torch.linspace(-1, 1, 9).reshape(3, 3)
expected = body(x)
lazy = x.to("lazy") if "{device}" == "lazy" else torpor.lazy(x.clone())
for step in range(6):
    if step == 2:
        appear()
    result = body(lazy)
    assert torch.equal(result.cpu(), expected), step
    torpor.sync()
assert NATIVE_RECORDER.library is not None and recorded() > 0
print("equal")
"""
    )
    assert run(program, library_path, tmp_path) == ["equal"]


def test_a_program_that_only_reads_takes_it_up_too(library_path: Path, tmp_path: Path) -> None:
    program = """
x = torch.ones(3, device="lazy")
for step in range(6):
    if step == 2:
        appear()
    assert (x * 2 + step).sum().item() == 6 + 3 * step
assert recorded() > 0
"""
    assert run(program, library_path, tmp_path) == []


def test_a_child_takes_up_what_appears_after_the_fork(library_path: Path, tmp_path: Path) -> None:
    program = """
x = torch.ones(3, device="lazy")
assert (x + 1).tolist() == [2, 2, 2]
child = os.fork()
if child == 0:
    appear()
for _ in range(3):
    assert (x + 1).tolist() == [2, 2, 2]
    torpor.sync()
if child == 0:
    os._exit(0 if recorded() else 1)
assert os.waitpid(child, 0)[1] == 0
NATIVE_RECORDER._next = 0.0
for _ in range(3):
    assert (x + 1).tolist() == [2, 2, 2]
assert recorded() and started == [1]
"""
    assert run(program, library_path, tmp_path) == []


def test_one_that_cannot_be_loaded_is_left_alone(library_path: Path, tmp_path: Path) -> None:
    program = """
sys.argv[1] = sys.argv[0] = __import__("tempfile").mkstemp()[1]
x = torch.ones(3, device="lazy")
for step in range(6):
    if step == 2:
        appear()
    assert (x + step).tolist() == [1 + step] * 3
assert NATIVE_RECORDER.library is None
print(torpor.native.status())
"""
    (reported,) = run(program, library_path, tmp_path)
    assert reported.startswith("Python: the native recorder cannot be loaded")
