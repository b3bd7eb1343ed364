"""Lowering for the TorchScript backend: builds the graphs of pieces node by node.

Registers and instructions are the reference backend's. So both backends copy before a write, elide
such copies, and call kernels in the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from torpor import _torch, config, metrics
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backends.blocks.block_backend import BlockLowering as TSLoweringContext
from torpor.backends.blocks.program import Piece
from torpor.backends.layout import repeated_dims
from torpor.backends.reference.lowering import (
    Instruction,
    ReferenceLowering,
    Register,
    registers_in,
)
from torpor.inference.infer import types_in
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.ops.spec import Return, ReturnKind

__all__ = ["ScriptBuilder", "ScriptCode", "TSLoweringContext", "remember_check", "why_not"]

MAX_OPS: Final = 1_000
"""The most ops in one graph. TorchScript generates code recursively: 30,000 in a chain overflow."""


_TYPES: Final = _torch.SCRIPT_TYPES


class Inexpressible(Exception):
    """TorchScript cannot express an instruction; the message says why."""


Source = tuple[Any, bool]
"""The source of a graph's input (a register or a number), and whether it must be a tensor."""


class Unexpected(Exception):
    """An op's output type differs from the recorded one."""


class ScriptCode:
    """The TorchScript graph of a piece, run by TorchScript's executor.

    The first run also queries the output types of one unchecked op per kind.
    """

    __slots__ = ("asked", "function", "inputs", "name", "piece")

    def __init__(self, name: str, piece: Piece) -> None:
        self.name = name
        self.piece = piece
        self.inputs: list[Source] = []  # of the graph; registers are places in the piece's inputs
        self.asked: list[Instruction] = []  # instructions whose output types are queried
        self.function: Callable[..., Any] | None = None

    def text(self) -> str:
        return f"# {self.name}\n{self.draw().graph}"

    def draw(self, asked: Sequence[Instruction] = ()) -> ScriptBuilder:
        """Build the graph, which returns a list of tensors.

        If instructions are `asked`, it also returns the sizes and strides, and the dtypes, of their
        outputs.
        """
        drawing = ScriptBuilder()
        asking = set(map(id, asked))
        for instruction in self.piece.instructions:
            drawing.add(instruction, asking=id(instruction) in asking)
        drawing.finish(self.piece.outputs, asking=bool(asked))
        return drawing

    def load(self) -> Callable[..., Any]:
        """Make an executor."""
        unseen: dict[Any, Instruction] = {}
        for instruction in self.piece.instructions:
            key = _check_key(instruction)
            if instruction.checked is None:
                instruction.checked = _checks.get(key)
            if instruction.checked is None:
                unseen.setdefault(key, instruction)
        self.asked = list(unseen.values())
        drawing = self.draw(self.asked)
        places = {register: Register(place) for place, register in enumerate(self.piece.inputs)}
        self.inputs = [
            (places[source] if type(source) is Register else source, is_tensor)
            for source, is_tensor in drawing.sources
        ]
        self.function = _torch.script_function(self.name, drawing.graph)
        return self.function

    def __call__(self, given: list[Any]) -> Any:
        """Run the graph; after a successful first run, discard the version with type queries."""
        function = self.function or self.load()
        made = function(*[_given(given, *source) for source in self.inputs])
        if self.asked:
            made, layouts, dtypes = made
            self._check(layouts, dtypes)
            self.function = None
        metrics.count("TorchScriptOps", len(self.piece.instructions))
        return made

    def _check(self, layouts: list[list[int]], dtypes: list[int]) -> None:
        """Compare queried output types with the recorded ones."""
        answers = iter(zip(layouts[::2], layouts[1::2], dtypes, strict=True))
        for instruction in self.asked:
            for type_ in _promises(instruction):
                size, stride, dtype = next(answers)
                if tuple(size) != type_.shape or dtype != _torch.script_dtype(type_.dtype):
                    raise Unexpected(instruction.node.op.name)
                if tuple(stride) != type_.stride and type_.numel > 1:
                    raise Unexpected(instruction.node.op.name)
            instruction.checked = []
            remember_check(instruction)


def _given(given: list[Any], source: Any, is_tensor: bool) -> Any:
    value = given[source] if type(source) is Register else source
    if not is_tensor or value is None or isinstance(value, torch.Tensor):
        return value
    return _torch.wrapped_number(value)


def _promises(instruction: Instruction) -> Iterator[TensorType]:
    return (v.type for v in instruction.node.outputs if type(v.type) is TensorType)


# -- what TorchScript can express --------------------------------------------------------------

_reasons: dict[tuple[Any, ...], str | None] = {}


def why_not(node: Node) -> str | None:
    """Why TorchScript cannot express a node; None if it can.

    TorchScript resolves an op's overload by argument types; memoized by those.
    """
    key = (node.op, len(node.outputs), tuple(_tag(arg) for arg in node.args))
    if key not in _reasons:
        _reasons[key] = _try_to_draw(_lowered(node))
    return _reasons[key]


def _tag(arg: Any) -> Any:
    if type(arg) is tuple:
        return (tuple, frozenset(_tag(item) for item in arg))
    if type(arg) is int and not -(2**63) <= arg < 2**63:
        return "an int of more than 64 bits"
    return type(arg)


def _lowered(node: Node) -> Instruction:
    """The instruction of a single node."""
    context = ReferenceLowering(node.op.name, BackendDevice(BackendDeviceType("cpu"), 0))
    for value in dict.fromkeys(node.operands):
        context.add_parameter(value)
    context.lower(node)
    return context.instructions[0]


def _try_to_draw(instruction: Instruction) -> str | None:
    drawing = ScriptBuilder()  # keeps its nodes alive
    try:
        node = drawing.add(instruction)
    except (Inexpressible, TypeError, ValueError, OverflowError, RuntimeError) as reason:
        return str(reason)
    wanted, found = instruction.spec.target.name(), node.schema().partition("(")[0]
    if found == wanted:
        return None
    return f"TorchScript takes it for {found}" if found else f"TorchScript finds no {wanted}"


# -- memoized check results --------------------------------------------------------------------

_checks: dict[Any, list[int]] = {}  # which outputs need new strides


def remember_check(instruction: Instruction) -> None:
    """Memoize the check result of an instruction."""
    if instruction.checked is not None:
        if len(_checks) >= config.max_memoised_types:
            _checks.clear()
        _checks[_check_key(instruction)] = instruction.checked


def _check_key(instruction: Instruction) -> Any:
    node = instruction.node
    return node.op, types_in(node.key)


# -- building ----------------------------------------------------------------------------------


class ScriptBuilder:
    """A TorchScript graph being built."""

    def __init__(self) -> None:
        self.graph = _torch.script_graph()
        self.values: dict[int, Any] = {}  # by register
        self.sources: list[Source] = []
        self.layouts: list[Any] = []  # queried sizes and strides of outputs
        self.dtypes: list[Any] = []
        self._inputs: dict[Any, Any] = {}
        self._constants: dict[Any, Any] = {}

    def add(self, instruction: Instruction, *, asking: bool = False) -> Any:
        """Add an instruction; returns the TorchScript node of its op."""
        spec = instruction.spec
        schema = spec.target._schema
        written = {p: self._written(instruction, p) for p in spec.mutated}
        inputs = [
            self._bundle(formal.type, arg, written[position])
            if position in written
            else self.argument(formal.type, arg)
            for position, (formal, arg) in enumerate(
                zip(schema.arguments, instruction.args, strict=True)
            )
        ]
        node = self._insert(schema.name, inputs, [r.type for r in schema.returns])
        made = [value for values in written.values() for value in values if value is not None]
        made = self._returned(instruction, list(node.outputs()), len(made)) + made
        for position, (register, value) in enumerate(zip(instruction.outputs, made, strict=True)):
            type_ = instruction.node.outputs[position].type
            if asking and type(type_) is TensorType:
                self._ask(value)
            if position in (instruction.checked or ()):
                value = self._copy(value, type_)
            self.values[register] = value
        return node

    def _returned(self, instruction: Instruction, outputs: list[Any], written: int) -> list[Any]:
        """The op's returned values, with lists unpacked, without written arguments."""
        pairs = [
            (returned, value)
            for returned, value in zip(instruction.spec.returns, outputs, strict=True)
            if returned.kind in (ReturnKind.FRESH, ReturnKind.VIEW)
        ]
        lists = sum(returned.is_list for returned, _ in pairs)
        if lists > 1:
            raise Inexpressible("several lists are returned, of lengths TorchScript cannot know")
        length = len(instruction.outputs) - written - len(pairs) + lists
        return [item for pair in pairs for item in self._unpacked(*pair, length)]

    def _unpacked(self, returned: Return, value: Any, length: int) -> list[Any]:
        if not returned.is_list:
            return [value]
        types = [_TYPES["Tensor"]] * length
        return list(self._insert("prim::ListUnpack", [value], types).outputs())

    def finish(self, registers: Sequence[int], *, asking: bool) -> None:
        """Set the outputs of the graph: `registers`, and queried types."""
        values = [self.values[register] for register in registers]
        result = self._made_list(_TYPES["Tensor[]"], values)
        if asking:
            layouts = self._made_list(_TYPES["int[][]"], self.layouts)
            facts = [result, layouts, self._made_list(_TYPES["int[]"], self.dtypes)]
            result = self._insert(
                "prim::TupleConstruct", facts, [_TYPES["(Tensor[], int[][], int[])"]]
            ).output()
        self.graph.registerOutput(result)

    # -- arguments -----------------------------------------------------------------------------

    def argument(self, formal: Any, arg: Any) -> Any:
        """The graph's value for an argument whose schema type is `formal`."""
        kind = formal.kind()
        if arg is None:
            return self._nothing(formal)
        if kind == "OptionalType":
            return self.argument(formal.getElementType(), arg)
        if type(arg) is Register:
            return self.values[arg] if arg in self.values else self._input(arg, arg, formal)
        if kind == "ListType":
            return self._list(formal, arg)
        if kind == "TensorType" or (kind == "NumberType" and type(arg) is bool):
            # a constant would not become a wrapped-number tensor as in eager, nor stay a bool
            return self._input((type(arg), repr(arg)), arg, formal)
        return self.constant(_plain(kind, arg))

    def constant(self, value: Any) -> Any:
        """A constant, added once."""
        key = (type(value), repr(value))
        if key not in self._constants:
            self._constants[key] = self.graph.insertConstant(value)
        return self._constants[key]

    def _nothing(self, formal: Any) -> Any:
        """None of type `formal`: overload resolution depends on that too."""
        key = (None, str(formal))
        if key not in self._constants:
            self._constants[key] = value = self.graph.insertConstant(None)
            if formal.kind() == "OptionalType":
                value.setType(formal)
        return self._constants[key]

    def _list(self, formal: Any, items: Any) -> Any:
        if type(items) is not list:
            raise Inexpressible(f"{items!r} stands where a list is expected")
        element = formal.getElementType()
        kind = element.kind()
        if items and kind in _CONVERSIONS and not registers_in(items):
            return self.constant([_plain(kind, item) for item in items])
        return self._made_list(formal, [self.argument(element, item) for item in items])

    def _made_list(self, formal: Any, values: list[Any]) -> Any:
        return self._insert("prim::ListConstruct", values, [formal]).output()

    def _input(self, name: Any, source: Any, formal: Any) -> Any:
        key = (name, formal.kind())
        if key not in self._inputs:
            self._inputs[key] = value = self.graph.addInput()
            value.setType(formal)
            self.sources.append((source, formal.kind() == "TensorType"))
        return self._inputs[key]

    # -- written arguments ---------------------------------------------------------------------

    def _written(self, instruction: Instruction, position: int) -> list[Any]:
        """What the op writes to instead of an argument: a copy, or the argument itself if dead."""
        arg, value = instruction.args[position], instruction.node.args[position]
        if type(arg) is not list:
            arg, value = [arg], (value,)
        reuse = position in instruction.reuse
        return [self._writable(*pair, reuse) for pair in zip(arg, value, strict=True)]

    def _writable(self, arg: Any, value: Value | None, reuse: bool) -> Any:
        if arg is None or value is None:
            return None
        drawn = self.argument(_TYPES["Tensor"], arg)
        return drawn if reuse else self._copy(drawn, value.type)

    def _bundle(self, formal: Any, arg: Any, values: list[Any]) -> Any:
        """Written tensors in the form in which the op takes them."""
        if type(arg) is not list:
            return self._nothing(formal) if values[0] is None else values[0]
        return self._made_list(formal, values)

    def _copy(self, value: Any, type_: TensorType) -> Any:
        """A copy with the strides of `type_`, as by `layout.with_layout`."""
        none = self._nothing(_TYPES["Tensor"])
        if type_.conj or type_.neg:
            return self._tensor("aten::clone", [value, none])
        layout = [self._ints(type_.shape), self._ints(type_.stride)]
        copy = self._tensor("aten::new_empty_strided", [value, *layout, none, none, none, none])
        source, target = value, copy
        for dim in repeated_dims(type_):
            ends = [self.constant(dim), self.constant(0), self.constant(1)]
            source = self._tensor("aten::narrow", [source, *ends])
            target = self._tensor("aten::narrow", [target, *ends])
        self._tensor("aten::copy_", [target, source, self.constant(False)])
        return copy

    def _ints(self, numbers: Sequence[int]) -> Any:
        return self._list(_TYPES["int[]"], list(numbers))

    # -- nodes ---------------------------------------------------------------------------------

    def _ask(self, value: Any) -> None:
        """Add outputs for the type of an op's result."""
        for question in ("aten::size", "aten::stride"):
            self.layouts.append(self._insert(question, [value], [_TYPES["int[]"]]).output())
        self.dtypes.append(self._insert("prim::dtype", [value], [_TYPES["int"]]).output())

    def _tensor(self, op: str, inputs: list[Any]) -> Any:
        return self._insert(op, inputs, [_TYPES["Tensor"]]).output()

    def _insert(self, op: str, inputs: list[Any], types: list[Any]) -> Any:
        node = self.graph.insertNode(self.graph.create(op, inputs, len(types)))
        for output, type_ in zip(node.outputs(), types, strict=True):
            output.setType(type_)
        return node


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "IntType": lambda arg: _number_of(arg),
    "FloatType": float,
    "BoolType": bool,
    "StringType": str,
}
"""Kinds of constants and their conversions; lists of them are constants too."""


def _plain(kind: str, arg: Any) -> Any:
    """An argument as a constant of the kind in the schema."""
    if kind in _CONVERSIONS:
        return _CONVERSIONS[kind](arg)
    if kind == "DeviceObjType":
        return torch.device(arg)
    if kind == "NumberType":
        return arg
    raise Inexpressible(f"no constant of TorchScript is of the kind {kind}")


def _number_of(arg: Any) -> Any:
    """An int, or one of torch's enums, which are ints in TorchScript."""
    if type(arg) is torch.memory_format:
        return _torch.SCRIPT_MEMORY_FORMATS[arg]
    return int(arg) if type(arg) is bool else arg
