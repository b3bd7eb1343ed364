"""Rules every graph keeps."""

from __future__ import annotations

from torpor.errors import GraphError
from torpor.ir.graph import Graph


def verify(graph: Graph) -> None:
    """Raise GraphError if an operand is used before it is defined or an output is not defined."""
    defined = set(graph.inputs)
    for node in graph.nodes:
        for operand in node.operands:
            if operand not in defined:
                raise GraphError(f"{node!r} uses {operand!r} before it is defined")
        defined.update(node.outputs)
    for output in graph.outputs:
        if output not in defined:
            raise GraphError(f"output {output!r} is not defined")
