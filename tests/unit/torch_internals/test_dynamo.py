"""What `_torch.dynamo` takes from inside torch still is what torpor takes it for."""

import logging
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import torpor
from tests.unit.torch_internals.traced import traced_sine
from torpor import _torch
from torpor._torch.dynamo import _capturing, _uncompiled


def test_dynamo_backends_are_listed_with_those_for_debugging() -> None:
    assert {"eager", "aot_eager", "inductor"} <= set(_torch.dynamo_backends())
    assert "torpor" not in _torch.dynamo_backends()


def test_dynamo_compiler_takes_a_module_and_inputs() -> None:
    module, inputs, _ = traced_sine()
    x = torch.randn(4, 3)
    assert torch.equal(_torch.dynamo_compiler("eager")(module, inputs)(x)[0], x.sin() + 1)


def test_dynamo_training_backend_compiles_forward_and_backward() -> None:
    compiled = []

    def compile_graph(module: torch.fx.GraphModule, shown: int, is_forward: bool) -> Any:
        compiled.append((shown, len(module.graph.output_node().args[0]), is_forward))
        return lambda args: module(*args)

    backend = _torch.dynamo_training_backend(compile_graph)
    function = torch.compile(lambda x: x.sin().sum(), backend=backend)
    x = torch.randn(3, requires_grad=True)
    function(x).backward()
    assert compiled == [(1, 2, True), (1, 1, False)]  # forward also keeps something for backward
    assert torch.allclose(x.grad, x.detach().cos())  # type: ignore[arg-type]  # it has one


def test_dynamo_graphs_counts_what_is_compiled() -> None:
    before = _torch.dynamo_graphs()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert _torch.dynamo_graphs() == before + 1


def test_on_dynamo_frame_is_what_torchdynamo_calls() -> None:
    from torch._dynamo import convert_frame, types
    from torch._dynamo.variables import builder

    assert "frames" in convert_frame.CatchErrorsWrapper.__call__.__code__.co_freevars
    assert "frames" in builder.VariableBuilder._wrap.__code__.co_freevars
    made = _uncompiled()
    assert made.guarded_code is None
    assert made.apply_to_code is False
    assert made.frame_exec_strategy.recursive_action == types.FrameAction.SKIP


def test_detach_what_has_no_gradient_replaces_what_torch_calls() -> None:
    from torch._functorch._aot_autograd import graph_compile

    names = graph_compile._aot_stage2a_partition.__code__.co_freevars
    assert names == ("partition", "place")


def test_capturing_is_silent() -> None:
    logger = logging.getLogger("torch._dynamo.variables.tensor")
    with _capturing():
        warnings.warn("advice", UserWarning, stacklevel=1)
    warned = logger.makeRecord(logger.name, logging.WARNING, "", 0, "heard", (), None)
    assert logger.filter(warned)
    with _capturing():
        assert not logger.filter(warned)


# -- regions ---------------------------------------------------------------------------------------


def test_region_backend_gives_graphs_between_which_one_tensor_is_kept() -> None:
    x = torch.randn(3, requires_grad=True)
    kept: list[Any] = []

    def make(captured: _torch.Captured) -> Any:
        def run(args: list[Any]) -> Any:
            if captured.resumes:
                return captured.module(*kept, *args[1:])
            results = captured.module(*args)
            kept[:] = results[captured.shown :]
            return [*results[: captured.shown], kept[0]]

        return run

    def called(graph: _torch.GraphOps) -> Any:
        return lambda *args: graph.compiled(*(args[place] for place in graph.uses.places))

    backend = _torch.region_backend(make, called)
    function = torch.compile(lambda x: (x.exp() * x.sigmoid()).sum(), backend=backend)
    function(x).backward()
    assert kept
    expected = x.detach().clone().requires_grad_()
    (expected.exp() * expected.sigmoid()).sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]  # it has one


def test_region_backend_refuses_writes_to_what_is_no_part_of_a_module() -> None:
    backend = _torch.region_backend(lambda captured: captured.module, lambda graph: graph.compiled)
    with pytest.raises(Exception, match="no part of a module"):
        torch.compile(lambda x: x.add_(1), backend=backend)(torch.ones(2))


def test_capturing_is_on_while_a_frame_with_lazy_tensors_is_traced() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            note()
        return x + 1

    @torch._dynamo.assume_constant_result  # runs while it is traced
    def note() -> int:
        seen.append(_torch.CAPTURING.on)
        return len(seen)

    assert not _torch.CAPTURING.on
    torch.compile(look, backend="eager")(torpor.lazy(torch.ones(2)))
    torch.compile(look, backend="eager")(torch.ones(3))
    assert seen == [True, False]
    assert not _torch.CAPTURING.on


def test_as_if_not_compiled_answers_code_that_is_traced() -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        return x + torch.compiler.is_compiling() + torch.compiler.is_dynamo_compiling()

    with _torch.as_if_not_compiled():
        assert torch.compile(ask, backend="eager")(torch.zeros(())) == 0
    torch.compiler.reset()
    assert torch.compile(ask, backend="eager")(torch.zeros(())) == 2


def test_take_ops_apart_as_eager_does_keeps_pythons_dispatcher_off_while_capturing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._functorch._aot_autograd import graph_capture

    assert type(graph_capture.enable_python_dispatcher()) is not nullcontext
    monkeypatch.setattr(_torch.CAPTURING, "on", True)
    assert type(graph_capture.enable_python_dispatcher()) is nullcontext


def test_keep_lazy_tangents_lets_them_enter_a_captured_backward() -> None:
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    assert "torpor" in AOTDispatchAutograd.process_runtime_tangent.__code__.co_filename
    x = torpor.lazy(torch.randn(3)).requires_grad_()
    result = torch.compile(lambda x: x.sin() * 2, backend="eager")(x)
    result.backward(torpor.lazy(torch.full((3,), 2.0)))
    assert torpor.is_pending(x.grad)
    expected = x.detach().cpu().requires_grad_()
    (expected.sin() * 2).backward(torch.full((3,), 2.0))
    assert torch.equal(torpor.eager(x.grad), expected.grad)  # type: ignore[arg-type]  # it has one
