"""Runs a node with eager's kernels: the fallback of backends for ops they do not lower.

`load` and `store` convert the data of a backend to tensors and back; without a backend, data must
be torch tensors. A node never modifies its operands: an op that writes gets a copy, which becomes
an output of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torpor import _torch
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.backends.layout import clone_strided, own_memory, storages_of, with_layout
from torpor.errors import BackendError, annotate
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.ops.spec import OpSpec, ReturnKind, spec_of
from torpor.text.printer import print_node


def load(arguments: Sequence[Any], backend: Backend | None = None) -> list[Any]:
    """The arguments of `Backend.execute` as tensors and numbers."""
    read = _held if backend is None else backend.tensor_from_data
    return [read(a.wait()) if isinstance(a, BackendData) else a for a in arguments]


def _held(data: BackendData) -> torch.Tensor:
    if data.tensor is None:
        raise BackendError(f"{data!r} is no torch tensor: pass the backend to load() and store()")
    return data.tensor


def run_node(node: Node, env: Mapping[Value, Any], device: BackendDevice) -> list[Any]:
    """The outputs of `node` on the operands in `env`, which are not modified."""
    args = arguments_of(node, env, device)
    try:
        outputs = call_on_copies(spec_of(node.op.target), args)
    except Exception as error:
        site = None if node.site is None else str(node.site)
        raise annotate(error, node.op.name, site, print_node(node)) from None
    return [as_promised(tensor, v.type) for tensor, v in zip(outputs, node.outputs, strict=True)]


def run_converted(
    node: Node,
    env: Mapping[Value, Any],
    device: BackendDevice,
    to_tensor: Callable[[Any, TensorType], torch.Tensor],
    from_tensor: Callable[[torch.Tensor], Any],
) -> list[Any]:
    """`run_node` on buffers of another kind, which are converted to tensors and back."""
    given = {
        value: to_tensor(env[value], value.type) if type(value.type) is TensorType else env[value]
        for value in node.operands
    }
    outputs = run_node(node, given, device)
    return [None if tensor is None else from_tensor(tensor) for tensor in outputs]


def store(
    tensors: Sequence[torch.Tensor],
    computation: Computation,
    arguments: Sequence[Any],
    backend: Backend | None = None,
) -> list[BackendData]:
    """The results of `Backend.execute`: strides as their types say, memory shared with nothing."""
    taken = storages_of(arguments)
    keep = _kept if backend is None else backend.data_from_tensor
    foreign = any(isinstance(a, BackendData) and a.tensor is None for a in arguments)
    made = []
    for tensor, type_ in zip(tensors, computation.result_types, strict=True):
        # aliasing cannot be seen on foreign buffers
        own = with_layout(tensor, type_) if foreign else own_memory(tensor, type_, taken)
        made.append(keep(own, type_, computation.device))
    return made


def _kept(tensor: torch.Tensor, type_: TensorType, device: BackendDevice) -> BackendData:
    return BackendData(device, type_, tensor)


def arguments_of(node: Node, env: Mapping[Value, Any], device: BackendDevice) -> list[Any]:
    """The arguments of a node in schema order, with values looked up in `env`."""
    return [_argument(arg, env, device) for arg in node.args]


def _argument(arg: Any, env: Mapping[Value, Any], device: BackendDevice) -> Any:
    if type(arg) is Value:
        return env[arg]
    if type(arg) is tuple:
        return [_argument(item, env, device) for item in arg]
    if type(arg) is torch.device and arg.type == "lazy":
        return device.torch_device
    return arg


def call_on_copies(spec: OpSpec, args: list[Any]) -> list[Any]:
    """Call an op on copies of the arguments that it writes to; outputs in a node's order."""
    args = [copies(arg) if at in spec.mutated else arg for at, arg in enumerate(args)]
    with _torch.kernels():
        return call(spec, args)


def call(spec: OpSpec, args: list[Any]) -> list[Any]:
    """Call an op on arguments in schema order; outputs in a node's order."""
    positional, keywords = spec.call_arguments(args)
    return outputs_of(spec, spec.target(*positional, **keywords), args)


def copies(arg: Any) -> Any:
    """Copies of a tensor or a list of tensors, with the same strides, for an op to write to."""
    if isinstance(arg, list):
        return [copies(item) for item in arg]
    return None if arg is None else clone_strided(arg)


def outputs_of(spec: OpSpec, result: Any, args: list[Any]) -> list[Any]:
    """Returned tensors, then written arguments: the order of a node's outputs."""
    outputs: list[Any] = []
    results = result if len(spec.returns) > 1 else (result,) if spec.returns else ()
    for returned, value in zip(spec.returns, results, strict=True):
        if returned.kind in (ReturnKind.FRESH, ReturnKind.VIEW):
            outputs.extend(value) if returned.is_list else outputs.append(value)
    for position in spec.mutated:
        written = args[position]
        if written is not None:
            outputs.extend(written if isinstance(written, list) else [written])
    return outputs


def flat(result: Any) -> list[Any]:
    """What a function returned, with lists flattened."""
    if isinstance(result, (list, tuple)):
        return [item for part in result for item in flat(part)]
    return [result]


def as_promised(tensor: Any, type_: Any) -> Any:
    """`tensor` with the strides of its type; anything else unchanged."""
    if not isinstance(tensor, torch.Tensor) or not isinstance(type_, TensorType):
        return tensor
    if tensor.numel() != type_.numel and type_.concrete is type_:
        raise BackendError(f"a tensor of shape {tuple(tensor.shape)}, not {type_!r}")
    if tensor.stride() == type_.stride:
        return tensor
    if tensor.numel() < 2:  # any strides fit
        return tensor.as_strided(type_.shape, type_.stride)
    return with_layout(tensor, type_)
