"""Canonical text of a graph, identical in every process: the key of the disk cache.

Two graphs have the same text if and only if a backend cannot distinguish them: inputs are numbered,
names and source lines are omitted, and every attribute is written with its type.

    torpor.leaf float32[4] @lazy:0
    torpor.scalar float
    aten.mul.Tensor i0 i1 -> float32[4] @lazy:0
    aten.sum.dim_IntList n0.0 (int:0) bool:False None -> float32[] @lazy:0
    return n1.0

Symbolic sizes are numbered by their first occurrence in the inputs, and their types are written in
full: strides that look contiguous for one step's sizes may not be for the next step's.

    torpor.leaf float32[s0,8] stride [8,1] offset 0 @lazy:0
    torpor.size s0
    aten.view.default i0 (size:8*s0) -> float32[8*s0] stride [1] offset 0 @lazy:0
    return n0.0
"""

from __future__ import annotations

from typing import Any, Final

import torch

from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, SIZE, Node, Value
from torpor.ir.types import ScalarType, SymbolicType, TensorType
from torpor.symbols.expressions import Expr, Symbol

_NUMBERS: Final = (bool, int, float, complex, str)
_TORCH: Final = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme, torch.device)


class NotCanonical(Exception):
    """A graph contains something without a process-independent text."""


def canonical_text(graph: Graph) -> str:
    """The canonical text of `graph`; raises `NotCanonical` if it has none."""
    return _Writer(graph).text()


class _Writer:
    """Writes one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names: dict[Value, str] = {v: f"i{i}" for i, v in enumerate(graph.inputs)}
        self.symbols: dict[Symbol, str] = {s: f"s{i}" for i, s in enumerate(graph.symbols)}
        self.types: dict[Any, str] = {None: "none"}

    def text(self) -> str:
        lines = [self._input(value) for value in self.graph.inputs]
        for number, node in enumerate(self.graph.nodes):
            lines.append(self._node(node, number))
        lines.append(f"return {' '.join(map(self._name, self.graph.outputs))}")
        return "\n".join(lines)

    def _input(self, value: Value) -> str:
        """The text of an input; values computed earlier count as leaves."""
        op = value.node.op
        if op is SIZE:
            return f"{SIZE.name} {self.symbols[value.node.args[0]]}"
        return f"{SCALAR.name if op is SCALAR else LEAF.name} {self._type(value.type)}"

    def _node(self, node: Node, number: int) -> str:
        args = " ".join(map(self._argument, node.args))
        for output in node.outputs:  # an output that is also an input keeps its name
            self.names.setdefault(output, f"n{number}.{output.index}")
        types = ", ".join(self._type(output.type) for output in node.outputs)
        return f"{node.op.name} {args} -> {types}"

    def _argument(self, arg: Any) -> str:
        if type(arg) is Value:
            return self._name(arg)
        if isinstance(arg, (tuple, list)):
            return f"({' '.join(map(self._argument, arg))})"
        return f"size:{self._size(arg)}" if type(arg) is Expr else _constant(arg)

    def _name(self, value: Value) -> str:
        try:
            return self.names[value]
        except KeyError:
            raise NotCanonical(f"{value!r} is computed nowhere in the graph") from None

    def _type(self, type_: Any) -> str:
        found = self.types.get(type_)
        if found is None:
            found = self.types[type_] = self._type_text(type_)
        return found

    def _type_text(self, type_: Any) -> str:
        if type(type_) in (TensorType, ScalarType):
            return repr(type_)
        if type(type_) is not SymbolicType:
            raise NotCanonical(f"the type {type_!r}")
        sizes, steps = (",".join(map(self._size, all_)) for all_ in (type_.sizes, type_.steps))
        lies = f"stride [{steps}] offset {self._size(type_.at_offset_size)}"
        lies += " conj" * type_.conj + " neg" * type_.neg
        return f"{str(type_.dtype).removeprefix('torch.')}[{sizes}] {lies} @{type_.device}"

    def _size(self, size: Any) -> str:
        """A size; terms and factors are sorted by their text, as their order is arbitrary."""
        if type(size) is Symbol:
            return self._symbol(size)
        if type(size) is not Expr:
            return str(size)
        text = " + ".join(sorted(self._term(*term) for term in size.terms))
        if size.divisor != 1:
            return f"({text})//{size.divisor}"
        return text if len(size.terms) == 1 else f"({text})"

    def _term(self, number: int, factors: tuple[Any, ...]) -> str:
        names = sorted(map(self._size, factors))
        return "*".join(names if names and number == 1 else [str(number), *names])

    def _symbol(self, symbol: Symbol) -> str:
        try:
            return self.symbols[symbol]
        except KeyError:
            raise NotCanonical(f"{symbol!r} is no input of the graph") from None


def _constant(constant: Any) -> str:
    kind = type(constant)
    if constant is None:
        return "None"
    if kind in _NUMBERS:
        return f"{kind.__name__}:{constant!r}"  # distinguishes 1, 1.0 and True, and 0.0 and -0.0
    if kind in _TORCH:
        return f"{kind.__name__}:{constant}"
    raise NotCanonical(f"a {kind.__name__} among the arguments")
