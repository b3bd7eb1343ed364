"""Data as jax arrays, and programs run: pieces by XLA, lone nodes by eager's kernels."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch uses the card as well

import jax
import jax.numpy as jnp
import numpy as np

from torpor import metrics
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backend.lowering import Computation
from torpor.backends import kernels
from torpor.backends.reference.lowering import ReferenceLowering
from torpor.backends.reference.runtime import run as run_reference
from torpor.backends.xla.lowering import Step, XlaPiece
from torpor.backends.xla.lowerings import DTYPES
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType, contiguous_strides

_SOLE_REFERENCES: Final = 3  # the handle, a name in `is_shared`, the count itself


class XlaData(BackendData):
    """A handle on a jax array, which may still be computed; a tensor if XLA has no such dtype."""

    __slots__ = ("array",)

    def __init__(self, device: BackendDevice, type_: TensorType, array: Any = None) -> None:
        super().__init__(device, type_)
        self.array = array

    def filled(self) -> bool:
        return self.array is not None

    def assign(self, other: BackendData) -> None:
        self.error = other.error
        self.array = other.array if isinstance(other, XlaData) else None

    def ready(self) -> Any:
        """The array, when it has one; its numbers may still be computed."""
        self.wait()
        return self.array

    def is_shared(self) -> bool:
        """Somebody else holds the array."""
        array = self.array
        return sys.getrefcount(array) > _SOLE_REFERENCES


def exact() -> Any:
    """Where jax is called: int64 and float64 are kept, on this thread, here alone."""
    return jax.enable_x64(True)


def jax_device(device: BackendDevice) -> Any:
    """The device on which jax keeps what torch has on `device`."""
    kind = device.type.name
    found = jax.devices(kind)
    return found[device.ordinal if kind != "cpu" and device.ordinal < len(found) else 0]


def place_of(type_: TensorType, device: BackendDevice) -> BackendDevice:
    """Where values of a type are in a graph for `device`: there, unless their type says more."""
    kind = type_.device.type
    if kind in ("lazy", device.type.name):
        return device
    return BackendDevice(BackendDeviceType(kind), type_.device.index or 0)


def _moved(array: Any, device: BackendDevice) -> Any:
    """An array on another device; a tensor stays where it is."""
    return array if isinstance(array, torch.Tensor) else jax.device_put(array, jax_device(device))


# -- arrays and tensors ----------------------------------------------------------------------------


def array_of(tensor: torch.Tensor, device: BackendDevice) -> Any:
    """A jax array with the contents of `tensor`, in memory of its own."""
    if tensor.dtype not in DTYPES:
        return tensor.to(device.torch_device, copy=True)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.dtype is torch.bool:
        return array_of(plain.view(torch.uint8), device).view(jnp.bool_)
    if not plain.numel():
        return jnp.zeros(plain.shape, DTYPES[plain.dtype], device=jax_device(device))
    rows = plain.as_strided(plain.shape, contiguous_strides(plain.shape))  # of sizes of 1 too
    copy = jax.device_put(jnp.from_dlpack(rows), jax_device(device), may_alias=False)
    return copy.block_until_ready()  # from now on torch may write to its memory, or free it


def tensor_of(array: Any, type_: TensorType, device: torch.device) -> torch.Tensor:
    """A tensor with the contents of an array, in memory of its own, with the strides of `type_`."""
    if isinstance(array, torch.Tensor):
        return kernels.as_promised(array, type_)  # type: ignore[no-any-return]  # a tensor
    if not array.size:
        return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=device)
    seen = torch.from_dlpack(array.view(jnp.uint8) if type_.dtype is torch.bool else array)
    tensor = seen.to(device, copy=True).view(type_.dtype)
    if seen.is_cuda:  # the copy is on torch's stream, of which jax does not know
        torch.cuda.current_stream(seen.device).synchronize()
    return kernels.as_promised(tensor, type_)  # type: ignore[no-any-return]  # a tensor


# -- programs --------------------------------------------------------------------------------------


class RefusedByEager(Exception):
    """A check found numbers that eager's kernels may refuse."""


def run(
    computation: Computation, arguments: Sequence[Any], device: BackendDevice, draws: bool = False
) -> list[BackendData]:
    """Run a compiled graph; its results may still be computed when this returns.

    Where it fails, eager's kernels run it instead: they say which op failed, and at which line.
    """
    graph, types = computation.graph, computation.result_types
    seed = np.int64(arguments[-1]) if draws and computation.program.draws else None
    given = arguments if seed is None else arguments[:-1]
    env: dict[Value, Any] = dict(zip(graph.inputs, map(_loaded, given), strict=True))
    written = False
    try:
        with exact():
            for value in computation.program.guests:
                env[value] = _moved(env[value], device)
            for step in computation.program.steps:
                written = written or bool(isinstance(step, XlaPiece) and step.donated)
                run_step(step, env, device, seed)
            if device.type.name == "cpu":  # this thread is the queue's: it may wait for errors
                jax.block_until_ready([env[value] for value in graph.outputs])
    except Exception as error:
        if written:
            error.inputs_written = True  # type: ignore[attr-defined]  # the core asks for it
            raise
        return run_by_reference(computation, given, device)
    return [_result(env[v], t, device) for v, t in zip(graph.outputs, types, strict=True)]


def _result(array: Any, type_: TensorType, device: BackendDevice) -> XlaData:
    place = place_of(type_, device)
    return XlaData(device, type_, array if place is device else _moved(array, place))


def run_by_reference(
    computation: Computation, arguments: Sequence[Any], device: BackendDevice
) -> list[BackendData]:
    """All of a graph by eager's kernels: what depends on an op that fails has its error."""
    metrics.count("StepsByEager")
    context = ReferenceLowering(computation.name, device, computation.graph.nodes)
    for value in computation.graph.inputs:
        context.add_parameter(value)
    for node in computation.graph.nodes:
        context.lower(node)
    for value in computation.graph.outputs:
        context.add_result(value)
    with exact():
        given = [_lent(a) if isinstance(a, XlaData) else a for a in arguments]
        types = computation.result_types
        return [_taken(r) for r in run_reference(context.build().program, given, types, device)]


def _lent(data: XlaData) -> BackendData:
    tensor = tensor_of(data.array, data.type, place_of(data.type, data.device).torch_device)
    return BackendData(data.device, data.type, tensor)


def _taken(result: BackendData) -> XlaData:
    data = XlaData(result.device, result.type)
    data.error = result.error
    if result.tensor is not None:
        data.array = array_of(result.tensor, result.device)
    return data


def _loaded(argument: Any) -> Any:
    if not isinstance(argument, XlaData):
        return argument
    if argument.error is not None:
        raise argument.error
    return argument.array


def run_step(step: Step, env: dict[Value, Any], device: BackendDevice, seed: Any = None) -> None:
    """Run one step on the values in `env`, and drop those that nobody needs after it."""
    if isinstance(step, XlaPiece):
        given = [env[value] for value in step.inputs]
        if step.offsets:
            given.append(seed)
        for value in step.dead:
            del env[value]
        made = step.compiled(*given)
        if step.checked and bool(made[0]):
            raise RefusedByEager
        env.update(zip(step.outputs, made[1:] if step.checked else made, strict=True))
    else:
        env.update(zip(step.node.outputs, run_lone(step.node, env, device), strict=True))
        for value in step.dead:
            del env[value]


def run_lone(node: Node, env: Mapping[Value, Any], device: BackendDevice) -> list[Any]:
    """The outputs of one node, by eager's kernel."""
    given = {value: _tensor(env[value], value.type, device) for value in node.operands}
    made = kernels.run_node(node, given, device)
    return [array_of(t, device) if isinstance(t, torch.Tensor) else t for t in made]


def _tensor(held: Any, type_: Any, device: BackendDevice) -> Any:
    if not isinstance(type_, TensorType):
        return held
    return tensor_of(held, type_, place_of(type_, device).torch_device)
