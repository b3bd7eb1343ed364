"""Lowering: from a graph of nodes to something that a backend can compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torpor import metrics
from torpor.backend.device import BackendDevice
from torpor.errors import BackendError
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.ir.types import type_at
from torpor.ops.spec import spec_of
from torpor.symbols.expressions import Symbol
from torpor.text.printer import print_graph


@dataclass(slots=True)
class Computation:
    """A lowered graph; after `Backend.compile`, a compiled one.

    `program` belongs to the backend: its `compile` sets it, and its `execute` uses it.
    """

    name: str
    device: BackendDevice
    graph: Graph
    parameter_names: tuple[str, ...]
    program: Any = None
    aliases: dict[int, int] = field(default_factory=dict)  # donated parameter -> result
    devices: tuple[str, ...] = ()  # from `Backend.compilation_devices`; (): only `device`

    @property
    def parameter_types(self) -> tuple[Any, ...]:
        return tuple(v.type for v in self.graph.inputs)

    @property
    def result_types(self) -> tuple[Any, ...]:
        return self.graph.types

    @property
    def offsets(self) -> dict[Node, int]:
        """The random nodes of the graph, numbered: with a run's seed, each has its own stream."""
        return random_offsets(self.graph)

    def sizes_in(self, arguments: Sequence[Any]) -> dict[Symbol, int]:
        """The values of the symbols in one run, which are its last arguments."""
        symbols = self.graph.symbols
        first = len(self.graph.inputs) - len(symbols)
        return dict(zip(symbols, arguments[first:], strict=True))

    def result_types_for(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The types of the results of one run."""
        types = self.result_types
        if not self.graph.symbols:
            return types
        sizes = self.sizes_in(arguments)
        return tuple([type_at(type_, sizes) for type_ in types])

    def text(self) -> str:
        """The graph as IR text."""
        return print_graph(self.graph)


def random_offsets(graph: Graph) -> dict[Node, int]:
    """The random nodes of a graph, numbered."""
    nodes = [node for node in graph.nodes if spec_of(node.op.target).draws(node.args)]
    return {node: offset for offset, node in enumerate(nodes)}


class LoweringContext:
    """Lowers one node after the other. A backend overrides `lower` and often `build`.

    The core calls, in this order: `add_parameter` for every input, `lower` for every node in
    post-order, `add_result` for every output, `build`.
    """

    def __init__(
        self,
        name: str,
        device: BackendDevice,
        post_order: Sequence[Node] | None = None,
        emitted: dict[Value, Any] | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.post_order: list[Node] = list(post_order or ())
        self.emitted: dict[Value, Any] = dict(emitted or {})
        self.parameters: list[Value] = []
        self.parameter_names: list[str] = []
        self.results: list[Value] = []
        self.aliases: dict[int, int] = {}
        self.free_strides: frozenset[int] = frozenset()  # results that may have any strides
        self.devices: tuple[str, ...] = ()
        self.hints: dict[Symbol, int] = {}  # example sizes, for compilers that tune for them

    def add_parameter(self, value: Value, name: str | None = None) -> int:
        """Make `value` an input; returns its position."""
        position = len(self.parameters)
        self.parameters.append(value)
        self.parameter_names.append(name or f"p{position}")
        self.emitted[value] = self.emit_parameter(value, position)
        return position

    def emit_parameter(self, value: Value, position: int) -> Any:
        """The representation of an input in the backend's program."""
        return position

    def lower(self, node: Node) -> None:
        """Lower one node: read its operands from `emitted`, and store its outputs there."""
        for output in node.outputs:
            self.emitted[output] = output

    def add_result(self, value: Value) -> int:
        """Make `value` an output; returns its position."""
        if value not in self.emitted:
            raise BackendError(f"result {value!r} of {self.name} was not lowered")
        self.results.append(value)
        return len(self.results) - 1

    def set_alias(self, parameter: int, result: int) -> None:
        """Allow `result` to be written into the buffer of `parameter`, which is donated."""
        self.aliases[parameter] = result

    def fell_back(self, node: Node) -> None:
        """Count a fallback: `node` runs with eager's kernel (`fallback::<op>`, with its line)."""
        metrics.count_line(f"fallback::{node.op.name}", str(node.site))

    def decomposed(self, node: Node) -> None:
        """Count a decomposition: `node` runs as simpler ops (`decomposed::<op>`, with its line)."""
        metrics.count_line(f"decomposed::{node.op.name}", str(node.site))

    def build(self) -> Computation:
        """Everything lowered so far, as a computation that can be compiled."""
        graph = Graph(self.parameters, self.post_order, self.results)
        return Computation(
            self.name,
            self.device,
            graph,
            tuple(self.parameter_names),
            aliases=self.aliases,
            devices=self.devices,
        )
