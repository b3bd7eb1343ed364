"""What `_torch.torchscript` takes from inside torch still is what torpor takes it for."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from torpor import _torch
from torpor._torch.torchscript import _SCRIPT_WRITERS


def _identity_graph(type_: Any) -> Any:
    graph = _torch.script_graph()
    value = graph.addInput()
    value.setType(type_)
    graph.registerOutput(value)
    return graph


def _clone_graph(memory_format: int) -> Any:
    graph = _torch.script_graph()
    inputs = [graph.addInput(), graph.insertConstant(memory_format)]
    graph.registerOutput(graph.insertNode(graph.create("aten::clone", inputs, 1)).output())
    return graph


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Tensor", torch.ones(2)),
        ("Tensor[]", [torch.ones(2)]),
        ("int", 3),
        ("int[]", [3, 4]),
        ("int[][]", [[3], []]),
        ("(Tensor[], int[][], int[])", ([], [[1]], [2])),
    ],
)
def test_script_types_are_what_their_names_say(name: str, value: Any) -> None:
    function = _torch.script_function("f", _identity_graph(_torch.SCRIPT_TYPES[name]))
    assert str(function(value)) == str(value)
    with pytest.raises(RuntimeError, match="Expected a value of type"):
        function("none of them")


@pytest.mark.parametrize("memory_format", _torch.SCRIPT_MEMORY_FORMATS)
def test_script_memory_formats_are_torchs_numbers(memory_format: torch.memory_format) -> None:
    shape = (2, 3, 4, 5, 6) if "3d" in str(memory_format) else (2, 3, 4, 5)
    tensor = torch.ones(shape).transpose(0, 1)
    function = _torch.script_function(
        "f", _clone_graph(_torch.SCRIPT_MEMORY_FORMATS[memory_format])
    )
    assert function(tensor).stride() == tensor.clone(memory_format=memory_format).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
def test_script_dtype_is_the_number_a_graph_gives(dtype: torch.dtype) -> None:
    graph = _torch.script_graph()
    node = graph.insertNode(graph.create("prim::dtype", [graph.addInput()], 1))
    node.output().setType(_torch.SCRIPT_TYPES["int"])
    graph.registerOutput(node.output())
    assert _torch.script_function("f", graph)(torch.ones(1).to(dtype)) == _torch.script_dtype(dtype)


def test_script_graph_is_empty() -> None:
    graph = _torch.script_graph()
    assert (list(graph.nodes()), list(graph.inputs()), list(graph.outputs())) == ([], [], [])


def test_script_function_runs_a_graph_on_its_inputs() -> None:
    graph = _torch.script_graph()
    inputs = [graph.addInput(), graph.addInput()]
    graph.registerOutput(graph.insertNode(graph.create("aten::mul", inputs, 1)).output())
    assert _torch.script_function("f", graph)(
        torch.full((2,), 3.0), torch.full((2,), 2.0)
    ).tolist() == [
        6.0,
        6.0,
    ]


def test_script_as_drawn_keeps_ops_nobody_looks_at_and_is_undone() -> None:
    """Batch norm writes to its statistics, and its schema denies it: dropped, they would be old."""
    graph = _torch.script_graph()
    x, mean, variance = (graph.addInput() for _ in range(3))
    none, training = graph.insertConstant(None), graph.insertConstant(True)
    numbers = [graph.insertConstant(0.5), graph.insertConstant(1e-5)]
    inputs = [x, none, none, mean, variance, training, *numbers]
    graph.insertNode(graph.create("aten::native_batch_norm", inputs, 3))
    graph.registerOutput(mean)
    function = _torch.script_function("f", graph)
    before = torch._C._get_graph_executor_optimize()
    with _torch.script_as_drawn():
        result = function(torch.ones(2, 3), torch.zeros(3), torch.ones(3))
    assert result.tolist() == [0.5] * 3
    assert torch._C._get_graph_executor_optimize() is before


def _script(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def _is_torpors(function: Any) -> bool:
    return "torpor" in function.__code__.co_filename


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_on_script_call(monkeypatch: pytest.MonkeyPatch) -> None:
    torchbind = importlib.import_module("torch._higher_order_ops.torchbind")
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        monkeypatch.setattr(kind, "__call__", kind.__call__)
    monkeypatch.setattr(torchbind, "_orig_scriptmethod_call", torchbind._orig_scriptmethod_call)
    called: list[str] = []

    def around(call: Any) -> Any:
        return lambda self, *args: called.append(type(self).__name__) or call(self, *args)

    module, function = _script(nn.Linear(2, 2)), torch.jit.trace(torch.sin, (torch.ones(2),))
    _torch.on_script_call(around)
    module(torch.ones(2)), function(torch.ones(2))
    with torchbind.enable_torchbind_tracing():
        pass
    module(torch.ones(2))
    assert called == ["ScriptMethod", "ScriptFunction", "ScriptMethod"]


def test_on_script_save() -> None:
    writers = [getattr(torch._C.ScriptModule, name, None) for name in _SCRIPT_WRITERS]
    assert all(_is_torpors(writer) for writer in writers[:2])


def test_on_script_move() -> None:
    assert _is_torpors(torch.jit.RecursiveScriptModule._apply)


def test_script_module_and_its_tensors() -> None:
    module = _script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    inside = _torch.script_module(module)
    names = [name for _, name, _ in _torch.script_tensors(inside)]
    assert names[:2] == ["weight", "bias"]
    assert "running_mean" in names
    holder, name, tensor = next(_torch.script_tensors(inside))
    holder.setattr(name, torch.zeros_like(tensor))
    assert not next(module.parameters()).any()


def test_script_tensors() -> None:
    tensors = list(_torch.script_tensors(_torch.script_module(_script(nn.Linear(2, 2)))))
    assert [name for _, name, _ in tensors] == ["weight", "bias"]


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_script_has_constants() -> None:
    weight = torch.ones(2)
    given = (torch.ones(2),)
    assert _torch.script_has_constants(torch.jit.trace(lambda a: a * weight, given))
    assert not _torch.script_has_constants(torch.jit.trace(lambda a: a * 2, given))


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_script_owner_of_a_method_and_of_a_function() -> None:
    module = _script(nn.Linear(2, 2))
    assert _torch.script_owner(module.forward).hasattr("weight")
    assert _torch.script_owner(torch.jit.trace(torch.sin, (torch.ones(2),))) is None
