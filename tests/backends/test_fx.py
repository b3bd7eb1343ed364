"""What the backends that compile fx graphs share; TorchDynamo's `eager` compiles at no cost."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torpor
from torpor import _torch
from torpor.backend.data import BackendData
from torpor.backend.lowering import Computation
from torpor.backend.registry import get_backend
from torpor.backends.blocks.program import Piece
from torpor.backends.dynamo import DynamoBackend
from torpor.backends.fx import functional, trace
from torpor.compiling.compilation import compile_graph
from torpor.errors import CompileError, TorporWarning
from torpor.ir.graph import Graph
from torpor.ir.types import TensorType
from torpor.ops.spec import spec_of
from torpor.overrides import rnn
from torpor.text.torch_parser import parse


@pytest.fixture(autouse=True)
def backend() -> DynamoBackend:
    made = torpor.use("dynamo:eager")
    assert isinstance(made, DynamoBackend)
    return made


def compiled(graph: Graph, aliases: dict[int, int] | None = None, **options: Any) -> Computation:
    """`graph`, compiled by a backend of its own, with donated parameters."""
    backend = DynamoBackend("eager", **options)
    device = backend.backend_device(torch.device("cpu"))
    return compile_graph(graph, "graph", backend, device, aliases or {})


def execute(computation: Computation, *arguments: Any) -> list[BackendData]:
    data = [
        BackendData(computation.device, type_, given) if isinstance(given, Tensor) else given
        for given, type_ in zip(arguments, computation.parameter_types, strict=True)
    ]
    return DynamoBackend("eager").execute(computation, data, computation.device)


def tensors(results: list[BackendData]) -> list[Tensor]:
    found = [result.wait().tensor for result in results]
    assert all(tensor is not None for tensor in found)
    return found  # type: ignore[return-value]  # checked


def pieces(computation: Computation) -> list[Any]:
    return [type(step).__name__ for step in computation.program.steps]


CHAIN = """
graph(%0 = leaf 0 : float32[4] @cpu) {
  %1 = aten.sin.default(%0) : float32[4] @cpu
  %2 = aten.cos.default(%1) : float32[4] @cpu
  %3 = aten.exp.default(%2) : float32[4] @cpu
  return %3
}
"""

UPDATE = """
graph(%0 = leaf 0 : float32[4] @cpu, %1 = leaf 1 : float32[4] @cpu) {
  %2 = aten.sub_.Tensor(%0, %1) : float32[4] @cpu
  %3 = aten.sin.default(%0) : float32[4] @cpu
  %4 = aten.view.default(%2, [2, 2]) : float32[2,2] @cpu
  return %2, %3, %4
}
"""


def test_ops_that_write_become_functional_ops() -> None:
    x = torch.randn(3, 4).to("lazy")
    y = x.clone()
    y.add_(x).mul_(2).copy_(y.relu_())
    torch.sin(y, out=y)
    text = torpor.graph(y, format="backend")
    assert "add.Tensor" in text
    assert "_.Tensor" not in text
    assert ".out(" not in text


def test_results_have_the_promised_strides_and_memory_of_their_own() -> None:
    text = """
graph(%0 = leaf 0 : float32[2,3] @cpu) {
  %1 = aten.t.default(%0) : float32[3,2] stride [1,3] @cpu
  %2 = aten.add.Tensor(%1, 1) : float32[3,2] stride [1,3] @cpu
  %3 = aten.select.int(%2, 0, 1) : float32[2] stride [3] offset 1 @cpu
  return %1, %2, %3
}
"""
    x = torch.arange(6.0).reshape(2, 3)
    one, two, three = tensors(execute(compiled(parse(text)), x))
    assert torch.equal(one, x.t())
    assert torch.equal(two, x.t() + 1)
    assert torch.equal(three, (x.t() + 1)[1])
    assert [t.stride() for t in (one, two, three)] == [(1, 3), (1, 3), (3,)]
    assert len({t.untyped_storage().data_ptr() for t in (x, one, two, three)}) == 4


@pytest.mark.parametrize("max_nodes", [1, 2, 100])
def test_a_large_graph_is_cut_into_pieces(max_nodes: int) -> None:
    computation = compiled(parse(CHAIN), max_nodes=max_nodes)
    assert len(pieces(computation)) == -(-3 // max_nodes)
    x = torch.randn(4)
    (result,) = tensors(execute(computation, x))
    assert torch.equal(result, x.sin().cos().exp())


@pytest.mark.parametrize("max_nodes", [1, 2, 100])
def test_a_donated_parameter_is_written_over_when_its_last_reader_has_run(max_nodes: int) -> None:
    x, y = torch.randn(4), torch.randn(4)
    old = x.clone()
    results = tensors(execute(compiled(parse(UPDATE), {0: 0}, max_nodes=max_nodes), x, y))
    assert results[0] is x
    assert torch.equal(x, old - y)
    assert torch.equal(results[1], old.sin())
    assert torch.equal(results[2], (old - y).view(2, 2))
    assert results[2].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_a_parameter_that_is_not_donated_is_left_alone() -> None:
    x, y = torch.randn(4), torch.randn(4)
    old = x.clone()
    results = tensors(execute(compiled(parse(UPDATE)), x, y))
    assert torch.equal(x, old)
    assert torch.equal(results[0], old - y)


# -- run-time numbers ------------------------------------------------------------------------------

NUMBERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "add": lambda x, s: x + s,
    "alpha": lambda x, s: x.add(x, alpha=s) if x.is_floating_point() else x + s,
    "sub": lambda x, s: s - x,
    "mul": lambda x, s: x * s,
    "mul_": lambda x, s: x.clone().mul_(s) if x.is_floating_point() else x * s,
    "div": lambda x, s: x / s,
    "clamp": lambda x, s: x.clamp(min=s),
    "less": lambda x, s: x < s,
    "lerp": lambda x, s: torch.lerp(x, x * x, s) if x.is_floating_point() else x * s,
    "masked_fill": lambda x, s: (x.float() + 0.0).masked_fill(x > 0, s),
    "remainder": lambda x, s: torch.remainder(x, s),
    "addcdiv": lambda x, s: x.addcdiv(x, x + 9, value=s) if x.is_floating_point() else x * s,
}
OPERANDS = {
    "float32": torch.tensor([1.5, -2.25, 3.0]),
    "float64": torch.tensor([1.5, -2.25, 3.0], dtype=torch.float64),
    "bfloat16": torch.tensor([1.5, -2.25, 3.0], dtype=torch.bfloat16),
    "int64": torch.tensor([3, -2, 7]),
    "0-dim": torch.tensor(2.5),
    "0-dim int": torch.tensor(3),
}


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_promotes_as_a_number_and_compiles_nothing(
    name: str, operand: str
) -> None:
    function, x = NUMBERS[name], OPERANDS[operand]
    lazy = x.to("lazy")
    for step in range(6):
        number = 0.7 + step / 7
        expected, actual = function(x, number), function(lazy, number)
        assert actual.dtype is expected.dtype
        before = torpor.metrics.counters().get("UncachedCompile", 0)
        torch.testing.assert_close(actual.cpu(), expected)
        torpor.sync()
        if step > 2:
            assert torpor.metrics.counters().get("UncachedCompile", 0) == before
    assert not [c for c in torpor.metrics.lines("fallback::aten.add.Tensor") if name in c]


def test_batch_norm_with_a_momentum_that_changes_compiles_nothing() -> None:
    plain = torch.nn.BatchNorm1d(3, momentum=None)
    lazy = torch.nn.BatchNorm1d(3, momentum=None).to("lazy")
    for step in range(6):
        x = torch.randn(4, 3)
        before = torpor.metrics.counters().get("UncachedCompile", 0)
        torch.testing.assert_close(lazy(x.to("lazy")).detach().cpu(), plain(x).detach())
        torch.testing.assert_close(lazy.running_var.cpu(), plain.running_var)
        torpor.sync()
        if step > 2:
            assert torpor.metrics.counters().get("UncachedCompile", 0) == before
    assert "fallback::aten.native_batch_norm.default" not in torpor.metrics.counters()


def test_lists_of_numbers_that_change_compile_nothing() -> None:
    plain = [torch.randn(3, requires_grad=True), torch.randn(2, 2, requires_grad=True)]
    lazy = [p.detach().to("lazy").requires_grad_() for p in plain]
    optimizers = [torch.optim.AdamW(p, lr=0.1) for p in (plain, lazy)]
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.1) for o in optimizers]
    for step in range(6):
        before = torpor.metrics.counters().get("UncachedCompile", 0)
        for parameters, optimizer, schedule in zip((plain, lazy), optimizers, schedules):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.5
            optimizer.step()
            schedule.step()
        torpor.sync()
        if step > 2:
            assert torpor.metrics.counters().get("UncachedCompile", 0) == before
    for expected, actual in zip(plain, lazy):
        torch.testing.assert_close(actual.detach().cpu(), expected.detach())


# -- what is refused -------------------------------------------------------------------------------


def refuse(*args: Any) -> list[Any]:
    raise functional.NotTraceable("for this test")


def test_an_op_that_cannot_be_traced_splits_the_graph_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(functional.FORMS, "aten.cos.default", refuse)
    before = torpor.metrics.counters().get("fallback::aten.cos.default", 0)
    computation = compiled(parse(CHAIN))
    assert pieces(computation) == ["Piece", "Instruction", "Piece"]
    assert torpor.metrics.counters()["fallback::aten.cos.default"] == before + 1
    x = torch.randn(4)
    (result,) = tensors(execute(computation, x))
    assert torch.equal(result, x.sin().cos().exp())


def test_an_op_whose_fake_kernel_is_wrong_about_sizes_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rnn, "_is_whole", lambda *args: False)
    network = torch.nn.LSTM(5, 8).to("lazy")  # the workspace of mkldnn_rnn_layer
    x = torch.randn(4, 3, 5)
    result = network(x.to("lazy"))[0]
    result.sum().backward()
    torpor.sync(wait=True)
    plain = copy.deepcopy(network).to("cpu")
    torch.testing.assert_close(result.detach().cpu(), plain(x)[0].detach())
    fakes_lie = "fallback::aten.mkldnn_rnn_layer.default"
    if torch.backends.mkldnn.is_available():
        assert torpor.metrics.counters()[fakes_lie] >= 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_op_whose_fake_has_other_strides_than_its_kernel_runs_alone(device: str) -> None:
    """On CUDA, torch's decomposition of `upsample_bilinear2d` makes few channels contiguous."""
    spec = spec_of(torch.ops.aten.upsample_bilinear2d.default)
    with _torch.new_fake_mode():
        picture = torch.empty_strided((2, 5, 8, 8), (320, 1, 40, 5), device=device)
        args = [picture, [32, 32], False, None, None]
        made = [spec.target(*args)]
    promised = [TensorType.of((2, 5, 32, 32), (5120, 1, 160, 5), torch.float32, picture.device)]
    if device == "cpu":
        trace._check_strides(spec, args, made, promised)
        return
    with pytest.raises(functional.NotTraceable, match="strides"):
        trace._check_strides(spec, args, made, promised)


def test_ops_a_compiler_blames_are_left_out(
    backend: DynamoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_module = backend.compile_module

    def fail(traced: Any, piece: Any) -> Any:
        if "aten.cos" in traced.module.code:
            raise RuntimeError("no lowering for cos")
        return compile_module(traced, piece)

    monkeypatch.setattr(backend, "compile_module", fail)
    monkeypatch.setattr(backend, "blamed_ops", lambda error: {"aten.cos.default"})
    x = torch.randn(4)
    assert torch.equal(x.to("lazy").sin().cos().exp().cpu(), x.sin().cos().exp())
    assert torpor.metrics.counters()["fallback::aten.cos.default"] >= 1


def test_a_compiler_that_draws_numbers_does_not_change_those_of_the_program(
    backend: DynamoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_module = backend.compile_module

    def draw(traced: Any, piece: Any) -> Any:
        with _torch.without_modes():
            torch.rand(3)
        return compile_module(traced, piece)

    monkeypatch.setattr(backend, "compile_module", draw)
    before = torch.get_rng_state()
    assert torch.zeros(4).to("lazy").cos().sum().item() == 4.0
    assert torch.equal(torch.get_rng_state(), before)


def fail_to_compile(traced: Any, piece: Any) -> Any:
    raise RuntimeError("the compiler is ill")


def test_a_piece_that_does_not_compile_runs_on_the_reference_with_a_warning(
    backend: DynamoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "compile_module", fail_to_compile)
    x = torch.randn(4)
    with pytest.warns(TorporWarning, match=r"could not compile graph.*\n?.*the compiler is ill"):
        assert torch.equal(x.to("lazy").sin().cpu(), x.sin())


def test_a_piece_that_does_not_compile_is_an_error_under_strict(
    backend: DynamoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "compile_module", fail_to_compile)
    monkeypatch.setattr(torpor.config, "strict", True)
    y = torch.randn(4).to("lazy").sin()
    with pytest.raises(CompileError, match="the compiler is ill"):
        y.cpu()
    monkeypatch.undo()


def test_compiled_code_that_fails_is_given_up_for_the_reference() -> None:
    computation = compiled(parse(CHAIN))
    calls = []

    def fail(inputs: list[Tensor]) -> Any:
        calls.append(1)
        raise RuntimeError("the compiled code is ill")

    (step,) = computation.program.steps
    assert isinstance(step, Piece)
    step.run = fail
    x = torch.randn(4)
    for _ in range(2):
        (result,) = tensors(execute(computation, x))
        assert torch.equal(result, x.sin().cos().exp())
    assert len(calls) == 1


# -- what eager refuses ----------------------------------------------------------------------------


def test_an_index_out_of_range_raises_eagers_error_at_its_line_and_spares_the_rest() -> None:
    table = torch.randn(5, 3).to("lazy")
    fine = table.exp()
    wrong = torch.nn.functional.embedding(torch.tensor([1, 7]).to("lazy"), table)
    torpor.sync()
    with pytest.raises(IndexError, match=r"(?s)index out of range.*test_fx\.py.*embedding"):
        wrong.cpu()
    assert torch.equal(fine.cpu(), table.cpu().exp())


def test_an_index_out_of_range_is_found_by_the_graph_itself() -> None:
    text = """
graph(%0 = leaf 0 : float32[5] @cpu, %1 = leaf 1 : int64[2] @cpu) {
  %2 = aten.index.Tensor(%0, [%1]) : float32[2] @cpu
  return %2
}
"""
    computation = compiled(parse(text))
    x = torch.randn(5)
    (found,) = tensors(execute(computation, x, torch.tensor([-5, 4])))
    assert torch.equal(found, x[[0, 4]])
    (failed,) = execute(computation, x, torch.tensor([-6, 4]))
    assert isinstance(failed.error, IndexError)
    assert computation.program.broken is None


@pytest.mark.parametrize("op", [torch.floor_divide, torch.remainder, torch.fmod])
def test_an_integer_divided_by_zero_raises_eagers_error(op: Callable[..., Tensor]) -> None:
    plain, divisor = torch.arange(3), torch.tensor([1, 2, 3])
    x = plain.to("lazy")
    assert op(x, divisor.to("lazy")).tolist() == op(plain, divisor).tolist()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        op(x, torch.tensor([1, 0, 1]).to("lazy")).tolist()


def test_compilers_do_not_meet_the_modes_of_the_program() -> None:
    with torpor.mode(), torch.no_grad(), torch.device("cpu"):
        assert torch.ones(3).sum().item() == 3.0
    assert get_backend().name == "dynamo:eager"


def test_importing_torpor_imports_no_compiler() -> None:
    wanted = "[m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules]"
    code = f"import sys, torpor; print({wanted})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.uint8])
def test_what_adds_up_into_another_dtype_converts_first(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.75, -1.75, 0.5], [-1.75, 1.0, 0.5]])
    with torpor.using("inductor", compile_after=0):
        running = () if dtype is torch.bool else (torch.cumsum, torch.cumprod)  # eager has none
        for reduce in (torch.sum, torch.prod, *running):
            expected, got = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype, device="lazy")
            reduce(x, 0, out=expected)
            reduce(x.to("lazy"), 0, out=got)
            assert torch.equal(got.cpu(), expected), reduce
