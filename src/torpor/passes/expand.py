"""Decompose ops that have a registered lowering (`custom.registration`) or a backend's own.

    %1 = acme.scale.default(%0, 2.0)        %1 = aten.mul.Tensor(%0, 2.0)
    %2 = aten.relu.default(%1)              %2 = aten.relu.default(%1)

A lowering is traced on fake tensors and functionalized; the resulting ops become nodes that carry
the source line of the op they replace. Their results must have exactly the types inferred for it.

A decomposition (`Backend.decompositions`) is a lowering that may decline: if it returns
NotImplemented, cannot be traced or makes other types, the backend gets the original op.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from torpor import _torch, metrics
from torpor._torch import OpOverload
from torpor.custom import registration
from torpor.errors import RegistrationError
from torpor.inference.infer import Physical, common_device, fake_arguments, infer, types_in
from torpor.ir.graph import Graph
from torpor.ir.memo import Memo
from torpor.ir.node import Node, Value, values_in
from torpor.ir.types import ScalarType, TensorType
from torpor.ops.keys import key_of, private_node
from torpor.ops.spec import Mode, OpSpec, ReturnKind, spec_of
from torpor.passes.functionalize import functional, is_rewritten
from torpor.passes.interpreter import Interpreter
from torpor.passes.pipeline import Pass

aten = torch.ops.aten


Decompositions = Mapping[str, registration.Lowering]
"""By op name."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ops that a backend accepts in its graphs."""

    backend: str
    physical: Physical  # maps a tensor's device to the physical one
    decompositions: Decompositions = field(default_factory=dict)
    functional: bool = False  # no in-place ops, no ops on lists
    draws: bool = False  # random ops are accepted as nodes

    def has(self, node: Node) -> bool:
        """Whether the backend gets `node` unchanged."""
        name = node.op.name
        if name in self.decompositions or registration.lowering_of(name, self.backend):
            return False
        return not (self.functional and is_rewritten(node))


def expand(vocabulary: Vocabulary) -> Pass:
    """The pass for one backend's vocabulary."""

    def run(graph: Graph) -> Graph:
        return expanded(graph, vocabulary)

    return Pass("expand", "ops that have a lowering or a decomposition, taken apart", run)


def expanded(graph: Graph, vocabulary: Vocabulary) -> Graph:
    """`graph` with only ops of `vocabulary`; `graph` itself if that already holds."""
    if all(map(vocabulary.has, graph.nodes)):
        return graph
    expansion = _Expansion(vocabulary)
    expansion.run(graph.nodes)
    outputs = [expansion.value(value) for value in graph.outputs]
    donated = {value: expansion.value(output) for value, output in graph.donated.items()}
    return Graph(graph.inputs, expansion.nodes, outputs, donated=donated)


class _Expansion(Interpreter[Value]):
    """A graph being rewritten: maps old values to new ones."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.physical = vocabulary.physical
        self.nodes: list[Node] = []
        self.inside: list[str] = []  # ops being decomposed, outermost first

    def input(self, value: Value) -> Value:
        return value

    def node(self, node: Node, args: tuple[Any, ...]) -> Sequence[Value]:
        name = node.op.name
        lowering = registration.lowering_of(name, self.vocabulary.backend)
        if lowering is not None:
            return self._inlined(node, args, lowering)
        made: Sequence[Value] | None = None
        if self.vocabulary.functional and is_rewritten(node):
            made = functional(node, args, self.call, self.types)
        if made is None and name in self.vocabulary.decompositions:
            made = self._decomposed(node, args)
        return self._kept(node, args).outputs if made is None else made

    def _inlined(
        self, node: Node, args: tuple[Any, ...], lowering: registration.Lowering
    ) -> Sequence[Value]:
        inlining = _Inlining(self, node, args)
        if node.op.name in self.inside:
            raise inlining.wrong("leads back to itself")
        self.inside.append(node.op.name)
        try:
            return inlining.run(lowering)
        finally:
            self.inside.pop()

    def _decomposed(self, node: Node, args: tuple[Any, ...]) -> Sequence[Value] | None:
        """The results of the backend's decomposition of `node`; None if it declines."""
        name, length = node.op.name, len(self.nodes)
        decomposition = self.vocabulary.decompositions[name]
        key = (decomposition, node.op, types_in(key_of(spec_of(node.op.target), args)))
        try:
            if _refused.find(key) is not None:
                return None
            made = self._inlined(node, args, decomposition)
        except Exception as error:  # any kind: the backend gets the op, and it is counted
            del self.nodes[length:]
            _refused.add(key, f"{type(error).__name__}: {error}")
            metrics.count_line(f"decomposition_refused::{name}", str(node.site))
            return None
        if not self.inside:
            metrics.count_line(f"decomposed::{name}", str(node.site))
        return made

    def _kept(self, node: Node, args: tuple[Any, ...]) -> Node:
        if args != node.args:
            types = tuple(value.type for value in node.outputs)
            node = private_node(spec_of(node.op.target), args, types, node.site)
        self.nodes.append(node)
        return node

    def call(
        self, target: OpOverload, bound: list[Any], site: Any, types: Sequence[Any] | None = None
    ) -> Sequence[Value]:
        """Add a node for an op on values of the new graph, and return its outputs."""
        types = self.types(target, bound) if types is None else types
        node = private_node(spec_of(target), bound, tuple(types), site)
        return self.node(node, node.args)

    def types(self, target: OpOverload, bound: list[Any]) -> Sequence[Any]:
        """The output types of an op on these arguments."""
        spec = spec_of(target)
        numbers = [v for v in values_in(tuple(bound)) if type(v.type) is ScalarType]
        sample = {value: value.type.kind(1) for value in numbers}
        return infer(spec, key_of(spec, bound), bound, sample, self.physical)


_REFUSED: Final = {
    Mode.RANDOM: "draws random numbers, which eager does when an op is recorded; pass them in",
    Mode.EAGER: registration.ASKS_FOR_NUMBERS,
    Mode.METADATA: "changes the size of a tensor in place",
}


_traces: Memo[torch.fx.GraphModule] = Memo()
_refused: Memo[str] = Memo()  # decompositions that declined, and why


class _Inlining:
    """One op being decomposed."""

    def __init__(self, expansion: _Expansion, node: Node, args: tuple[Any, ...]) -> None:
        self.expansion = expansion
        self.node = node
        self.args = args
        self.spec = spec_of(node.op.target)
        self.device = common_device(self.spec, list(args)) or _device_of(node)
        self.values: dict[torch.fx.Node, Any] = {}
        self.constants: torch.fx.GraphModule | None = None

    def run(self, lowering: registration.Lowering) -> list[Value]:
        """The values that replace the outputs of the node."""
        operands = list(values_in(self.args))
        if any(type(value.type) is ScalarType for value in operands):
            raise self.wrong("takes a number that is not known yet")
        module = self._trace(lowering)
        self.constants = module
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.values = dict(zip(inputs, operands, strict=True))
        made: list[Any] = []
        for node in module.graph.nodes:
            if node.op == "output":
                made = [self._argument(arg) for arg in node.args[0]]
            elif node.op != "placeholder":
                self.values[node] = self._step(node)
        after = iter([self.values[node] for node in inputs])
        args = [_refilled(arg, after) for arg in self.args]
        made += values_in(tuple(args[position] for position in self.spec.mutated))
        return self._promised_all(made)

    # -- tracing -----------------------------------------------------------------------------------

    def _trace(self, lowering: registration.Lowering) -> torch.fx.GraphModule:
        """The ops of a lowering, traced once per combination of types.

        Traced on a separate thread, where the user's modes are not active.
        """
        on = None if self.device is None else self.expansion.physical(self.device)
        key = (lowering, self.node.op, types_in(self.node.key), on)
        return _traces.find(key) or _traces.add(key, self._traced_aside(lowering))

    def _traced_aside(self, lowering: registration.Lowering) -> torch.fx.GraphModule:
        try:
            with ThreadPoolExecutor(1, "torpor-lowering") as threads:
                return threads.submit(self._traced, lowering).result()
        except RegistrationError as error:
            error.node = self.node
            raise
        except Exception as error:
            raise self._error(registration.lowering_failed(self.spec, error)) from error

    def _traced(self, lowering: registration.Lowering) -> torch.fx.GraphModule:
        mode, fakes = fake_arguments(list(self.args), self.expansion.physical)
        tensors = [leaf for leaf in _torch.tree_leaves(fakes) if isinstance(leaf, torch.Tensor)]

        def call(*given: torch.Tensor) -> list[Any]:
            rest = iter(given)
            positional, keywords = self.spec.call_arguments([_refilled(f, rest) for f in fakes])
            with registration.running(f"the lowering of {self.spec.name}"), _NoMemory(self):
                result = lowering(*positional, **keywords)
            if result is NotImplemented:
                raise self.wrong("does not know these arguments")
            return _made(self.spec, result)

        with torch.no_grad(), _torch.quiet_fakes(), mode:
            return make_fx(torch.func.functionalize(call, remove="mutations"))(*tensors)

    # -- nodes -------------------------------------------------------------------------------------

    def _step(self, node: torch.fx.Node) -> Any:
        if node.op == "get_attr":
            return self._constant(str(node.target))
        if node.target is operator.getitem:
            source, index = node.args
            return self.values[source][index]  # type: ignore[index]  # it is a node
        if not isinstance(node.target, OpOverload):
            raise self.wrong(f"calls {node.target}, which is no op")
        return self._call(node, spec_of(node.target))

    def _call(self, node: torch.fx.Node, spec: OpSpec) -> Any:
        if spec.mode in _REFUSED and not (
            spec.mode is Mode.RANDOM and self.expansion.vocabulary.draws
        ):
            raise self.wrong(f"calls {spec.name}, which {_REFUSED[spec.mode]}")
        args = spec.bind(tuple(node.args), dict(node.kwargs))
        bound = [self._argument(arg) for arg in args]
        outputs = self.expansion.call(spec.target, bound, self.node.site)
        written = [leaf for i in spec.mutated for leaf in _torch.tree_leaves(args[i])]
        fresh = len(outputs) - len(written)
        self.values.update(zip(written, outputs[fresh:], strict=True))  # its contents from here on
        return _shaped(spec, list(outputs[:fresh]), args, self.values)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self.values[arg]
        if isinstance(arg, (list, tuple)):
            return tuple(self._argument(item) for item in arg)
        return self._virtual(arg) if isinstance(arg, torch.device) else arg

    def _virtual(self, device: torch.device) -> torch.device:
        """The lazy device for the physical device that a lowering saw."""
        ours = self.device
        return ours if ours is not None and self.expansion.physical(ours) == device else device

    def _constant(self, name: str) -> Value:
        """A node for a tensor constant that a lowering made from a Python number."""
        tensor = getattr(self.constants, name)
        if tensor.numel() != 1:
            raise self.wrong("makes a tensor of Python numbers; make it an argument of the op")
        device = self._virtual(tensor.device)
        bound = [tuple(tensor.shape), tensor.item(), tensor.dtype, torch.strided, device, False]
        return self.expansion.call(aten.full.default, bound, self.node.site)[0]

    # -- results -----------------------------------------------------------------------------------

    def _promised_all(self, made: list[Any]) -> list[Value]:
        """New tensors, then written arguments, each checked against its inferred type."""
        if len(made) != len(self.node.outputs):
            wanted = len(self.node.outputs)
            raise self.wrong(f"makes {len(made)} tensors where the op makes {wanted}")
        pairs = zip(made, self.node.outputs, strict=True)
        return [self._promised(value, output) for value, output in pairs]

    def _promised(self, value: Any, output: Value) -> Value:
        type_ = output.type
        if value is None and type_ is None:
            return output
        if type_ is None or type(value) is not Value or (value.type.shape, value.type.dtype) != (
            type_.shape, type_.dtype
        ):  # fmt: skip
            made = value.type if type(value) is Value else value
            raise self.wrong(f"makes {made!r} where {type_!r} was promised")
        movable = type_.is_dense and not type_.offset
        if value.type is type_ and not (movable and value in self.node.operands):
            return value
        if not movable:
            raise self.wrong(f"makes {value.type!r} where {type_!r} was promised")
        return self._with_layout(value, type_)

    def _with_layout(self, value: Value, type_: TensorType) -> Value:
        """A copy of `value` with the strides of `type_`, which is dense."""
        rank = len(type_.shape)
        order = sorted(range(rank), key=lambda d: (-type_.stride[d], -type_.shape[d]))
        call, site = self.expansion.call, self.node.site
        turned = call(aten.permute.default, [value, tuple(order)], site)[0]
        copy = call(aten.clone.default, [turned, torch.contiguous_format], site)[0]
        back = tuple(order.index(dim) for dim in range(rank))
        return call(aten.permute.default, [copy, back], site)[0]

    def wrong(self, what: str) -> RegistrationError:
        """An error about the lowering."""
        return self._error(f"the lowering of {self.spec.name} {what}")

    def _error(self, text: str) -> RegistrationError:
        error = RegistrationError(text)
        error.node = self.node
        return error


def _device_of(node: Node) -> torch.device | None:
    """The device for factory ops: that of the node's first output."""
    return next((value.type.device for value in node.outputs if value.type is not None), None)


_NUMBERS: Final = frozenset(
    # methods of tensors that access memory, which a traced tensor lacks
    {"numpy", "__array__", "__array_wrap__", "__dlpack__", "tolist", "data_ptr", "storage",
     "untyped_storage", "_typed_storage", "share_memory_", "__reduce_ex__", "__deepcopy__"}
)  # fmt: skip


class _NoMemory(TorchFunctionMode):
    """Refuses a lowering access to the memory of its arguments."""

    def __init__(self, inlining: _Inlining) -> None:
        super().__init__()
        self.inlining = inlining

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _NUMBERS:
            raise self.inlining.wrong(f"calls {name}: it {registration.ASKS_FOR_NUMBERS}")
        return func(*args, **(kwargs or {}))


def _refilled(arg: Any, given: Iterator[Any]) -> Any:
    """`arg` with each tensor or value replaced by the next of `given`."""
    if isinstance(arg, (torch.Tensor, Value)):
        return next(given)
    if isinstance(arg, (list, tuple)):
        return type(arg)(_refilled(item, given) for item in arg)
    return arg


def _made(spec: OpSpec, result: Any) -> list[Any]:
    """The new tensors among the results of a lowering, with lists flattened."""
    made: list[Any] = []
    for returned, item in zip(spec.returns, registration.returned_by(spec, result), strict=True):
        if returned.kind is not ReturnKind.ARGUMENT:
            made += item if returned.is_list else (item,)
    return made


def _shaped(spec: OpSpec, fresh: list[Value], args: list[Any], values: dict[Any, Any]) -> Any:
    """The return value of an op, built from its new values and the arguments it writes to."""
    single = sum(not r.is_list and r.kind is not ReturnKind.ARGUMENT for r in spec.returns)
    length = len(fresh) - single  # of the list, of which it returns at most one
    results: list[Any] = []
    rest = iter(fresh)
    for returned in spec.returns:
        if returned.kind is ReturnKind.ARGUMENT:
            results.append(_torch.tree_map(values.get, args[returned.argument]))
        elif returned.is_list:
            results.append([next(rest) for _ in range(length)])
        else:
            results.append(next(rest))
    return results[0] if len(results) == 1 else results
