"""Graphs as Graphviz text, for `dot -Tsvg`.

Leaves are green, run-time scalars yellow, values computed earlier grey, ops blue, and ops that
write to an argument red. In an SVG, hovering over a box shows the full node and the user's line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Final

from torpor.ir.graph import Graph
from torpor.ir.node import Node, OpKind, Value
from torpor.text.printer import (
    argument_text,
    given_arguments,
    input_words,
    name_values,
    print_node,
    type_text,
)

_COLOURS: Final = {
    "leaf": "#cfe8cf",
    "scalar": "#fff1b8",
    "computed": "#dcdcdc",
    "op": "#d8e6f7",
    "write": "#f7d3c8",
}
_LINE: Final = 44  # characters per line of a label
_LINES: Final = 4  # lines for the attributes of a node
_TYPES: Final = 3  # output types in a label
_TOOLTIP: Final = 600

_HEAD: Final = (
    "digraph torpor {",
    '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10];',
    '  edge [fontname="Helvetica", fontsize=8];',
)


def dot(graph: Graph) -> str:
    """The Graphviz text of a graph."""
    ids: dict[Value, str] = {}
    lines = [*_HEAD, *_inputs(graph, ids)]
    for position, node in enumerate(graph.nodes):
        lines += _node(node, f"n{position}", ids)
    lines += _results(graph, ids)
    return "\n".join([*lines, "}"])


def _inputs(graph: Graph, ids: dict[Value, str]) -> Iterator[str]:
    for position, (value, (word, place)) in enumerate(input_words(graph).items()):
        ids[value] = f"i{position}"
        yield _box(ids[value], [f"{word} {place}", type_text(value)], word, value.node)


def _node(node: Node, id_: str, ids: dict[Value, str]) -> Iterator[str]:
    label = [node.op.name, *_attributes(node), *_types(node)]
    yield _box(id_, label, "write" if _writes(node.op) else "op", node)
    for operand in node.operands:
        yield _edge(operand, id_, ids)
    for output in node.outputs:
        ids.setdefault(output, id_)  # an output that is also an input keeps the input's box


def _results(graph: Graph, ids: dict[Value, str]) -> Iterator[str]:
    names = name_values(graph)
    for position, value in enumerate(graph.outputs):
        label = f"return {position}  {names.get(value, '')}".rstrip()
        yield f"  r{position} [label={_quoted(label)}, shape=plaintext, style=solid];"
        yield _edge(value, f"r{position}", ids)


def _box(id_: str, label: Iterable[str], colour: str, node: Node) -> str:
    site = "" if node.site is None else f"{node.site}\n"
    text = print_node(node)
    tooltip = text if len(text) <= _TOOLTIP else f"{text[:_TOOLTIP]} ..."
    return (
        f"  {id_} [label={_quoted(chr(10).join(label))}, "
        f'fillcolor="{_COLOURS[colour]}", tooltip={_quoted(site + tooltip)}];'
    )


def _edge(value: Value, target: str, ids: dict[Value, str]) -> str:
    source = ids.get(value, '"defined nowhere"')  # invalid graphs are drawn too
    label = f' [taillabel="{value.index}"]' if len(value.node.outputs) > 1 else ""
    return f"  {source} -> {target}{label};"


# Labels


def _attributes(node: Node) -> list[str]:
    """The arguments other than values and defaults, wrapped."""
    given = [
        f"{a.name}={text}" if a.name else text
        for a in given_arguments(node)
        if type(a.value) is not Value
        for text in [argument_text(a.value, _in_place_of_value, _LINE)]
    ]
    text = ", ".join(given)
    if len(text) <= _LINE:
        return [text] if text else []
    lines = textwrap.wrap(text, _LINE, break_on_hyphens=False)
    return lines if len(lines) <= _LINES else [*lines[: _LINES - 1], "..."]


def _in_place_of_value(value: Value) -> str:
    return "·"


def _types(node: Node) -> list[str]:
    types = [type_text(output) for output in node.outputs]
    rest = len(types) - _TYPES
    return types if rest <= 0 else [*types[:_TYPES], f"... {rest} more"]


def _writes(op: OpKind) -> bool:
    return any(getattr(parameter, "mutated", False) for parameter in op.parameters)


def _quoted(text: str) -> str:
    """A Graphviz string: quotes and backslashes escaped, lines centred."""
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "\\n".join(_printable(line) for line in text.splitlines()) + '"'


def _printable(line: str) -> str:
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)
