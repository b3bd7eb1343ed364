"""Data as jax arrays, and ops on them that are left to eager's kernels."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch uses the card as well

import jax
import jax.numpy as jnp

from torpor import _torch
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backends import kernels
from torpor.backends.reference.lowering import Instruction, registers_in
from torpor.backends.reference.runtime import step
from torpor.backends.xla.lowerings import DTYPES
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


def moved(array: Any, device: BackendDevice) -> Any:
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


class XlaCode:
    """The compiled code of a piece."""

    __slots__ = ("compiled",)

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled  # by jax

    def __call__(self, given: list[Any]) -> Any:
        return self.compiled(*given)

    def text(self) -> str:
        return str(self.compiled.as_text())


def lent(data: XlaData) -> BackendData:
    """The contents of an array for eager's kernels."""
    given = BackendData(data.device, data.type)
    given.error = data.error
    if data.error is None:
        given.tensor = _tensor(data.array, data.type, data.device)
    return given


def taken(result: BackendData) -> XlaData:
    """A result of eager's kernels as an array."""
    data = XlaData(result.device, result.type)
    data.error = result.error
    if result.tensor is not None:
        data.array = array_of(result.tensor, result.device)
    return data


def run_alone(
    types: Mapping[int, Any], device: BackendDevice, instruction: Instruction, env: list[Any]
) -> None:
    """Run an op on arrays in registers of these types, by eager's kernel."""
    read = registers_in(instruction.args)
    tensors: Any = {register: _tensor(env[register], types[register], device) for register in read}
    with _torch.kernels():
        step(instruction, tensors)
    for register in instruction.outputs:
        made = tensors[register]
        env[register] = array_of(made, device) if isinstance(made, torch.Tensor) else made


def _tensor(held: Any, type_: Any, device: BackendDevice) -> Any:
    if not isinstance(type_, TensorType):
        return held
    return tensor_of(held, type_, place_of(type_, device).torch_device)
