"""Traces a run of nodes into one functional ATen `GraphModule`, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torpor import _torch
from torpor.backends.blocks.program import PACKED, Piece
from torpor.backends.fx import functional, numbers
from torpor.backends.fx.functional import NO_VALUE, NotTraceable
from torpor.backends.fx.guards import Guards
from torpor.backends.fx.numbers import Number
from torpor.backends.reference.lowering import Instruction, Register, Sized
from torpor.ir.types import SymbolicType, TensorType, contiguous_strides
from torpor.ops.spec import OpSpec
from torpor.symbols.expressions import Symbol
from torpor.symbols.solve import size_of


class NodeError(Exception):
    """Tracing failed at one instruction, which falls back to the reference."""

    def __init__(self, instruction: Instruction, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.instruction = instruction
        self.reason = reason


@dataclass(slots=True)
class Traced:
    """A traced piece: the module, its example inputs and their fake-tensor mode, and more."""

    module: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    mode: Any
    sources: dict[str, list[Instruction]]  # ATen op -> instructions traced to it
    layouts: dict[int, TensorType]  # outputs whose strides differ from their type's
    open_sizes: Any = None  # the compiler's symbols, and guards on them


def trace(
    piece: Piece,
    types: dict[int, Any],
    device: torch.device,
    decompositions: dict[Any, Callable[..., Any]] | None,
    hints: Mapping[Symbol, int],
    channels_last: bool = False,
    fixed: bool = False,
) -> Traced:
    """Trace `piece`; its module takes tensors, packed numbers and sizes, and returns a tuple.

    `hints` are example sizes; if `fixed`, the module is specialized to them. With `channels_last`,
    convolutions get channels-last inputs, and free outputs keep the resulting strides.
    """
    inputs, mode, open_sizes = fake_inputs(piece, types, device, hints, fixed)
    replay = _FunctionalRun(piece, types, device, channels_last)
    with mode, torch.no_grad(), _torch.quiet_fakes():
        module = make_fx(replay, decomposition_table=decompositions)(*inputs)
        if open_sizes is not None:
            _torch.fold_known_sizes(module)
    layouts = {register: _settled(type_, open_sizes) for register, type_ in replay.layouts.items()}
    return Traced(module, inputs, mode, replay.sources, layouts, open_sizes)


def _settled(type_: TensorType, open_sizes: _torch.OpenSizes | None) -> TensorType:
    """Translate a type from the compiler's symbols to ours."""
    if open_sizes is None:
        return type_
    numbers = (*type_.shape, *type_.stride)
    found = [size_of(open_sizes.formula(number)) for number in numbers]
    if None in found:
        raise NotTraceable(f"{type_!r} does not follow from the sizes")
    rank = len(type_.shape)
    return SymbolicType.with_sizes(tuple(found[:rank]), tuple(found[rank:]), 0, type_)  # type: ignore[arg-type]  # no None


def fake_inputs(
    piece: Piece,
    types: dict[int, Any],
    device: torch.device,
    hints: Mapping[Symbol, int],
    fixed: bool = False,
) -> tuple[list[Any], Any, _torch.OpenSizes | None]:
    """The inputs of the module of `piece`: tensors, packed numbers, and sizes.

    Also returns their fake-tensor mode and, unless sizes are `fixed`, the compiler's symbols.
    """
    open_sizes: _torch.OpenSizes | None = None
    sizes: dict[Symbol, Any] = {one: hints[one] for one in piece.sizes}
    if sizes and not fixed:
        open_sizes = _torch.OpenSizes({one.name: hints[one] for one in piece.sizes})
        sizes = {one: open_sizes.sizes[one.name] for one in piece.sizes}
    mode = _torch.new_fake_mode() if open_sizes is None else open_sizes.mode
    with mode:
        inputs: list[Any] = [fake(on_sizes(types[r], sizes), device) for r in piece.inputs]
        for kind, registers in piece.numbers.items():
            inputs.append(torch.empty((len(registers),), dtype=PACKED[kind], device=device))
    return [*inputs, *sizes.values()], mode, open_sizes


def on_sizes(type_: Any, sizes: Mapping[Symbol, Any]) -> Any:
    """A type with its symbols replaced by `sizes`."""
    return type_.uninterned_at(sizes) if type(type_) is SymbolicType else type_


def fake(type_: TensorType, device: torch.device) -> torch.Tensor:
    """A tensor of that type; under a fake mode, a fake one."""
    where = device if type_.device.type == "lazy" else type_.device
    size = (type_.shape, type_.stride)
    return torch.empty_strided(*size, dtype=type_.dtype, device=where)


class _FunctionalRun:
    """Calls the functional forms of a piece's instructions, while they are traced."""

    def __init__(
        self, piece: Piece, types: dict[int, Any], device: torch.device, channels_last: bool
    ) -> None:
        self.piece = piece
        self.channels_last = channels_last
        self.promised = types
        self.sizes: dict[Symbol, Any] = {}
        self.fixed = True  # no size is one of the compiler's symbols
        self.device = device
        self.env: dict[int, Any] = {}
        self.maker: dict[int, Instruction] = {}
        self.sources: dict[str, list[Instruction]] = {}
        self.layouts: dict[int, TensorType] = {}
        self.guards = Guards() if device.type == "cpu" else None

    def __call__(self, *given: Any) -> tuple[torch.Tensor, ...]:
        inputs, sizes = self.piece.inputs, self.piece.sizes
        tensors, given = given[: len(given) - len(sizes)], given[len(given) - len(sizes) :]
        self.sizes = dict(zip(sizes, given, strict=True))
        self.fixed = all(type(size) is int for size in given)
        self.env = dict(zip(inputs, tensors))
        self._unpack(tensors[len(inputs) :])
        for instruction in self.piece.instructions:
            try:
                self._step(instruction)
            except Exception as error:
                raise NodeError(instruction, error) from error
        return self._results(tensors)

    def _unpack(self, packed: Sequence[torch.Tensor]) -> None:
        for (kind, registers), tensor in zip(self.piece.numbers.items(), packed, strict=True):
            for position, register in enumerate(registers):
                self.env[register] = Number(tensor.select(0, position), kind)

    def _step(self, instruction: Instruction) -> None:
        last = _torch.last_traced_node()
        args = self._arguments(instruction)
        spec, promised = instruction.spec, [self._open(v.type) for v in instruction.node.outputs]
        if self.guards is not None:
            args = self.guards.guarded(spec, args)
        if self.channels_last and spec.name in CONVOLUTIONS:
            args = list(map(self._side_by_side, instruction.args, args))
        if numbers.has_numbers(args):
            made = numbers.call(spec, args, promised)
        else:
            operands = [self._open(getattr(arg, "type", None)) for arg in instruction.node.args]
            made = functional.call(spec, args, promised, operands)
            if spec.name not in functional.FORMS:
                _check_sizes(made, promised)
                if self.fixed:
                    _check_strides(spec, args, made, promised)
        for register, tensor in zip(instruction.outputs, made, strict=True):
            self.env[register] = tensor
            self.maker[register] = instruction
        self._note_source(instruction, last)

    def _side_by_side(self, arg: Any, value: Any) -> Any:
        """An argument in channels-last layout; free values keep that layout from here on."""
        moved = _channels_last(value)
        if type(arg) is Register and arg in self.maker and arg in self.piece.free:
            self.env[arg] = moved
        return moved

    def _open(self, type_: Any) -> Any:
        return on_sizes(type_, self.sizes)

    def _note_source(self, instruction: Instruction, last: torch.fx.Node) -> None:
        """Attribute the ATen ops traced after `last` to the instruction."""
        node = last.next
        while node.op != "root":
            made = self.sources.setdefault(str(node.target), [])
            if not made or made[-1] is not instruction:
                made.append(instruction)
            node = node.next

    def _arguments(self, instruction: Instruction) -> list[Any]:
        unread = functional.UNREAD.get(instruction.spec.name)
        return [
            None if place == unread else self._argument(arg)
            for place, arg in enumerate(instruction.args)
        ]

    def _argument(self, arg: Any) -> Any:
        if type(arg) is Register:
            value = self.env[arg]
            if value is NO_VALUE:
                raise NotTraceable("takes what a functional form does not compute")
            return value
        if type(arg) is list:
            return [self._argument(item) for item in arg]
        return arg.expr.at(self.sizes) if type(arg) is Sized else arg

    def _results(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Outputs that share no memory; donated ones are written into their inputs instead."""
        taken = {_torch.memory_of(tensor) for tensor in inputs}
        donated = {output: register for register, output in self.piece.donated.items()}
        taken |= {_torch.memory_of(self._checked(output)) for output in donated}
        results = []
        for register in self.piece.outputs:
            if register not in donated:
                results.append(self._result(register, taken))
        flag = None if self.guards is None else self.guards.flag()
        self.piece.checked = flag is not None
        for output, register in donated.items():
            self.env[register].copy_(self._checked(output))
        return tuple(results) if flag is None else (*results, flag)

    def _result(self, register: int, taken: set[int]) -> torch.Tensor:
        tensor, type_ = self._checked(register), self._open(self.promised[register])
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        free = self._may_stay(register, tensor)
        if _torch.memory_of(tensor) in taken or not (free or _lies_as(tensor, type_)):
            tensor = functional.with_strides(tensor, type_ if type_.is_dense else _dense(type_))
        taken.add(_torch.memory_of(tensor))
        if free or not type_.is_dense:  # a view gets dense memory of its own
            size = (type_.shape, tuple(tensor.stride()))
            make = TensorType.of if self.fixed else TensorType.uninterned
            self.layouts[register] = make(*size, type_.dtype, type_.device)
        return tensor

    def _may_stay(self, register: int, tensor: torch.Tensor) -> bool:
        """Whether an output may keep the strides it was computed with."""
        if not (self.channels_last and register in self.piece.free):
            return False
        return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)

    def _checked(self, register: int) -> torch.Tensor:
        """The tensor of an output, checked against its type."""
        tensor, type_ = self.env[register], self._open(self.promised[register])
        wrong = tensor is NO_VALUE or tuple(tensor.shape) != type_.shape
        if wrong or tensor.dtype is not type_.dtype:
            refusal = NotTraceable(f"its functional form does not make {type_!r}")
            if register not in self.maker:
                raise refusal
            raise NodeError(self.maker[register], refusal)
        return tensor  # type: ignore[no-any-return]  # registers hold anything


CONVOLUTIONS: Final = frozenset(
    {"aten.convolution.default", "aten.convolution_backward.default"}
)  # fmt: skip


def has_convolutions(piece: Piece) -> bool:
    """Whether a piece has convolutions, which may be faster on channels-last images."""
    return any(instruction.spec.name in CONVOLUTIONS for instruction in piece.instructions)


def _channels_last(arg: Any) -> Any:
    """A batch of images, or the weights of a convolution, in channels-last layout."""
    if not isinstance(arg, torch.Tensor) or arg.dim() != 4:
        return arg
    return arg.contiguous(memory_format=torch.channels_last)


def _check_sizes(made: list[Any], promised: list[Any]) -> None:
    """Refuse an op whose fake kernel gets sizes wrong: compilers rely on them."""
    for tensor, type_ in zip(made, promised, strict=True):
        if tensor is not None and type_ is not None and tuple(tensor.shape) != type_.shape:
            raise NotTraceable(f"its fake kernel makes {tuple(tensor.shape)}, not {type_!r}")


def _check_strides(spec: OpSpec, args: list[Any], made: list[Any], promised: list[Any]) -> None:
    """Refuse an op whose fake gets strides wrong: compiled code asserts them.

    Only fakes made by decomposing the op are suspect. They are compared with its meta kernel, which
    has the strides that all devices' kernels produce.
    """
    pairs = list(zip(made, promised, strict=True))
    if all(t is None or type_ is None or t.stride() == type_.stride for t, type_ in pairs):
        return
    if spec.mutated or not _torch.fakes_by_decomposition(spec.target):
        return
    with _torch.without_modes():
        positional, keywords = spec.call_arguments([_torch.tree_map(_meta, arg) for arg in args])
        results = spec.target(*positional, **keywords)
    real = results if isinstance(results, (list, tuple)) else [results]
    for tensor, known in zip(made, real, strict=True):
        if isinstance(known, torch.Tensor) and tensor.stride() != known.stride():
            raise NotTraceable(f"its fake has strides {tensor.stride()}, not {known.stride()}")


def _meta(arg: Any) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")


def _lies_as(tensor: torch.Tensor, type_: TensorType) -> bool:
    """Whether the strides match (ignoring dimensions of size 1) and the offset is 0."""
    pairs = zip(tensor.stride(), type_.stride, type_.shape, strict=True)
    same = all(have == want for have, want, size in pairs if size > 1) or not type_.numel
    return (same or not type_.is_dense) and tensor.storage_offset() == 0


def _dense(type_: TensorType) -> TensorType:
    return TensorType.uninterned(
        type_.shape, contiguous_strides(type_.shape), type_.dtype, type_.device
    )
