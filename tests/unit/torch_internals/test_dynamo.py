"""What `_torch.dynamo` takes from inside torch still is what torpor takes it for."""

from typing import Any

import torch

from tests.unit.torch_internals.traced import traced_sine
from torpor import _torch
from torpor._torch.dynamo import _uncompiled


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

    assert "meets_lazy" in convert_frame.CatchErrorsWrapper.__call__.__code__.co_freevars
    assert "is_lazy" in builder.VariableBuilder.wrap_tensor.__code__.co_freevars
    made = _uncompiled()
    assert made.guarded_code is None
    assert made.apply_to_code is False
    assert made.frame_exec_strategy.recursive_action == types.FrameAction.SKIP
