"""Graphs to print, parse, verify and draw: written by hand, or drawn by hypothesis."""

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st

from torpor.ir.graph import Graph
from torpor.ir.node import TABLE, Node, Value, leaf, scalar
from torpor.ir.types import TensorType, contiguous_strides
from torpor.ops.keys import node_of
from torpor.ops.spec import ArgKind, Argument, spec_of

aten = torch.ops.aten
LAZY = torch.device("lazy:0")
CPU = torch.device("cpu")


def tensor_type(*shape: int, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType.contiguous(shape, dtype, LAZY)


MATRIX = tensor_type(4, 8)
ROW = tensor_type(8)


class Line:
    """Where a node was recorded, as tracing would say."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def record(target: Any, *args: Any, types: Any = MATRIX, site: Any = None, **keywords: Any) -> Node:
    """The node of an op, its type given."""
    spec = spec_of(target)
    types = types if isinstance(types, tuple) else (types,)
    return node_of(spec, spec.bind(args, keywords), types, site)


def chain(length: int) -> Graph:
    """`length` additions, each on the one before."""
    value = first = leaf(0, MATRIX)
    spec = spec_of(aten.add.Tensor)
    for _ in range(length):
        value = node_of(spec, [value, first, 1], (MATRIX,)).outputs[0]
    return Graph.of([value])


def same_graph(a: Graph, b: Graph) -> bool:
    """Whether two graphs hold the very same nodes and values in the same order."""
    return (a.inputs, a.nodes, a.outputs) == (b.inputs, b.nodes, b.outputs)


# -- hypothesis ------------------------------------------------------------------------------------

DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]
LAYOUTS = [torch.strided, torch.sparse_coo, torch.sparse_csr]
MEMORY_FORMATS = [
    torch.preserve_format,
    torch.contiguous_format,
    torch.channels_last,
    torch.channels_last_3d,
]
DEVICES = [torch.device(name) for name in ("cpu", "lazy", "lazy:0", "lazy:1", "cuda:0", "meta")]

TRAPS = [1, 1.0, True, 0, 0.0, -0.0, False, math.nan, math.inf, -math.inf, 1e22, 5e-324, 2**63 - 1]

integers = st.integers(-(2**63), 2**63 - 1)
numbers = (
    st.sampled_from(TRAPS) | integers | st.floats() | st.booleans() | st.complex_numbers()
    | st.builds(complex, st.sampled_from([0.0, -0.0, math.nan]), st.sampled_from([0.0, -0.0]))
)  # fmt: skip
# a lone surrogate is no text that torch could take
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
constants = (
    integers | st.booleans() | texts | st.sampled_from(DTYPES) | st.sampled_from(LAYOUTS)
    | st.sampled_from(MEMORY_FORMATS) | st.sampled_from(DEVICES)
)  # fmt: skip

sizes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensor_types(draw: st.DrawFn) -> TensorType:
    shape = draw(sizes)
    strides = st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)).map(tuple)
    return TensorType.of(
        shape,
        draw(st.just(contiguous_strides(shape)) | strides),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(DEVICES)),
        draw(st.sampled_from([0, 0, 3])),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@dataclasses.dataclass(frozen=True)
class Attribute:
    """Draws the argument at one place of a schema."""

    argument: Argument
    values: st.SearchStrategy[Value]

    def strategy(self) -> st.SearchStrategy[Any]:
        plain = {
            ArgKind.TENSOR: self.values | numbers,  # a number stands for a wrapped 0-dim tensor
            ArgKind.TENSORS: _lists(self.values | st.none()),
            ArgKind.PLAIN: constants,
            ArgKind.PLAINS: _lists(integers) | _lists(st.booleans()),
            ArgKind.FLOAT: numbers,
            ArgKind.FLOATS: _lists(numbers),
            ArgKind.SCALAR: numbers | self.values,
            ArgKind.SCALARS: _lists(numbers),
            ArgKind.OPAQUE: st.none(),
        }[self.argument.kind]
        if self.argument.has_default:
            plain = st.just(self.argument.default) | plain
        return plain


def _lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=4).map(tuple)


OPS = [
    aten.add.Tensor, aten.add_.Tensor, aten.mul.Scalar, aten.clamp.default, aten.max.dim,
    aten.sum.dim_IntList, aten.slice.Tensor, aten.full.default, aten.clone.default,
    aten._to_copy.default, aten.div.Tensor_mode, aten.index.Tensor, aten.index_put_.default,
    aten.cat.default, aten.convolution_backward.default, aten.upsample_nearest2d.vec,
    aten._foreach_add.ScalarList, aten._foreach_mul_.Scalar, aten.native_batch_norm.default,
    aten.tril_indices.default, aten.gelu.default, aten.scatter.value_reduce,
]  # fmt: skip


@st.composite
def nodes(draw: st.DrawFn, values: list[Value]) -> Node:
    spec = spec_of(draw(st.sampled_from(OPS)))
    operands = st.sampled_from(values)
    bound = [draw(Attribute(argument, operands).strategy()) for argument in spec.arguments]
    types = draw(st.lists(tensor_types() | st.none(), max_size=3).map(tuple))
    return node_of(spec, bound, types)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs of real ops on any arguments; their types mean nothing, as the IR does not ask."""
    TABLE.clear()  # what is drawn must not depend on nodes of an earlier draw
    leaf_types = draw(st.lists(tensor_types(), min_size=1, max_size=3))
    kinds = draw(st.lists(st.sampled_from([bool, int, float, complex]), max_size=2))
    values = [leaf(slot, type_) for slot, type_ in enumerate(leaf_types)]
    values += [scalar(slot, kind) for slot, kind in enumerate(kinds)]
    for _ in range(draw(st.integers(0, 6))):
        values += draw(nodes(values)).outputs
    return Graph.of(draw(st.lists(st.sampled_from(values), max_size=4, unique=True)))
