"""Puts all pieces of a program on one tape, which the native library runs without the GIL."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from types import MethodType
from typing import Any, Final
from weakref import ref

import torch

from torpor import _torch, config
from torpor.backend.device import cores
from torpor.backend.native_library import NATIVE
from torpor.backends.blocks.program import (
    Compiled,
    Piece,
    Program,
    Step,
    crossing,
    note_writes,
    refusal,
)
from torpor.backends.inductor.saved import SOURCE
from torpor.backends.inductor.tape import Action, NotUnderstood, Tape, read
from torpor.backends.reference.lowering import Instruction, registers_in
from torpor.ir.types import TensorType

_LOG = logging.getLogger(__name__)


class Taped:
    """Runs the compiled code of a program from a tape."""

    def __init__(self, program: Program, library: Any) -> None:
        self.steps = program.steps
        self.writes = bool(program.donated)
        self.library = library
        self.tape = library.tape(*assembled(program, tapes_of(program.steps)))
        # run on one core, in the background
        self.one_core = is_light(program) and not has_fixed_threads(program.steps)

    def leaves_cores(self) -> bool:
        """Whether a run leaves a core to the program: it uses one, or all that torch may use."""
        return self.one_core or torch.get_num_threads() == 1 < cores()

    def __call__(self, code: Compiled, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            with _torch.kernels():
                results = self.library.run_tape(self.tape, tensors, self.one_core)
        except Exception:
            raise  # nothing fails after parameters are overwritten (`_committing`)
        except BaseException as error:  # Ctrl-C: after the tape has run
            note_writes(error, self.writes)
            raise
        if isinstance(results, int):  # the number of the piece whose check failed
            raise refusal(self.steps[results])
        return results  # type: ignore[no-any-return]  # from C++


def taped(program: Program) -> Taped | None:
    """All steps of `program` on a tape; None if impossible, or if the library is not loaded yet."""
    if program.device.type != "cpu":
        return None
    if NATIVE.library is None:
        _WITHOUT.append(ref(program))
        return None
    try:
        return Taped(program, NATIVE.library)
    except NotUnderstood as reason:
        _LOG.info("%s is run by Python: %s", program.name, reason)
    except Exception as error:
        if config.strict:
            raise
        _LOG.warning("%s is run by Python: %r", program.name, error)
    return None


_WITHOUT: deque[ref[Program]] = deque(maxlen=1024)
"""Programs compiled before the library was loaded."""


def _tape_all() -> None:
    """Make the tapes of programs that were compiled before the library was loaded."""
    while _WITHOUT:
        program = _WITHOUT.popleft()()
        if program is not None and program.replayed is None:
            program.replayed = taped(program)


NATIVE.on_load(_tape_all)


def assembled(
    program: Program, tapes: Sequence[Tape]
) -> tuple[list[Action], int, list[int], list[int]]:
    """The actions of all pieces, the number of slots, and the slots of inputs and results."""
    actions: list[Action] = []
    slots = program.reference[1]  # registers have the first slots
    inputs = program.tensors
    packed = list(range(slots, slots + len(program.packing.registers)))
    slots += len(packed)
    steps = zip(program.steps, tapes, program.packing.places, program.dead, strict=True)
    for number, (step, tape, numbers, dead) in enumerate(steps):
        assert isinstance(step, Piece), "others have no tape"
        if number == program.commit:
            writing = len(actions)
        slots = _add_piece(actions, slots, number, step, tape, numbers, packed)
        left = [register for register in step.returned if register not in dead]
        if number >= program.commit and left:
            actions.append(("guarded", list(program.donated), left))
        if dead:
            actions.append(("free", list(dead)))
    if program.donated:
        if program.commit == len(program.steps):
            writing = len(actions)
        actions[writing:] = _committing(actions[writing:], program)
    over = set(program.donated.values())
    results = [register for register in program.results if register not in over]
    return actions, slots, inputs + packed, results


_MAY_FAIL: Final = ("empty", "constant", "shaped", "aligned")


def _committing(actions: list[Action], program: Program) -> list[Action]:
    """`actions`, which overwrite parameters, with everything that may fail moved to the front."""
    if any(action[0] in ("call", "flag") for action in actions):
        raise NotUnderstood("an op is called when parameters have been written over")
    made = {action[1] for action in actions if action[0] in ("part", "alias")}
    first = [a for a in actions if a[0] in _MAY_FAIL and a[1] not in made]
    moved = set(map(id, first))
    guarded = ("guarded", list(program.donated), crossing(program))
    copies = [("copies", list(program.copied.items()))] if program.copied else []
    return [*first, guarded, *(a for a in actions if id(a) not in moved), *copies]


def _add_piece(
    actions: list[Action],
    slots: int,
    number: int,
    piece: Piece,
    tape: Tape,
    numbers: list[tuple[int, int, int]],
    packed: list[int],
) -> int:
    """Add the actions of a piece; returns the new number of slots."""
    own = []
    for which, start, length in numbers:
        actions.append(("part", slots, packed[which], (length,), (1,), start))
        own.append(slots)
        slots += 1
    given = [*piece.inputs, *own]
    if len(given) != tape.inputs:
        raise NotUnderstood("a piece with sizes")
    moved, results = tape.placed(given, slots)
    actions += moved
    inner = list(range(slots, slots + tape.slots - tape.inputs))
    slots += len(inner)
    if piece.checked:
        actions.append(("flag", results[-1], number))
    for register, slot in zip(piece.returned, results):  # a flag may follow
        actions.append(("alias", register, slot))
    for parameter, result in piece.donated.items():
        actions.append(("alias", result, parameter))
    if own or inner:
        actions.append(("free", own + inner))
    return slots


def tapes_of(steps: Sequence[Step]) -> list[Tape]:
    """The tape of each step, shared by equal steps; raises for a step that eager runs."""
    known: dict[int, Tape] = {}
    found = []
    for step in steps:
        if isinstance(step, Instruction):
            raise NotUnderstood(f"{step.node.op.name} runs by eager")
        if id(step.run) not in known:
            known[id(step.run)] = tape_of(step.run)
        found.append(known[id(step.run)])
    return found


def tape_of(run: Compiled) -> Tape:
    """The tape of a piece's code, compiled in this process or loaded from the disk cache."""
    if isinstance(run, MethodType):  # from the disk cache
        names = run.__func__.__globals__
        if SOURCE in names:
            return read(names[SOURCE], names)
    made = _torch.inductor_module(run)
    if made is None:
        raise NotUnderstood("code that is not a module of Inductor's for a CPU")
    source, names, constants = made
    return read(source, names | constants)


def has_fixed_threads(steps: Sequence[Step]) -> bool:
    """Whether kernels use a number of threads fixed at compile time, ignoring the current setting.

    Inductor generates such code unless the setting equals the machine's number of cores.
    """
    pieces = {id(step.run): step for step in steps if isinstance(step, Piece)}
    return any("num_threads(" in piece.text() for piece in pieces.values())


# -- what a run costs ------------------------------------------------------------------------------

NODE: Final = 8e-6
"""Seconds to record a node, roughly."""
ELEMENT: Final = 0.25e-9
"""Seconds to read or compute one element on one core."""
FLOP: Final = 2e-11
"""Seconds per addition or multiplication of a matrix product on one core."""


_PRODUCTS: Final = ("mm", "matmul", "linear", "conv", "attention", "dot", "einsum")
_HEAVY: Final = (
    "linalg_", "_linalg_", "cholesky", "geqrf", "ormqr", "triangular_solve", "lu_unpack", "_fft_",
    "fft_", "_cdist", "cdist", "_pdist", "_thnn_", "mkldnn_rnn", "lstm", "gru", "rnn",
)  # fmt: skip


def is_light(program: Program) -> bool:
    """Whether running on one core costs no more time than overlapping with recording saves.

    With `n` cores, a run takes at best `1/n` of the time. Estimated, not measured: results may
    depend on the number of cores, and must not depend on the machine's load.
    """
    instructions = program.reference[0]
    run = sum(_seconds(instruction, program.types) for instruction in instructions)
    return cores() > 1 and run * (cores() - 1) / cores() < NODE * len(instructions)


def _seconds(instruction: Instruction, types: dict[int, Any]) -> float:
    """The estimated time of an op on one core; infinite for inherently slow ops."""
    name = instruction.spec.target._opname
    if name.startswith(_HEAVY):
        return math.inf
    made = [_numel(types[register]) for register in instruction.outputs]
    given = [_numel(types[register]) for register in registers_in(instruction.args)]
    seconds = ELEMENT * max(sum(made), sum(given))
    if any(word in name for word in _PRODUCTS):
        largest = sorted([*given, *made])[-3:]
        window = 10 if "conv" in name else 1  # assumes at most that many elements per kernel side
        product = math.prod(largest) / _batch(instruction, types)
        seconds += FLOP * 2 * window * math.sqrt(product)  # the product of mk, kn and mn
    return seconds


def _batch(instruction: Instruction, types: dict[int, Any]) -> int:
    """The number of matrix products in a batched one."""
    type_ = types[instruction.outputs[0]]
    is_batch = "bmm" in instruction.spec.target._opname and isinstance(type_, TensorType)
    return max(type_.shape[0], 1) if is_batch else 1


def _numel(type_: Any) -> int:
    return type_.numel if isinstance(type_, TensorType) else 1
