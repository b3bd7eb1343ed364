"""The intern table, torpor's counterpart of the trie in `torch._lazy`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torpor.execute.storage import TRACE
from torpor.ir.node import TABLE, Node
from torpor.text.printer import print_node

_LABEL = 160  # the most characters in a label


def dump(dot_file_name: str) -> None:
    """Write the nodes of the intern table and their edges, as Graphviz."""
    with TRACE.lock:
        nodes = [
            node
            for kind in TABLE.kinds.values()
            for node in (*kind.old_nodes.values(), *kind.nodes.values())
        ]
    with Path(dot_file_name).open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in _lines(nodes))


def _lines(nodes: list[Node]) -> Iterator[str]:
    numbers = {node: number for number, node in enumerate(nodes)}
    yield "digraph G {"
    for node, number in numbers.items():
        label = print_node(node)[:_LABEL].replace("\\", "\\\\").replace('"', '\\"')
        yield f'{number}[label="{label}"]'
        for operand in dict.fromkeys(value.node for value in node.operands):
            if operand in numbers:
                yield f"{numbers[operand]} -> {number}"
    yield "}"


def reset() -> None:
    """Drop all nodes; what is recorded and not yet run stays valid."""
    with TRACE.lock:
        TABLE.clear()
