"""Lowering for XLA: the nodes of a block become one jax function."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp

from torpor.backend.lowering import Computation, random_offsets
from torpor.backends.blocks.block_backend import BlockLowering
from torpor.backends.blocks.program import Piece, Program
from torpor.backends.blocks.registers import Registers
from torpor.backends.reference.lowering import Instruction
from torpor.backends.xla.checks import check_of, needs_reals
from torpor.backends.xla.lowerings import DTYPES, TABLE, NotLowered
from torpor.backends.xla.lowerings.random import DRAWS
from torpor.backends.xla.lowerings.table import cast
from torpor.backends.xla.runtime import place_of
from torpor.errors import BackendError
from torpor.inference.infer import types_in
from torpor.ir.graph import COMPILED, EAGER, Block
from torpor.ir.memo import Memo
from torpor.ir.node import Node, Value
from torpor.ir.types import ScalarType, TensorType
from torpor.passes.rewrite import mapped

MAX_NODES: Final = 4_000
"""Nodes in one function: XLA's passes take more than linear time."""


@dataclass(slots=True)
class XlaProgram(Program):
    """What runs a graph."""

    reusable: dict[int, int] = field(default_factory=dict)  # donated parameters -> results
    guests: list[int] = field(default_factory=list)  # parameters that are on another device
    sent: list[int] = field(default_factory=list)  # results that go to another device


class XlaLowering(BlockLowering):
    """The shared lowering; the register after the parameters is for the seed of a run, if any."""

    program = XlaProgram

    def lower(self, node: Node) -> None:
        if not self.instructions:
            self._register()
        super().lower(node)

    def donated(self) -> dict[Value, Value]:
        return {}  # XLA itself writes over what it is given

    def build(self) -> Computation:
        computation = super().build()
        program = computation.program
        program.reusable = {p: program.results[r] for p, r in self.aliases.items()}
        program.guests, program.sent = map(self._elsewhere, (self.parameters, self.results))
        return computation

    def _elsewhere(self, values: Sequence[Value]) -> list[int]:
        """The places of tensors that are on another device."""
        types = [value.type for value in values]
        tensors = ((place, t) for place, t in enumerate(types) if isinstance(t, TensorType))
        return [place for place, type_ in tensors if place_of(type_, self.device) != self.device]


@dataclass(slots=True, eq=False, weakref_slot=True)  # jax keeps it in a table
class XlaFunction:
    """What jax traces for a block: its outputs, of its inputs, then a seed if some nodes draw.

    If there are nodes to check, it also returns whether eager accepts the numbers they get.
    """

    nodes: Sequence[Node]
    inputs: list[Value]
    outputs: list[Value]
    checked: Sequence[Node]
    offsets: dict[Node, int]  # of its nodes that draw

    def __call__(self, *arrays: Any) -> list[Any]:
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=False))
        key = jax.random.key(arrays[-1]) if self.offsets else None
        for node in self.nodes:
            own = jax.random.fold_in(key, self.offsets[node]) if node in self.offsets else None
            env.update(zip(node.outputs, call(node, env, own), strict=True))
        made = [env[value] for value in self.outputs]
        if not self.checked:
            return made
        refused = [r for node in self.checked if (r := refusal(node, env)) is not None]
        return [*made, ~jnp.any(jnp.stack(refused)) if refused else jnp.ones((), jnp.bool_)]

    def structs(self) -> list[Any]:
        """What jax traces in the place of the arguments."""
        seed = [jax.ShapeDtypeStruct((), jnp.int64)] if self.offsets else []
        return [*[struct_of(value) for value in self.inputs], *seed]


def piece_of(
    block: Block, checked: Sequence[Node], registers: Registers, program: Program
) -> Piece:
    """A block as a piece that is still to be compiled, and that checks these nodes."""
    made = set(block.made)
    indices = [v for node in checked for v in node.operands if not _is_real(v) and v not in made]
    read = list(dict.fromkeys((*block.read, *indices)))
    outputs = sorted(block.outputs or (), key=registers.register)
    offsets = {node: n for node, n in random_offsets(program.graph).items() if node in block.nodes}
    piece = registers.piece(block)
    piece.inputs = [registers.register(value) for value in read]
    if offsets:
        piece.inputs.append(program.parameters)  # the seed
    piece.checked = bool(checked)
    piece.run = XlaFunction(block.nodes, read, outputs, checked, offsets)
    return piece


def given_away(program: XlaProgram) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The positions of inputs that steps may write over: those after which nothing can fail."""
    for place in reversed(range(len(program.steps))):
        step, dead = program.steps[place], set(program.dead[place])
        if isinstance(step, Instruction) or step.checked:
            return
        over = {r for r in dead if program.reusable.get(r) in step.outputs}
        donated = tuple(i for i, register in enumerate(step.inputs) if register in over)
        if donated:
            yield place, donated


def with_checks(
    blocks: Iterable[Block], given: Collection[Value]
) -> list[tuple[Block, list[Node]]]:
    """Blocks, and the nodes they check; checks of whole numbers of `given` alone come first."""
    nodes: list[Node] = []
    first: list[Node] = []
    found: list[tuple[Block, list[Node]]] = []
    for block in blocks:
        own = () if block.kind == EAGER else block.nodes
        cones = {n: _cone(n, own, given) for n in own if check_of(n) is not None}
        before = {n for cone in cones.values() if cone is not None for n in cone}
        nodes += [node for node in own if node in before]
        first += [node for node, cone in cones.items() if cone is not None]
        found.append((block, [node for node, cone in cones.items() if cone is None]))
    return [(Block(COMPILED, -1, tuple(nodes)), first), *found] if first else found


_MANY: Final = 100  # nodes that are worth running twice for a check


def _cone(node: Node, nodes: Sequence[Node], given: Collection[Value]) -> set[Node] | None:
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


# -- one node --------------------------------------------------------------------------------------


def call(node: Node, env: Mapping[Value, Any], key: Any = None) -> list[Any]:
    """The outputs of a node as its lowering makes them, with the dtypes that were promised.

    `key` is what it draws from, if it draws.
    """
    args = [mapped(arg, env) for arg in node.args]
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
    return check(*[mapped(arg, seen) for arg in node.args])


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
