"""The Inductor backend: right numbers, options, availability. Graphs are few: each is compiled."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torpor
from torpor import _torch
from torpor.backend import registry
from torpor.backend.data import BackendData
from torpor.backends.inductor import InductorBackend
from torpor.backends.inductor import runtime as inductor_runtime
from torpor.backends.inductor.lowering import decompositions
from torpor.compat import dynamo
from torpor.compiling.compilation import compile_graph
from torpor.errors import BackendError
from torpor.text.torch_parser import parse

needs_compiler = pytest.mark.skipif(
    inductor_runtime.unavailable() is not None, reason=str(inductor_runtime.unavailable())
)


class Net(nn.Module):
    """A little of everything: convolution, batch norm, dropout, embedding, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.25)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).transpose(1, 2)
        x = self.dropout(torch.relu(self.norm(self.convolution(x)))).transpose(1, 2)
        mixed = torch.softmax(x @ x.transpose(1, 2), -1) @ x
        scores: Tensor = self.out(mixed)
        return scores


def train(model: nn.Module, place: Callable[[Any], Any]) -> list[float]:
    model = place(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4)
    torch.manual_seed(3)
    losses = []
    for _ in range(5):
        tokens = place(torch.randint(11, (3, 6)))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@needs_compiler
def test_training_gives_eagers_losses_and_compiles_nothing_in_later_steps() -> None:
    torch.manual_seed(0)
    model = Net()
    expected = train(copy.deepcopy(model), lambda thing: thing)
    torpor.use("inductor")
    before = torpor.metrics.counters()
    actual = train(model, lambda thing: thing.to("lazy"))
    after = torpor.metrics.counters()
    assert actual == pytest.approx(expected, rel=1e-4)
    assert after["UncachedCompile"] - before.get("UncachedCompile", 0) <= 3
    assert [name for name in after if name.startswith("fallback::") and name not in before] == []


@needs_compiler
def test_an_index_out_of_range_does_not_end_the_process() -> None:
    torpor.use("inductor")
    table = torch.randn(50, 64).to("lazy")
    wrong = table[(torch.arange(4000) % 51).to("lazy")].sin()
    with pytest.raises(IndexError, match="index 50 is out of bounds"):
        wrong.cpu()


@needs_compiler
def test_a_donated_parameter_is_updated_in_place() -> None:
    text = """
graph(%0 = leaf 0 : float32[64] @cpu, %1 = leaf 1 : float32[64] @cpu, %2 = scalar 0 : float) {
  %3 = aten.sub_.Tensor(%0, %1, alpha=%2) : float32[64] @cpu
  %4 = aten.sin.default(%0) : float32[64] @cpu
  return %3, %4
}
"""
    backend = InductorBackend()
    device = backend.backend_device(torch.device("cpu"))
    graph = parse(text)
    computation = compile_graph(graph, "graph", backend, device, {0: 0})
    x, y = torch.randn(64), torch.randn(64)
    old, address = x.clone(), x.data_ptr()
    for rate in (0.5, 0.25):
        data = [BackendData(device, v.type, t) for v, t in zip(graph.inputs, (x, y))]
        new, other = backend.execute(computation, [*data, rate], device)
        assert new.tensor is x
        assert x.data_ptr() == address
        torch.testing.assert_close(x, old - rate * y)
        torch.testing.assert_close(other.tensor, old.sin())
        old = x.clone()
    assert "cpp_fused" in backend.computation_text(computation)


@needs_compiler
def test_ops_inductor_cannot_lower_are_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_graph = _torch.inductor_compile

    def fail(module: Any, *rest: Any) -> Any:
        if "aten.tan" in module.code:
            raise RuntimeError("LoweringException: no\n  target: aten.tan.default\n  args[0]: x")
        return compile_graph(module, *rest)

    monkeypatch.setattr(_torch, "inductor_compile", fail)
    torpor.use("inductor")
    x = torch.randn(4)
    torch.testing.assert_close(x.to("lazy").tan().sin().cpu(), x.tan().sin())
    assert torpor.metrics.counters()["fallback::aten.tan.default"] >= 1


@needs_compiler
def test_a_view_that_one_piece_leaves_to_the_next_is_found_as_it_lies() -> None:
    def halves(x: Tensor) -> Tensor:
        left, right = (x * 2).chunk(2, -1)
        return left.sin() * right

    x = torch.randn(4, 6)
    with torpor.using("inductor", max_nodes=2):
        assert torch.allclose(halves(x.to("lazy")).cpu(), halves(x))


@pytest.fixture
def channels_last(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether channels were laid side by side, for each module that was compiled."""
    found = []
    original = InductorBackend.prefers_channels_last

    def prefers(self: InductorBackend, traced: Any) -> bool:
        found.append(original(self, traced))
        return found[-1]

    monkeypatch.setattr(InductorBackend, "prefers_channels_last", prefers)
    return found


class Pictures(nn.Module):
    """Convolutions, and what depends on how their results lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.relu(self.norm(self.first(x)))
        z = nn.functional.max_pool2d(self.second(y), 2)
        rows = z.as_strided((2, 8), (32, 1), 3)  # of memory, as eager lays it
        return self.out(z.flatten(1)), y, rows


@needs_compiler
@pytest.mark.parametrize("by", ["recording", "torch.compile"])
def test_convolutions_have_their_channels_side_by_side_and_results_lie_as_eagers(
    by: str, channels_last: list[bool]
) -> None:
    torch.manual_seed(0)
    eager, x = Pictures(), torch.randn(2, 3, 8, 8)
    lazy = torpor.lazy(copy.deepcopy(eager)) if by == "recording" else copy.deepcopy(eager)
    run: Callable[..., Any] = lazy
    if by == "torch.compile":
        run = torch.compile(lazy, backend=dynamo.torpor, options={"backend": "inductor"})
    with torpor.using("inductor", compile_after=0):
        expected = eager(x)
        actual = run(torpor.lazy(x) if by == "recording" else x)
        for tensors in (expected, actual):
            sum(t.square().mean() for t in tensors).backward()  # type: ignore[union-attr]  # not 0
        torpor.sync()
    assert any(channels_last)
    for one, other in zip(actual, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(torpor.eager(one), other, rtol=1e-4, atol=1e-5)
    for one, other in zip(lazy.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert one.grad.stride() == other.grad.stride()  # type: ignore[union-attr]  # it has one
        torch.testing.assert_close(torpor.eager(one.grad), other.grad, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_windows_beyond_the_padding_are_averaged_as_eager_does(dims: int) -> None:
    pool = getattr(nn.functional, f"avg_pool{dims}d")
    x = torch.randn(1, 2, *[9] * dims, requires_grad=True)
    lazy = x.detach().to("lazy").requires_grad_()
    expected = pool(x, 6, 3, 2, ceil_mode=True)
    with torpor.using("inductor"):
        actual = pool(lazy, 6, 3, 2, ceil_mode=True)
        for y, t in ((expected, x), (actual, lazy)):
            y.backward(torch.arange(y.numel(), dtype=y.dtype, device=y.device).view_as(y))
            assert t.grad is not None
        assert torch.allclose(lazy.grad.cpu(), x.grad)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "view": lambda x: x.view(8, 8).clone().view(64),
    "other dtype": lambda x: x.double().float(),
    "plus 0": lambda x: x + 0,
    "times 1": lambda x: x * 1.0,
    "zeros": lambda x: x + torch.zeros_like(x),
    "twice": lambda x: x.clone().clone(),
    "slice": lambda x: x[:].clone(),
}


@needs_compiler
@pytest.mark.parametrize("copied", COPIES)
def test_old_contents_that_are_kept_elsewhere_are_the_old_ones(copied: str) -> None:
    """`previous.copy_(weight); weight.sub_(...)`: torch 2.13 keeps the new weight."""

    def step(weight: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        moved = (weight * previous).sum()
        old, other = COPIES[copied](weight), COPIES[copied](weight)
        weight.add_(1)
        previous.copy_(old)
        return moved, other

    eager = [torch.full((64,), 1.0), torch.full((64,), 5.0)]
    lazy = [torpor.lazy(tensor.clone()) for tensor in eager]
    with torpor.using("inductor", compile_after=0):
        for _ in range(3):
            expected, actual = step(*eager), step(*lazy)
            torpor.sync()
            for one, other in zip([*lazy, *actual], [*eager, *expected], strict=True):
                assert torch.equal(torpor.eager(one), other)


@needs_compiler
def test_with_rng_fast_inductor_draws_inside_its_kernels() -> None:
    masks = []
    with torpor.using("inductor", rng="fast") as backend:
        x = torch.ones(4000).to("lazy").requires_grad_()
        for _ in range(3):
            y = nn.functional.dropout(x, 0.25)
            (grad,) = torch.autograd.grad(y.sum(), x)
            code = torpor.graph(y, format="backend")
            masks.append(y.cpu())
            assert torch.equal(grad.cpu(), y.cpu())
            torpor.sync(wait=True)
        assert "fallback::aten.bernoulli_.float" not in torpor.metrics.counters()
    assert backend.draws
    assert "inductor_random" in code
    assert not torch.equal(masks[0], masks[1])
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0, 4 / 3])
        assert abs((mask == 0).float().mean() - 0.25) < 0.05


# -- options ---------------------------------------------------------------------------------------


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(BackendError, match=r"no option 'max_autotun'.*'max_autotune'"):
        torpor.use("inductor", max_autotun=True)


def test_rng_is_exact_or_fast() -> None:
    assert not InductorBackend(rng="exact").draws
    assert InductorBackend(rng="fast").draws
    with pytest.raises(BackendError, match="rng is 'exact' or 'fast'"):
        torpor.use("inductor", rng="slow")


def test_a_piece_has_at_least_one_node() -> None:
    with pytest.raises(BackendError, match="max_nodes is at least 1"):
        torpor.use("inductor", max_nodes=0)


def test_settings_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as settings

    seen = []

    def look(module: Any, inputs: Any, mode: Any, options: dict[str, Any], *rest: Any) -> Any:
        with settings.patch(options):
            seen.append(settings.cpp.simdlen)
        return lambda given: module(*given)

    monkeypatch.setattr(_torch, "inductor_compile", look)
    torpor.use("inductor", **{"cpp.simdlen": 8})
    assert torch.ones(3).to("lazy").sin().sum().item() == pytest.approx(2.5244129)
    assert seen == [8]


# -- availability ----------------------------------------------------------------------------------


def test_without_a_compiler_the_backend_says_why_it_is_not_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C++ compiler" in registry.backends()["inductor"]
    with pytest.raises(BackendError, match=r"no C\+\+ compiler"):
        torpor.use("inductor")


def test_without_triton_the_backend_is_not_available_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "no Triton" in str(inductor_runtime.unavailable())


def test_what_dropout_keeps_is_scaled_as_the_kernel_scales_it() -> None:
    """In one multiplication: 1 / 0.9 is no number of bfloat16."""
    op = torch.ops.aten.native_dropout_backward.default
    grad, mask = torch.randn(1000, dtype=torch.bfloat16), torch.rand(1000) > 0.1
    expected = (grad.double() * mask * (1 / 0.9)).to(torch.bfloat16)
    assert torch.equal(decompositions()[op](grad, mask, 1 / 0.9), expected)


SMALL = (torch.bool, torch.uint8, torch.int8, torch.float16)
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x.add_(x),
    "scaled": lambda x: x.add_(x, alpha=2),
    "scaled_list": lambda x: torch._foreach_add_([x], [x.clone()], alpha=2),
    "mul": lambda x: x.mul_(x),
    "eq": lambda x: x.eq_(x),
}


@needs_compiler
@pytest.mark.parametrize("dtype", SMALL)
def test_a_result_written_over_a_small_buffer_has_its_dtype(dtype: torch.dtype) -> None:
    torpor.use("inductor")
    eager = [torch.ones(24, dtype=dtype) for _ in WRITES]
    lazy = [tensor.to("lazy") for tensor in eager]
    torpor.sync(wait=True)
    for _ in range(2):
        for write, one, other in zip(WRITES.values(), eager, lazy, strict=True):
            write(one)
            write(other)
        torpor.sync(wait=True)
    for one, other in zip(eager, lazy, strict=True):
        assert torch.equal(other.cpu(), one)
