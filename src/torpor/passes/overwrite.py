"""Find which donated inputs each block may overwrite with its results.

    commit 0:                                commit 0:
      %1 = aten.add_.Tensor(%0, 1)             %1 = aten.add_.Tensor(%0, 1)
      leave %1                                 leave %1 over %0
      return %1 over %0                        return %1 over %0

Allowed if nothing that may fail runs after the block, the block makes the result, and nothing later
reads the input. A result that no block writes in place is copied at the end of the step.

Compilers fuse the computation of a result into the loop that writes it, and elide copies. In these
cases (torch 2.13) that gives wrong results, so this pass excludes them:

- The new contents of an input are read from other places of the same input: `x.copy_(x.t())`,
  `x.copy_(x.roll(1))`. The loop reads elements that it has already overwritten.
- The old contents of an input are kept, in another overwritten input or in a result:
  `previous.copy_(x)`, then `x.add_(1)`. With the copy elided, the new contents are kept.
- One op on lists writes inputs that it computes from one another: `_foreach_add_([x, y], [y, x])`.
- A part of an input is written, and the whole becomes the new contents of something else:
  `y.copy_(x); y[0] = 1; x.fill_(2)`. The part is written into the input itself.
- An input of an op on lists is overwritten with the result for another of its inputs:
  `_foreach_add_([x, y], 1)`, then `x.copy_(y)`. `x` gets its own result, not `y`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from torpor.ir.graph import COMMIT, Block, Donated, Graph
from torpor.ir.node import Node, Value
from torpor.ir.types import ScalarType
from torpor.ops.spec import spec_of
from torpor.passes.pipeline import Pass

BATCH_NORMS: Final = (
    "aten.native_batch_norm.default",
    "aten.cudnn_batch_norm.default",
    "aten.miopen_batch_norm.default",
    "aten._native_batch_norm_legit.default",
)

_IN_PLACE: Final = frozenset(
    # ops that compute each element from the same index of their operands, besides pointwise ops
    {"_to_copy", "alias", "detach", "lift_fresh_copy", "copy", "copy_", "tril", "triu", "fill_",
     "zero_", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
)  # fmt: skip

_APART: Final = frozenset(
    # ops with standalone kernels: their results are complete before any loop reads them
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
    # ops that return their first operand with parts of it overwritten
    {"slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "index_put",
     "index_put_", "_unsafe_index_put", "_index_put_impl", "_index_put_impl_", "index_copy",
     "index_copy_", "index_add", "index_add_", "scatter", "scatter_", "scatter_add",
     "scatter_add_", "masked_scatter", "masked_scatter_"}
)  # fmt: skip

_COPIES: Final = ("copy", "copy_", "_foreach_copy", "_foreach_copy_")  # arguments: to, from
Inputs = frozenset[Value]
Operand = tuple[int, int, Value, Any]  # which argument, place in a list, value, shape
_NONE: Final[Inputs] = frozenset()


def _overwrite(graph: Graph) -> Graph:
    if not graph.donated:
        return graph
    rest = dict(graph.donated)
    read_later: set[Value] = set()
    blocks: list[Block] = []
    for block in reversed(graph.blocks):
        if block.kind == COMMIT:
            made = set(block.outputs or ())
            taken = {v: o for v, o in rest.items() if o in made and v not in read_later}
            for value in taken:
                del rest[value]
            block = replace(block, donated=taken)
            wrong = unsafe(block)
            block = replace(block, donated={v: o for v, o in taken.items() if v not in wrong})
        blocks.append(block)
        read_later.update(block.read)
    return graph.in_blocks(blocks[::-1])


class _DonatedReads:
    """Which donated inputs each value reads, within the loop that would compute the value."""

    def __init__(self, block: Block) -> None:
        donated = frozenset(block.donated)
        inputs = [v for v in (*block.read, *block.donated) if type(v.type) is not ScalarType]
        self.here = {v: frozenset({v}) & donated for v in inputs}  # read at the same index
        self.elsewhere: dict[Value, Inputs] = {}  # read at other indices
        self.sole: dict[Value, Value | None] = {v: v for v in inputs}  # only read; None: several
        self.together: dict[Value, frozenset[Value]] = {}  # results of one op on lists
        self.copied: dict[Value, Value] = {}  # value -> the list op's result that it equals
        self.first: dict[Value, Value] = {}  # the first operand of each value
        self.scattered: dict[Value, list[Value]] = {}  # input -> its partial overwrites
        self.updated: dict[Value, list[tuple[int, tuple[Value, ...]]]] = {}  # list ops
        for node in block.nodes:
            self._follow(node)

    def _follow(self, node: Node) -> None:
        spec, name, outputs = spec_of(node.op.target), node.op.target._opname, node.outputs
        operands = list(_operands(node))
        if name in _COPIES:
            operands = [operand for operand in operands if operand[0] == 1]
        on_lists = name.startswith(("_foreach_", "_fused_")) and name != "_foreach_norm"
        in_place = on_lists or _POINTWISE in spec.target.tags or name in _IN_PLACE
        if on_lists:
            self.together.update(dict.fromkeys(outputs, frozenset(outputs)))
            self.copied.update(zip(outputs, outputs, strict=True))
            for _, place, operand, _ in (one for one in operands if one[0] == 0):
                self.updated.setdefault(operand, []).append((place, outputs))
        elif len(operands) == 1 and operands[0][2] in self.copied:
            self.copied.update(dict.fromkeys(outputs, self.copied[operands[0][2]]))
        if operands and operands[0][0] == 0 and not on_lists:
            self.first.update(dict.fromkeys(outputs, operands[0][2]))
        if name in _SCATTERS and outputs:
            *_, origin = self.descent(outputs[0])
            self.scattered.setdefault(origin, []).append(outputs[0])
        for place, value in enumerate(outputs):
            read = _others(operands, place) if on_lists else operands
            self._note_sole(value, read)
            if name in _APART or (name in _NORM_BACKWARDS and place):
                continue
            if spec.name in BATCH_NORMS and place:
                self.here[value] = self._of_statistics(node, value)
            else:
                shape = value.type.shape if in_place and value.type is not None else None
                self._note_reads(value, read, shape)

    def _note_reads(self, value: Value, operands: Iterable[Operand], shape: Any) -> None:
        """Record what `value` reads: at the same index, for operands that have its shape."""
        here, elsewhere = _NONE, _NONE
        for _, _, operand, form in operands:
            known = self.here.get(operand, _NONE)
            elsewhere |= self.elsewhere.get(operand, _NONE)
            if shape is not None and form == shape:
                here |= known
            else:
                elsewhere |= known
        if here:
            self.here[value] = here
        if elsewhere:
            self.elsewhere[value] = elsewhere

    def _note_sole(self, value: Value, operands: Iterable[Operand]) -> None:
        read = {self.sole[operand] for _, _, operand, _ in operands if operand in self.sole}
        if read:
            self.sole[value] = read.pop() if len(read) == 1 else None

    def descent(self, value: Value) -> Iterator[Value]:
        """A value, its first operand, and so on."""
        yield value
        while value in self.first:
            value = self.first[value]
            yield value

    def is_lost(self, output: Value, value: Value) -> bool:
        """Whether parts of the input `value` are written for something other than `output`."""
        written = self.scattered.get(value)
        return written is not None and not set(self.descent(output)).issuperset(written)

    def are_mixed(self, output: Value, value: Value, donated: Donated) -> bool:
        """Whether `output` reads another input that the same op on lists overwrites."""
        together = self.together.get(output, _NONE)
        read = self.here.get(output, _NONE) | self.elsewhere.get(output, _NONE)
        return any(donated.get(other) in together for other in read - {value})

    def are_exchanged(self, output: Value, value: Value) -> bool:
        """Whether `output` is the result of an op on lists for an input other than `value`."""
        copied = self.copied.get(output)
        updates = self.updated.get(value, ())
        return any(copied in made and copied is not made[place] for place, made in updates)

    def _of_statistics(self, node: Node, value: Value) -> Inputs:
        """Batch norm updates running statistics elementwise, after computing those it saves."""
        written = spec_of(node.op.target).mutated
        from_end = len(node.outputs) - value.index
        if from_end > len(written):
            return _NONE
        operand = node.args[written[-from_end]]
        return self.here.get(operand, _NONE) if type(operand) is Value else _NONE


def _operands(node: Node) -> Iterator[Operand]:
    """The values a node reads."""
    for position, arg in enumerate(node.args):
        for place, one in enumerate(arg if type(arg) is tuple else (arg,)):
            if type(one) is Value:
                yield position, place, one, getattr(one.type, "shape", None)


def _others(operands: Sequence[Operand], place: int) -> list[Operand]:
    """Operands of an op on lists that belong to the item at `place`, or to all items."""
    lengths = [0] * (1 + max((position for position, *_ in operands), default=0))
    for position, *_ in operands:
        lengths[position] += 1
    length = max(lengths, default=1)
    return [o for o in operands if lengths[o[0]] < length or o[1] == place % length]


def unsafe(block: Block) -> set[Value]:
    """Donated inputs of `block` that its results must not overwrite."""
    reads, donated = _DonatedReads(block), dict(block.donated)
    while True:  # each exclusion makes one more result separate memory
        new = set(donated.values())
        kept = {reads.sole.get(output) for output in block.outputs or () if output not in new}
        found = [
            value
            for value, output in donated.items()
            if value in kept
            or value in reads.elsewhere.get(output, _NONE)
            or (reads.sole.get(output) is not value and reads.sole.get(output) in donated)
            or reads.are_mixed(output, value, donated)
            or reads.are_exchanged(output, value)
            or reads.is_lost(output, value)
        ]
        if not found:
            return block.donated.keys() - donated.keys()
        for value in found:
            del donated[value]


OVERWRITE = Pass("overwrite", "donated inputs that blocks write their results over", _overwrite)
