"""Typed nodes: one class per overload, with the op's own argument names and types.

    >>> from torpor.ops.nodes import AddTensor
    >>> total = AddTensor.create(x, y, alpha=2)      # finds the interned node, or makes it
    >>> total.alpha, AddTensor.can_be_reused(total.node, x, y, alpha=2)
    (2, True)

The classes are made on first use from the op's spec: ATen's in `ops.nodes`, a backend's in the
package that `torpor codegen` writes for it.

Nodes are shared with recorders: hold the trace's lock to make them while other threads record.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol, Self, TypeAlias

import torch

from torpor.errors import GraphError
from torpor.inference.infer import infer, physical_device
from torpor.ir.node import Node, Value, intern, values_in
from torpor.ir.types import ScalarType, TensorType
from torpor.ops.keys import key_of
from torpor.ops.spec import Mode, OpSpec, spec_of
from torpor.text.torch_parser import find_op

Number: TypeAlias = bool | int | float | complex
Operand: TypeAlias = Value | Number  # a number as a tensor argument is a wrapped number
Scalar: TypeAlias = Number | Value  # a number that changes from step to step is a value
Types: TypeAlias = tuple[TensorType | None, ...]


class Lowers(Protocol):
    """What lowers nodes: `backend.LoweringContext`."""

    def lower(self, node: Node) -> None: ...


class TypedNode:
    """A node of one op, with its arguments as attributes.

    An argument with the name of a method of this class gets a trailing underscore.
    """

    __slots__ = ("node",)

    op: ClassVar[OpSpec]
    signature: ClassVar[inspect.Signature]

    def __init__(self, node: Node) -> None:
        if node.op is not self.op.kind:
            raise GraphError(f"{node!r} is not a node of {self.op.name}")
        self.node = node

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.node!r})"

    @property
    def outputs(self) -> tuple[Value, ...]:
        """What the op returns, then the new contents of the arguments it writes to."""
        return self.node.outputs

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Self:
        """The interned node of the op on these arguments, found or made."""
        spec, bound = cls.op, cls._bind(args, kwargs)
        key = key_of(spec, bound)
        return cls(intern(spec.kind, key, lambda: (tuple(bound), _types(spec, key, bound))))

    @classmethod
    def can_be_reused(cls, node: Node, *args: Any, **kwargs: Any) -> bool:
        """Whether `node` is the op on exactly these arguments."""
        return node.op is cls.op.kind and node.key == key_of(cls.op, cls._bind(args, kwargs))

    @classmethod
    def infer(cls, *args: Any, **kwargs: Any) -> Types:
        """The types of the node's outputs; memoized by the types of the arguments."""
        bound = cls._bind(args, kwargs)
        return _types(cls.op, key_of(cls.op, bound), bound)

    def lower(self, context: Lowers) -> None:
        """Pass the node to `context` for lowering."""
        context.lower(self.node)

    @classmethod
    def _bind(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        bound = cls.signature.bind(*args, **kwargs)
        for argument in cls.op.target._schema.arguments:
            if argument.name in bound.arguments:
                bound.arguments[argument.name] = _as_declared(
                    cls.op, argument, bound.arguments[argument.name]
                )
        bound.apply_defaults()
        return list(bound.arguments.values())


def _types(spec: OpSpec, key: tuple[Any, ...], bound: list[Any]) -> Types:
    numbers = {v: v.type.kind(1) for v in values_in(tuple(bound)) if type(v.type) is ScalarType}
    return infer(spec, key, bound, numbers, physical_device)


# -- arguments ---------------------------------------------------------------------------------


def _as_declared(spec: OpSpec, argument: Any, given: Any) -> Any:
    """`given` in the form its schema declares: lists as tuples, numbers of the declared type.

    Thus equal calls give one node, the same that recording gives.
    """
    declared = _without(argument.real_type, "Optional[")
    if given is None or not str(declared).startswith("List["):
        return _item(spec, argument.name, str(declared), given)
    single = isinstance(given, (bool, int, float))
    if single and argument.N:
        given = (given,) * argument.N
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _wrong(spec, argument.name, "a list", given)
    item = str(_without(declared.getElementType(), "Optional["))
    return tuple([_item(spec, argument.name, item, one) for one in given])


def _without(type_: Any, head: str) -> Any:
    return type_.getElementType() if str(type_).startswith(head) else type_


_NUMBERS: Final = (bool, int, float, complex)
_TAKES: Final[dict[str, tuple[str, tuple[type, ...]]]] = {
    "Tensor": ("a Value or a number", _NUMBERS),
    "number": ("a number", _NUMBERS),
    "float": ("a float", (bool, int, float)),
    "int": ("an int", (bool, int)),
    "bool": ("a bool", (bool,)),
    "str": ("a str", (str,)),
    "Device": ("a torch.device", (torch.device, str)),
    "ScalarType": ("a torch.dtype", (torch.dtype,)),
    "Layout": ("a torch.layout", (torch.layout,)),
    "MemoryFormat": ("a torch.memory_format", (torch.memory_format,)),
}
_MAKES: Final[dict[str, Callable[[Any], Any]]] = {
    "float": float, "int": int, "Device": torch.device,
}  # fmt: skip


def _item(spec: OpSpec, name: str, declared: str, given: Any) -> Any:
    if given is None or type(given) is Value or declared not in _TAKES:
        return given
    wanted, types = _TAKES[declared]
    if not isinstance(given, types):
        raise _wrong(spec, name, wanted, given)
    return _MAKES[declared](given) if declared in _MAKES else given


def _wrong(spec: OpSpec, name: str, wanted: str, given: Any) -> TypeError:
    hint = ""
    if isinstance(given, torch.Tensor):
        hint = "; a node's operands are the values of a graph, not tensors"
    what = type(given).__name__
    return TypeError(f"{spec.name}: argument {name!r} is {wanted}, not a {what}{hint}")


# -- classes -----------------------------------------------------------------------------------


def class_finder(module: str, ops: Mapping[str, str]) -> Callable[[str], type[TypedNode]]:
    """A `__getattr__` for a module of node classes that makes each class on first use.

    `ops` maps class names to op names.
    """
    made: dict[str, type[TypedNode]] = {}

    def find(name: str) -> type[TypedNode]:
        if name not in ops:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name not in made:
            made[name] = node_class(module, name, ops[name])
        return made[name]

    return find


def can_be_node(spec: OpSpec) -> bool:
    """Whether calls can be nodes: the op is not random, eager-only, or a change of metadata."""
    return spec.mode in (Mode.RECORD, Mode.VIEW)


def class_name(base: str, overload: str) -> str:
    """The class name of an overload, by LTC's rule: `AddTensor`, `NativeLayerNorm`, `AddTensor_`.

    Underscores that distinguish ops are kept: leading ones, and the one of in-place ops.
    """
    leading = len(base) - len(base.lstrip("_"))
    end = "_" if base.endswith("_") or overload.endswith("_") else ""
    words = re.split("_+", f"{base.strip('_')}_{overload}")
    return "_" * leading + "".join(w[:1].upper() + w[1:] for w in words) + end


def node_class(module: str, name: str, op: str) -> type[TypedNode]:
    """Make the class of an op; `module` and `name` are where it will be found."""
    try:
        spec = spec_of(find_op(op))
    except GraphError as error:  # this torch does not have the op
        raise AttributeError(str(error)) from None
    members: dict[str, Any] = {
        attribute_name(a.name): property(_argument(i)) for i, a in enumerate(spec.arguments)
    }
    signature = inspect.Signature(list(map(_parameter, spec.arguments)))
    members |= {"op": spec, "signature": signature, "__slots__": (), "__module__": module}
    members["__doc__"] = str(spec.target._schema)
    return type(name, (TypedNode,), members)


def attribute_name(argument: str) -> str:
    """The attribute of a typed node that holds this argument."""
    return f"{argument}_" if hasattr(TypedNode, argument) else argument


def _argument(position: int) -> Callable[[TypedNode], Any]:
    return lambda typed: typed.node.args[position]


def _parameter(argument: Any) -> inspect.Parameter:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    default = argument.default if argument.has_default else inspect.Parameter.empty
    return inspect.Parameter(argument.name, kinds[argument.keyword_only], default=default)
