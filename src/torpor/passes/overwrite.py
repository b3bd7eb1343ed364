"""Finds which donated inputs each block may write its results over.

    commit 0:                                commit 0:
      %1 = aten.add_.Tensor(%0, 1)             %1 = aten.add_.Tensor(%0, 1)
      leave %1                                 leave %1 over %0
      return %1 over %0                        return %1 over %0

A block may do so if nothing fails after it, it makes the result, and nothing after it reads the
input. What no block writes is copied when all has run.

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
    """The donated inputs that values are computed from, in the loop that reads the value."""

    def __init__(self, block: Block) -> None:
        donated = frozenset(block.donated)
        inputs = [v for v in (*block.read, *block.donated) if type(v.type) is not ScalarType]
        self.here = {v: frozenset({v}) & donated for v in inputs}  # from the same place
        self.elsewhere: dict[Value, Inputs] = {}  # from other places
        self.sole: dict[Value, Value | None] = {v: v for v in inputs}  # only input; None: several
        self.together: dict[Value, frozenset[Value]] = {}  # results of one op on lists
        self.copied: dict[Value, Value] = {}  # result of an op on lists that this one is
        self.first: dict[Value, Value] = {}  # the first operand of each value
        self.scattered: dict[Value, list[Value]] = {}  # inputs of which parts are written
        self.updated: dict[Value, list[tuple[int, tuple[Value, ...]]]] = {}  # place in such ops
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
        """What a value is computed from; from the same places, if operands have that shape."""
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
        """Parts of the input `value` are written for something else than `output`."""
        written = self.scattered.get(value)
        return written is not None and not set(self.descent(output)).issuperset(written)

    def are_mixed(self, output: Value, value: Value, donated: Donated) -> bool:
        """`output` is computed from another input that the same op on lists writes over."""
        together = self.together.get(output, _NONE)
        read = self.here.get(output, _NONE) | self.elsewhere.get(output, _NONE)
        return any(donated.get(other) in together for other in read - {value})

    def are_exchanged(self, output: Value, value: Value) -> bool:
        """`output` is a result of an op on lists for another input than `value`."""
        copied = self.copied.get(output)
        updates = self.updated.get(value, ())
        return any(copied in made and copied is not made[place] for place, made in updates)

    def _of_statistics(self, node: Node, value: Value) -> Inputs:
        """Batch norm writes running statistics place by place; what it saves is computed before."""
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
    """Operands of an op on lists that belong to the same item as its output, or to all items."""
    lengths = [0] * (1 + max((position for position, *_ in operands), default=0))
    for position, *_ in operands:
        lengths[position] += 1
    length = max(lengths, default=1)
    return [o for o in operands if lengths[o[0]] < length or o[1] == place % length]


def unsafe(block: Block) -> set[Value]:
    """Donated inputs of `block` that its results must not be written over."""
    reads, donated = _DonatedReads(block), dict(block.donated)
    while True:  # a result that is not written over an input is kept elsewhere
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
