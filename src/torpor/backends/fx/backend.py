"""What backends that compile `torch.fx` modules share: lowering, cutting, compiling, running."""

from __future__ import annotations

import abc
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from torpor import _torch, config, metrics
from torpor.backend.beside import is_beside
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.failures import Failure, reproduction
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.backends import provenance
from torpor.backends.fx.failed import failure_of
from torpor.backends.fx.pieces import cut, donate, made_by, read_by
from torpor.backends.fx.program import (
    Compiled,
    CompiledPiece,
    CompiledStep,
    Packing,
    Program,
    commit_of,
    function,
    run,
)
from torpor.backends.fx.saved import dump_program, load_program
from torpor.backends.fx.sharing import Shared, SharedPieces, key_of
from torpor.backends.fx.trace import PACKED, NodeError, Piece, Traced, is_number, trace
from torpor.backends.reference.lowering import (
    Instruction,
    ReferenceLowering,
    plan_memory,
    registers_in,
)
from torpor.errors import BackendError, CompileError, TorporWarning
from torpor.ir.sizes import Condition, Symbol
from torpor.ir.told_sizes import assumption, own_names
from torpor.ops.infer import types_in

T = TypeVar("T")


class Refused(Exception):
    """A compiler refused some of the instructions it was given."""

    def __init__(self, instructions: Sequence[Instruction], reason: BaseException) -> None:
        super().__init__(str(reason))
        self.instructions = instructions
        self.reason = reason


class FailedBefore(Exception):
    """A piece that is equal to another could not be compiled."""


class FxLowering(ReferenceLowering):
    """The reference's instructions, with the type of every register beside them."""

    def build(self) -> Computation:
        computation = super().build()
        types = {register: value.type for value, register in self.emitted.items()}
        computation.program = Program(
            self.name, computation.program, types, self.device.torch_device
        )
        computation.program.donated = self._donated()
        computation.program.loose = frozenset(self.emitted[self.results[i]] for i in self.loose)
        computation.program.sizes = self.sizes
        computation.program.hints = {one: self.hints.get(one, one.value) for one in self.sizes}
        return computation

    def _donated(self) -> dict[int, int]:
        """Donated parameters whose results fit over them."""
        return {
            self.emitted[self.parameters[parameter]]: self.emitted[self.results[result]]
            for parameter, result in self.aliases.items()
            if self.parameters[parameter].type is self.results[result].type
        }


class FxBackend(Backend):
    """Compiles graphs piece by piece; what a compiler refuses runs by eager's kernels."""

    dynamic = True
    takes_donations = True

    def __init__(self, *, max_nodes: int, equal_subgraphs: bool = False) -> None:
        super().__init__()
        if max_nodes < 1:
            raise BackendError(f"max_nodes is at least 1, not {max_nodes}")
        self.max_nodes = max_nodes
        self.equal_subgraphs = equal_subgraphs  # are compiled once
        self.shared = SharedPieces()
        self.failed: set[Any] = set()  # pieces of this graph that could not be compiled
        self.refused: set[Any] = set()  # ops the compiler refused, with the types of their operands
        self.complaints: list[str] = []  # warnings for the next thread of the user's that compiles

    # -- for compilers to fill in ------------------------------------------------------------------

    @abc.abstractmethod
    def compile_module(self, traced: Traced, piece: Piece) -> tuple[Compiled, Callable[[], str]]:
        """Compile a traced piece: a function on its inputs, and a function that shows the code."""

    def in_background(self, program: Program) -> AbstractContextManager[Callable[[], None]]:
        """While `program` is compiled, `compile_module` may return before all is done.

        What the context gives is then called, and returns, or raises, when it is.
        """
        return nullcontext(lambda: None)

    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """The ops that are taken apart while tracing."""
        return None

    def blamed_ops(self, error: BaseException) -> set[str]:
        """The ATen ops a compiler's error is about, as far as it says."""
        return set()

    def prefers_channels_last(self, traced: Traced) -> bool:
        """Convolutions are faster if channels lie side by side, for all that surrounds them."""
        return False

    def miscompiles(self, instruction: Instruction) -> bool:
        """The compiler is known to make wrong code of it."""
        return False

    # -- the interface -----------------------------------------------------------------------------

    def lowering_context(
        self, name: str, device: BackendDevice, post_order: Any = None, emitted: Any = None
    ) -> FxLowering:
        return FxLowering(name, device, post_order, emitted)

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        for computation in computations:
            compile_ = self._compile_beside if is_beside() else self._compile_quietly
            in_fresh_thread(functools.partial(compile_, computation.program))
        while self.complaints and not is_beside():
            warnings.warn(self.complaints.pop(0), TorporWarning, stacklevel=2)
        return list(computations)

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        program = computation.program
        was_broken = program.broken
        results = run(program, arguments, computation.result_types_for(arguments), device)
        if program.broken is not was_broken:
            metrics.count("CompiledGraphsGivenUp")
            self._complain(f"compiled code of {program.name} failed", program.broken)
        return results

    def fits(self, computation: Computation, sizes: Mapping[Symbol, int]) -> bool:
        return all(condition.at(sizes) for condition in computation.program.conditions)

    def function(
        self, computation: Computation, device: BackendDevice
    ) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        slowly = super().function(computation, device)
        computation.program.padded = True
        return function(computation.program, computation.result_types, slowly)

    def computation_text(self, computation: Computation) -> str:
        text: str = computation.program.text()
        return text

    # -- graphs kept on disk -----------------------------------------------------------------------

    def dump_code(self, code: Compiled) -> bytes | None:
        """What `compile_module` made, as bytes; None if that cannot be."""
        return None

    def load_code(
        self, saved: bytes, piece: Piece, program: Program
    ) -> tuple[Compiled, Callable[[], str]]:
        """What `compile_module` made, from the bytes of `dump_code`."""
        raise NotImplementedError(f"backend {self.name!r} keeps no compiled graphs")

    def dump(self, computation: Computation) -> bytes | None:
        """The steps of a graph, unless the compiler failed at some of it: it may not, next time."""
        program = computation.program
        alone = self._runs_alone(program)
        if any(isinstance(step, Instruction) and not alone(step) for step in program.steps):
            return None
        return dump_program(program, self.dump_code)

    def load(self, computation: Computation, saved: bytes) -> Computation:
        in_fresh_thread(functools.partial(self._load_quietly, computation.program, saved))
        return computation

    def _load_quietly(self, program: Program, saved: bytes) -> None:
        with warnings.catch_warnings(), undrawn(program.device):
            warnings.simplefilter("ignore")
            load_program(program, saved, self.load_code)
        for step in program.steps:
            if isinstance(step, Instruction):
                self._note_fallback(step)
        _plan(program)

    # -- compiling ---------------------------------------------------------------------------------

    def _compile_beside(self, program: Program) -> None:
        """Compile while the program goes on, and draws."""
        with _torch.leave_states_alone():
            self._compile_program(program)

    def _compile_quietly(self, program: Program) -> None:
        """Compile without a trace: no warnings about compilers, no random numbers drawn.

        Compilers draw numbers to measure kernels with, from the generators of the program.
        """
        with warnings.catch_warnings(), undrawn(program.device):
            warnings.simplefilter("ignore")
            self._compile_program(program)

    def _compile_program(self, program: Program) -> None:
        types = dict(program.types)
        with self.in_background(program) as finish:
            self._compile_steps(program)
        try:
            finish()
        except Exception:  # one piece after the other, it turns out which one it was
            self.shared.clear()
            program.types, program.steps = types, []
            self._compile_steps(program)
        _plan(program)

    def _compile_steps(self, program: Program) -> None:
        instructions, _, results = program.reference
        copies = [i.copy() for i in instructions]
        program.conditions.clear()
        self.failed.clear()
        alone = self._runs_alone(program)
        device = program.device if self.equal_subgraphs else None
        given = (copies, results, program.types, self.max_nodes, alone, device)
        steps = cut(*given, program.donated)
        program.copied = donate(steps, program.donated)
        bound = {*results, *program.copied.values()} - program.loose
        for step in steps:
            if isinstance(step, Piece) and step.has_convolutions:
                step.free = frozenset({*step.outputs} - {*step.donated.values()} - bound)
            program.steps += self._compile_step(step, program)

    def _runs_alone(self, program: Program) -> Callable[[Instruction], bool]:
        types = program.types

        def alone(instruction: Instruction) -> bool:
            drawn = instruction.spec.draws(instruction.args) and not self.draws
            if drawn or self._name(instruction) in self.refused:
                return True
            if self.miscompiles(instruction) or _changes_device(instruction, types):
                return True
            numbers = (types[r] for r in registers_in(instruction.args) if is_number(types[r]))
            return any(type_.kind not in PACKED for type_ in numbers)

        return alone

    @staticmethod
    def _name(instruction: Instruction) -> Any:
        return (instruction.node.op, types_in(instruction.node.key))

    def _compile_step(self, step: Piece | Instruction, program: Program) -> list[CompiledStep]:
        if isinstance(step, Instruction):
            self._note_fallback(step)
            return [step]
        step.sizes = program.sizes
        if self.refused and any(self._name(i) in self.refused for i in step.instructions):
            return self._compile_without_refused(step, program)
        try:
            return [self._compile_piece(step, program)]
        except Refused as refusal:
            self.refused.update(map(self._name, refusal.instructions))
            return self._compile_without_refused(step, program)
        except FailedBefore:
            return self._by_eager(step, program)
        except Exception as error:
            first = next((i.node.site for i in step.instructions if i.node.site), None)
            where = f"{program.name}, {len(step.instructions)} ops from {first}"
            failure = failure_of(step, program, self, error)
            self._complain(f"could not compile {where}", error, failure)
            return self._by_eager(step, program)

    def _by_eager(self, piece: Piece, program: Program) -> list[CompiledStep]:
        for instruction in piece.instructions:
            self._note_fallback(instruction)
        program.copied.update(piece.donated)
        return list(piece.instructions)

    def _compile_without_refused(self, piece: Piece, program: Program) -> list[CompiledStep]:
        steps = cut(
            piece.instructions,
            piece.outputs,
            program.types,
            self.max_nodes,
            self._runs_alone(program),
            donated=piece.donated,
        )
        program.copied.update(donate(steps, piece.donated))
        return [compiled for step in steps for compiled in self._compile_step(step, program)]

    def _compile_piece(self, piece: Piece, program: Program) -> CompiledPiece:
        """Compile a piece, unless an equal one was compiled before."""
        compile_or_find = self._shared if self.equal_subgraphs else self._compile_anew
        shared = compile_or_find(piece, program)
        piece.checked = shared.checked
        known = {one.text for one in program.conditions}
        program.conditions += [one for one in shared.conditions if one.text not in known]
        for position, type_ in shared.laid.items():  # as later pieces will find them
            program.types[piece.outputs[position]] = type_
        return CompiledPiece(piece, shared.run, shared.text)

    def _shared(self, piece: Piece, program: Program) -> Shared:
        """What is compiled for all pieces that are equal to this one."""
        key = (key_of(piece, program.types, program.device), provenance.settings_of_torch())
        if key in self.failed:
            raise FailedBefore
        found = self.shared.get(key)
        if found is not None and all(one.at(program.hints) for one in found.conditions):
            metrics.count("EqualSubgraphs")
            return found
        try:
            found = self.shared[key] = self._compile_anew(piece, program)
        except Refused:
            raise
        except Exception:
            self.failed.add(key)
            raise
        return found

    def _compile_anew(self, piece: Piece, program: Program) -> Shared:
        """Compile a piece: for all sizes, or if that fails for those that occur."""
        try:
            return self._compile_traced(piece, program, fixed=not piece.sizes)
        except Refused:
            raise
        except Exception:
            if not piece.sizes:
                raise
        metrics.count("CompiledForFixedSizes")
        return self._compile_traced(piece, program, fixed=True)

    def _compile_traced(self, piece: Piece, program: Program, *, fixed: bool) -> Shared:
        traced = self._traced(piece, program, fixed)
        try:
            laid = {piece.outputs.index(register): t for register, t in traced.laid.items()}
            compiled = self.compile_module(traced, piece)
            conditions = _conditions(traced, piece, program.hints)
            return Shared(*compiled, piece.checked, laid, conditions)
        except Exception as error:
            blamed = [
                instruction
                for op in self.blamed_ops(error)
                for instruction in traced.sources.get(op, ())
            ]
            if not blamed:
                raise
            raise Refused(blamed, error) from error

    def _traced(self, piece: Piece, program: Program, fixed: bool) -> Traced:
        given = (piece, program.types, program.device, self.decompositions(), program.hints)
        try:
            with metrics.timer("FxTrace"):
                traced = trace(*given, fixed=fixed)
                if self.prefers_channels_last(traced):
                    traced = trace(*given, channels_last=True, fixed=fixed)
        except NodeError as error:
            raise Refused([error.instruction], error.reason) from error
        return traced

    def _note_fallback(self, instruction: Instruction) -> None:
        node = instruction.node
        metrics.count_line(f"fallback::{node.op.name}", str(node.site))

    def _complain(
        self, what: str, error: BaseException | None, failure: Failure | None = None
    ) -> None:
        reason = f"{type(error).__name__}: {error}".strip()
        text = f"backend {self.name!r}: {what}: {reason}"
        if config.strict:
            failed = CompileError(text)
            failed.failure = failure
            raise failed from error
        if failure is not None:
            text = f"{text}\n{reproduction(failure)}"
        hint = "The reference's kernels run it instead; with config.strict this is an error."
        self.complaints.append(f"{text}\n{hint}")


def _conditions(traced: Traced, piece: Piece, hints: Mapping[Symbol, int]) -> tuple[Condition, ...]:
    """What compiling assumed about sizes."""
    if traced.open_sizes is None:
        texts = [f"{one.name} == {hints[one]}" for one in piece.sizes]
    else:
        texts = traced.open_sizes.conditions()
    symbols = own_names(piece.sizes)
    return tuple([assumption(text, symbols) for text in texts])


def _changes_device(instruction: Instruction, types: dict[int, Any]) -> bool:
    """It brings tensors from one device to another, as `x.cpu()` does: no compiler is needed."""
    read = {types[r].device for r in registers_in(instruction.args) if not is_number(types[r])}
    made = {types[r].device for r in instruction.outputs if types[r] is not None}
    return bool(read) and not made <= read


def _plan(program: Program) -> None:
    """Find where registers die, now that the order of steps is known."""
    parameters = len(program.types) - sum(len(i.outputs) for i in program.reference[0])
    order: list[Instruction] = []
    for step in program.steps:
        order += [step] if isinstance(step, Instruction) else step.piece.instructions
    plan_memory(order, parameters, program.results)
    kept = {*program.results, *program.donated}
    seen: set[int] = set(kept)
    program.dead = []
    for step in reversed(program.steps):
        part = step if isinstance(step, Instruction) else step.piece
        touched = {*read_by(part), *made_by(part)}
        program.dead.append(sorted(touched - seen))
        seen |= touched
    program.dead.reverse()
    program.commit = commit_of(program.steps)
    program.packing = Packing(program.steps)


@contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    """The generators are afterwards what they were before.

    That of a GPU draws from a copy of its state meanwhile: to set its state, even to what it is,
    starts the dropout of cuDNN's recurrent networks anew, for which it draws once more.
    """
    before = torch.get_rng_state()
    try:
        with _on_a_copy(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def _on_a_copy(device: torch.device) -> Iterator[None]:
    torch.cuda.init()
    generator = torch.cuda.default_generators[device.index or 0]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(own.clone_state())
    try:
        with _torch.set_cuda_states_by_copies():
            yield
    finally:
        generator.graphsafe_set_state(own)


def in_fresh_thread(function: Callable[[], T]) -> T:
    """Run `function` on a thread of its own and wait for it.

    Compilers trace, and must not meet the modes, dispatch keys and settings of whoever happens to
    ask for a number.
    """
    outcome: list[Any] = []
    threads = torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def work() -> None:
        torch.set_num_threads(threads)
        if device is not None:
            torch.cuda.set_device(device)
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, name="torpor-compile")
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]  # what `function` returned
