"""The base class of backends that compile `torch.fx` modules: what is compiled, and when."""

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
from torpor.backend.compile_thread import (
    is_waited_for,
    mark_as_waited_for,
    on_compile_thread,
)
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.failures import CompileFailure, reproduction
from torpor.backend.lowering import Computation
from torpor.backends import provenance
from torpor.backends.blocks.block_backend import BlockBackend
from torpor.backends.blocks.program import (
    PACKED,
    Compiled,
    Piece,
    Program,
    ProgramRun,
    Step,
    function,
    is_number,
)
from torpor.backends.blocks.registers import Registers
from torpor.backends.fx.equal_pieces import Shared, SharedPieces, key_of
from torpor.backends.fx.failed import failure_of
from torpor.backends.fx.guards import may_refuse
from torpor.backends.fx.trace import NodeError, Traced, has_convolutions, trace
from torpor.backends.reference.lowering import Instruction
from torpor.distributed.ops import ORDERED
from torpor.errors import BackendError, CompileError, TorporWarning
from torpor.inference.infer import types_in
from torpor.ir.graph import Block
from torpor.ir.node import Node
from torpor.ops.spec import spec_of
from torpor.passes import Pass, run_passes
from torpor.passes.limit import limit
from torpor.passes.lists import JOIN_LISTS, SPLIT_LISTS
from torpor.passes.outputs import OUTPUTS
from torpor.passes.overwrite import OVERWRITE
from torpor.passes.repeats import repeats
from torpor.passes.schedule import schedule
from torpor.passes.views import VIEWS
from torpor.symbols.expressions import Condition, Symbol
from torpor.symbols.serialize import assumption, own_names

T = TypeVar("T")


class Refused(Exception):
    """A compiler rejected some of its instructions."""

    def __init__(self, instructions: Sequence[Instruction], reason: BaseException) -> None:
        super().__init__(str(reason))
        self.instructions = instructions
        self.reason = reason


class FailedBefore(Exception):
    """An equal piece has failed to compile before."""


class FxBackend(BlockBackend):
    """Compiles blocks as `torch.fx` modules; eager's kernels run what a compiler rejects."""

    dynamic = True
    takes_donations = True
    packs_numbers = True

    def __init__(self, *, max_nodes: int, equal_subgraphs: bool = False) -> None:
        super().__init__()
        if max_nodes < 1:
            raise BackendError(f"max_nodes is at least 1, not {max_nodes}")
        self.max_nodes = max_nodes
        self.equal_subgraphs = equal_subgraphs  # compile equal pieces once
        self.shared = SharedPieces()
        self.failed: set[Any] = set()  # keys of pieces that failed to compile
        self.refused: set[Any] = set()  # ops the compiler rejected, with their operand types
        self.complaints: list[str] = []  # warnings to issue when a user's thread next compiles

    # -- to be implemented per compiler ------------------------------------------------------------

    @abc.abstractmethod
    def compile_module(self, traced: Traced, piece: Piece) -> tuple[Compiled, Callable[[], str]]:
        """Compile a traced piece: returns the compiled function, and one that gives its code."""

    def in_background(self, program: Program) -> AbstractContextManager[Callable[[], None]]:
        """A context in which `compile_module` may return before compilation is complete.

        It yields a function that waits for all compilations, and raises if one failed.
        """
        return nullcontext(lambda: None)

    def traced_decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """Decompositions to apply while tracing."""
        return None

    def blamed_ops(self, error: BaseException) -> set[str]:
        """The ATen ops that a compiler's error message blames, if any."""
        return set()

    def prefers_channels_last(self, traced: Traced) -> bool:
        """Whether channels-last convolutions are faster here, including conversions around them."""
        return False

    def miscompiles(self, node: Node) -> bool:
        """Whether the compiler is known to generate wrong code for the node."""
        return False

    # -- passes ------------------------------------------------------------------------------------

    def passes(self, device: BackendDevice) -> tuple[Pass, ...]:
        found = self._cut_passes()
        if not self.equal_subgraphs:
            return found
        first, *rest = found
        return (first, SPLIT_LISTS, repeats(device.torch_device), JOIN_LISTS, *rest)

    def _cut_passes(self) -> tuple[Pass, ...]:
        """The passes that partition a graph, except the search for repeats."""
        first = schedule(self.runs_eagerly, may_refuse)
        return (first, limit(self.max_nodes), VIEWS, OUTPUTS, OVERWRITE)

    def why_not(self, node: Node) -> str | None:
        if spec_of(node.op.target).draws(node.args) and not self.draws:
            return "it draws random numbers"
        if self._name(node) in self.refused:
            return "the compiler has rejected it"
        if node.op.target in ORDERED:
            return "it communicates"
        if self.miscompiles(node):
            return "the compiler generates wrong code for it"
        if self._changes_device(node):
            return "it moves tensors between devices"
        numbers = (value.type for value in node.operands if is_number(value.type))
        unknown = any(type_.kind not in PACKED for type_ in numbers)
        return "it takes a number that is not packed" if unknown else None

    def _changes_device(self, node: Node) -> bool:
        """Whether it moves tensors between devices, as `x.cpu()` does on a GPU.

        A copy between `lazy` and the physical device behind it moves nothing: it is compiled.
        """
        values = [value for value in node.operands if not is_number(value.type)]
        read = {self.backend_device(value.type.device) for value in values}
        made = {self.backend_device(v.type.device) for v in node.outputs if v.type is not None}
        return bool(read) and not made <= read

    @staticmethod
    def _name(node: Node) -> Any:
        return (node.op, types_in(node.key))

    # -- the interface -----------------------------------------------------------------------------

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        for computation in computations:
            compile_ = self._compile_in_background if on_compile_thread() else self._compile_quietly
            inside = is_waited_for()  # nested: the outer compile holds the lock
            in_fresh_thread(functools.partial(_alone, inside, compile_, computation.program))
        while self.complaints and not on_compile_thread():
            warnings.warn(self.complaints.pop(0), TorporWarning, stacklevel=2)
        return list(computations)

    def run_again(self, call: ProgramRun, error: Exception) -> list[BackendData]:
        results, program = super().run_again(call, error), call.program
        if all(result.error is None for result in results) and not _is_out_of_memory(error):
            program.broken = error  # not called again
            metrics.count("CompiledGraphsGivenUp")
            self._complain(f"compiled code of {program.name} failed", error)
        return results

    def accepts_sizes(self, computation: Computation, sizes: Mapping[Symbol, int]) -> bool:
        return all(condition.at(sizes) for condition in computation.program.conditions)

    def function(
        self, computation: Computation, device: BackendDevice
    ) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        slowly = super().function(computation, device)
        computation.program.padded = True
        return function(computation.program, computation.result_types, slowly)

    # -- graphs in the disk cache ------------------------------------------------------------------

    def load(self, computation: Computation, saved: bytes) -> Computation:
        in_fresh_thread(functools.partial(self._load_quietly, computation.program, saved))
        return computation

    def _load_quietly(self, program: Program, saved: bytes) -> None:
        with warnings.catch_warnings(), undrawn(program.device):
            warnings.simplefilter("ignore")
            self.load_program(program, saved)

    # -- compiling ---------------------------------------------------------------------------------

    def _compile_in_background(self, program: Program) -> None:
        """Compile while the user's program keeps running and drawing random numbers."""
        with _torch.leave_states_alone():
            self.compile_program(program)

    def _compile_quietly(self, program: Program) -> None:
        """Compile without side effects: suppress warnings, restore random state.

        Compilers draw random inputs to benchmark kernels, from the program's generators.
        """
        with warnings.catch_warnings(), undrawn(program.device):
            warnings.simplefilter("ignore")
            self.compile_program(program)

    def compile_program(self, program: Program) -> None:
        types = dict(program.types)
        with self.in_background(program) as finish:
            self._compile_steps(program)
        try:
            finish()
        except Exception:  # recompile one by one, to find the piece that failed
            self.shared.clear()
            program.types = types
            self._compile_steps(program)

    def _compile_steps(self, program: Program) -> None:
        program.conditions.clear()
        self.failed.clear()
        super().compile_program(program)

    def compile_block(self, block: Block, registers: Registers, program: Program) -> Sequence[Step]:
        piece = registers.piece(block)
        if has_convolutions(piece):
            bound = {*program.results, *program.copied.values()} - program.free_strides
            piece.free = frozenset({*piece.outputs} - {*piece.donated.values()} - bound)
        piece.sizes = program.sizes
        if self.refused and any(self._name(node) in self.refused for node in block.nodes):
            return self._compile_without_refused(block, registers, program)
        try:
            return [self._compile_piece(piece, program)]
        except Refused as refusal:
            self.refused.update(self._name(i.node) for i in refusal.instructions)
            return self._compile_without_refused(block, registers, program)
        except FailedBefore:
            pass
        except Exception as error:
            first = next((node.site for node in block.nodes if node.site), None)
            where = f"{program.name}, {len(block.nodes)} ops from {first}"
            failure = failure_of(block, program, registers, self, error)
            self._complain(f"could not compile {where}", error, failure)
        program.copied.update(piece.donated)
        return self.by_eager(piece.instructions)

    def _compile_without_refused(
        self, block: Block, registers: Registers, program: Program
    ) -> list[Step]:
        graph = run_passes(self._cut_passes(), block.graph())
        program.copied.update(registers.copied(graph))
        return list(self.compile_blocks(graph, registers, program))

    def _compile_piece(self, piece: Piece, program: Program) -> Piece:
        """Compile a piece, unless an equal one has been compiled."""
        compile_or_find = self._shared if self.equal_subgraphs else self._compile_anew
        shared = compile_or_find(piece, program)
        piece.checked = shared.checked
        known = {one.text for one in program.conditions}
        program.conditions += [one for one in shared.conditions if one.text not in known]
        for position, type_ in shared.layouts.items():  # the strides that later pieces will read
            program.types[piece.outputs[position]] = type_
        piece.run, piece.text = shared.run, shared.text
        return piece

    def _shared(self, piece: Piece, program: Program) -> Shared:
        """The compiled code shared by all pieces equal to this one."""
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
        """Compile a piece for all sizes or, if that fails, for the current ones."""
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
            layouts = {piece.outputs.index(register): t for register, t in traced.layouts.items()}
            compiled = self.compile_module(traced, piece)
            conditions = _conditions(traced, piece, program.hints)
            return Shared(*compiled, piece.checked, layouts, conditions)
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
        given = (piece, program.types, program.device, self.traced_decompositions(), program.hints)
        try:
            with metrics.timer("FxTrace"):
                traced = trace(*given, fixed=fixed)
                if self.prefers_channels_last(traced):
                    traced = trace(*given, channels_last=True, fixed=fixed)
        except NodeError as error:
            raise Refused([error.instruction], error.reason) from error
        return traced

    def _complain(
        self, what: str, error: BaseException | None, failure: CompileFailure | None = None
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
    """The guards on sizes that compiling introduced."""
    if traced.open_sizes is None:
        texts = [f"{one.name} == {hints[one]}" for one in piece.sizes]
    else:
        texts = traced.open_sizes.conditions()
    symbols = own_names(piece.sizes)
    return tuple([assumption(text, symbols) for text in texts])


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the step ran out of memory, so that it may succeed another time."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in str(error)  # what torch says for a CPU


@contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    """Restore the random generators on exit.

    A GPU's generator is replaced by a copy meanwhile: setting its state, even to the current one,
    resets the dropout state of cuDNN's RNNs, which then draws an extra number.
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


_COMPILING = threading.Lock()
"""Compilers keep their state in module globals, so only one graph is compiled at a time."""


def _alone(inside: bool, compile_: Callable[[Program], None], program: Program) -> None:
    with nullcontext() if inside else _COMPILING:
        compile_(program)


def in_fresh_thread(function: Callable[[], T]) -> T:
    """Run `function` on a new thread and wait for it.

    Compilers trace, and must not see the modes, dispatch keys and settings of the thread that
    happened to need a result.
    """
    outcome: list[Any] = []
    threads = torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def work() -> None:
        mark_as_waited_for()
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
