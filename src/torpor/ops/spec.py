"""What an op is, derived once from its torch schema: arguments, aliases, and recording mode."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torpor import _torch
from torpor._torch import OpOverload
from torpor.ir.node import TABLE, OpKind
from torpor.ops import rules


class ArgKind(enum.Enum):
    """How an argument enters the intern key."""

    TENSOR = "tensor"
    TENSORS = "tensors"
    PLAIN = "plain"  # int, bool, dtype, device, str, ...: hashable, of a fixed Python type
    PLAINS = "plains"  # a list of those
    FLOAT = "float"
    FLOATS = "floats"
    SCALAR = "scalar"  # int, float, bool or complex
    SCALARS = "scalars"
    OPAQUE = "opaque"  # cannot be part of a graph: generators, storages, streams


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an op's schema."""

    name: str
    kind: ArgKind
    default: Any
    has_default: bool
    keyword_only: bool
    mutated: bool  # the op writes to it
    alias: frozenset[str]  # alias sets the argument is in


class ReturnKind(enum.Enum):
    """Where a returned tensor comes from."""

    FRESH = "fresh"  # new memory
    VIEW = "view"  # a view of an argument
    ARGUMENT = "argument"  # an argument that was written to, itself
    OTHER = "other"  # not a tensor


@dataclass(frozen=True, slots=True)
class Return:
    """One return of an op's schema."""

    kind: ReturnKind
    is_list: bool
    argument: int  # the argument that a VIEW or ARGUMENT return belongs to, else -1


class Mode(enum.Enum):
    """How an op is recorded."""

    RECORD = "record"  # a node
    VIEW = "view"  # a node whose result shares its argument's storage
    METADATA = "metadata"  # changes sizes or strides of its argument in place
    RANDOM = "random"  # random numbers are drawn when it is recorded, as in eager
    EAGER = "eager"  # its result depends on the contents of its arguments: runs immediately


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Everything that recording, lowering and running need to know about one op overload."""

    kind: OpKind
    target: OpOverload
    arguments: tuple[Argument, ...]
    returns: tuple[Return, ...]
    mutated: tuple[int, ...]  # arguments written to, in schema order
    mode: Mode
    promotable: bool  # its numbers may become run-time inputs

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def may_fail(self) -> bool:
        """Whether its kernel may reject tensor contents, which are not known at recording."""
        return self.target.namespace != "aten" or self.target._opname in rules.MAY_FAIL

    @property
    def tensors(self) -> int:
        """How many arguments are tensors or lists of tensors."""
        return sum(a.kind in (ArgKind.TENSOR, ArgKind.TENSORS) for a in self.arguments)

    @property
    def takes_type_alone(self) -> bool:
        """Whether it uses nothing of its only tensor but the type."""
        return self.target._opname in rules.SHAPE_ONLY and self.tensors == 1

    @property
    def views(self) -> int:
        """The argument that its first aliasing result is, or is a view of; -1 if there is none."""
        return next((r.argument for r in self.returns if r.argument >= 0), -1)

    def draws(self, args: Sequence[Any]) -> bool:
        """Whether it draws random numbers for these arguments (in schema order)."""
        place = rules.DROPOUT_AT.get(self.name)
        return self.mode is Mode.RANDOM and (place is None or args[place] != 0.0)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments in schema order, defaults filled in."""
        bound = [a.default for a in self.arguments]
        bound[: len(args)] = args
        if kwargs:
            for position, argument in enumerate(self.arguments):
                if argument.name in kwargs:
                    bound[position] = kwargs[argument.name]
        return bound

    def call_arguments(self, bound: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Split schema-ordered arguments into positional and keyword ones, omitting defaults."""
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for argument, value in zip(self.arguments, bound, strict=True):
            if not argument.keyword_only:
                positional.append(value)
            elif not (argument.has_default and value is argument.default):
                keywords[argument.name] = value
        return positional, keywords


_SCALAR_TYPES = {"number", "Scalar"}


def _arg_kind(type_: Any) -> ArgKind:
    text = str(type_)
    if text.startswith("Optional["):
        return _arg_kind(type_.getElementType())
    if text.startswith("List["):
        inner = _arg_kind(type_.getElementType())
        return {
            ArgKind.TENSOR: ArgKind.TENSORS,
            ArgKind.FLOAT: ArgKind.FLOATS,
            ArgKind.SCALAR: ArgKind.SCALARS,
            ArgKind.PLAIN: ArgKind.PLAINS,
        }.get(inner, ArgKind.OPAQUE)
    if text == "Tensor":
        return ArgKind.TENSOR
    if text in _SCALAR_TYPES:
        return ArgKind.SCALAR
    if text == "float":
        return ArgKind.FLOAT
    if text in ("Generator", "Storage", "Stream", "Any", "AnyClassType"):
        return ArgKind.OPAQUE
    return ArgKind.PLAIN


def _alias_set(item: Any) -> frozenset[str]:
    info = item.alias_info
    return frozenset(info.before_set | info.after_set) if info is not None else frozenset()


def _read_arguments(schema: Any, op_name: str) -> tuple[Argument, ...]:
    hidden = rules.HIDDEN_MUTATIONS.get(op_name, ())
    return tuple(
        Argument(
            name=a.name,
            kind=_arg_kind(a.type),
            default=_hashable(a.default_value) if a.has_default_value() else None,
            has_default=a.has_default_value(),
            keyword_only=a.kwarg_only,
            mutated=(a.alias_info is not None and a.alias_info.is_write) or a.name in hidden,
            alias=_alias_set(a),
        )
        for a in schema.arguments
    )


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_LIST_ALIAS = re.compile(r"Tensor\((\w)[^)]*\)\[")


def _return_alias(item: Any, schema: Any) -> frozenset[str]:
    """The alias sets of a return; for lists, torch exposes them only in the schema's text."""
    if not str(item.type).startswith("List["):
        return _alias_set(item)
    found = _LIST_ALIAS.findall(str(schema).rpartition("->")[2])
    return frozenset(found)


def _read_return(item: Any, schema: Any, arguments: tuple[Argument, ...]) -> Return:
    text = str(item.type)
    is_list = text.startswith("List[")
    if text not in ("Tensor", "List[Tensor]", "Optional[Tensor]", "List[Optional[Tensor]]"):
        return Return(ReturnKind.OTHER, is_list, -1)
    if (
        f"aten.{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
        in rules.HIDDEN_VIEWS
    ):
        return Return(ReturnKind.VIEW, is_list, 0)
    alias = _return_alias(item, schema)
    for position, argument in enumerate(arguments):
        if alias and alias & argument.alias:
            kind = ReturnKind.ARGUMENT if argument.mutated else ReturnKind.VIEW
            return Return(kind, is_list, position)
    return Return(ReturnKind.FRESH, is_list, -1)


def _mode(target: OpOverload, name: str, spec_returns: tuple[Return, ...]) -> Mode:
    tags = target.tags
    if name in rules.METADATA_OPS or torch.Tag.inplace_view in tags:
        return Mode.METADATA
    if name in rules.EAGER_OPS:
        return Mode.EAGER
    if torch.Tag.nondeterministic_seeded in tags and name not in rules.NOT_RANDOM:
        return Mode.RANDOM
    if any(r.kind is ReturnKind.OTHER for r in spec_returns):
        return Mode.EAGER
    if torch.Tag.data_dependent_output in tags:
        return Mode.EAGER
    if any(r.kind is ReturnKind.VIEW for r in spec_returns):
        return Mode.VIEW
    return Mode.RECORD


def op_name(target: OpOverload) -> str:
    """The name of an op in the IR: `aten.add.Tensor`."""
    return str(target)


def read_spec(target: OpOverload) -> OpSpec:
    """Make the spec of a torch op from its schema."""
    schema = target._schema
    name = op_name(target)
    arguments = _read_arguments(schema, name)
    returns = tuple(_read_return(r, schema, arguments) for r in schema.returns)
    mutated = tuple(i for i, a in enumerate(arguments) if a.mutated)
    kind = TABLE.kind(name, target, arguments)
    kind.target, kind.parameters = target, arguments
    mode = _mode(target, name, returns)
    promotable = mode is not Mode.RANDOM and target._opname not in rules.NOT_PROMOTABLE
    return OpSpec(kind, target, arguments, returns, mutated, mode, promotable)


def spec_of(target: OpOverload) -> OpSpec:
    """The spec of a torch op, cached on the op itself."""
    try:
        return target._torpor_spec  # type: ignore[attr-defined,no-any-return]  # set below
    except AttributeError:
        spec = read_spec(target)
        _torch.set_op_attribute(target, "_torpor_spec", spec)
        return spec
