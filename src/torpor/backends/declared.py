"""A base class for backends that list the ops they lower, with one method per op.

Used by packages that `torpor codegen` generates: the generated class has a method for every listed
op, which falls back to eager's kernel; the author overrides them one by one. What a method returns
is up to the backend. `DeclaredBackend` accepts a function on tensors, which is enough to start
with; a backend with a compiler overrides `compile` and `execute`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from torpor import _torch
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation, LoweringContext
from torpor.backends import kernels
from torpor.errors import BackendError, annotate
from torpor.ir.node import Node, Value
from torpor.ops.spec import OpSpec, spec_of
from torpor.text.printer import print_node

Kernel = Callable[..., Any]
"""Takes the op's arguments and must write to none of them. Returns the node's outputs (new tensors,
then the new contents of the arguments the op writes to): one tensor, or a list."""


class Eager:
    """Marks a node that eager's kernel runs, in place of a lowering."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "eager"


EAGER: Final = Eager()


@dataclass(frozen=True, slots=True)
class LoweredNode:
    """A node and what it was lowered to."""

    node: Node
    lowered: Any
    as_twin: bool = False  # lowered as its functional variant: the result may need a cast


@dataclass(frozen=True, slots=True)
class DeclaredProgram:
    """Steps in order, and the values that are dead after each."""

    steps: list[LoweredNode]
    dead: list[list[Value]]


def copy_name(name: str) -> str:
    """The copying variant of a view op, whose result has the same value."""
    namespace, op, overload = name.split(".", 2)
    return f"{namespace}.{op}_copy.{overload}"


class DeclaredLowering(LoweringContext):
    """Dispatches every node to the method of its op.

    A method gets the node and its arguments in schema order: a `Value` per tensor, a tuple per
    list. A node that writes (`add_`) is dispatched to the method of its functional variant (`add`)
    if only that one is listed, and a view (`view`) to that of its copying variant (`view_copy`).
    """

    METHODS: ClassVar[Mapping[str, str]] = {}  # the method of each declared op
    TWINS: ClassVar[Mapping[str, str]] = {}  # in-place ops, by the method of their functional form

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[LoweredNode] = []

    @classmethod
    def written(cls) -> list[str]:
        """The listed ops whose method is overridden."""
        base = next(c for c in cls.__mro__ if "METHODS" in vars(c))
        methods = base.METHODS.items()  # type: ignore[attr-defined]  # it has them
        return [op for op, name in methods if getattr(cls, name) is not getattr(base, name)]

    def lower(self, node: Node) -> None:
        name = node.op.name
        method = self.METHODS.get(name) or self.METHODS.get(copy_name(name))
        twin = self.TWINS.get(name) if method is None else None
        chosen = method or twin
        if chosen is None:
            lowered = self.lower_other(node)
        else:
            lowered = getattr(self, chosen)(node, *node.args)
        self.steps.append(LoweredNode(node, lowered, twin is not None))
        super().lower(node)

    def lower_other(self, node: Node) -> Any:
        """Lower a node whose op is not listed."""
        return self.eager(node)

    def eager(self, node: Node) -> Any:
        """Leave a node to eager's kernel; counted with the user's line."""
        self.fell_back(node)
        return EAGER

    def build(self) -> Computation:
        computation = super().build()
        computation.program = self.steps
        return computation


class DeclaredBackend(Backend):
    """Runs what `lowering` returned for each node: a function on tensors, or eager's kernel."""

    lowering: ClassVar[type[DeclaredLowering]] = DeclaredLowering

    def lowering_context(self, *args: Any) -> DeclaredLowering:
        return self.lowering(*args)

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        for computation in computations:
            steps = computation.program
            computation.program = DeclaredProgram(
                steps, _last_uses(steps, computation.graph.outputs)
            )
        return list(computations)

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        graph, program = computation.graph, computation.program
        env: dict[Value, Any] = dict(zip(graph.inputs, kernels.load(arguments, self), strict=True))
        for step, dead in zip(program.steps, program.dead, strict=True):
            env.update(zip(step.node.outputs, self.run_step(step, env, device), strict=True))
            for value in dead:
                env.pop(value, None)
        return kernels.store([env[value] for value in graph.outputs], computation, arguments, self)

    def run_step(
        self, step: LoweredNode, env: Mapping[Value, Any], device: BackendDevice
    ) -> list[torch.Tensor]:
        """The outputs of one step."""
        node = step.node
        if step.lowered is EAGER:
            return kernels.run_node(node, env, device)
        spec = spec_of(node.op.target)
        positional, keywords = _call(spec, kernels.arguments_of(node, env, device))
        try:
            with _torch.kernels():
                made = kernels.flat(step.lowered(*positional, **keywords))
            return _promised(step, made)
        except Exception as error:
            site = None if node.site is None else str(node.site)
            raise annotate(error, node.op.name, site, print_node(node)) from None

    def computation_text(self, computation: Computation) -> str:
        return "\n".join(
            f"{getattr(step.lowered, '__name__', step.lowered)!s:<16} {print_node(step.node)}"
            for step in _steps(computation)
        )


def _steps(computation: Computation) -> list[LoweredNode]:
    program = computation.program
    return program.steps if isinstance(program, DeclaredProgram) else program


def _last_uses(steps: Sequence[LoweredNode], kept: Sequence[Value]) -> list[list[Value]]:
    """For each step, the values that it is the last to use."""
    last: dict[Value, int] = {}
    for position, step in enumerate(steps):
        for value in (*step.node.outputs, *step.node.operands):
            last[value] = position
    dead: list[list[Value]] = [[] for _ in steps]
    for value, position in last.items():
        if value not in kept:
            dead[position].append(value)
    return dead


def _call(spec: OpSpec, bound: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """All arguments of the op: positional ones, and keyword-only ones by name."""
    pairs = list(zip(spec.arguments, bound, strict=True))
    positional = [value for argument, value in pairs if not argument.keyword_only]
    return positional, {a.name: value for a, value in pairs if a.keyword_only}


def _promised(step: LoweredNode, made: list[Any]) -> list[torch.Tensor]:
    """The tensors that a kernel returned, converted to their inferred types."""
    outputs = step.node.outputs
    if len(made) != len(outputs):
        raise BackendError(f"the kernel made {len(made)} tensors, not {len(outputs)}")
    return [_as_promised(t, v.type, step.as_twin) for t, v in zip(made, outputs, strict=True)]


def _as_promised(tensor: Any, type_: Any, cast: bool) -> Any:
    if type_ is None:
        return tensor
    if cast and isinstance(tensor, torch.Tensor):
        tensor = tensor.to(type_.dtype)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not type_.dtype:
        raise BackendError(f"the kernel made {getattr(tensor, 'dtype', tensor)}, not {type_!r}")
    if tuple(tensor.shape) != type_.shape:
        raise BackendError(f"the kernel made {tuple(tensor.shape)}, not {type_!r}")
    return kernels.as_promised(tensor, type_)
