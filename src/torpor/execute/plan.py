"""Plans: a compiled graph, where its inputs come from, and which graph a sync needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torpor.backend.interface import Backend
from torpor.backend.item_getter import item_getter
from torpor.backend.lowering import Computation
from torpor.cache.graphs import MOST_KINDS
from torpor.compiling.compilation import StandIn
from torpor.distributed.ops import collectives_in
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, SIZE, Node, Value
from torpor.ir.types import ScalarType, SymbolicType
from torpor.observe.history import GraphRecord
from torpor.ops.spec import spec_of
from torpor.overrides.draws import IN_TURN
from torpor.symbols.expressions import Symbol

if TYPE_CHECKING:
    from torpor.compiling.draft import Draft


class Outline:
    """What is known of a plan before its graph is compiled: enough to make handles for results."""

    __slots__ = (
        "collectives", "draws", "fragile", "graph", "in_turn", "leaves", "others", "outputs",
        "places", "positions", "sized", "symbols", "types",
    )  # fmt: skip

    def __init__(self, graph: Graph, inputs: Sequence[tuple[int, Any]]) -> None:
        self.graph = graph  # as recorded; the computation's graph may be expanded
        self.symbols = graph.symbols
        self.outputs = graph.outputs
        self.types = graph.types  # may be symbolic
        self.sized = any(type(type_) is SymbolicType for type_ in self.types)
        self.positions = {value: i for i, value in enumerate(graph.outputs)}
        self.places = {value: i for i, value in enumerate(graph.inputs)}
        self.leaves = item_getter([place for source, place in inputs if source == LEAVES])
        self.others = tuple(  # inputs other than leaves: position, kind of source, where to find it
            (i, source, place) for i, (source, place) in enumerate(inputs) if source != LEAVES
        )
        self.fragile = tuple(filter(_may_fail, graph.nodes))
        self.draws = any(spec_of(node.op.target).draws(node.args) for node in graph.nodes)
        self.collectives = tuple(collectives_in(graph))
        # its job must run on the submitting thread, before that thread goes on
        draws_later = any(node.op.target in IN_TURN for node in graph.nodes)
        self.in_turn = draws_later or bool(self.collectives)

    @classmethod
    def of(cls, graph: Graph, backend: Backend) -> Outline:
        """The outline of a graph; run-time numbers are passed as numbers, whatever will run it."""
        return cls(graph, [_source(value, backend, False) for value in graph.inputs])


class Plan(Outline):
    """A compiled graph, the backend that runs it, and where its inputs come from."""

    __slots__ = (
        "checked", "computation", "donated", "draft", "kept_bytes", "kept_inputs", "kept_outputs",
        "launches", "record", "runner", "source", "variants",
    )  # fmt: skip

    def __init__(
        self,
        computation: Computation,
        graph: Graph,
        backend: Backend,
        runner: Backend | StandIn,
        record: GraphRecord,
    ) -> None:
        as_data = runner.scalars_as_data
        inputs = [_source(value, backend, as_data) for value in graph.inputs]
        super().__init__(graph, inputs)
        self.computation = computation
        self.record = record
        self.draft: Draft | None = None  # set while the plan is interpreted: what compiles it later
        self.donated = tuple(computation.aliases)  # positions of donated inputs
        # bucketing may have merged collectives, so there may be fewer than were recorded
        self.launches = len(collectives_in(computation.graph)) if self.collectives else 0
        self.runner = runner
        self.source: Draft | None = None  # the draft it was compiled from
        self.variants: list[Plan] = []  # the same graph, compiled for sizes that this plan rejects
        written = set(computation.aliases.values())  # outputs that use the memory of donated inputs
        kept_inputs = [
            place
            for place, (source, _) in enumerate(inputs)
            if source in (LEAVES, COMPUTED) and place not in computation.aliases
        ]
        kept_outputs = [i for i in range(len(graph.outputs)) if i not in written]
        self.kept_inputs, self.kept_outputs = item_getter(kept_inputs), item_getter(kept_outputs)
        kept = [*self.kept_inputs(graph.inputs), *self.kept_outputs(graph.outputs)]
        self.kept_bytes = None if self.symbols else sum(value.type.nbytes for value in kept)
        self.checked = False  # a run has returned results of the promised types

    def accepts_sizes(self, sizes: Mapping[Symbol, int]) -> bool:
        """Whether it can run with these sizes."""
        if type(self.runner) is StandIn:
            return True
        return self.runner.accepts_sizes(self.computation, sizes)  # type: ignore[union-attr]  # no stand-in

    def for_sizes(self, sizes: dict[Symbol, int]) -> Plan:
        """This plan, or a variant of it that accepts these sizes."""
        if self.accepts_sizes(sizes):
            return self
        for place, plan in enumerate(self.variants):
            if plan.draft is not None and plan.draft.is_due():  # by now, compiled in the background
                plan = self.variants[place] = plan.draft.compiled(sizes)
            if plan.accepts_sizes(sizes):
                return plan
        assert self.source is not None, "a compiled plan knows its source"
        made = self.source.for_other_sizes(sizes, len(self.variants) < MAX_VARIANTS)
        self.variants.append(made)
        return made


MAX_VARIANTS = MOST_KINDS - 1
"""How many variants are compiled for other kinds of sizes; further ones run on the reference
backend."""


def _may_fail(node: Node) -> bool:
    return node.op.target is not None and spec_of(node.op.target).may_fail


LEAVES, SCALARS, COMPUTED, CARRIED, SCALAR_DATA, SIZE_NOW = 0, 1, 2, 3, 4, 5


def _source(value: Value, backend: Backend, scalars_as_data: bool) -> tuple[int, Any]:
    node = value.node
    if node.op is LEAF:
        data = backend.data_of(node)
        return (LEAVES, node.args[0]) if data is None else (CARRIED, data)
    if node.op is SCALAR:
        return SCALAR_DATA if scalars_as_data else SCALARS, node.args[0]
    if node.op is SIZE:
        return SIZE_NOW, node.args[0]
    return COMPUTED, value


def needed_graph(wanted: Sequence[Value], live: Sequence[Value], known: Collection[Value]) -> Graph:
    """The graph that computes `wanted`; every value in it that will be needed again is an output.

    Live values in the cone of `wanted` are computed anyway, so they become outputs; so do the
    values in the cone that live values outside of it use. Thus nothing is computed twice.
    """
    cone = Graph.of(wanted, known)
    inside = {output for node in cone.nodes for output in node.outputs}
    outputs = dict.fromkeys(wanted)
    outputs.update(dict.fromkeys(value for value in live if value in inside))
    rest = Graph.of([value for value in live if value not in inside], inside | set(known))
    taken = [_memory(value) for value in rest.inputs if value in inside]
    outputs.update(dict.fromkeys(value for value in taken if value in inside))
    return Graph(cone.inputs, cone.nodes, tuple(outputs))


def in_launch_order(graph: Graph, known: Collection[Value]) -> Graph:
    """`graph`, reordered so that each collective starts as soon as its operands are computed.

    %1 = forward(%0)                        %1 = forward(%0)
    %2 = backward of the last layers(%1)    %2 = backward of the last layers(%1)
    %3 = backward of the first layers(%2)   %4 = all_reduce(%2)
    %4 = all_reduce(%2)                     %3 = backward of the first layers(%2)
    %5 = wait(%4)                           %5 = wait(%4)
    """
    launches = collectives_in(graph)
    if not launches:
        return graph
    early = Graph.of((*(node.outputs[0] for node in launches), *graph.outputs), known)
    return Graph(early.inputs, early.nodes, graph.outputs)


def _memory(value: Value) -> Value:
    """The value that `value` views if it has a conj or neg bit: outputs cannot have such bits."""
    while type(value.type) is not ScalarType and (value.type.conj or value.type.neg):
        value = value.node.args[spec_of(value.node.op.target).views]
    return value
