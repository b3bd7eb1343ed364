"""`torch.compile(model, backend="torpor")`: runs any backend of torpor under TorchDynamo.

TorchDynamo finds the function `torpor` by the entry point `torch_dynamo_backends`. It captures a
program as graphs, AOTAutograd turns those into functional ATen graphs, forward and backward, and
each of these becomes a graph of nodes here, compiled by the current backend or by the one that
`options={"backend": name}` names. Nothing is recorded when a compiled graph runs.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torpor import _torch, config
from torpor._torch import OpOverload
from torpor.backend.device import BackendDevice
from torpor.backend.heap import retain_free_memory
from torpor.backend.interface import Backend
from torpor.backend.item_getter import item_getter
from torpor.backend.native_library import NATIVE
from torpor.backend.registry import get_backend, make
from torpor.backends.fx import functional
from torpor.backends.fx.backend import FxBackend, in_fresh_thread
from torpor.backends.layout import with_layout
from torpor.compiling.compilation import compile_graph
from torpor.errors import CompileError, TorporWarning, UnsupportedError
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value, leaf
from torpor.ir.types import TensorType
from torpor.ops.keys import private_node
from torpor.ops.spec import Return, ReturnKind, spec_of
from torpor.overrides import draws

aten = torch.ops.aten


def torpor(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a TorchDynamo graph; `options` are the backend's name and its own options."""
    NATIVE.look()
    devices = {one.device for one in example_inputs if isinstance(one, torch.Tensor)}
    if torch.device("cpu") in devices:
        retain_free_memory()
    chosen = dict(options or {})
    name = chosen.pop("backend", None)
    if name is None and chosen:
        raise TypeError(f"options {sorted(chosen)} belong to a backend: name it, as 'backend'")
    backend = get_backend() if name is None else make(name, **chosen)
    for device in devices:
        backend.expect(backend.backend_device(device))
    compiler = _torch.dynamo_training_backend(
        lambda *graph: CompiledGraph(backend, *graph), _decompositions(backend)
    )
    return compiler(module, example_inputs)  # type: ignore[no-any-return]  # what TorchDynamo calls


def _decompositions(backend: Backend) -> dict[Any, Callable[..., Any]] | None:
    """The backend's decompositions, applied early so that the partitioner sees the parts.

    Random ops are excluded, unless the backend draws: their parts would draw other numbers.
    """
    table = backend.traced_decompositions() if isinstance(backend, FxBackend) else None
    if table is None or backend.draws:
        return table
    random = torch.Tag.nondeterministic_seeded
    return {op: part for op, part in table.items() if random not in getattr(op, "tags", ())}


class CompiledGraph:
    """A functional ATen graph, compiled separately for every combination of sizes.

    The first `shown` results are visible to the user; the others may have any strides. Results of a
    forward graph alias where they do in the graph.
    """

    def __init__(
        self, backend: Backend, module: fx.GraphModule, shown: int, is_forward: bool
    ) -> None:
        self.module = module
        self.backend = backend
        self.shown = shown
        self.is_forward = is_forward
        self.versions: dict[tuple[Any, ...], Callable[[list[Any]], list[Any]]] = {}
        self.fixed = all(map(_is_fixed, module.graph.find_nodes(op="placeholder")))

    def __call__(self, args: list[Any]) -> list[Any]:
        """Compute the results; the list of arguments is cleared, to free them early."""
        key = () if self.fixed else _sizes(args)
        version = self.versions.get(key)
        if version is None:
            version = self.versions[key] = self._compile(args)
        return version(args)

    def _compile(self, args: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        try:
            static = in_fresh_thread(lambda: with_fixed_sizes(self.module, args))
            return Version(static, args, self.backend, self.shown, self.is_forward)
        except (UnsupportedError, CompileError) as error:
            if config.strict:
                raise
            text = f"backend 'torpor' runs this graph eagerly: {error}"
            warnings.warn(text, TorporWarning, stacklevel=2)
            return lambda given: list(OnAnyStrides(self.module).run(*given))


def _is_fixed(node: fx.Node) -> bool:
    """Whether TorchDynamo guarantees the sizes of an input."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _sizes(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        (arg.shape, arg.stride()) if isinstance(arg, torch.Tensor) else arg for arg in args
    )


def with_fixed_sizes(module: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """`module` traced for the sizes of `args`: symbols become numbers, tensors stay inputs."""
    mode = _torch.new_fake_mode()
    converted = [mode.from_tensor(a.detach()) if isinstance(a, torch.Tensor) else a for a in args]
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        given = list(converted)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return OnAnyStrides(module).run(*given)

    mode.allow_non_fake_inputs = True  # constants of the graph
    try:
        with mode, torch.no_grad():
            return make_fx(run)(*(converted[place] for place in places))
    except Exception as error:
        raise UnsupportedError(f"it cannot be traced for fixed sizes: {error}") from error


class OnAnyStrides(fx.Interpreter):
    """Runs a graph on inputs whose strides may differ from those it was traced with."""

    def run_node(self, node: fx.Node) -> Any:
        if node.target is aten.view.default:
            (tensor, size), _ = self.fetch_args_kwargs_from_env(node)
            return tensor.reshape(size)
        if getattr(node.target, "_opname", None) in functional.STRIDED:
            source = node.all_input_nodes[0]
            self.env[source] = _as_traced(self.env[source], source.meta["val"])
        return super().run_node(node)


def _as_traced(tensor: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides that a graph was traced with."""
    if tensor.stride() == traced.stride():
        return tensor
    made = torch.empty_strided(
        tensor.shape, traced.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return aten.copy.default(made, tensor)  # type: ignore[no-any-return]  # ops have no types


class Version:
    """A graph for one combination of sizes, as a computation of the backend."""

    def __init__(
        self,
        module: fx.GraphModule,
        args: Sequence[Any],
        backend: Backend,
        shown: int,
        is_forward: bool = True,
    ) -> None:
        self.backend = backend
        self.places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        in_order = isinstance(backend, FxBackend) and not backend.draws and _draws_in_order(module)
        builder = _NodeBuilder(module, in_order, shown, is_forward)
        devices = {v.type.device for v in (*builder.inputs, *builder.computed)} or {
            torch.device("cpu")
        }
        where = sorted(devices, key=lambda device: device.type == "cpu")[0]
        self.device: BackendDevice = backend.backend_device(where)
        self.constants = builder.constants
        self.returned = builder.returned  # the source of each result: (kind, index)
        bases = {one.base: one.lies for one in builder.views}
        self.layouts = {
            which: type_ for (kind, which), type_ in bases.items() if kind == "computed"
        }
        self.inputs = builder.inputs
        self.order: list[int] = []
        self.run: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None
        self.written = builder.written  # inputs to write to at the end: (slot, source)
        if builder.computed:
            graph = Graph.of(builder.computed).in_order_of(builder.nodes)
            self.order = [builder.slot_of[value] for value in graph.inputs]
            donated = self._donated(graph) if backend.takes_donations else {}
            bound = {which for kind, which in self.returned[:shown] if kind == "computed"}
            bound |= self.layouts.keys()
            free_strides = {*range(len(builder.computed))} - bound - {*donated.values()}
            computation = compile_graph(
                graph, "dynamo", backend, self.device, donated, free_strides=free_strides
            )
            self.run = backend.function(computation, self.device)
        computed = [("computed", place) for place in range(len(builder.computed))]
        self.as_computed = self.returned == computed and not self.written
        sources = [*self.returned, *(source for _, source in self.written)]
        sources += [one.base for one in builder.views]
        needed = {which for kind, which in sources if kind == "input"}
        self.kept = sorted(needed | {slot for slot, _ in self.written})  # inputs needed to the end
        self.take_kept = item_getter(self.kept)
        self.answer = ReturnValues(self.returned, self.kept, len(computed))

    def _donated(self, graph: Graph) -> dict[int, int]:
        """Inputs that the graph itself may overwrite: parameter -> result, by position.

        A result that is also returned, or written twice, needs its own memory; an input that is
        the source of another write is needed until the end.
        """
        places = {slot: place for place, slot in enumerate(self.order)}
        uses = Counter([*self.returned, *(source for _, source in self.written)])
        sources = {source for _, source in self.written}
        donated: dict[int, int] = {}
        for slot, (kind, which) in self.written:
            may_overwrite = kind == "computed" and uses[kind, which] == 1 and slot in places
            if (
                may_overwrite
                and ("input", slot) not in sources
                and graph.outputs[which].type is self.inputs[slot].type
            ):
                donated[places[slot]] = which
        done = {self.order[parameter] for parameter in donated}
        self.written = [(slot, source) for slot, source in self.written if slot not in done]
        return donated

    def __call__(self, args: list[Any]) -> list[Any]:
        tensors = [*map(args.__getitem__, self.places), *self.constants]
        args.clear()
        kept = self.take_kept(tensors)
        given = list(map(tensors.__getitem__, self.order))
        tensors.clear()
        computed = [] if self.run is None else self.run(given)
        if self.as_computed:
            return computed
        for place, type_ in self.layouts.items():  # bases of views
            if computed[place].stride() != type_.stride:
                computed[place] = with_layout(computed[place], type_)
        if self.written:
            self._write(kept, computed)
        return self.answer(kept, computed)

    def _write(self, kept: Sequence[torch.Tensor], computed: list[torch.Tensor]) -> None:
        inputs = dict(zip(self.kept, kept, strict=True))
        sources: dict[str, Any] = {"input": inputs, "computed": computed}
        new = [(inputs[slot], sources[kind][which]) for slot, (kind, which) in self.written]
        if len(new) > 1:  # a target may be the source of another write
            new = [(tensor, source.clone()) for tensor, source in new]
        for tensor, source in new:
            tensor.copy_(source)


class ReturnValues:
    """Collects the return values: kept inputs, computed results, constants, and views."""

    def __init__(
        self, returned: Sequence[tuple[str, Any]], kept: Sequence[int], computed: int
    ) -> None:
        places = {("input", slot): place for place, slot in enumerate(kept)}
        places |= {("computed", place): len(kept) + place for place in range(computed)}
        self.plain: list[Any] = []
        self.views: list[tuple[SeenAs, int]] = []
        plain = itertools.count(len(places))
        views = itertools.count(len(places) + sum(kind == "plain" for kind, _ in returned))
        order = []
        for kind, which in returned:
            if kind == "plain":
                self.plain.append(which)
                order.append(next(plain))
            elif kind == "view":
                self.views.append((which, places[which.base]))
                order.append(next(views))
            else:
                order.append(places[kind, which])
        self.take = item_getter(order)

    def __call__(self, kept: Sequence[torch.Tensor], computed: Sequence[torch.Tensor]) -> list[Any]:
        found: list[Any] = [*kept, *computed, *self.plain]
        for view, base in self.views:
            found.append(view.of(found[base]))
        return list(self.take(found))


@dataclass(frozen=True)
class SeenAs:
    """A view of a result or an input, saved for backward or returned with others."""

    base: tuple[str, Any]
    lies: TensorType  # the type of the base, for its strides
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # relative to the base's

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """Make the view."""
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class _NodeBuilder:
    """Builds nodes for the operators of an fx graph.

    With `in_order`, random ops on a GPU are compiled with the rest, chained to keep their order.
    The first `shown` results are visible to the user; others may be views of computed tensors, and
    so may those results of a forward graph that alias each other.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        in_order: bool = False,
        shown: int | None = None,
        is_forward: bool = False,
    ) -> None:
        self.module = module
        self.in_order = in_order
        self.shown = shown
        self.is_forward = is_forward
        self.views: list[SeenAs] = []
        self.base_of: dict[fx.Node, fx.Node] = {}  # view -> its base
        self.drawn: Value | None = None  # a result of the last random op
        self.nodes: list[Node] = []
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[Value] = []
        self.constants: list[torch.Tensor] = []
        self.slot_of: dict[Value, int] = {}
        self._slots: dict[fx.Node, int] = {}
        self.computed: list[Value] = []
        self.returned: list[tuple[str, Any]] = []
        self.written: list[tuple[int, tuple[str, Any]]] = []  # input slot, new contents
        self.new: dict[int, Value] = {}  # by slot
        self.old: dict[Value, Value] = {}  # copies of inputs that are written to
        for node in module.graph.nodes:
            getattr(self, f"_{node.op}")(node)

    def _add_input(self, node: fx.Node, tensor: torch.Tensor) -> None:
        value = leaf(len(self.inputs), _type(tensor).at_offset(0))
        self.slot_of[value] = self._slots[node] = len(self.inputs)
        self.inputs.append(value)
        self.values[node] = value

    def _placeholder(self, node: fx.Node) -> None:
        if self.constants:
            raise UnsupportedError("an input stands after a constant")
        self._add_input(node, node.meta["val"])

    def _get_attr(self, node: fx.Node) -> None:
        constant = operator.attrgetter(str(node.target))(self.module)
        if not isinstance(constant, torch.Tensor):
            raise UnsupportedError(f"{node.target} is a {type(constant).__name__}, not a tensor")
        self._add_input(node, constant)
        self.constants.append(constant.detach())

    def _call_function(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            self.values[node] = self.values[source][index]  # type: ignore[index]  # of a node
            if source in self.base_of:
                self.base_of[node] = self.base_of[source]  # type: ignore[index]  # a node
            return
        if node.target is aten.copy_.default:
            self._write(*node.args[:2])
            self.values[node] = self.values[node.args[0]]  # type: ignore[index]  # a node
            return
        if not isinstance(node.target, OpOverload):
            raise UnsupportedError(f"{node.target} is no operator")
        spec = spec_of(node.target)
        made = node.meta["val"]
        results = made if len(spec.returns) > 1 else (made,)
        if spec.mutated or not all(map(_is_known, spec.returns, results)):
            raise UnsupportedError(f"{node.target} is no function from tensors to tensors")
        bound = spec.bind(self._arguments(node.args), self._arguments(node.kwargs))
        if self.in_order and spec.draws(bound):
            self.values[node] = self._draw(node.target, bound, made)
            return
        types = [
            None if t is None else _type(t)
            for r, result in zip(spec.returns, results, strict=True)
            if r.kind is not ReturnKind.OTHER
            for t in (result if r.is_list else (result,))
        ]
        self.values[node] = _structure(self._add(node.target, bound, types), made)
        if all(returned.kind is ReturnKind.VIEW for returned in spec.returns):
            source = node.all_input_nodes[0]
            self.base_of[node] = self.base_of.get(source, source)

    def _add(self, op: Any, bound: Sequence[Any], types: Sequence[TensorType | None]) -> Node:
        node = private_node(spec_of(op), bound, tuple(types))
        self.nodes.append(node)
        return node

    def _draw(self, op: Any, bound: list[Any], made: Any) -> list[Any]:
        """Add a random op, chained to the previous one."""
        if op is aten.native_dropout.default:
            return self._drop_out(bound[0], bound[1], made)
        drawing = draws.ATTENTION_IN_ORDER[op]
        types = [_type(made[place]) for place in drawing.tensors]
        node = self._add(drawing.target, [self.drawn, *bound], types)
        self.drawn = node.outputs[-1]
        results = [None if isinstance(one, torch.Tensor) else one for one in made]
        for place, output in zip(drawing.tensors, node.outputs, strict=True):
            results[place] = output
        return results

    def _drop_out(self, tensor: Value, p: float, made: Any) -> list[Any]:
        """A mask, drawn by the kernel, and its product with the input."""
        out, mask = map(_type, made)
        type_: TensorType = tensor.type
        memory = (type_.shape, type_.stride, type_.dtype, type_.device)
        self.drawn = self._add(draws.DROPOUT_MASK, [self.drawn, *memory, p], [mask]).outputs[0]
        scaled = [tensor, self.drawn, draws.scale_of(p, type_.dtype)]
        product = self._add(aten.native_dropout_backward.default, scaled, [out])
        return [product.outputs[0], self.drawn]

    def _write(self, target: Any, source: Any) -> None:
        """Record a write to an input; AOTAutograd writes whole inputs, of the same type.

        It does so after all reads, so nodes that read the input mean its old contents.
        """
        if target.op != "placeholder" or target.meta["val"].dtype is not source.meta["val"].dtype:
            raise UnsupportedError(f"{target} is written to")
        slot = self._slots[target]
        self.new[slot] = self.values[source]

    def _arguments(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, lambda node: self.values[node])

    def _output(self, node: fx.Node) -> None:
        places: dict[Value, int] = {}

        def source(value: Any) -> tuple[str, Any]:
            if not isinstance(value, Value):
                return "plain", value
            if value in self.slot_of:
                return "input", self.slot_of[value]
            return "computed", places.setdefault(value, len(places))

        items: Sequence[Any] = node.args[0]  # type: ignore[assignment]  # a tuple
        together = self._seen_together(items)
        for place, item in enumerate(items):
            base = self.base_of.get(item) if self.shown is not None else None
            is_kept = self.shown is not None and place >= self.shown
            if base is not None and (is_kept or base in together) and _is_part(item, base):
                view = _seen_as(item, base, source(self._value(base, is_kept)))
                self.views.append(view)
                self.returned.append(("view", view))
            else:
                value = self._value(item, is_kept) if isinstance(item, fx.Node) else item
                self.returned.append(source(value))
        self.written = [(slot, source(value)) for slot, value in self.new.items()]
        self.computed = list(places)

    def _value(self, node: fx.Node, is_kept: bool) -> Any:
        """The value of a result; backward gets the contents of an input before it is written to."""
        value = self.values[node]
        if not is_kept or self.slot_of.get(value) not in self.new:
            return value
        if value not in self.old:
            made = node.meta["val"].clone()
            self.old[value] = self._add(aten.clone.default, [value, None], [_type(made)]).outputs[0]
        return self.old[value]

    def _seen_together(self, items: Sequence[Any]) -> set[fx.Node]:
        """Bases of several visible results, and inputs that a visible result is a view of.

        For the latter AOTAutograd makes its own views, based on the storage offsets of ours.
        """
        if not self.is_forward:
            return set()
        seen = {item for item in items[: self.shown] if isinstance(item, fx.Node)}
        bases = Counter(self.base_of.get(item, item) for item in seen)
        return {one for one, count in bases.items() if count > 1 or one.op == "placeholder"}


def _is_part(view: fx.Node, base: fx.Node) -> bool:
    """Whether a view shows elements of its base unchanged."""
    one, other = view.meta["val"], base.meta["val"]
    plain = not (one.is_conj() or one.is_neg() or other.is_conj() or other.is_neg())
    return plain and one.dtype is other.dtype and _type(other).is_dense and one.numel() > 0


def _seen_as(view: fx.Node, base: fx.Node, source: tuple[str, Any]) -> SeenAs:
    one, other = view.meta["val"], base.meta["val"]
    offset = one.storage_offset() - other.storage_offset()
    return SeenAs(source, _type(other), tuple(one.shape), one.stride(), offset)


def _draws_in_order(module: fx.GraphModule) -> bool:
    """Whether all random ops in a graph can be compiled with the rest, in order."""
    return all(map(_can_draw_in_order, filter(_draws, module.graph.nodes)))


def _draws(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    spec = spec_of(node.target)
    return spec.draws(spec.bind(node.args, node.kwargs))


def _can_draw_in_order(node: fx.Node) -> bool:
    tensor = node.args[0].meta["val"] if isinstance(node.args[0], fx.Node) else None
    if tensor is None or tensor.device.type != "cuda":
        return False
    if node.target is aten.native_dropout.default:
        return draws.has_a_mask(_type(tensor), node.args[1])  # type: ignore[arg-type]  # a number
    return node.target in draws.ATTENTION_IN_ORDER


def _is_known(returned: Return, result: Any) -> bool:
    """Whether a result is a tensor, or a number determined by sizes."""
    if returned.kind is ReturnKind.OTHER:
        return type(result) in (int, float, bool)
    return returned.kind in (ReturnKind.FRESH, ReturnKind.VIEW)


def _structure(node: Node, made: Any) -> Any:
    """The outputs of `node` in the structure of the op's results."""
    outputs = iter(node.outputs)

    def take(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return [take(part) for part in item]
        if isinstance(item, (int, float)):  # sizes are fixed, so it is a constant
            return item
        return next(outputs)

    return take(made)


def _type(tensor: torch.Tensor) -> TensorType:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"a tensor has layout {tensor.layout}")
    return TensorType.of_tensor(tensor)
