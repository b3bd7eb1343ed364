"""The memory a graph needs is known before it runs, and a warning names what is too large."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torpor
from torpor import _torch
from torpor.backend import BackendData, MemoryInfo, register
from torpor.backend.registry import make
from torpor.backends.reference import ReferenceBackend
from torpor.backends.reference.runtime import step
from torpor.errors import TorporWarning
from torpor.observe import memory
from torpor.observe.memory import free_bytes, predict
from torpor.testing.networks import Attentive, Recurrent
from torpor.text.torch_parser import parse

GRAPH = """graph(%0 = leaf 0 : float32[256] @cpu) {
  %1 = aten.mul.Tensor(%0, 2) : float32[256] @cpu
  %2 = aten.view.default(%1, [16, 16]) : float32[16,16] @cpu
  %3 = aten.relu.default(%0) : float32[256] @cpu
  %4 = aten.mm.default(%2, %2) : float32[16,16] @cpu
  %5 = aten.add_.Tensor(%4, 1) : float32[16,16] @cpu
  return %3, %5
}"""
KIB = 1024


@pytest.fixture(autouse=True)
def on_the_reference():
    torpor.use("reference")
    yield
    torpor.sync(wait=True)
    torpor.use("reference")


class Counting(ReferenceBackend):
    """Counts the bytes that the values of a running graph hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []  # predicted and real

    def execute(self, computation: Any, arguments: Any, device: Any) -> list[BackendData]:
        instructions, registers, _ = computation.program
        env: list[Any] = [a.tensor if isinstance(a, BackendData) else a for a in arguments]
        given = {_memory(t) for t in env if isinstance(t, torch.Tensor)}
        env += [None] * (registers - len(env))
        peak = 0
        with _torch.kernels():
            for instruction in instructions:
                step(instruction, env)
                held = {_memory(t): t.untyped_storage().nbytes() for t in env
                        if isinstance(t, torch.Tensor)}  # fmt: skip
                peak = max(peak, sum(n for key, n in held.items() if key not in given))
                for register_ in instruction.dead:
                    env[register_] = None
        self.seen.append((predict(computation.graph).peak, peak))
        return super().execute(computation, arguments, device)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def test_views_writes_and_dead_values_are_counted_as_they_are():
    found = predict(parse(GRAPH))
    # %1, %3 and %4 side by side; %2 is a view and %5 takes the memory of %4
    assert (found.inputs, found.peak) == (KIB, 3 * KIB)
    assert found.node.op.name == "aten.mm.default"
    assert [size for _, size in found.alive] == [KIB] * 3


def test_a_result_that_is_a_view_of_an_input_costs_a_copy():
    text = """graph(%0 = leaf 0 : float32[256] @cpu) {
      %1 = aten.view.default(%0, [16, 16]) : float32[16,16] @cpu
      return %1
    }"""
    assert predict(parse(text)).peak == KIB


def test_a_donated_input_takes_its_result():
    text = """graph(%0 = leaf 0 : float32[256] @cpu) {
      %1 = aten.mul.Tensor(%0, 2) : float32[256] @cpu
      %2 = aten.relu.default(%1) : float32[256] @cpu
      return %2
    }"""
    graph = parse(text)
    assert predict(graph).peak == 2 * KIB
    assert predict(graph, {0: 0}).peak == KIB


def test_an_empty_graph_needs_nothing():
    found = predict(parse("graph(%0 = leaf 0 : float32[4] @cpu) {\n return\n}"))
    assert (found.peak, found.node, found.alive) == (0, None, ())


def _mlp() -> torch.nn.Module:
    wide = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.ReLU()
    return torch.nn.Sequential(*wide, torch.nn.Linear(256, 4))


MODELS = {
    "mlp": (_mlp, lambda: torch.randn(512, 64)),
    "attention": (Attentive, lambda: torch.randint(11, (32, 24))),
    "lstm": (Recurrent, lambda: torch.randn(128, 20, 5)),
    "convolution": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
            torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.LazyLinear(4),
        ),
        lambda: torch.randn(16, 3, 24, 24),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_prediction_is_near_what_a_training_step_really_holds(name):
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), batch()
    model(x)
    register("counting", Counting)
    backend = torpor.use("counting")
    model = model.to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    y = torch.randint(4, (len(x),)).to("lazy")
    x = x.to("lazy")
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    torpor.wait()
    predicted, real = max(backend.seen, key=lambda pair: pair[1])
    assert real > 100 * KIB
    assert predicted == pytest.approx(real, rel=0.2)


class Small(ReferenceBackend):
    """A device with little memory."""

    def memory_info(self, device: Any) -> MemoryInfo:
        return MemoryInfo(40 << 20, 100 << 20)


def test_a_graph_that_does_not_fit_is_told_before_it_runs_and_once():
    register("small", Small)
    torpor.use("small")
    x = torch.zeros(1).to("lazy")
    y = x.expand(1 << 23, 4) * 2  # the large one
    total = y.sum()
    with pytest.warns(TorporWarning) as reported:
        assert total.item() == 0.0
    (warning,) = reported
    text = str(warning.message)
    assert "needs about 128.0 MiB on cpu:0, where 60.0 MiB are free" in text
    assert "float32[8388608,4]" in text
    assert "# the large one" in text
    assert warning.filename == __file__
    torpor.sync(wait=True)
    y = x.expand(1 << 23, 4) * 2
    total = y.sum()
    assert total.item() == 0.0  # no second warning: warnings are errors here


def test_a_small_graph_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda *_: pytest.fail("asked"))
    assert (torch.ones(3).to("lazy") * 7).tolist() == [7.0] * 3


def test_a_graph_that_fits_is_not_told():
    assert (torch.zeros(1).to("lazy").expand(1 << 23, 4) * 3).sum().item() == 0.0


def test_free_memory_of_the_host_is_known():
    backend = make("reference")
    free = free_bytes(backend, backend.backend_device(torch.device("cpu")))
    assert 0 < free < 1 << 50


def test_a_limit_of_a_container_counts(monkeypatch):
    files = {
        "/proc/meminfo": ["MemTotal: 9 kB", "MemAvailable:    8000000 kB"],
        "/sys/fs/cgroup/memory.max": ["1000000"],
        "/sys/fs/cgroup/memory.current": ["700000"],
        "/sys/fs/cgroup/memory.stat": ["anon 1", "inactive_file 50000"],
    }
    monkeypatch.setattr(memory, "_lines", lambda path: files.get(path, []))
    assert memory._free_on_host() == 350_000
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert memory._free_on_host() == 8_000_000 * 1024
    files.clear()
    assert memory._free_on_host() is None


def test_a_table_of_what_a_tensor_will_need():
    x = torch.ones(1000, 1000).to("lazy")
    shown = torpor.graph(x @ x, format="memory")
    assert "at most 3.8 MiB more at aten.mm.default" in shown
    assert "float32[1000,1000]" in shown


def test_a_prediction_holds_no_tensor():
    x = torch.ones(4).to("lazy")
    data = weakref.ref(x._lazy_storage)
    str(predict(parse(GRAPH)))
    del x
    torpor.sync(wait=True)
    assert data() is None
