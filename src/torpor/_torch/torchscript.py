"""TorchScript: graphs and their executor, and scripted modules that are called, moved and saved.

Uses `torch._C.Graph`, and `ScriptFunction`, `ScriptMethod` and `ScriptModule` in C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _C

from torpor._torch.import_hooks import after_import

_SCRIPT_INTS: Any = _C.ListType(_C.IntType.get())
_SCRIPT_TENSORS: Any = _C.ListType(_C.TensorType.get())
_SCRIPT_LAYOUTS: Any = _C.ListType(_SCRIPT_INTS)

SCRIPT_TYPES: dict[str, Any] = {
    "Tensor": _C.TensorType.get(),
    "Tensor[]": _SCRIPT_TENSORS,
    "int": _C.IntType.get(),
    "int[]": _SCRIPT_INTS,
    "int[][]": _SCRIPT_LAYOUTS,
    "(Tensor[], int[][], int[])": _C.TupleType([_SCRIPT_TENSORS, _SCRIPT_LAYOUTS, _SCRIPT_INTS]),
}
"""Types of values in a TorchScript graph; others are taken from the ops' schemas."""

SCRIPT_MEMORY_FORMATS: dict[torch.memory_format, int] = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""The ints that represent memory formats in a TorchScript graph."""


@functools.cache
def script_dtype(dtype: torch.dtype) -> int:
    """The int that represents a dtype in a TorchScript graph."""
    graph = script_graph()  # keeps its nodes alive
    return int(graph.insertConstant(dtype).node().i("value"))


def script_graph() -> Any:
    """An empty TorchScript graph."""
    return _C.Graph()


def script_function(name: str, graph: Any) -> Callable[..., Any]:
    """A TorchScript graph with an executor of its own, as a function of its inputs."""
    return _C._create_function_from_graph(name, graph)


@contextmanager
def script_as_drawn() -> Iterator[None]:
    """Run TorchScript graphs on this thread unoptimized: nothing fused or eliminated."""
    before = _C._get_graph_executor_optimize()
    _C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        _C._set_graph_executor_optimize(before)


def on_script_call(
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Wrap the calls of TorchScript functions and methods."""
    for kind in (_C.ScriptFunction, _C.ScriptMethod):
        kind.__call__ = around(kind.__call__)  # type: ignore[method-assign]  # the purpose
    call = _C.ScriptMethod.__call__

    def keep(module: Any) -> None:  # `torch.export` restores the call that this module saved
        if hasattr(module, "_orig_scriptmethod_call"):
            module._orig_scriptmethod_call = call

    after_import("torch._higher_order_ops.torchbind", keep)


def on_script_move(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the conversion of a TorchScript module's tensors."""
    kind: Any = torch.jit.RecursiveScriptModule
    kind._apply = around(kind._apply)


_SCRIPT_WRITERS = (
    "save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile",
)  # fmt: skip


def on_script_save(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the functions that save TorchScript modules."""
    for name in _SCRIPT_WRITERS:
        writer = getattr(_C.ScriptModule, name, None)
        if writer is not None:
            setattr(_C.ScriptModule, name, around(writer))


def script_owner(called: Any) -> Any:
    """The module of a TorchScript method; None for a function."""
    return getattr(called, "owner", None)


def script_module(module: Any) -> Any:
    """The C++ object of a TorchScript module."""
    return module._c


def script_tensors(module: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Parameters and buffers of a TorchScript module and its submodules: owner, name, tensor."""
    tables: tuple[Any, ...] = (_C.ParameterDict, _C.BufferDict)
    for table in tables:
        for name, tensor in table(module).items():
            if tensor is not None:
                yield module, name, tensor
    for _, part in _C.ModuleDict(module).items():
        yield from script_tensors(part)


def script_has_constants(function: Any) -> bool:
    """Whether a TorchScript function has constant tensors other than numbers."""
    graph = function.inlined_graph  # keeps its nodes alive
    constants = graph.findAllNodes("prim::Constant")
    tensors = (node for node in constants if node.output().type().kind() == "TensorType")
    return any(not node.hasAttribute("value") or node.t("value").dim() for node in tensors)
