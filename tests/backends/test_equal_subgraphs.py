"""Layers that are equal are compiled once, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torpor
from torpor.backend.data import BackendData
from torpor.backends.dynamo import DynamoBackend
from torpor.backends.fx.backend import FxBackend
from torpor.backends.inductor.runtime import unavailable
from torpor.bench.models import GPT
from torpor.compiling.compilation import compile_graph
from torpor.errors import TorporWarning
from torpor.passes import repeats
from torpor.text.torch_parser import parse

needs_inductor = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


class Residual(nn.Module):
    """One block of a small ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm_1(self.one(x)))
        return torch.relu(x + self.norm_2(self.two(y)))


class Recurrent(nn.Module):
    """An LSTM cell in Python, over time."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.steps = steps
        self.gates = nn.Linear(2 * width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x)
        for _ in range(self.steps):
            i, f, g, o = self.gates(torch.cat([x, h], dim=1)).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


class Dropping(nn.Module):
    """A layer that drops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width),
        )  # fmt: skip
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(self.norm(x)))
        return x + self.drop(self.down(y))  # type: ignore[no-any-return]  # modules are not typed


Case = tuple[nn.Module, Tensor]


def gpt(layers: int) -> Case:
    return GPT(layers, 16, 2, 8, 32), torch.randint(32, (2, 8))


def resnet(layers: int) -> Case:
    return nn.Sequential(*(Residual(4) for _ in range(layers))), torch.randn(2, 4, 6, 6)


def lstm(layers: int) -> Case:
    return Recurrent(layers, 4), torch.randn(3, 4)


def dropping(layers: int) -> Case:
    return nn.Sequential(*(Dropping(8) for _ in range(layers))), torch.randn(4, 8)


def train(make: Callable[[int], Case], layers: int, place: Callable[[Any], Any]) -> list[float]:
    """Losses of a few steps, and a sum over the parameters in the end."""
    torch.manual_seed(0)
    module, batch = make(layers)
    model, x = place(module), place(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = sum(p.detach().square().sum() for p in model.parameters())
    return [float(loss) for loss in (*losses, total)]


def as_it_is(thing: Any) -> Any:
    return thing


def lazily(thing: Any) -> Any:
    return thing.to("lazy")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes each module has that is compiled."""
    compiled: list[int] = []
    compile_anew = FxBackend._compile_anew

    def counting(self: FxBackend, piece: Any, program: Any) -> Any:
        compiled.append(len(piece.instructions))
        return compile_anew(self, piece, program)

    monkeypatch.setattr(FxBackend, "_compile_anew", counting)
    return compiled


# -- what is compiled ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "few", "many"), [(gpt, 6, 12), (resnet, 16, 32), (lstm, 80, 160), (dropping, 16, 32)]
)
def test_more_layers_are_not_more_to_compile(
    make: Callable[[int], Case], few: int, many: int, modules: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(repeats, "BLOCK", 0.1)  # small graphs are cut as well
    torpor.use("dynamo:eager", equal_subgraphs=True)
    nodes, count = [], []
    for layers in (few, many):
        modules.clear()
        got = train(make, layers, lazily)
        nodes.append(sum(modules))
        count.append(len(modules))
        assert got == pytest.approx(train(make, layers, as_it_is), rel=1e-4, abs=1e-6)
    assert count[1] <= count[0] + 2
    assert nodes[1] <= 1.6 * nodes[0]  # parts grow with the root of what repeats


def test_a_second_graph_with_the_same_layers_compiles_little(modules: list[int]) -> None:
    torpor.use("dynamo:eager", equal_subgraphs=True)
    train(gpt, 8, lazily)
    first = sum(modules)
    assert first > 0
    modules.clear()
    train(gpt, 9, lazily)
    assert sum(modules) < first / 2


def test_layers_that_differ_are_compiled_one_by_one(modules: list[int]) -> None:
    torpor.use("dynamo:eager", equal_subgraphs=True)
    x = torch.randn(4).to("lazy")
    for number in range(200):
        x = torch.sin(x) * (1 + number / 100)
    x.tolist()
    assert sum(modules) == 400


def test_the_switch(modules: list[int]) -> None:
    torpor.use("dynamo:eager", equal_subgraphs=False)
    torpor.metrics.reset()
    train(gpt, 8, lazily)
    assert max(modules) > 1000
    assert torpor.metrics.counters().get("EqualSubgraphs", 0) == 0


# -- what goes wrong -------------------------------------------------------------------------------


def chain(layers: int = 30) -> str:
    """A graph of small equal layers."""
    lines, made = [], 1
    for _ in range(layers):
        for call in (
            "aten.mm.default(%{x}, %0)",
            "aten.sin.default(%{x})",
            "aten.neg.default(%{x})",
        ):
            lines.append(f"  %{made} = {call} : float32[3,3] @cpu".replace("{x}", str(made - 1)))
            made += 1
    body = "\n".join(lines)
    return f"graph(%0 = leaf 0 : float32[3,3] @cpu) {{\n{body}\n  return %{made - 1}\n}}"


def computed(backend: FxBackend, text: str, x: Tensor) -> Tensor:
    device = backend.backend_device(torch.device("cpu"))
    computation = compile_graph(parse(text), "graph", backend, device, {})
    data = [BackendData(device, computation.parameter_types[0], x)]
    (result,) = backend.execute(computation, data, device)
    tensor = result.wait().tensor
    assert tensor is not None
    return tensor


def expected(x: Tensor, layers: int = 30) -> Tensor:
    y = x
    for _ in range(layers):
        y = -torch.sin(y @ x)
    return y


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "BLOCK", 0.0)
    costs = repeats.COSTS["cpu"]
    monkeypatch.setitem(repeats.COSTS, "cpu", replace(costs, call=0.0))
    monkeypatch.setattr(repeats, "SEED", 2)


@pytest.mark.usefixtures("small_cuts")
def test_what_fails_is_tried_once_and_told_once() -> None:
    class Failing(DynamoBackend):
        tries = 0

        def compile_module(self, traced: Any, piece: Any) -> Any:
            if len(piece.instructions) == 3:
                self.tries += 1
                raise ValueError("not this one")
            return super().compile_module(traced, piece)

    backend = Failing("eager", equal_subgraphs=True)
    x = torch.randn(3, 3)
    with pytest.warns(TorporWarning, match="not this one") as reported:
        torch.testing.assert_close(computed(backend, chain(), x), expected(x))
    assert (
        backend.tries == len(reported) == 2
    )  # the first layer is another: it reads one tensor twice


@pytest.mark.usefixtures("small_cuts")
def test_an_op_that_is_refused_is_refused_in_every_layer() -> None:
    class Refusing(DynamoBackend):
        tries = 0

        def compile_module(self, traced: Any, piece: Any) -> Any:
            if any(i.spec.name == "aten.sin.default" for i in piece.instructions):
                self.tries += 1
                raise ValueError("no sine")
            return super().compile_module(traced, piece)

        def blamed_ops(self, error: BaseException) -> set[str]:
            return {"aten.sin.default"}

    backend = Refusing("eager", equal_subgraphs=True)
    x = torch.randn(3, 3)
    torch.testing.assert_close(computed(backend, chain(), x), expected(x))
    assert backend.tries == 1  # it is known from then on


@pytest.mark.usefixtures("small_cuts")
def test_what_fails_in_the_background_is_compiled_one_by_one(modules: list[int]) -> None:
    class Late(DynamoBackend):
        finished = 0

        def in_background(self, program: Any) -> Any:
            return nullcontext(self._finish)

        def _finish(self) -> None:
            self.finished += 1
            raise RuntimeError("a kernel could not be compiled")

    backend = Late("eager", equal_subgraphs=True)
    x = torch.randn(3, 3)
    torch.testing.assert_close(computed(backend, chain(), x), expected(x))
    assert backend.finished == 1
    half = len(modules) // 2
    assert modules[:half] == modules[half:]


# -- Inductor --------------------------------------------------------------------------------------


@needs_inductor
def test_inductor_trains_layers_as_eager_does() -> None:
    torpor.use("inductor")
    torpor.metrics.reset()
    got = train(gpt, 4, lazily)
    counters = torpor.metrics.counters()
    assert counters["EqualSubgraphs"] > 0
    assert counters["Donated"] > 0
    assert got == pytest.approx(train(gpt, 4, as_it_is), rel=1e-4)


@needs_inductor
def test_inductor_drops_what_eager_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "BLOCK", 0.0)
    torpor.use("inductor", rng="exact")
    torpor.metrics.reset()
    got = train(dropping, 12, lazily)
    assert torpor.metrics.counters()["EqualSubgraphs"] > 0
    assert got == pytest.approx(train(dropping, 12, as_it_is), rel=1e-4)
