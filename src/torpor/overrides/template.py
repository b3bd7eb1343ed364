"""Templates of decompositions: the nodes of one, instantiated for other values of the same types.

Of twelve equal layers one is decomposed; the other eleven are instantiated from its template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torpor import metrics
from torpor.execute.storage import TRACE
from torpor.ir.graph import Graph
from torpor.ir.node import Node, OpKind, Value, intern
from torpor.passes.rewrite import mapped
from torpor.symbols.expressions import Condition
from torpor.symbols.symbolic_nodes import contents


class Undefined:
    """A result that an op does not have for these arguments."""

    type = None


UNDEFINED = Undefined()


class _Slot(int):
    """A value in a pattern, by number: operands first, then results in order."""

    __slots__ = ()


class _TemplateNode:
    """One node of a template."""

    __slots__ = ("args", "conditions", "key", "op", "types")

    def __init__(self, node: Node, slots: dict[Value, _Slot]) -> None:
        self.op: OpKind = node.op
        self.key = mapped(node.key, slots)
        self.args = self.key if node.args == node.key else mapped(node.args, slots)
        self.types = tuple([value.type for value in node.outputs])
        self.conditions = node.conditions

    def write(self, values: list[Value], site: Any, scope: Any) -> None:
        """Find or make the node on `values`, and append its outputs to them."""
        key = _filled(self.key, values)

        def make() -> tuple[Any, ...]:
            args = key if self.args is self.key else _filled(self.args, values)
            metrics.count_node(self.op.name)
            TRACE.misses += 1
            return contents(self.op, args, self.types, site, scope, self.conditions)

        values.extend(intern(self.op, key, make).outputs)


class Template:
    """The nodes from operands to results."""

    __slots__ = ("results", "steps")

    def __init__(self, steps: list[_TemplateNode], results: list[_Slot | None]) -> None:
        self.steps = steps
        self.results = results

    @staticmethod
    def between(operands: Sequence[Value], results: Sequence[Value | Undefined]) -> Template | None:
        """The template of what was recorded; None if it depends on other values too."""
        graph = Graph.of([v for v in results if isinstance(v, Value)], set(operands))
        if not set(graph.inputs) <= set(operands):
            return None
        slots: dict[Value, _Slot] = {}
        for number, value in enumerate(operands):
            slots.setdefault(value, _Slot(number))
        steps, filled = [], len(operands)
        for node in graph.nodes:
            steps.append(_TemplateNode(node, slots))
            for value in node.outputs:
                slots[value] = _Slot(filled)
                filled += 1
        return Template(steps, [slots[v] if isinstance(v, Value) else None for v in results])

    def write(
        self, operands: Sequence[Value], site: Any, scope: Any
    ) -> tuple[Value | Undefined, ...]:
        """The results for other operands of the same types."""
        values = list(operands)
        for step in self.steps:
            step.write(values, site, scope)
        return tuple([UNDEFINED if slot is None else values[slot] for slot in self.results])


def conditions_between(
    operands: Sequence[Value], results: Sequence[Value | Undefined]
) -> tuple[Condition, ...]:
    """The conditions on sizes under which the nodes between operands and results are valid."""
    graph = Graph.of([v for v in results if isinstance(v, Value)], set(operands))
    return tuple({c: None for node in graph.nodes for c in node.conditions})


def _filled(pattern: tuple[Any, ...], values: list[Value]) -> tuple[Any, ...]:
    return tuple(
        [
            values[p] if type(p) is _Slot else _filled(p, values) if type(p) is tuple else p
            for p in pattern
        ]
    )  # fmt: skip
