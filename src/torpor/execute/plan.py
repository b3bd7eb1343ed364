"""From the values a sync needs to a compiled graph, and the cache in between.

Values are interned, so the tuple of values to compute *is* the key of the compiled graph: a step
that was recorded before is found with one look-up, without walking its graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from torpor import config, metrics
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, Value
from torpor.ir.verify import verify


class Plan:
    """A compiled graph, and where its inputs come from."""

    __slots__ = ("computation", "inputs", "outputs", "positions")

    def __init__(self, computation: Computation, graph: Graph) -> None:
        self.computation = computation
        self.outputs = graph.outputs
        self.positions = {value: i for i, value in enumerate(graph.outputs)}
        self.inputs = tuple(_source(value) for value in graph.inputs)


LEAVES, SCALARS, COMPUTED = 0, 1, 2


def _source(value: Value) -> tuple[int, Any]:
    if value.node.op is LEAF:
        return LEAVES, value.node.args[0]
    if value.node.op is SCALAR:
        return SCALARS, value.node.args[0]
    return COMPUTED, value


class PlanCache:
    """Plans by the values they compute; the least recently used goes first."""

    def __init__(self) -> None:
        self.plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self.serial = 0

    def find(self, key: tuple[Any, ...]) -> Plan | None:
        """The plan under `key`, if there is one."""
        plan = self.plans.get(key)
        if plan is None:
            metrics.count("UncachedCompile")
        else:
            self.plans.move_to_end(key)
            metrics.count("CachedCompile")
        return plan

    def add(
        self, key: tuple[Any, ...], graph: Graph, backend: Backend, device: BackendDevice
    ) -> Plan:
        """Compile `graph` and keep it under `key`."""
        self.serial += 1
        if config.verify_graphs:
            verify(graph)
        with metrics.timer("Compile"):
            plan = Plan(compile_graph(graph, f"graph{self.serial}", backend, device), graph)
        self.plans[key] = plan
        while len(self.plans) > config.max_cached_plans:
            self.plans.popitem(last=False)
        return plan

    def clear(self) -> None:
        """Forget every plan."""
        self.plans.clear()


def compile_graph(graph: Graph, name: str, backend: Backend, device: BackendDevice) -> Computation:
    """Lower and compile `graph`."""
    context = backend.lowering_context(name, device, graph.nodes)
    for value in graph.inputs:
        context.add_parameter(value)
    for node in graph.nodes:
        context.lower(node)
    for value in graph.outputs:
        context.add_result(value)
    (computation,) = backend.compile([context.build()])
    return computation


def needed_graph(wanted: Sequence[Value], live: Sequence[Value], known: Collection[Value]) -> Graph:
    """The graph for `wanted` alone, with every value in it that is needed again as an output.

    Live values inside the cone of `wanted` are computed on the way, so they become outputs; so
    does everything that live values outside the cone take from inside it. Nothing is ever
    computed twice.
    """
    cone = Graph.of(wanted, known)
    inside = {output for node in cone.nodes for output in node.outputs}
    outputs = dict.fromkeys(wanted)
    outputs.update(dict.fromkeys(value for value in live if value in inside))
    rest = Graph.of([value for value in live if value not in inside], inside | set(known))
    outputs.update(dict.fromkeys(value for value in rest.inputs if value in inside))
    return Graph(cone.inputs, cone.nodes, tuple(outputs))
