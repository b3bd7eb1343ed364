"""Lowering for XLA: nodes in a row become one jax function, what XLA cannot express stays alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp

from torpor.backend.lowering import Computation, LoweringContext
from torpor.backends.xla.checks import check_of, needs_reals
from torpor.backends.xla.lowerings import DTYPES, TABLE, NotLowered
from torpor.backends.xla.lowerings.random import DRAWS
from torpor.backends.xla.lowerings.table import cast
from torpor.errors import BackendError
from torpor.inference.infer import types_in
from torpor.ir.memo import Memo
from torpor.ir.node import Node, Value
from torpor.ir.types import ScalarType, TensorType

MAX_NODES: Final = 4_000
"""Nodes in one function: XLA's passes take more than linear time."""


@dataclass(slots=True)
class XlaPiece:
    """Nodes in a row that are compiled as one.

    The first output is whether a check of `checked` found what eager may refuse, if there are any.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)  # what later steps and results need
    checked: list[Node] = field(default_factory=list)
    donated: tuple[int, ...] = ()  # inputs that outputs may be written over
    dead: list[Value] = field(default_factory=list)  # not needed after it
    offsets: dict[Node, int] = field(default_factory=dict)  # of its nodes that draw
    compiled: Any = None  # by jax

    def function(self, *arrays: Any) -> list[Any]:
        """What jax traces: the outputs, of the inputs, then a seed if it draws."""
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=False))
        key = jax.random.key(arrays[-1]) if self.offsets else None
        for node in self.nodes:
            own = jax.random.fold_in(key, self.offsets[node]) if node in self.offsets else None
            env.update(zip(node.outputs, call(node, env, own), strict=True))
        refused = [r for node in self.checked if (r := refusal(node, env)) is not None]
        flags = [jnp.any(jnp.stack(refused)) if refused else jnp.zeros((), jnp.bool_)]
        return [*(flags if self.checked else ()), *[env[value] for value in self.outputs]]


@dataclass(slots=True)
class Lone:
    """A node that eager's kernel runs."""

    node: Node
    dead: list[Value] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        return [self.node]


Step = XlaPiece | Lone


@dataclass(slots=True)
class XlaProgram:
    """What runs a graph."""

    steps: list[Step]
    guests: list[Value]  # parameters that are on another device
    draws: bool  # some of its nodes draw random numbers


class XlaLowering(LoweringContext):
    """Cuts a graph into pieces that XLA compiles and nodes that it cannot express."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[Step] = []

    def lower(self, node: Node) -> None:
        if why_not(node) is not None:
            self.fell_back(node)
            self.steps.append(Lone(node))
        else:
            last = self.steps[-1] if self.steps else None
            if not isinstance(last, XlaPiece) or len(last.nodes) >= MAX_NODES:
                last = XlaPiece()
                self.steps.append(last)
            last.nodes.append(node)
        super().lower(node)

    def build(self) -> Computation:
        computation = super().build()
        donated = {self.parameters[p]: self.results[r] for p, r in self.aliases.items()}
        offsets = computation.offsets
        for step in self.steps:
            if isinstance(step, XlaPiece):
                step.offsets = {node: offsets[node] for node in step.nodes if node in offsets}
        steps = with_checks(self.steps, set(self.parameters))
        _find_ends(steps, self.results, donated)
        guests = [value for value in self.parameters if self._is_guest(value)]
        computation.program = XlaProgram(steps, guests, bool(offsets))
        return computation

    def _is_guest(self, value: Value) -> bool:
        type_ = value.type
        here = ("lazy", self.device.type.name)
        return isinstance(type_, TensorType) and type_.device.type not in here


def with_checks(steps: Sequence[Step], given: set[Value]) -> list[Step]:
    """The steps, with checks: those that need whole numbers of `given` alone before all others."""
    first = XlaPiece()
    for step in steps:
        if isinstance(step, XlaPiece):
            checked = [node for node in step.nodes if check_of(node) is not None]
            cones = {node: _cone(node, step.nodes, given) for node in checked}
            step.checked = [node for node in checked if cones[node] is None]
            first.checked += [node for node in checked if cones[node] is not None]
            before = {n for cone in cones.values() if cone is not None for n in cone}
            first.nodes += [node for node in step.nodes if node in before]
    return [first, *steps] if first.checked else list(steps)


_MANY: Final = 100  # nodes that are worth running twice for a check


def _cone(node: Node, nodes: Sequence[Node], given: set[Value]) -> set[Node] | None:
    """What makes the indices of a node; None if that takes more than a few whole numbers."""
    if needs_reals(node):
        return None
    makers = {value: maker for maker in nodes for value in maker.outputs}
    cone: set[Node] = set()
    waiting = [value for value in node.operands if not _is_real(value)]
    while waiting:
        value = waiting.pop()
        maker = makers.get(value)
        if maker is None:
            if value not in given:
                return None
        elif maker not in cone:
            cone.add(maker)
            if len(cone) > _MANY or any(map(_is_real, maker.operands)):
                return None
            waiting += maker.operands
    return cone


def _is_real(value: Value) -> bool:
    type_ = value.type
    return isinstance(type_, TensorType) and (
        type_.dtype.is_floating_point or type_.dtype.is_complex
    )


def _find_ends(
    steps: Sequence[Step], results: Sequence[Value], donated: dict[Value, Value]
) -> None:
    """Say what each step is given and what it gives, and where values die.

    Parameters are given away in steps after which nothing can fail any more.
    """
    needed, may_fail = set(results), False
    for step in reversed(steps):
        made = {value for node in step.nodes for value in node.outputs}
        checked = step.checked if isinstance(step, XlaPiece) else []
        indices = (v for node in checked for v in node.operands if not _is_real(v))
        used = dict.fromkeys(v for node in step.nodes for v in node.operands if v not in made)
        used |= dict.fromkeys(v for v in indices if v not in made)
        step.dead = [value for value in used if value not in needed]
        may_fail = may_fail or bool(checked) or isinstance(step, Lone)
        if isinstance(step, XlaPiece):
            step.outputs = [v for node in step.nodes for v in node.outputs if v in needed]
            step.inputs = list(used)
            given = set() if may_fail else set(step.dead) & donated.keys()
            step.donated = tuple(
                i for i, v in enumerate(step.inputs) if v in given and donated[v] in made
            )
        needed.update(used)


# -- one node --------------------------------------------------------------------------------------


def call(node: Node, env: Mapping[Value, Any], key: Any = None) -> list[Any]:
    """The outputs of a node as its lowering makes them, with the dtypes that were promised.

    `key` is what it draws from, if it draws.
    """
    args = [_argument(arg, env) for arg in node.args]
    draws = DRAWS.get(node.op.name)
    made = TABLE[node.op.name](node, *args) if draws is None else draws(node, key, *args)
    outputs = list(made) if isinstance(made, (list, tuple)) else [made]
    if len(outputs) != len(node.outputs):
        raise BackendError(f"{len(outputs)} outputs of {node.op.name}, not {len(node.outputs)}")
    return [_promised(out, v.type) for out, v in zip(outputs, node.outputs, strict=True)]


def refusal(node: Node, env: Mapping[Value, Any]) -> Any:
    """Whether eager may refuse the numbers of a node: a boolean, or None if it never does."""
    check = check_of(node)
    assert check is not None
    seen = {value: env[value] if value in env else struct_of(value) for value in node.operands}
    return check(*[_argument(arg, seen) for arg in node.args])


def _argument(arg: Any, env: Mapping[Value, Any]) -> Any:
    if type(arg) is Value:
        return env[arg]
    if type(arg) is tuple:
        return tuple(_argument(item, env) for item in arg)
    return arg


def _promised(made: Any, type_: Any) -> Any:
    if type_ is None:
        return None
    made = cast(made, DTYPES[type_.dtype])
    if made.shape != type_.shape:
        if made.size != type_.numel:
            raise BackendError(f"the lowering makes {made.shape}, not {type_!r}")
        made = made.reshape(type_.shape)
    return made


_reasons: Memo[str] = Memo()


def why_not(node: Node) -> str | None:
    """Why XLA does not run a node; None if it does. Asked once for each op and its types."""
    key = (node.op, types_in(node.key))
    found = _reasons.find(key)
    if found is None:
        found = _reasons.add(key, _refusal(node) or "")
    return found or None


def _refusal(node: Node) -> str | None:
    if node.op.name not in TABLE and node.op.name not in DRAWS:
        return "no lowering"
    operands = list(dict.fromkeys(node.operands))
    for value in (*operands, *node.outputs):
        if isinstance(value.type, TensorType) and value.type.dtype not in DTYPES:
            return f"XLA has no {value.type.dtype}"

    def trial(*arrays: Any) -> list[Any]:
        return call(node, dict(zip(operands, arrays, strict=True)), jax.random.key(0))

    try:
        with jax.enable_x64(True):
            jax.eval_shape(trial, *[struct_of(value) for value in operands])
    except (NotLowered, NotImplementedError, TypeError, ValueError, BackendError) as reason:
        return f"{type(reason).__name__}: {reason}"
    return None


_NUMBERS: Final = {bool: jnp.bool_, int: jnp.int64, float: jnp.float64, complex: jnp.complex128}


def struct_of(value: Value) -> Any:
    """What jax traces in the place of a value: a number gives way to the dtypes of tensors."""
    type_ = value.type
    if isinstance(type_, ScalarType):
        return jax.ShapeDtypeStruct((), _NUMBERS[type_.kind], weak_type=True)
    return jax.ShapeDtypeStruct(type_.shape, DTYPES[type_.dtype])


def structs_of(piece: XlaPiece) -> list[Any]:
    """What jax traces in the place of all that a piece is given."""
    seed = [jax.ShapeDtypeStruct((), jnp.int64)] if piece.offsets else []
    return [*[struct_of(value) for value in piece.inputs], *seed]
