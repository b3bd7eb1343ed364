"""Prints graphs and nodes as text; `torpor.text.torch_parser.parse` is the inverse.

    graph(%0 = leaf 0 : float32[4,8] @lazy:0, %1 = scalar 0 : float) {
      %2 = aten.add.Tensor(%0, %0, alpha=%1) : float32[4,8] @lazy:0    # train.py:31  y = x + x
      %3, %4 = aten.max.dim(%2, 1) : float32[4] @lazy:0, int64[4] @lazy:0
      return %2, %4
    }

An argument equal to its schema's default is omitted, and those after it are given by name. A node's
outputs are the tensors its op returns, then the new contents of each argument it writes; an
undefined tensor has the type `none`.

An input that is neither a leaf nor a run-time scalar was computed earlier; it prints as
`computed k`, without the nodes behind it. Where the graph computes such a value again (because
another output of its node is needed), `_` is printed instead of its name.

The results of passes (`torpor.passes`) are printed too: blocks with their kind and stage, which
are copies of each other, the outputs of each, which output may overwrite which input, and which
items of a list a node works on:

    compiled 0 repeat 1:
      %2 = aten.sin.default(%0) : float32[4] @cpu
      %3 = aten._foreach_exp.default([%2]) : float32[4] @cpu items [1] of 4 op 0
      leave %2, %3
      return %3 over %1
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Final, NamedTuple

import torch

from torpor.ir.graph import EAGER, Block, Donated, Graph
from torpor.ir.node import LEAF, SCALAR, SIZE, TABLE, Node, Value, items_of
from torpor.symbols.expressions import Expr

COMPUTED: Final = TABLE.kind("torpor.computed", parameters=("position",))
"""Stands for a value computed earlier, in a graph parsed from text."""

INPUT_WORDS: Final = {LEAF: "leaf", SCALAR: "scalar", SIZE: "size", COMPUTED: "computed"}

_WIDTH: Final = 100
_LONGEST_LIST: Final = 8  # the most items of a list in `print_node`
_TORCH_CONSTANTS: Final = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_PLAIN_CONSTANTS: Final = (type(None), bool, int, float, Expr)

Names = Callable[[Value], str]


def print_graph(graph: Graph) -> str:
    """Print a graph, one node per line; parses to the same nodes."""
    names = name_values(graph)
    inputs = frozenset(graph.inputs)
    lines = _header(graph, names)

    def line(node: Node) -> str:
        targets = ["_" if output in inputs else names[output] for output in node.outputs]
        return f"  {_statement(node, targets, names)}{_items(node)}{_comment(node)}"

    for block in graph.blocks:
        lines += [_label(block), *map(line, block.nodes)]
        if block.outputs is not None and block.kind != EAGER:
            lines.append(f"  leave {_results(block.outputs, block.donated, names)}".rstrip())
    if not graph.blocks:
        lines += map(line, graph.nodes)
    results = _results(graph.outputs, graph.donated, names)
    return "\n".join([*lines, f"  return {results}".rstrip(), "}"])


def _label(block: Block) -> str:
    copy = "" if block.repeat is None else f" repeat {block.repeat}"
    return f"{block.kind} {block.stage}{copy}:"


def _items(node: Node) -> str:
    items = items_of(node)
    if items is None:
        return ""
    return f" items {list(items.positions)} of {items.length} op {items.op}"


def _results(outputs: Iterable[Value], donated: Donated, names: dict[Value, str]) -> str:
    over = {output: f" over {_name(names, value)}" for value, output in donated.items()}
    return ", ".join(f"{_name(names, value)}{over.get(value, '')}" for value in outputs)


def print_node(node: Node) -> str:
    """Print one node on one line, with lettered operands and their types."""
    if node.op in INPUT_WORDS:
        return _input(INPUT_WORDS[node.op], node.args[0], node.outputs[0])
    given = _arguments(node, _LetteredOperands(), _LONGEST_LIST)
    types = ", ".join(type_text(output) for output in node.outputs)
    return f"{node.op.name}({given}) -> {types or '()'}"


def name_values(graph: Graph) -> dict[Value, str]:
    """A name for every value of a graph, numbered in textual order."""
    names: dict[Value, str] = {}
    for value in _values(graph):
        if value not in names:
            names[value] = f"%{len(names)}"
    return names


def _values(graph: Graph) -> Iterator[Value]:
    yield from graph.inputs
    for node in graph.nodes:
        yield from node.outputs


def _name(names: dict[Value, str], value: Value) -> str:
    return names.get(value, "%?")  # invalid graphs are printed too


# Inputs


def _header(graph: Graph, names: dict[Value, str]) -> list[str]:
    words = input_words(graph)
    inputs = [f"{names[value]} = {_input(*words[value], value)}" for value in words]
    line = f"graph({', '.join(inputs)}) {{"
    if len(line) <= _WIDTH and not any(_is_computed(value) for value in words):
        return [line]
    body = [f"  {text},{_origin(value)}" for text, value in zip(inputs, words, strict=True)]
    return ["graph(", *body, ") {"]


def _input(word: str, place: object, value: Value) -> str:
    return f"{word} {place} : {type_text(value).removeprefix('scalar ')}"


def input_words(graph: Graph) -> dict[Value, tuple[str, object]]:
    """For every input, its kind (`leaf`, `scalar`, `computed`) and its number within that kind."""
    taken = {v.node.args[0] for v in graph.inputs if v.node.op is COMPUTED}
    free = (place for place in count() if place not in taken)
    return {
        value: (INPUT_WORDS[value.node.op], value.node.args[0])
        if value.node.op in INPUT_WORDS
        else ("computed", next(free))
        for value in dict.fromkeys(graph.inputs)
    }


def _is_computed(value: Value) -> bool:
    return value.node.op not in INPUT_WORDS


def _origin(value: Value) -> str:
    """A comment with the node that computed an input."""
    if not _is_computed(value):
        return ""
    which = f" output {value.index}" if len(value.node.outputs) > 1 else ""
    return f"    # {value.node.op.name}{which}{_comment(value.node).replace('    # ', '  ', 1)}"


# Nodes


def _statement(node: Node, targets: list[str], names: dict[Value, str]) -> str:
    def name(value: Value) -> str:
        return _name(names, value)

    call = f"{node.op.name}({_arguments(node, name)})"
    if not targets:
        return call
    types = ", ".join(type_text(output) for output in node.outputs)
    return f"{', '.join(targets)} = {call} : {types}"


def _comment(node: Node) -> str:
    if node.site is None:
        return ""
    return f"    # {' '.join(str(node.site).splitlines())}"


def type_text(value: Value) -> str:
    """The type of a value; `none` for an undefined tensor."""
    return "none" if value.type is None else repr(value.type)


# Arguments


class Given(NamedTuple):
    """An argument that differs from its schema's default."""

    name: str  # empty if the op has no schema
    value: Any
    by_name: bool  # keyword-only, or follows an omitted argument


def given_arguments(node: Node) -> Iterator[Given]:
    """The arguments of a node, except defaults."""
    parameters = node.op.parameters
    if node.op.target is None or len(parameters) != len(node.args):  # no schema
        yield from (Given("", arg, False) for arg in node.args)
        return
    by_name = False
    for parameter, arg in zip(parameters, node.args, strict=True):
        if parameter.has_default and same_constant(arg, parameter.default):
            by_name = True
        else:
            yield Given(parameter.name, arg, by_name or parameter.keyword_only)


def same_constant(a: object, b: object) -> bool:
    """Equal and of the same types throughout: distinguishes 1, 1.0 and True, and 0.0 and -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_constant, a, b))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)  # includes the sign of zero, and NaN
    return a is b or bool(a == b)


def _arguments(node: Node, names: Names, longest: int | None = None) -> str:
    return ", ".join(
        f"{given.name}={text}" if given.by_name else text
        for given in given_arguments(node)
        for text in [argument_text(given.value, names, longest)]
    )


def argument_text(arg: Any, names: Names, longest: int | None = None) -> str:
    """One argument; of a list, at most the first `longest` items."""
    if type(arg) is Value:
        return names(arg)
    if isinstance(arg, (tuple, list)):
        items = [argument_text(item, names, longest) for item in arg[:longest]]
        if longest is not None and len(arg) > longest:
            items.append(f"... {len(arg) - longest} more")
        return f"[{', '.join(items)}]"
    return constant_text(arg)


def constant_text(constant: object) -> str:
    """One constant; an object that no schema allows prints as `<its type>`."""
    kind = type(constant)
    if kind in _PLAIN_CONSTANTS:
        return repr(constant)
    if isinstance(constant, str):
        return json.dumps(constant)
    if isinstance(constant, complex):
        return f"complex({constant.real!r}, {constant.imag!r})"
    if isinstance(constant, _TORCH_CONSTANTS):
        return str(constant)
    if isinstance(constant, torch.device):
        return f"@{constant}"
    return f"<{kind.__name__}>"


class _LetteredOperands:
    """Names operands %a, %b, ..., with the type of each at its first occurrence."""

    def __init__(self) -> None:
        self.names: dict[Value, str] = {}

    def __call__(self, value: Value) -> str:
        known = self.names.get(value)
        if known is not None:
            return known
        turn, letter = divmod(len(self.names), 26)
        name = self.names[value] = f"%{chr(ord('a') + letter)}{turn or ''}"
        return f"{name}: {type_text(value)}"
