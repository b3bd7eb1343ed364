"""The table of lowerings, and what they share: dtypes, promotion, outputs of a node.

A lowering is a function of the node and its arguments in schema order, with a jax array in the
place of each value. It returns the outputs in order; each is cast to the dtype that was promised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import torch

from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType

Lowering = Callable[..., Any]

TABLE: Final[dict[str, Lowering]] = {}
"""By the name of the op: "aten.exp.default"."""

DTYPES: Final[dict[torch.dtype, Any]] = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.uint16: jnp.uint16,
    torch.uint32: jnp.uint32,
    torch.uint64: jnp.uint64,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
}
"""What XLA computes with; values of other dtypes stay torch tensors."""


class NotLowered(Exception):
    """This call of an op is left to eager's kernel; the message says why."""


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Put a function into the table under names without the namespace: "add.Tensor"."""

    def add(function: Lowering) -> Lowering:
        TABLE.update({f"aten.{name}": function for name in names})
        return function

    return add


def lowers_all(functions: Mapping[str, Lowering], wrap: Callable[[Lowering], Lowering]) -> None:
    """Put wrapped functions into the table, each under the names in its key, by spaces."""
    for names, function in functions.items():
        lowers(*[n if "." in n else f"{n}.default" for n in names.split()])(wrap(function))


# -- types -----------------------------------------------------------------------------------------


def type_of(node: Node, output: int = 0) -> TensorType:
    """The promised type of an output."""
    return node.outputs[output].type  # type: ignore[no-any-return]  # of a tensor


def shape_of(node: Node, output: int = 0) -> tuple[int, ...]:
    """The promised sizes of an output."""
    return type_of(node, output).shape


def dtype_of(node: Node, output: int = 0) -> Any:
    """The promised dtype of an output."""
    return DTYPES[type_of(node, output).dtype]


def is_array(value: Any) -> bool:
    """A tensor or a number that is known when the graph runs; anything else is known now."""
    return isinstance(value, jax.Array)


def cast(value: Any, dtype: Any) -> Any:
    """`value` in another dtype; of a complex number the real part."""
    value = jnp.asarray(value)
    if jnp.iscomplexobj(value) and not jnp.issubdtype(dtype, jnp.complexfloating):
        value = value != 0 if dtype is jnp.bool_ else value.real
    return value.astype(dtype)


def opmath(dtype: Any) -> Any:
    """The dtype in which kernels of eager's compute: half precision is widened."""
    return jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype


def promoted(node: Node, args: Sequence[Any], *positions: int) -> list[Any]:
    """Those arguments in the dtype to which torch promotes them, two of them or one."""
    types = [_example(node.args[position], args[position]) for position in positions]
    dtype = DTYPES[torch.result_type(*types) if len(types) > 1 else types[0].dtype]
    return [cast(args[position], dtype) for position in positions]


def _example(arg: Any, value: Any) -> Any:
    """What torch promotes as it would `arg`."""
    if type(arg) is not Value:
        return arg
    if type(arg.type) is not TensorType:  # a run-time number
        return arg.type.kind(0)
    return torch.empty((1,) * len(arg.type.shape), dtype=arg.type.dtype, device="meta")


def in_opmath(function: Lowering) -> Lowering:
    """A function of the tensors and numbers among the arguments, in the dtype of the result."""

    def lowered(node: Node, *args: Any) -> Any:
        dtype = opmath(dtype_of(node))
        return function(*[_operand(arg, dtype) for arg in args])

    return lowered


def _operand(arg: Any, dtype: Any) -> Any:
    if isinstance(arg, (str, type(None), torch.dtype)):
        return arg
    if jnp.iscomplexobj(arg) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray(arg)
    return cast(arg, dtype)


def as_given(function: Lowering) -> Lowering:
    """A function of the arguments as they are."""
    return lambda node, *args: function(*args)


def dims_of(dims: Any, rank: int) -> tuple[int, ...]:
    """Dimensions counted from the front; none given: all of them."""
    if dims is None or dims == () or dims == []:
        return tuple(range(rank))
    given = dims if isinstance(dims, (tuple, list)) else (dims,)
    return tuple(dim % max(rank, 1) for dim in given)[: max(rank, 1)] if rank else ()


def backward_of(forward: Callable[..., Any], *primals: Any) -> Callable[..., tuple[Any, ...]]:
    """From the gradient of what `forward` makes to those of what it is given."""
    return jax.vjp(forward, *primals)[1]  # type: ignore[no-any-return]  # jax is not annotated here
