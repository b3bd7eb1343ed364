"""Compiled graphs and how they run: compiled pieces, single instructions, reference instructions.

Donated parameters are overwritten last, when nothing can fail any more. If compiled code fails
before that, the whole graph is rerun with the reference instructions, which report the op and the
user's line, and still compute everything that does not depend on it.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from torpor import _torch
from torpor.backend.data import BackendData, filled, tensors_of
from torpor.backend.device import BackendDevice
from torpor.backend.interrupts import Shield
from torpor.backend.item_getter import item_getter
from torpor.backends.fx.trace import PACKED, Piece, is_number
from torpor.backends.layout import storages_of, with_layout
from torpor.backends.reference.lowering import Instruction, registers_in
from torpor.backends.reference.runtime import run as run_reference
from torpor.backends.reference.runtime import step as run_alone
from torpor.errors import StepError
from torpor.ir.graph import Graph
from torpor.ir.types import TensorType
from torpor.symbols.expressions import Condition, Symbol

Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes a list of tensors, which it may clear (boxed), and returns tensors."""

Replays = Callable[[Compiled, list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes a function and the tensors to call it with."""

ReferenceProgram = tuple[list[Instruction], int, list[int]]


@dataclass(slots=True)
class CompiledPiece:
    """A piece and its compiled function."""

    piece: Piece
    run: Compiled
    text: Callable[[], str]
    returned: list[int] = field(init=False)  # registers of what `run` returns

    def __post_init__(self) -> None:
        donated = set(self.piece.donated.values())
        self.returned = [r for r in self.piece.outputs if r not in donated]


CompiledStep = CompiledPiece | Instruction


@dataclass(slots=True, weakref_slot=True)
class Program:
    """Everything needed to run one graph."""

    name: str
    graph: Graph  # as it was lowered
    reference: ReferenceProgram
    types: dict[int, Any]  # by register
    device: torch.device
    steps: list[CompiledStep] = field(default_factory=list)
    dead: list[list[int]] = field(default_factory=list)  # registers not read after each step
    packing: Packing = field(default_factory=lambda: Packing(()))  # run-time numbers
    donated: dict[int, int] = field(default_factory=dict)  # parameter -> result, both registers
    copied: dict[int, int] = field(default_factory=dict)  # donations that are copied at the end
    commit: int = 0  # the first step that overwrites parameters
    guarded: dict[int, list[int]] = field(default_factory=dict)  # see `guard_memory`
    free_strides: frozenset[int] = frozenset()  # results that may have any strides
    padded: bool = False  # results may have gaps between their rows
    argument_paths: ArgumentPaths | None = None  # set by the first run
    fixes: dict[int, Fix] | None = None  # by position of results; set by the first run
    sizes: dict[Symbol, int] = field(default_factory=dict)  # registers of sizes
    hints: dict[Symbol, int] = field(default_factory=dict)  # the sizes it was compiled with
    conditions: list[Condition] = field(default_factory=list)  # guards on sizes
    broken: BaseException | None = None  # compiled code failed where the reference did not
    replayed: Replays | None = None  # runs a function, or replays its CUDA graph

    @property
    def results(self) -> list[int]:
        return self.reference[2]

    def text(self) -> str:
        """The generated code, for people; code shared by several pieces is shown once."""
        parts: list[str] = []
        shown: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            if isinstance(step, Instruction):
                parts.append(f"# by eager: {step.node.op.name}")
            elif id(step.run) in shown:
                parts.append(f"# step {number}: as step {shown[id(step.run)]}")
            else:
                shown[id(step.run)] = number
                parts.append(step.text())
        return "\n\n".join(parts)


def run(
    program: Program,
    arguments: Sequence[Any],
    types: tuple[TensorType, ...],
    device: BackendDevice,
) -> list[BackendData]:
    """Run a program; returns one handle per result, with an error where it failed."""
    given = None if program.broken is not None else tensors_of(arguments)
    if given is None:
        return run_reference(program.reference, arguments, types, device)
    try:
        tensors = _run_steps(program, given)
    except Exception as error:
        if getattr(error, "inputs_written", False):
            raise
        return _run_again(program, arguments, types, device, error)
    try:
        return _store(program, tensors, arguments, types, device)
    except BaseException as error:
        if program.donated or not isinstance(error, Exception):
            note_writes(error, bool(program.donated))
            raise
        return _run_again(program, arguments, types, device, error)


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
    argument_paths = ArgumentPaths(program)

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        fixes = program.fixes
        if fixes is None or program.broken is not None:
            return slowly(tensors)
        written = argument_paths.written(tensors)
        kept = list(tensors) if keeps else None
        try:
            made = (program.replayed or _called)(plainly, tensors)
        except Exception:
            if kept is None:
                raise
            return slowly(kept)
        results = list(argument_paths.results((*written, *made)))
        _apply(fixes, results, types)
        return results

    def plainly(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with _torch.kernels():
            return compute(program, tensors, ())

    return run


def _called(run: Compiled, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return run(tensors)


def _run_again(
    program: Program,
    arguments: Sequence[Any],
    types: Sequence[TensorType],
    device: BackendDevice,
    error: Exception,
) -> list[BackendData]:
    """Rerun with the reference, for eager's error; if none, the compiled code is broken."""
    results = run_reference(program.reference, arguments, types, device)
    if all(result.error is None for result in results) and not _is_out_of_memory(error):
        program.broken = error
    return results


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the step ran out of memory, so that it may succeed another time."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in str(error)  # what torch says for a CPU


def _run_steps(program: Program, given: list[Any]) -> list[Any]:
    """Run all steps and return the result tensors."""
    argument_paths = program.argument_paths = program.argument_paths or ArgumentPaths(program)
    written = argument_paths.written(given)
    made: Sequence[torch.Tensor]
    if program.replayed is None:
        with _torch.kernels():
            made = compute(program, given, program.packing.pack(given, program.device))
    else:
        with _torch.without_torch_function(), _torch.below_autograd():
            packed = program.packing.pack(given, program.device)
        made = program.replayed(on_tensors(program), [*argument_paths.tensors(given), *packed])
    return list(argument_paths.results((*written, *made)))


class ArgumentPaths:
    """How arguments and computed tensors map to results; built once per program."""

    __slots__ = ("results", "tensors", "written")

    def __init__(self, program: Program) -> None:
        self.tensors = item_getter(tensor_parameters(program))
        self.written = item_getter(list(program.donated))
        over = {register: place for place, register in enumerate(program.donated.values())}
        made = itertools.count(len(program.donated))  # computed results follow
        self.results = item_getter([over[r] if r in over else next(made) for r in program.results])


def on_tensors(program: Program) -> Compiled:
    """`compute` as a function of the tensor arguments followed by the packed numbers."""

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        parameters = tensor_parameters(program)
        given: list[Any] = [None] * parameters_of(program)
        for register, tensor in zip(parameters, tensors):  # packed numbers follow
            given[register] = tensor
        packed = tensors[len(parameters) :]
        tensors.clear()
        with _torch.kernels():
            return compute(program, given, packed)

    return run


def parameters_of(program: Program) -> int:
    """The number of parameters, which are the first registers."""
    return len(program.types) - sum(len(i.outputs) for i in program.reference[0])


def tensor_parameters(program: Program) -> list[int]:
    """The registers of parameters that are tensors."""
    return [r for r in range(parameters_of(program)) if not is_number(program.types[r])]


def compute(
    program: Program, given: list[Any], packed: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run all steps on arguments and packed numbers; returns the results that are not donated.

    The list of arguments is extended to hold all registers; dead ones are cleared.
    """
    env = given
    env += [None] * (program.reference[1] - len(given))
    numbers = ([packed[i].narrow(0, *part) for i, *part in one] for one in program.packing.places)
    _run_part(program, 0, program.commit, env, numbers, writes=False)
    if program.donated:
        if -1 not in program.guarded or program.guarded[-1]:
            guard_memory(program, env, -1, crossing(program))
        try:
            with Shield():
                _run_part(program, program.commit, len(program.steps), env, numbers, writes=True)
                if program.copied:
                    _torch.copy_each(*_pairs(program.copied, env))
        except BaseException as error:
            note_writes(error)
            raise
    over = set(program.donated.values())
    return [env[register] for register in program.results if register not in over]


def _run_part(
    program: Program,
    start: int,
    end: int,
    env: list[Any],
    numbers: Iterator[list[torch.Tensor]],
    *,
    writes: bool,
) -> None:
    for place in range(start, end):
        step, dead = program.steps[place], program.dead[place]
        if isinstance(step, Instruction):
            run_alone(step, env)
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


def made_while_writing(step: CompiledStep) -> list[int]:
    """A step's outputs, except the parameters it overwrites."""
    return step.outputs if isinstance(step, Instruction) else step.returned


def crossing(program: Program) -> list[int]:
    """Registers made before the commit and read after it starts."""
    rest = program.steps[program.commit :]
    pieces = [step.piece for step in rest if isinstance(step, CompiledPiece)]
    made = {r for step in rest for r in _made_by(step)}
    read = {r for piece in pieces for r in piece.inputs}
    read |= {r for step in rest if isinstance(step, Instruction) for r in registers_in(step.args)}
    read |= {*program.results, *program.copied.values()}
    first = parameters_of(program)
    return sorted(r for r in read - made if r >= first)


def _made_by(step: CompiledStep) -> list[int]:
    return step.outputs if isinstance(step, Instruction) else step.piece.outputs


def commit_of(steps: Sequence[CompiledStep]) -> int:
    """The index of the first step that overwrites parameters."""
    writes = (isinstance(step, CompiledPiece) and bool(step.piece.donated) for step in steps)
    return next((place for place, one in enumerate(writes) if one), len(steps))


ALIGNED: Final = 2
"""The alignment that compilers assume, in 8-byte numbers."""


class Packing:
    """Transfers run-time numbers to a device in one tensor per kind.

    `places` gives, for each piece and each kind of number it takes, where its numbers are.
    """

    def __init__(self, steps: Sequence[CompiledStep]) -> None:
        self.registers: dict[type, list[int]] = {}
        self.places: list[list[tuple[int, int, int]]] = []  # which tensor, start, length
        for step in steps:
            if not isinstance(step, Instruction):
                kinds = step.piece.numbers.items()
                self.places.append([self._add(kind, registers) for kind, registers in kinds])

    def _add(self, kind: type, registers: list[int]) -> tuple[int, int, int]:
        together = self.registers.setdefault(kind, [])
        place = (list(self.registers).index(kind), len(together), len(registers))
        together += [*registers, *registers[:1] * (-len(registers) % ALIGNED)]
        return place

    def pack(self, given: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
        """The run-time numbers among the arguments, as tensors on the device."""
        pinned = device.type == "cuda"  # so that the copy does not wait for the device
        tensors = []
        for kind, registers in self.registers.items():
            numbers = [given[register] for register in registers]
            tensor = torch.tensor(numbers, dtype=PACKED[kind], pin_memory=pinned)
            tensors.append(tensor.to(device, non_blocking=pinned) if pinned else tensor)
        return tensors


def _run_piece(
    step: CompiledPiece, env: list[Any], packed: list[torch.Tensor], dead: Sequence[int]
) -> None:
    """Run compiled code, handing over `dead` inputs so that it can free them early."""
    piece = step.piece
    sizes = [env[register] for register in piece.sizes.values()]
    inputs = [*(env[register] for register in piece.inputs), *packed, *sizes]
    for register in dead:
        env[register] = None
    results = step.run(inputs)
    if piece.checked and not results[-1].item():
        raise _refusal(piece)
    for register, tensor in zip(step.returned, results):  # a flag may follow
        env[register] = tensor
    for parameter, result in piece.donated.items():
        env[result] = env[parameter]
    for register in dead:  # outputs that nobody reads
        env[register] = None


def refusal(step: CompiledStep) -> StepError:
    """The error of a step whose operand check failed."""
    assert isinstance(step, CompiledPiece), "no other step refuses anything"
    return _refusal(step.piece)


def _refusal(piece: Piece) -> StepError:
    sites = (i.node.site for i in piece.instructions if i.node.site is not None)
    return StepError(
        "an index is out of range, an integer is divided by 0, or a probability is not one, in the "
        f"compiled graph recorded from {next(sites, 'here')}"
    )


# -- results ---------------------------------------------------------------------------------------


class Fix(enum.Enum):
    """How a result must be corrected to match its type, in memory of its own."""

    STRIDES = "strides"  # other strides in dimensions of size 1
    COPY = "copy"


def _store(
    program: Program,
    tensors: list[Any],
    arguments: Sequence[Any],
    types: tuple[TensorType, ...],
    device: BackendDevice,
) -> list[BackendData]:
    """Handles for results; the fixes are determined once, as compiled code does not change."""
    if program.fixes is None:
        program.fixes = _find_fixes(program, tensors, arguments, types)
    _apply(program.fixes, tensors, types)
    return filled(device, types, tensors)


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
    storage = int(tensor.untyped_storage()._cdata)
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
