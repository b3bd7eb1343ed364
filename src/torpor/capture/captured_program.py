"""A captured graph of ATen ops as calls that the recorder takes one by one.

Random numbers are inputs: an op that draws is taken out of the graph, and its draw is made whenever
the graph is called, in the order of the program. What is left gives the same for the same inputs.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torpor import _torch
from torpor.ir.types import TensorType
from torpor.observe.site import Site, is_users, recorded_at
from torpor.ops.spec import Mode, spec_of
from torpor.overrides import draws, fused
from torpor.trace.dispatch import dispatch
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import physical
from torpor.trace.wrap import wrap_data

aten = torch.ops.aten
Draw = Callable[[], Sequence[LazyTensor]]
_FRAME = re.compile(r'File "(.+)", line (\d+), in ')


class NotCaptured(Exception):
    """The graph holds something that cannot be recorded as an op."""


class CapturedProgram:
    """The calls of a captured graph. Inputs are its own, then all that was drawn for this call."""

    def __init__(self, module: GraphModule) -> None:
        self.draws: list[Draw] = []
        self.is_pure = True  # it gives the same for the same inputs
        self.draws_when_run = False  # random numbers that depend on values
        self.writes = False
        self.inputs: list[Node] = []
        self.constants: dict[Node, Any] = {}
        self.calls: list[tuple[Node, Any, Any, Any, Site | None]] = []
        self.drawn: list[tuple[Node, int]] = []  # what each drawn tensor is in the graph
        self.results: Any = ()
        for node in module.graph.nodes:
            self._add(module, node)

    def _add(self, module: GraphModule, node: Node) -> None:
        if node.op == "placeholder":
            self.inputs.append(node)
            self.is_pure &= isinstance(node.meta.get("val"), (torch.Tensor, type(None)))
        elif node.op == "get_attr":
            self.constants[node] = _constant(module, str(node.target))
        elif node.op == "output":
            self.results = node.args[0]
        elif node.target is operator.getitem:
            self.calls.append((node, node.target, node.args, node.kwargs, None))
        else:
            self._call(node)

    def _call(self, node: Node) -> None:
        target: Any = node.target
        if not _torch.is_op(target):
            raise NotCaptured(f"{target} is no op")
        spec = spec_of(target)
        self.writes |= any(argument.mutated for argument in spec.arguments)
        if spec.mode is Mode.RANDOM and spec.draws(spec.bind(node.args, node.kwargs)):
            target = self._take_out(node)
        if target is not None:
            self.calls.append((node, target, node.args, node.kwargs, _site(node)))

    def _take_out(self, node: Node) -> Any:
        """Make a draw of a random op; what is left of it to record, if anything."""
        draw, left = drawn_apart(node)
        if draw is None:
            self.is_pure, self.draws_when_run = False, True
            return node.target
        if self.draws_when_run:  # all that is taken out is drawn first
            raise NotCaptured(f"{node.target} would be drawn before what the program draws first")
        self.drawn.append((node, len(self.draws)))
        self.draws.append(draw)
        return left

    def line(self) -> str:
        """The user's line that its first op comes from."""
        sites = (site for *_, site in self.calls if site is not None)
        return str(next(sites, "no line of the program"))

    def run(self, args: Sequence[Any], drawn: Sequence[Sequence[Any]]) -> list[Any]:
        """Record all calls; the results."""
        env: dict[Node, Any] = dict(zip(self.inputs, args, strict=True)) | self.constants
        apart = {node: drawn[place] for node, place in self.drawn}
        for node, made in apart.items():
            env[node] = made[0]
        for node, target, args_, kwargs, site in self.calls:
            bound = torch.fx.node.map_arg((args_, kwargs), env.__getitem__)
            if target is operator.getitem:
                env[node] = bound[0][0][bound[0][1]]
                continue
            with recorded_at(site):
                if node in apart:
                    env[node] = target(apart[node], *bound[0], **bound[1])
                else:
                    env[node] = dispatch(None, target, (), bound[0], bound[1])
        results = torch.fx.node.map_arg(self.results, env.__getitem__)
        return list(results)


def _constant(module: GraphModule, name: str) -> Any:
    found: Any = functools.reduce(getattr, name.split("."), module)
    if not isinstance(found, torch.Tensor):
        raise NotCaptured(f"{name} is a {type(found).__name__}")
    if type(found) is LazyTensor:
        return found
    with _torch.without_modes():
        return wrap_data(found.detach().clone(), found.device)


# -- lines -----------------------------------------------------------------------------------------


def _site(node: Node) -> Site | None:
    """The user's line that an op of the graph comes from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        code = _code_in(file)
        if is_users(code):
            return Site(code, int(line))
    return None


@functools.cache
def _code_in(file: str) -> CodeType:
    return compile("", file, "exec")


# -- draws -----------------------------------------------------------------------------------------

_BY_TYPE = frozenset({
    "bernoulli.p", "rand_like.default", "randn_like.default", "randint_like.default",
    "randint_like.low_dtype", "uniform.default", "normal_functional.default",
    "exponential.default", "geometric.default", "cauchy.default", "log_normal.default",
    "random.default", "random.from", "random.to",
})  # fmt: skip
"""Random ops that ask of their one tensor for nothing but the type."""


def drawn_apart(node: Node) -> tuple[Draw | None, Any]:
    """A function that draws what a random op draws, and what is left of the op to record.

    That is called with what was drawn and the op's arguments; None: the draw is all.
    No function: what is drawn depends on numbers.
    """
    name = str(node.target).removeprefix("aten.")
    tensors = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
    if not all(_has_fixed_size(arg) for arg in [*tensors, node]) or "generator" in node.kwargs:
        return None, None
    if node.target is aten.native_dropout.default:
        return _dropout(node)
    args, kwargs = _with_types(node)
    if tensors and name not in _BY_TYPE:
        return fused.turn_apart(node.target, args, kwargs)
    device = node.meta["val"].device
    return functools.partial(_draw, _as_called(node), args, kwargs, device), None


def _as_called(node: Node) -> Any:
    """The op that eager calls: `bernoulli_` is `bernoulli` in the graph, which draws in another
    order if its tensor is not contiguous."""
    if node.target is not aten.bernoulli.p:
        return node.target
    tensor: Any = node.args[0]
    if tensor.target is aten.empty_like.default:
        return aten.bernoulli_.float
    if not tensor.meta["val"].is_contiguous():
        raise NotCaptured("bernoulli of a tensor that is not contiguous")
    return node.target


def _has_fixed_size(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(type(size) is int for v in values if isinstance(v, torch.Tensor) for size in v.shape)


def _with_types(node: Node) -> tuple[Any, Any]:
    """The arguments of a call, with types in the place of tensors."""
    return torch.fx.node.map_arg((node.args, node.kwargs), _blank)


def _blank(node: Node) -> Any:
    value = node.meta.get("val")
    return TensorType.of_tensor(value) if isinstance(value, torch.Tensor) else value


def _draw(target: Any, args: Any, kwargs: Any, device: torch.device) -> Sequence[LazyTensor]:
    """What a random op draws now, as a tensor on `device`."""
    with _torch.without_modes(), draws.DRAWING, _torch.kernels():
        real = [_real(arg) for arg in args]
        made = target(*real, **{name: _real(arg) for name, arg in kwargs.items()})
        return [wrap_data(made, device)]


def _real(arg: Any) -> Any:
    if isinstance(arg, TensorType):
        return fused.alike(arg, physical(arg.device))
    return physical(arg) if isinstance(arg, torch.device) else arg


def _dropout(node: Node) -> tuple[Draw | None, Any]:
    """The mask of the kernel that drops, apart from its product with the input."""
    value, p, train = node.args[0].meta["val"], node.args[1], node.args[2]  # type: ignore[union-attr]  # a node
    type_ = TensorType.of_tensor(value)
    on_cuda = physical(type_.device).type == "cuda"
    if not (on_cuda and train is not False and draws.has_a_mask(type_, p)):  # type: ignore[arg-type]  # a number
        return None, None
    scale = draws.scale_of(p, type_.dtype)  # type: ignore[arg-type]  # a number

    def draw() -> Sequence[LazyTensor]:
        with _torch.without_modes(), draws.DRAWING, _torch.kernels():
            like = fused.alike(type_, physical(type_.device))
            return [wrap_data(aten.native_dropout.default(like, p, train)[1], type_.device)]

    def multiply(drawn: Any, input: Any, p: float, train: bool) -> Any:
        product = dispatch(None, aten.native_dropout_backward.default, (), (input, drawn[0], scale))
        return product, drawn[0]

    return draw, multiply
