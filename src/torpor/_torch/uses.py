"""Captured graphs that take an input once per use, so that autograd sees each use separately.

Eager accumulates the gradients of all uses of a tensor one by one. A graph that took a tensor once
would add up the gradients of its own uses first: another order, other bits. And autocast caches its
copy of a parameter for all uses: a graph that cast a parameter itself would cast each gradient back
before accumulating. So a use that autocast casts takes autocast's copy instead.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

_CASTS = ("to", "type", "type_as", "half", "bfloat16")
"""Methods that cast a tensor explicitly."""


class Uses:
    """A TorchDynamo graph with one placeholder for each use of its inputs.

    `is_leaf`: inputs that are parameters, for which autocast caches its copies.
    """

    def __init__(self, module: GraphModule, inputs: Sequence[Any], is_leaf: Sequence[bool]) -> None:
        self.inputs = list(inputs)  # an example per placeholder
        self.places = list(range(len(inputs)))  # the argument that each placeholder takes
        self.is_leaf = is_leaf
        self.lower = {
            device: torch.get_autocast_dtype(device)
            for device in torch._C._autocast_supported_devices()
            if torch.is_autocast_enabled(device)
        }
        self.keeps_copies = torch.is_autocast_cache_enabled()
        self.copies: set[int] = set()  # placeholders that take autocast's copy
        self.casts: set[int] = set()  # others that autocast casts, uncached: not leaves
        self.arrived: list[int] = []  # placeholders in the order in which gradients arrived
        self.is_refused = False  # its backward cannot leave out a result that is not used
        self.module = _module(module, self._split(module.graph))
        self.again = {use for use, p in enumerate(self.places) if self.places.count(p) > 1}
        if any(map(_enters_autocast, module.graph.nodes)) and any(
            is_leaf[self.places[use]] for use in self.again
        ):  # autocast would keep one copy for all these uses
            raise ValueError("it enters autocast and uses a parameter more than once")

    def __deepcopy__(self, memo: Any) -> Uses:
        return self  # AOTAutograd copies graphs, and what they know

    def _split(self, graph: Graph) -> Graph:
        """A copy of the graph with a placeholder for each use of an input that needs a gradient."""
        made, copies = Graph(), dict[Node, Node]()
        given = graph.find_nodes(op="placeholder")
        places = {node: place for place, node in enumerate(given) if _has_gradient(self, place)}
        met: set[Node] = set()

        def use(node: Node) -> Node:
            if node not in places or node not in met:
                met.add(node)
                return copies[node]
            with made.inserting_after(last[0]):
                last[0] = made.placeholder(f"{node.name}_use_{len(self.places)}")
            _describe(last[0], node, None)
            self.places.append(places[node])
            self.inputs.append(_like(self.inputs[places[node]]))
            return last[0]

        for node in given:
            copies[node] = made.node_copy(node, copies.__getitem__)
            _describe(copies[node], node, getattr(node, "_dynamo_source", None))
        last = [copies[given[-1]]] if given else []
        for node in graph.nodes:
            if node not in copies:
                find = copies.__getitem__ if node.op == "output" else use
                copies[node] = made.node_copy(node, find)
        return made

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Note the order of gradients while forward and backward are traced in the body."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        for use in self.again:
            with self.module.graph.inserting_after(placeholders[-1]):
                self.module.graph.call_function(note_gradient, (placeholders[use], use))
        self.module.recompile()
        _TRACING.arrived = self.arrived
        try:
            yield
        finally:
            _TRACING.arrived = None
            for node in self.module.graph.find_nodes(op="call_function", target=note_gradient):
                self.module.graph.erase_node(node)
            self.module.recompile()

    def arrange(self, joint: GraphModule, shown: int) -> None:
        """Give each use its own gradient, in the order in which eager accumulates them.

        `joint` is the graph of forward and backward; its results after `shown` are gradients.
        """
        output = joint.graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]  # a tuple
        gradients = results[shown:]
        if len(gradients) != len(self.places):
            raise ValueError("its inputs are not those of its backward")
        for use, node in enumerate(joint.graph.find_nodes(op="placeholder")[: len(gradients)]):
            _refuse_sum(gradients[use])
            if self._casts(use, node):
                gradients[use] = self._take_copy(use, node, gradients[use])
        self._sort(gradients)
        output.args = ([*results[:shown], *gradients],)
        joint.graph.eliminate_dead_code()
        joint.recompile()

    def _casts(self, use: int, node: Node) -> bool:
        """Whether autocast casts this use, judging by the graph."""
        value: Any = node.meta.get("val")
        given = self.module.graph.find_nodes(op="placeholder")[use]
        by_hand = any(one.target in _CASTS or "dtype" in one.kwargs for one in given.users)
        if by_hand or not _has_gradient(self, use) or value.dtype != torch.float32:
            return False
        lower = self.lower.get(value.device.type)
        return any(_is_cast(one) and one.kwargs["dtype"] == lower for one in node.users)

    def _take_copy(self, use: int, node: Node, gradient: Any) -> Any:
        """Replace the tensor by autocast's copy; returns the copy's gradient."""
        if not (self.is_leaf[self.places[use]] and self.keeps_copies):
            self.casts.add(use)
            return gradient
        casts = list(node.users)
        if not all(map(_is_cast, casts)) or not (gradient is None or _is_cast(gradient)):
            raise ValueError("one function casts a parameter and uses it as it is")
        node.meta.update(val=casts[0].meta["val"], tensor_meta=casts[0].meta.get("tensor_meta"))
        for cast in casts:
            cast.replace_all_uses_with(node)
        self.copies.add(use)
        return None if gradient is None else gradient.args[0]

    def _sort(self, gradients: list[Any]) -> None:
        """Sort the gradients of each tensor by arrival, as autograd accumulates in result order.

        They all go to the same tensor, so any use of it may deliver any of them.
        """
        came = {use: time for time, use in enumerate(self.arrived)}
        of_one: dict[tuple[int, bool], list[int]] = {}
        for use in sorted(self.again):
            of_one.setdefault((self.places[use], use in self.copies), []).append(use)
        for uses in of_one.values():
            first = sorted(uses, key=lambda use: came.get(use, len(came)))
            for use, gradient in zip(uses, [gradients[one] for one in first], strict=True):
                gradients[use] = gradient


def _enters_autocast(node: Node) -> bool:
    is_enter = node.target is torch.amp.autocast_mode._enter_autocast
    return is_enter and (len(node.args) < 3 or bool(node.args[2]))


class _Tracing(threading.local):
    arrived: list[int] | None = None


_TRACING = _Tracing()


def note_gradient(tensor: torch.Tensor, use: int) -> None:
    """Note when the gradient of a use arrives; called by traced graphs."""
    arrived = _TRACING.arrived
    if arrived is not None and tensor.requires_grad:
        tensor.register_hook(lambda _: arrived.append(use))


def _has_gradient(uses: Uses, place: int) -> bool:
    value = uses.inputs[place]
    return isinstance(value, torch.Tensor) and value.requires_grad


def _describe(made: Node, node: Node, source: Any) -> None:
    made.meta = {key: value for key, value in node.meta.items() if key != "grapharg"}  # a tensor
    made._dynamo_source = source  # required by AOTAutograd


def _module(module: GraphModule, graph: Graph) -> GraphModule:
    made = GraphModule(module, graph)
    made.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        made._param_name_to_source = module._param_name_to_source
    return made


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same type that shares no memory with it."""
    mode = torch._guards.detect_fake_mode()
    assert mode is not None  # TorchDynamo's
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).requires_grad_()


def _is_cast(node: Node) -> bool:
    return node.target is _aten._to_copy.default and "dtype" in node.kwargs


def _refuse_sum(gradient: Any) -> None:
    """Reject a function that uses a tensor twice: it would sum what eager accumulates singly."""
    if gradient is not None and gradient.meta.get("is_gradient_acc"):
        raise ValueError("one function uses an input twice")


# -- results that are not used ---------------------------------------------------------------------


def gradients_of_results(graph: Graph) -> list[Node]:
    """Those of the inputs of a backward graph, its last, that are gradients of results."""
    return [one for one in graph.find_nodes(op="placeholder") if "tangents" in str(one.target)]


def without_results(backward: GraphModule, unused: Collection[int]) -> GraphModule | None:
    """A backward graph for results of which some are not used: it does not take their gradients.

    Like autograd, it computes nothing from a gradient that is not there, and adds nothing of it:
    zeros in its place would become NaN where a derivative is infinite. Where autograd takes zeros,
    for the parts that a tensor was split into, so does this. None: it cannot be said what it does.
    """
    made, copies = Graph(), dict[Node, Node]()
    gradients = gradients_of_results(backward.graph)
    missing = {gradients[place] for place in unused}
    come = {*gradients} - missing  # what is made of gradients that are there
    for node in backward.graph.nodes:
        gone = missing.intersection(node.all_input_nodes)
        if node in missing:
            continue
        if node.op == "output":
            made.output(tuple(copies.get(one) for one in node.args[0]))
        elif not gone:
            copies[node] = made.node_copy(node, copies.__getitem__)
            if not come.isdisjoint(node.all_input_nodes):
                come.add(node)
        elif come.isdisjoint(node.all_input_nodes):
            missing.add(node)
        else:
            left = _of_the_others(node, gone, made, copies)
            if left is None:
                return None
            copies[node] = left
            come.add(node)
    made.eliminate_dead_code()
    return GraphModule(backward, made)


def _of_the_others(
    node: Node, gone: Collection[Node], made: Graph, copies: dict[Node, Node]
) -> Node | None:
    """What a node gives where some of its gradients are not there; None if that is unknown."""
    if node.target is _aten.add.Tensor and node.meta.get("is_gradient_acc"):
        [left] = [one for one in node.all_input_nodes if one not in gone]
        return copies[left]
    if node.target not in (_aten.cat.default, _aten.stack.default):
        return None
    left = next(one for one in node.all_input_nodes if one not in gone)

    def zeros(one: Node) -> Node:
        size = list(one.meta["val"].shape)
        return made.call_function(_aten.new_zeros.default, (copies[left], size))

    return made.node_copy(node, lambda one: zeros(one) if one in gone else copies[one])


# -- autocast's copies -----------------------------------------------------------------------------


class _Found(Exception):
    """The copy was found: stop computing."""


class _Copy(TorchDispatchMode):
    found: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _aten._to_copy.default:
            self.found = args[0]
            raise _Found
        return func(*args, **kwargs or {})


_NOTHING = torch.empty(0)


def autocast_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Autocast's cached copy of a parameter, made now if there is none.

    Torch has no function for it, so a matrix product is started, and aborted once it is cast.
    """
    mode = _Copy()  # type: ignore[no-untyped-call]  # torch's class
    try:
        with mode:
            torch.matmul(tensor, _NOTHING)
    except _Found:
        assert mode.found is not None
        return mode.found
    raise RuntimeError("autocast has not cast a product")  # autocast is off
