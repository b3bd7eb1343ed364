"""The invariants of graphs, checked before a graph is compiled.

Inputs      are distinct; a leaf or scalar slot enters once, with one type.
Nodes       occur once, after the nodes they take operands from; leaves are not among them.
Operands    are the values in the arguments, in order, each an output of its own node.
Outputs     know their node and position; what the graph returns is defined in it and not `none`.
Types       have a stride for every size, and no negative numbers.
Devices     the results of a node are on the device of an operand, or of an argument.
Interning   a node is the one in its op's table, as long as the table has evicted nothing; or it is
            private to the graph, and in no table.
Donations   an output overwrites one input, of its own type.
Blocks      contain all nodes, in order. If their outputs are known, nothing else that a block makes
            is read after it, and only its outputs overwrite inputs.

A value computed earlier may be an input although its node is in the graph too, because another
output of that node is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from torpor.errors import GraphError, annotate
from torpor.ir.graph import Donated, Graph
from torpor.ir.node import LEAF, SCALAR, SIZE, TABLE, Node, Value, values_in
from torpor.ir.types import ScalarType, TensorType
from torpor.text.printer import INPUT_WORDS, print_node


def verify(graph: Graph, known: set[Node] | None = None) -> None:
    """Raise GraphError, with the node and the user's line, at the first violated invariant.

    Nodes in `known` have been checked before; those of the graph are added to it.
    """
    known = set() if known is None else known
    checked: set[TensorType] = set()  # valid types: there are few
    _check_inputs(graph, checked)
    defined = set(graph.inputs)
    seen: set[Node] = set()
    for node in graph.nodes:
        if node in seen:
            _fault(node, "the node stands in the graph twice")
        seen.add(node)
        if node not in known:
            _check_node(node, checked)
            _check_devices(node)
        _check_operands(node, defined)
        defined.update(node.outputs)
    known |= seen
    _check_results(graph, defined)
    if graph.donated:
        _check_donated(graph.donated, graph.outputs, set(graph.inputs))
    if graph.blocks:
        _check_blocks(graph)


def _fault(node: Node, problem: str) -> NoReturn:
    site = None if node.site is None else str(node.site)
    raise annotate(GraphError(problem), node.op.name, site, print_node(node))


# Graph


def _check_inputs(graph: Graph, checked: set[TensorType]) -> None:
    slots: dict[tuple[object, object], Value] = {}
    seen: set[Value] = set()
    for position, value in enumerate(graph.inputs):
        node = value.node
        if value in seen:
            _fault(node, f"input {position} of the graph is an input already")
        seen.add(value)
        _check_node(node, checked)
        _check_membership(node, value, f"input {position} of the graph")
        if node.op is LEAF or node.op is SCALAR:
            _check_slot(value, slots)


def _check_slot(value: Value, slots: dict[tuple[object, object], Value]) -> None:
    node = value.node
    slot = node.args[0]
    if type(slot) is not int or slot < 0:
        _fault(node, f"slot {slot!r} is not a number from 0 up")
    wanted = TensorType if node.op is LEAF else ScalarType
    if not isinstance(value.type, wanted):
        _fault(node, f"a {INPUT_WORDS[node.op]} has a {wanted.__name__}, not {value.type!r}")
    first = slots.setdefault((node.op, slot), value)
    if first is not value:
        what = f"{INPUT_WORDS[node.op]} slot {slot} enters the graph twice"
        _fault(node, f"{what}: as {first.type!r} and as {value.type!r}")


def _check_results(graph: Graph, defined: set[Value]) -> None:
    for position, value in enumerate(graph.outputs):
        if value not in defined:
            _check_membership(value.node, value, f"output {position} of the graph")
            _fault(value.node, f"output {position} of the graph is defined nowhere in it")
        if value.type is None:
            _fault(value.node, f"output {position} of the graph is an undefined tensor")


def _check_donated(donated: Donated, outputs: Sequence[Value], inputs: set[Value]) -> None:
    made = set(outputs)
    for value, output in donated.items():
        if value not in inputs:
            _fault(value.node, f"{value!r} is written over, and is no input")
        if output not in made:
            _fault(output.node, f"{output!r} is written over an input, and is no output")
        if value.type is not output.type:
            _fault(output.node, f"{output.type!r} is written over {value.type!r}")
    if len(set(donated.values())) < len(donated):
        _fault(next(iter(donated.values())).node, "one output is written over two inputs")


def _check_blocks(graph: Graph) -> None:
    if graph.nodes != tuple([node for block in graph.blocks for node in block.nodes]):
        raise GraphError("the blocks of the graph do not hold its nodes in order")
    inputs = set(graph.inputs)
    inside: set[Value] = set()  # made by earlier blocks, and not outputs of them
    for block in graph.blocks:
        for value in block.read:
            if value in inside:
                _fault(value.node, f"{value!r} is read by a block, and not left behind by its own")
        if block.outputs is None:
            continue
        made = set(block.made)
        for value in block.outputs:
            if value not in made:
                _fault(value.node, f"{value!r} is left behind by a block that does not make it")
        if block.donated:
            _check_donated(block.donated, block.outputs, inputs)
        inside |= made.difference(block.outputs)
    for value in graph.outputs:
        if value in inside and value not in inputs:
            _fault(value.node, f"{value!r} is an output of the graph, and not left behind")


# Nodes


def _check_node(node: Node, checked: set[TensorType]) -> None:
    if len(node.op.parameters) not in (0, len(node.args)):
        known = len(node.op.parameters)
        _fault(node, f"{len(node.args)} arguments for an op that has {known}")
    if node.operands != tuple(values_in(node.args)):  # values compare by identity
        _fault(node, "the operands are not the values among the arguments")
    for position, output in enumerate(node.outputs):
        if output.node is not node or output.index != position:
            _fault(node, f"output {position} belongs to another node or place: {output!r}")
        _check_type(node, position, output.type, checked)
    if TABLE.generation < 2:
        _check_interned(node)


def _check_type(node: Node, position: int, type_: Any, checked: set[TensorType]) -> None:
    if isinstance(type_, TensorType):
        problem = "" if type_ in checked else _type_problem(type_)
        if problem:
            _fault(node, f"output {position} has a malformed type: {problem}")
        checked.add(type_)
    elif type(type_) is ScalarType:
        if node.op is not SCALAR and node.op is not SIZE:
            _fault(node, f"output {position} is a number; only run-time scalars are")
    elif type_ is not None:
        _fault(node, f"output {position} has {type_!r} in the place of its type")


def _type_problem(type_: TensorType) -> str:
    if len(type_.shape) != len(type_.stride):
        return f"{len(type_.shape)} sizes and {len(type_.stride)} strides"
    if any(size < 0 for size in type_.shape):
        return "a size is negative"
    if any(stride < 0 for stride in type_.stride):
        return "a stride is negative"
    return "the offset is negative" if type_.offset < 0 else ""


def _check_interned(node: Node) -> None:
    """A key has only one node until the table has evicted one (after two generations)."""
    if node.conditions or type(node) is not Node:  # another node may exist for other sizes
        return
    known = node.op.nodes.get(node.key) or node.op.old_nodes.get(node.key)
    if known is not None and known is not node:
        _fault(node, f"not interned: its key belongs to another node, {known!r}")


# Operands


def _check_operands(node: Node, defined: set[Value]) -> None:
    if node.op in INPUT_WORDS:
        _fault(node, "an input stands among the nodes")
    for position, operand in enumerate(node.operands):
        if operand not in defined:
            _check_membership(node, operand, f"operand {position}")
            _fault(node, f"operand {position} is used before it is defined: {operand!r}")
        if operand.type is None:
            _fault(node, f"operand {position} is an undefined tensor")


def _check_membership(node: Node, value: Value, what: str) -> None:
    outputs = value.node.outputs
    if not (0 <= value.index < len(outputs) and outputs[value.index] is value):
        _fault(node, f"{what} is not among the outputs of its own node, {value.node!r}")


def _check_devices(node: Node) -> None:
    operand_devices = {v.type.device for v in node.operands if isinstance(v.type, TensorType)}
    if not operand_devices:
        return
    for position, output in enumerate(node.outputs):
        if output.type is None or output.type.device in operand_devices:
            continue
        if not any(_is_on(output.type.device, d) for d in _device_arguments(node)):
            places = ", ".join(sorted(map(str, operand_devices)))
            _fault(node, f"output {position} is on {output.type.device}, the operands on {places}")


def _device_arguments(node: Node) -> Iterator[torch.device]:
    return (arg for arg in node.args if type(arg) is torch.device)


def _is_on(device: torch.device, named: torch.device) -> bool:
    """Whether `named`, which may lack an index, means `device`."""
    return (device.type == named.type and None in (device.index, named.index)) or device == named
