"""Which inputs a compiled piece may write its results over.

Compilers put what a result is computed from into the loop that writes it, and leave out copies.
That goes wrong (torch 2.13) in these cases, which are found here:

- The new contents of an input are read from other places of the same input: `x.copy_(x.t())`,
  `x.copy_(x.roll(1))`. The loop reads what it has already written.
- The old contents of an input are kept, in another input that is written over or in a result:
  `previous.copy_(x)`, and then `x.add_(1)`. Without the copy the new contents are kept.
- One op on lists writes inputs that it computes from one another: `_foreach_add_([x, y], [y, x])`.
- A part of an input is written, and the whole becomes something else than that input:
  `y.copy_(x); y[0] = 1; x.fill_(2)`. The part is written in the input itself.
- An input of an op on lists is written over with a result of that op for another of its inputs:
  `_foreach_add_([x, y], 1)`, and then `x.copy_(y)`. It gets the result that was meant for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from torpor.backends.fx.functional import BATCH_NORMS
from torpor.backends.fx.trace import Piece
from torpor.backends.reference.lowering import Instruction, Register

_IN_PLACE: Final = frozenset(
    # ops that compute each element from the same place of their operands, besides pointwise ones
    {"_to_copy", "alias", "detach", "lift_fresh_copy", "copy", "copy_", "tril", "triu", "fill_",
     "zero_", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
)  # fmt: skip

_APART: Final = frozenset(
    # ops with kernels of their own, whose results are there before any loop reads them
    {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "linear_backward",
     "convolution", "convolution_backward", "_trilinear", "embedding_dense_backward",
     "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
     "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
     "_scaled_dot_product_efficient_attention_backward",
     "_scaled_dot_product_cudnn_attention_backward", "flash_attention", "cudnn_attention",
     "_scaled_dot_product_flash_attention_for_cpu",
     "_scaled_dot_product_flash_attention_for_cpu_backward", "sort", "topk"}
)  # fmt: skip

_NORM_BACKWARDS: Final = ("native_layer_norm_backward", "native_group_norm_backward",
                          "native_batch_norm_backward", "cudnn_batch_norm_backward")  # fmt: skip
_POINTWISE: Final = torch.Tag.pointwise

_SCATTERS: Final = frozenset(
    # ops that return their first operand, parts of it written
    {"slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "index_put",
     "index_put_", "_unsafe_index_put", "_index_put_impl", "_index_put_impl_", "index_copy",
     "index_copy_", "index_add", "index_add_", "scatter", "scatter_", "scatter_add",
     "scatter_add_", "masked_scatter", "masked_scatter_"}
)  # fmt: skip

_COPIES: Final = ("copy", "copy_", "_foreach_copy", "_foreach_copy_")  # arguments: to, from
Inputs = frozenset[int]
Operand = tuple[int, int, int, Any]  # which argument, place in a list, register, shape
_NONE: Final[Inputs] = frozenset()


class _Reads:
    """The donated inputs that registers are computed from, in the loop that reads the register."""

    def __init__(self, piece: Piece) -> None:
        donated = frozenset(piece.donated)
        self.here = {r: frozenset({r}) & donated for r in piece.inputs}  # from the same place
        self.elsewhere: dict[int, Inputs] = {}  # from other places
        self.sole = {r: r for r in piece.inputs}  # the only input; -1: of several
        self.together: dict[int, frozenset[int]] = {}  # results of one op on lists
        self.copied: dict[int, int] = {}  # result of an op on lists that this one is
        self.first: dict[int, int] = {}  # the first operand of each register
        self.scattered: dict[int, list[int]] = {}  # inputs of which parts are written: all results
        self.updated: dict[int, list[tuple[int, list[int]]]] = {}  # place of inputs in such ops
        for instruction in piece.instructions:
            self._follow(instruction)

    def _follow(self, instruction: Instruction) -> None:
        spec, name = instruction.spec, instruction.spec.target._opname
        operands = list(_operands(instruction))
        if name in _COPIES:
            operands = [operand for operand in operands if operand[0] == 1]
        on_lists = name.startswith(("_foreach_", "_fused_")) and name != "_foreach_norm"
        in_place = on_lists or _POINTWISE in spec.target.tags or name in _IN_PLACE
        if on_lists:
            self.together.update(dict.fromkeys(instruction.outputs, frozenset(instruction.outputs)))
            self.copied.update(zip(instruction.outputs, instruction.outputs))
            for _, place, operand, _ in (one for one in operands if one[0] == 0):
                self.updated.setdefault(operand, []).append((place, instruction.outputs))
        elif len(operands) == 1 and operands[0][2] in self.copied:
            self.copied.update(dict.fromkeys(instruction.outputs, self.copied[operands[0][2]]))
        if operands and operands[0][0] == 0 and not on_lists:
            self.first.update(dict.fromkeys(instruction.outputs, operands[0][2]))
        if name in _SCATTERS and instruction.outputs:
            *_, origin = self.descent(instruction.outputs[0])
            self.scattered.setdefault(origin, []).append(instruction.outputs[0])
        outputs = zip(instruction.outputs, instruction.node.outputs, strict=True)
        for place, (register, value) in enumerate(outputs):
            read = _beside(operands, place) if on_lists else operands
            self._note_sole(register, read)
            if name in _APART or (name in _NORM_BACKWARDS and place):
                continue
            if spec.name in BATCH_NORMS and place:
                self.here[register] = self._of_statistics(instruction, register)
            else:
                shape = value.type.shape if in_place and value.type is not None else None
                self._note_reads(register, read, shape)

    def _note_reads(self, register: int, operands: Iterable[Operand], shape: Any) -> None:
        """What a register is computed from; from the same places, if operands have that shape."""
        here, elsewhere = _NONE, _NONE
        for _, _, operand, form in operands:
            known = self.here.get(operand, _NONE)
            elsewhere |= self.elsewhere.get(operand, _NONE)
            if shape is not None and form == shape:
                here |= known
            else:
                elsewhere |= known
        if here:
            self.here[register] = here
        if elsewhere:
            self.elsewhere[register] = elsewhere

    def _note_sole(self, register: int, operands: Iterable[Operand]) -> None:
        read = {self.sole[operand] for _, _, operand, _ in operands if operand in self.sole}
        if read:
            self.sole[register] = read.pop() if len(read) == 1 else -1

    def descent(self, register: int) -> Iterator[int]:
        """A register, its first operand, and so on."""
        yield register
        while register in self.first:
            register = self.first[register]
            yield register

    def is_lost(self, output: int, register: int) -> bool:
        """Parts of `register` are written for something else than `output`."""
        written = self.scattered.get(register)
        return written is not None and not set(self.descent(output)).issuperset(written)

    def are_mixed(self, output: int, register: int, donated: dict[int, int]) -> bool:
        """`output` is computed from another input that the same op on lists writes over."""
        together = self.together.get(output, _NONE)
        read = self.here.get(output, _NONE) | self.elsewhere.get(output, _NONE)
        return any(donated.get(other) in together for other in read - {register})

    def are_exchanged(self, output: int, register: int) -> bool:
        """`output` is a result of an op on lists for another input than `register`."""
        copied = self.copied.get(output)
        updates = self.updated.get(register, ())
        return any(copied in made and copied != made[place] for place, made in updates)

    def _of_statistics(self, instruction: Instruction, register: int) -> Inputs:
        """Batch norm writes running statistics place by place; what it saves is computed before."""
        written = instruction.spec.mutated
        from_end = len(instruction.outputs) - instruction.outputs.index(register)
        if from_end > len(written):
            return _NONE
        operand = instruction.args[written[-from_end]]
        return self.here.get(operand, _NONE) if type(operand) is Register else _NONE


def _operands(instruction: Instruction) -> Iterator[Operand]:
    """The registers an instruction reads."""
    for position, (arg, value) in enumerate(zip(instruction.args, instruction.node.args)):
        args = arg if type(arg) is list else [arg]
        values = value if isinstance(value, (tuple, list)) else [value]
        for place, (one, told) in enumerate(zip(args, values)):
            if type(one) is Register:
                yield position, place, one, getattr(told.type, "shape", None)


def _beside(operands: Sequence[Operand], place: int) -> list[Operand]:
    """Those of the operands of an op on lists that are beside its output, and those of all."""
    lengths = [0] * (1 + max((position for position, *_ in operands), default=0))
    for position, *_ in operands:
        lengths[position] += 1
    length = max(lengths, default=1)
    return [o for o in operands if lengths[o[0]] < length or o[1] == place % length]


def unsafe(piece: Piece) -> list[int]:
    """Donated inputs of `piece` that its results must not be written over."""
    reads, donated = _Reads(piece), dict(piece.donated)
    while True:  # a result that is not written over an input is kept elsewhere
        new = set(donated.values())
        kept = {reads.sole.get(output) for output in piece.outputs if output not in new}
        found = [
            register
            for register, output in donated.items()
            if register in kept
            or register in reads.elsewhere.get(output, _NONE)
            or (reads.sole.get(output) != register and reads.sole.get(output) in donated)
            or reads.are_mixed(output, register, donated)
            or reads.are_exchanged(output, register)
            or reads.is_lost(output, register)
        ]
        if not found:
            return [register for register in piece.donated if register not in donated]
        for register in found:
            del donated[register]
