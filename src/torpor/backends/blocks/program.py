"""Compiled graphs and how they run: compiled pieces, single instructions, reference instructions.

Donated parameters are overwritten last, when nothing can fail any more. If compiled code fails
before that, the whole graph is rerun with the reference instructions (`BlockBackend.execute`).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from torpor import _torch
from torpor.backend.device import BackendDevice
from torpor.backend.interrupts import Shield
from torpor.backend.item_getter import item_getter
from torpor.backends.layout import storages_of, with_layout
from torpor.backends.reference.lowering import Instruction, plan_memory
from torpor.backends.reference.runtime import step as run_alone
from torpor.errors import StepError
from torpor.ir.graph import Graph
from torpor.ir.node import Node
from torpor.ir.types import ScalarType, TensorType
from torpor.symbols.expressions import Condition, Symbol
from torpor.text.printer import print_node

PACKED: Final = {float: torch.float64, int: torch.int64}
"""The dtypes in which run-time numbers enter a piece that takes tensors only."""

Compiled = Callable[[list[Any]], Sequence[Any]]
"""Takes a list of a backend's buffers, which it may clear (boxed), and returns buffers."""

Replays = Callable[[Compiled, list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes a function and the tensors to call it with."""

ReferenceProgram = tuple[list[Instruction], int, list[int]]


def not_compiled(given: list[Any]) -> Sequence[Any]:
    """What a piece runs before it is compiled."""
    raise StepError("this piece has not been compiled")


@dataclass(slots=True)
class Piece:
    """Instructions that are compiled together, with the registers they read and output."""

    instructions: list[Instruction]
    inputs: list[int]  # registers of buffers, and of numbers that are not packed
    numbers: dict[type, list[int]]  # registers of packed run-time numbers, by kind
    outputs: list[int]
    donated: dict[int, int]  # input register -> the output that overwrites it
    free: frozenset[int] = frozenset()  # outputs that may have any strides
    checked: bool = False  # a flag is returned last: no operand has values that eager rejects
    sizes: dict[Symbol, int] = field(default_factory=dict)  # registers of sizes, given last
    run: Compiled = not_compiled
    text: Callable[[], str] = str  # its code, for people
    returned: list[int] = field(init=False)  # registers of what `run` returns

    def __post_init__(self) -> None:
        donated = set(self.donated.values())
        self.returned = [r for r in self.outputs if r not in donated]

    @property
    def read(self) -> list[int]:
        """The registers it reads, except those of sizes."""
        return [*self.inputs, *(r for registers in self.numbers.values() for r in registers)]


def is_number(type_: Any) -> bool:
    """Whether this is the type of a run-time number."""
    return type(type_) is ScalarType


Step = Piece | Instruction


@dataclass(slots=True)
class ProgramRun:
    """One run of a program."""

    program: Program
    arguments: Sequence[Any]
    types: tuple[TensorType, ...]  # of the results
    device: BackendDevice


@dataclass(slots=True, weakref_slot=True)
class Program:
    """Everything needed to run one graph."""

    name: str
    graph: Graph  # as it was lowered
    reference: ReferenceProgram
    types: dict[int, Any]  # by register
    device: torch.device
    parameters: int  # how many: they are the first registers
    steps: list[Step] = field(default_factory=list)
    dead: list[list[int]] = field(default_factory=list)  # registers not read after each step
    packing: Packing = field(default_factory=lambda: Packing(()))  # run-time numbers
    donated: dict[int, int] = field(default_factory=dict)  # parameter -> result, both registers
    copied: dict[int, int] = field(default_factory=dict)  # donations that are copied at the end
    commit: int = 0  # the first step that overwrites parameters
    guarded: dict[int, list[int]] = field(default_factory=dict)  # see `guard_memory`
    free_strides: frozenset[int] = frozenset()  # results that may have any strides
    padded: bool = False  # results may have gaps between their rows
    fixes: dict[int, Fix] | None = None  # by position of results; set by the first run
    sizes: dict[Symbol, int] = field(default_factory=dict)  # registers of sizes
    hints: dict[Symbol, int] = field(default_factory=dict)  # the sizes it was compiled with
    conditions: list[Condition] = field(default_factory=list)  # guards on sizes
    broken: BaseException | None = None  # compiled code failed where the reference did not
    replayed: Replays | None = None  # runs a function, or replays its CUDA graph
    run_alone: Callable[[Instruction, list[Any]], None] = run_alone  # runs one by eager's kernel
    around: Callable[[], AbstractContextManager[Any]] = _torch.kernels  # where its steps run
    paths: Paths = field(init=False)  # set by `plan`

    @property
    def results(self) -> list[int]:
        return self.reference[2]

    @property
    def tensors(self) -> list[int]:
        """The registers of parameters that are tensors."""
        return [r for r in range(self.parameters) if not is_number(self.types[r])]

    @property
    def pieces(self) -> Iterator[Piece]:
        """The compiled steps."""
        return (step for step in self.steps if isinstance(step, Piece))

    @property
    def writes(self) -> bool:
        """Whether it overwrites buffers that it is given."""
        return bool(self.donated) or self.commit < len(self.steps)

    def text(self, why_not: Callable[[Node], str | None]) -> str:
        """The generated code, for people; code shared by several pieces is shown once."""
        parts: list[str] = []
        shown: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            if isinstance(step, Instruction):
                parts.append(f"# by eager: {why_not(step.node)}\n{print_node(step.node)}")
            elif id(step.run) in shown:
                parts.append(f"# step {number}: as step {shown[id(step.run)]}")
            else:
                shown[id(step.run)] = number
                parts.append(step.text())
        return "\n\n".join(parts)


def note_writes(error: BaseException, written: bool = True) -> None:
    """Mark `error`: inputs have been overwritten (see `Backend.execute`)."""
    if written:
        error.inputs_written = True  # type: ignore[attr-defined]  # marks a foreign exception


def function(
    program: Program,
    types: Sequence[TensorType],
    slowly: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """A program as a function of a list of tensors, which it clears to free them early.

    `slowly` serves its first run, and reruns after errors: compiled CPU code checks indices, and
    `slowly` then raises the right error. On a GPU that would come too late.
    """

    keeps = program.device.type == "cpu" and not program.donated

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        fixes = program.fixes
        if fixes is None or program.broken is not None:
            return slowly(tensors)
        written = program.paths.written(tensors)
        kept = list(tensors) if keeps else None
        try:
            made = (program.replayed or _called)(plainly, tensors)
        except Exception:
            if kept is None:
                raise
            return slowly(kept)
        results = list(program.paths.results((*written, *made)))
        _apply(fixes, results, types)
        return results

    def plainly(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with _torch.kernels():
            return compute(program, tensors, ())

    return run


def _called(run: Compiled, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return run(tensors)


def run_steps(program: Program, given: list[Any]) -> list[Any]:
    """Run all steps on buffers and numbers; returns the buffers of results."""
    paths = program.paths
    written = paths.written(given) if program.donated else ()
    made: Sequence[torch.Tensor]
    if program.replayed is None:
        with program.around():
            packed = program.packing.pack(given, program.device)
            made = compute(program, given, packed)
    else:
        with _torch.without_torch_function(), _torch.below_autograd():
            packed = program.packing.pack(given, program.device)
        made = program.replayed(on_tensors(program), [*paths.tensors(given), *packed])
    return list(paths.results((*written, *made)) if written else made)


class Paths:
    """How arguments and computed registers map to results."""

    __slots__ = ("made", "numbers", "results", "tensors", "written")

    def __init__(self, program: Program) -> None:
        tensors = program.tensors
        self.numbers = sorted({*range(program.parameters)}.difference(tensors))
        self.tensors = item_getter(tensors)
        self.written = item_getter(list(program.donated))
        over = {register: place for place, register in enumerate(program.donated.values())}
        self.made = item_getter([r for r in program.results if r not in over])
        made = itertools.count(len(program.donated))  # computed results follow
        self.results = item_getter([over[r] if r in over else next(made) for r in program.results])


def on_tensors(program: Program) -> Compiled:
    """`compute` as a function of the tensor arguments followed by the packed numbers."""

    def run(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        parameters = program.tensors
        given: list[Any] = [None] * program.parameters
        for register, tensor in zip(parameters, tensors):  # packed numbers follow
            given[register] = tensor
        packed = tensors[len(parameters) :]
        tensors.clear()
        with _torch.kernels():
            return compute(program, given, packed)

    return run


def compute(program: Program, given: list[Any], packed: Sequence[Any]) -> Sequence[Any]:
    """Run all steps on arguments and packed numbers; returns the results that are not donated.

    The list of arguments is extended to hold all registers; dead ones are cleared.
    """
    env = given
    env += [None] * (program.reference[1] - len(given))
    numbers = program.packing.parts(packed) if packed else itertools.repeat(())
    _run_part(program, 0, program.commit, env, numbers, writes=False)
    if program.donated or program.commit < len(program.steps):
        guarded = bool(program.donated)
        if guarded and (-1 not in program.guarded or program.guarded[-1]):
            guard_memory(program, env, -1, crossing(program))
        try:
            with Shield():
                _run_part(program, program.commit, len(program.steps), env, numbers, writes=guarded)
                if program.copied:
                    _torch.copy_each(*_pairs(program.copied, env))
        except BaseException as error:
            note_writes(error)
            raise
    return program.paths.made(env)


def _run_part(
    program: Program,
    start: int,
    end: int,
    env: list[Any],
    numbers: Iterator[Sequence[torch.Tensor]],
    *,
    writes: bool,
) -> None:
    for place in range(start, end):
        step, dead = program.steps[place], program.dead[place]
        if isinstance(step, Instruction):
            program.run_alone(step, env)
            for register in dead:
                env[register] = None
        else:
            _run_piece(step, env, next(numbers), dead)
        if writes and (place not in program.guarded or program.guarded[place]):
            guard_memory(program, env, place, made_while_writing(step))


def _pairs(copied: dict[int, int], env: list[Any]) -> tuple[list[Any], list[Any]]:
    return [env[parameter] for parameter in copied], [env[result] for result in copied.values()]


def guard_memory(program: Program, env: list[Any], place: int, made: Sequence[int]) -> None:
    """Copy those of `made` that alias parameters which are overwritten later.

    Compiled code may return a parameter itself instead of a copy. Which registers do so is found on
    the first run of each place in a program, since it does not change.
    """
    found = program.guarded.get(place)
    if found is None:
        written = {_torch.memory_of(env[parameter]) for parameter in program.donated}
        there = [register for register in made if env[register] is not None]
        found = [register for register in there if _torch.memory_of(env[register]) in written]
        program.guarded[place] = found
    for register in found:
        env[register] = env[register].clone()


def made_while_writing(step: Step) -> list[int]:
    """A step's outputs, except the parameters it overwrites."""
    return step.outputs if isinstance(step, Instruction) else step.returned


def crossing(program: Program) -> list[int]:
    """Registers made before the commit and read after it starts."""
    rest = program.steps[program.commit :]
    made = {r for step in rest for r in step.outputs}
    read = {r for step in rest for r in step.read}
    read |= {*program.results, *program.copied.values()}
    return sorted(r for r in read - made if r >= program.parameters)


def plan(program: Program) -> None:
    """Find where registers die, now that the order of the steps is known."""
    order = [instruction for step in program.steps for instruction in step.instructions]
    plan_memory(order, program.parameters, program.results)
    seen = {*program.results, *program.donated}
    program.dead = []
    for step in reversed(program.steps):
        touched = {*step.read, *step.outputs}
        program.dead.append(sorted(touched - seen))
        seen |= touched
    program.dead.reverse()
    writes = (isinstance(step, Piece) and bool(step.donated) for step in program.steps)
    commits = (place for place, one in enumerate(writes) if one)
    program.commit = next(commits, len(program.steps))
    program.packing = Packing(program.steps)
    program.paths = Paths(program)


ALIGNED: Final = 2
"""The alignment that compilers assume, in 8-byte numbers."""


class Packing:
    """Transfers run-time numbers to a device in one tensor per kind.

    `places` gives, for each piece and each kind of number it takes, where its numbers are.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.registers: dict[type, list[int]] = {}
        self.places: list[list[tuple[int, int, int]]] = []  # which tensor, start, length
        for step in steps:
            if isinstance(step, Piece):
                kinds = step.numbers.items()
                self.places.append([self._add(kind, registers) for kind, registers in kinds])

    def _add(self, kind: type, registers: list[int]) -> tuple[int, int, int]:
        together = self.registers.setdefault(kind, [])
        place = (list(self.registers).index(kind), len(together), len(registers))
        together += [*registers, *registers[:1] * (-len(registers) % ALIGNED)]
        return place

    def parts(self, packed: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        """The tensors of numbers that each piece takes."""
        for places in self.places:
            yield [packed[i].narrow(0, *part) for i, *part in places]

    def pack(self, given: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
        """The run-time numbers among the arguments, as tensors on the device."""
        if not self.registers:
            return []
        pinned = device.type == "cuda"  # so that the copy does not wait for the device
        tensors = []
        for kind, registers in self.registers.items():
            numbers = [given[register] for register in registers]
            tensor = torch.tensor(numbers, dtype=PACKED[kind], pin_memory=pinned)
            tensors.append(tensor.to(device, non_blocking=pinned) if pinned else tensor)
        return tensors


def _run_piece(
    piece: Piece, env: list[Any], packed: Sequence[torch.Tensor], dead: Sequence[int]
) -> None:
    """Run compiled code, handing over `dead` inputs so that it can free them early."""
    inputs = [env[register] for register in piece.inputs]
    inputs += packed
    inputs += [env[register] for register in piece.sizes.values()]
    for register in dead:
        env[register] = None
    results = piece.run(inputs)
    if piece.checked and not results[-1].item():
        raise refusal(piece)
    for register, tensor in zip(piece.returned, results):  # a flag may follow
        env[register] = tensor
    for parameter, result in piece.donated.items():
        env[result] = env[parameter]
    for register in dead:  # outputs that nobody reads
        env[register] = None


def refusal(step: Step) -> StepError:
    """The error of a step whose operand check failed."""
    sites = (i.node.site for i in step.instructions if i.node.site is not None)
    return StepError(
        "an index is out of range, an integer is divided by 0, or a probability is not one, in the "
        f"compiled graph recorded from {next(sites, 'here')}"
    )


# -- results ---------------------------------------------------------------------------------------


class Fix(enum.Enum):
    """How a result must be corrected to match its type, in memory of its own."""

    STRIDES = "strides"  # other strides in dimensions of size 1
    COPY = "copy"


def corrected(call: ProgramRun, tensors: list[Any]) -> list[Any]:
    """Results as their types say; the fixes are found once, as compiled code does not change."""
    program = call.program
    if program.fixes is None:
        program.fixes = _find_fixes(program, tensors, call.arguments, call.types)
    _apply(program.fixes, tensors, call.types)
    return tensors


def _apply(fixes: dict[int, Fix], tensors: list[Any], types: Sequence[TensorType]) -> None:
    for place, fix in fixes.items():
        tensor, type_ = tensors[place], types[place]
        if fix is Fix.STRIDES:
            tensors[place] = tensor.as_strided(type_.shape, type_.stride)
        else:
            tensors[place] = with_layout(tensor, type_)


def _find_fixes(
    program: Program, tensors: list[Any], arguments: Sequence[Any], types: Sequence[TensorType]
) -> dict[int, Fix]:
    taken = storages_of(arguments)
    donated = set(program.donated.values())
    fixes: dict[int, Fix] = {}
    promised = zip(tensors, types, program.results, strict=True)
    for place, (tensor, type_, register) in enumerate(promised):
        if tuple(tensor.shape) != type_.shape or tensor.dtype is not type_.dtype:
            raise StepError(
                f"{program.name}: compiled code made {tensor.dtype} {tuple(tensor.shape)} "
                f"where {type_!r} was promised"
            )
        if register in program.free_strides:
            type_ = TensorType.of_tensor(tensor)
        fix = None if register in donated else _fix(tensor, type_, taken, program.padded)
        if fix is not None:
            fixes[place] = fix
    return fixes


def _fix(tensor: torch.Tensor, type_: TensorType, taken: set[int], padded: bool) -> Fix | None:
    storage = _torch.memory_of(tensor)
    shared = storage in taken
    taken.add(storage)
    if shared or tensor.storage_offset() or tensor.is_conj() or tensor.is_neg():
        return Fix.COPY
    if tensor.stride() == type_.stride:
        return None
    pairs = zip(tensor.stride(), type_.stride, type_.shape, strict=True)
    same_strides = not type_.numel or all(have == want for have, want, size in pairs if size > 1)
    if same_strides:
        return Fix.STRIDES
    return None if padded and _is_padded(tensor, type_) else Fix.COPY


def _is_padded(tensor: torch.Tensor, type_: TensorType) -> bool:
    """Whether dimensions nest in the order the type says, but with gaps between them."""
    end = 0
    for _, dim in sorted((stride, dim) for dim, stride in enumerate(type_.stride)):
        if tensor.shape[dim] > 1:
            if tensor.stride(dim) < max(end, type_.stride[dim]):
                return False
            end = tensor.stride(dim) * tensor.shape[dim]
    return type_.is_dense
