"""Replays compiled code as a CUDA graph: one launch instead of one per kernel.

A CUDA graph reads and writes the addresses it was captured with. Parameters and optimizer state
keep their addresses, because steps overwrite them (donation); an input whose address changes is
copied to a static buffer. Results are handed out without a copy, in the graph's own memory: it is
replayed only while nobody holds results of its last run. When anything does not match, the compiled
code is called directly, and the graph is captured anew if that persists.

All graphs of a device and stream share a memory pool, as only one of them runs at a time. A capture
spares the results of other graphs that are held at that time: its replays never overwrite those.
They may overwrite anything else, including inputs that nobody else holds, such as the activations
that forward saves for backward. So a graph is replayed only while nobody holds any other result. If
a later graph is captured into the memory of a result, the result no longer owns it; its tensors
become windows on that memory (`GraphMemory.window`), valid until the later graph is replayed.
Graphs whose results conflict repeatedly get pools of their own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torpor import _torch, metrics
from torpor.backend.item_getter import ItemGetter, item_getter
from torpor.backends.blocks.program import (
    Compiled,
    Program,
    is_number,
    note_writes,
)
from torpor.backends.inductor.cuda import cuda_memory
from torpor.backends.layout import clone_strided, repeated_dims
from torpor.backends.reference.lowering import Instruction, registers_in
from torpor.ir.types import TensorType
from torpor.overrides.draws import IN_ORDER, IN_TURN, set_turn

STEADY = 2  # runs at the same address after which an input is considered static
PATIENCE = 6  # runs in which all inputs may become static, such as other graphs' results
LAST = 40  # runs in which large inputs may: graphs that feed each other settle one by one
OFTEN = 2  # mismatches before the graph is replaced: one may be an exception
MOST_COPIED = 1 << 28  # bytes of inputs to copy before a run; with more, a graph does not pay
HELD, FREE, TOO_OFTEN = 4, 1, 12  # a result in use adds 4 to the pressure, a replay takes off 1
MOST_STEADY = 256  # the upper bound of `steady`, which repeated captures double

Tensors = list[torch.Tensor]
Replay = Callable[[], object]
Turns = dict[int, torch.Generator]
"""Generators of kernels that draw in their turn, by address of the offset (`overrides.draws`)."""


class GraphMemory(Protocol):
    """Captures and replays graphs."""

    lock: Any  # held while a graph is captured or replayed
    graphs: set[CapturedGraph]  # those whose results may be held
    captured: weakref.WeakSet[CapturedGraph]  # all that are alive
    serial: int  # graphs captured so far

    def is_current(self) -> bool:
        """Whether the caller's kernels are ordered with the graphs."""

    def shared_pool(self) -> Any:
        """The memory pool that graphs share."""

    def new_pool(self) -> Any:
        """A memory pool for one graph."""

    def capture(
        self, run: Callable[[], Sequence[torch.Tensor]], pool: Any, draws: bool, turns: Turns
    ) -> tuple[Tensors, Replay]:
        """Capture `run`: returns its results, without contents yet, and the replay that fills them.

        Allocates from `pool`. Kernels draw from the device's generator, or from those of `turns`.
        """

    def aside(self) -> AbstractContextManager[None]:
        """For code that runs without a graph: allocate memory that graphs can reclaim."""

    def window(self, tensor: torch.Tensor, replay: Replay) -> torch.Tensor:
        """A tensor on the memory of another that does not keep the memory from being reused.

        Holds `replay`, which keeps the memory mapped.
        """


@dataclass(frozen=True, slots=True)
class ResultView:
    """A tensor as a view of a result of a graph."""

    graph: CapturedGraph
    place: int  # of the result
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor, graph: CapturedGraph, place: int) -> ResultView:
        return ResultView(graph, place, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        return self.graph.results[self.place].as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True, eq=False, weakref_slot=True)
class CapturedGraph:
    """A graph, and where it reads and writes."""

    serial: int
    pool: Any
    addresses: tuple[int, ...]  # of static inputs
    stay: list[int]  # indices of static inputs
    memories_given: dict[int, Any]  # weak references to those that are not results of graphs
    resting: ItemGetter  # gets the static inputs
    copied: list[int]  # indices of inputs that are copied to `buffers`
    buffers: Tensors
    results: Tensors
    copied_out: list[int]  # results that are handed out as copies
    replay: Replay
    generators: list[torch.Generator]  # of turns
    consumed: dict[int, ResultView]  # inputs that it may overwrite
    spared: dict[int, set[int]]  # results of other graphs that it does not, by serial
    owned: set[int] = field(init=False)  # results whose memory later graphs do not use
    memories: list[int] = field(init=False)  # of the results
    users: list[int] = field(init=False)  # their reference counts while nobody holds a result

    def __post_init__(self) -> None:
        self.owned = set(range(len(self.results)))
        self.memories = [_torch.memory_of(result) for result in self.results]
        self.users = list(map(_torch.users_of, self.memories))

    def held(self) -> list[int]:
        """The indices of results that somebody holds."""
        now = list(map(_torch.users_of, self.memories))
        if now == self.users:
            return []
        return [i for i, (n, users) in enumerate(zip(now, self.users, strict=True)) if n > users]

    def let_go(self, place: int, window: Callable[[torch.Tensor, Replay], torch.Tensor]) -> None:
        """Allow other graphs to reuse the memory of a result."""
        result = window(self.results[place], self.replay)
        self.results[place] = result
        self.owned.discard(place)
        self.memories[place] = _torch.memory_of(result)
        self.users[place] = _torch.users_of(self.memories[place])


class GraphedCode:
    """Calls the same compiled code each time; as a CUDA graph once its inputs are static."""

    def __init__(
        self,
        written: Collection[int],
        memory: Callable[[], GraphMemory],
        draws: bool = False,
        turns: Sequence[tuple[int, int]] = (),
        device: torch.device | str = "cpu",
        unseen: Collection[int] = (),
    ) -> None:
        self.draws = draws  # random numbers, from the generator of the device
        self.turns = list(turns)  # indices of (seed, offset) inputs of kernels that draw
        self.device = device
        self.numbers = frozenset(i for turn in turns for i in turn)  # no kernel reads them
        self.written = frozenset(written)  # inputs that the code writes to: must be static
        self.unseen = frozenset(unseen)  # results that only other compiled code reads
        self.find_memory = memory
        self.memory: GraphMemory | None = None
        self.graph: CapturedGraph | None = None
        self.off: str | None = None  # why there will never be a graph
        self.runs = 0
        self.steady = STEADY
        self.addresses: list[int] = []
        self.streaks: list[int] = []  # consecutive runs of each input at its address
        self.matched = False  # the last run's inputs matched the graph
        self.strays = 0  # runs that did not match the graph
        self.restless: set[int] = set()  # inputs that have moved since a capture
        self.kept: set[int] = set()  # results that outlive the next run, so are copied
        self.pressure = 0  # how often results were still in use
        self.apart = False  # it needs a memory pool of its own

    def __call__(self, code: Compiled, inputs: Tensors) -> Sequence[torch.Tensor]:
        if self.off is not None:
            return code(inputs)
        with _torch.without_torch_function():
            addresses = [tensor.data_ptr() for tensor in inputs]
            for place in self.numbers:
                addresses[place] = 0
            results = self._by_graph(code, inputs, addresses)
        if results is not None or self.memory is None:
            return code(inputs) if results is None else results
        with self.memory.aside():
            return code(inputs)

    def state(self) -> str:
        """The graph's status, for people."""
        if self.off is not None:
            return f"no CUDA graph: {self.off}"
        return "no CUDA graph yet" if self.graph is None else "replayed as a CUDA graph"

    def _watch(self, addresses: list[int]) -> None:
        if len(self.addresses) != len(addresses):
            self.addresses, self.streaks = addresses, [0] * len(addresses)
        else:
            pairs = zip(addresses, self.addresses, self.streaks)
            self.streaks = [streak + 1 if new == old else 0 for new, old, streak in pairs]
            self.addresses = addresses
        self.runs += 1

    def _by_graph(self, code: Compiled, inputs: Tensors, addresses: list[int]) -> Tensors | None:
        """The results by replaying the graph; None if that is not possible now."""
        memory = self.memory = self.memory or self.find_memory()
        with memory.lock:
            if not memory.is_current():
                return None
            graph = self._matching(memory, code, inputs, addresses)
            if graph is None:
                return None
            for place in graph.consumed:
                inputs[place] = None  # type: ignore[call-overload]  # drop this reference
            if self._in_use(memory, graph):
                for place, part in graph.consumed.items():
                    inputs[place] = part.tensor()
                return None
            with _torch.below_autograd():
                return self._replayed(memory, graph, inputs)

    def _matching(
        self, memory: GraphMemory, code: Compiled, inputs: Tensors, addresses: list[int]
    ) -> CapturedGraph | None:
        graph = self.graph
        if graph is None:
            self._watch(addresses)
            ready = self._at_rest(inputs)
        elif graph.resting(addresses) == graph.addresses:
            self.matched = True
            return graph
        else:
            ready = self._outgrown(graph, inputs, addresses)
        if not ready:
            return None
        with torch.inference_mode(False), _torch.kernels():  # for use in any mode
            return self._captured(memory, code, inputs, addresses)

    def _outgrown(self, graph: CapturedGraph, inputs: Tensors, addresses: list[int]) -> bool:
        """Handle a mismatch: whether another graph should be captured now."""
        if self.matched:
            self._saw(graph)
        self._watch(addresses)
        self.strays += 1
        if self.strays < OFTEN:
            return False
        if self._may_copy(graph, inputs, addresses):
            self.graph = None
            return True
        if self._at_rest(inputs):  # captured too early: wait longer next time
            self.graph, self.steady = None, min(2 * self.steady, MOST_STEADY)
        return False

    def _saw(self, graph: CapturedGraph) -> None:
        """Record that the inputs matched the graph in the last run."""
        self.matched = False
        for place, address in zip(graph.stay, graph.addresses, strict=True):
            self.addresses[place] = address
            self.streaks[place] = max(self.streaks[place], self.steady)

    def _may_copy(self, graph: CapturedGraph, inputs: Tensors, addresses: list[int]) -> bool:
        """Try to mark inputs that have moved since the capture as copied; whether that suffices.

        Inputs whose captured memory is freed are marked too: as one dropout mask has moved, so will
        the next.
        """
        pairs = zip(graph.stay, graph.resting(addresses), graph.addresses, strict=True)
        moved = {place for place, now, then in pairs if now != then}
        gone = {place for place, memory in graph.memories_given.items() if memory.expired()}
        before = self.restless
        for more in (gone - self.written, set[int]()):
            self.restless = before.union(graph.copied, moved, more)
            copied = self._moving()
            if not self.written.intersection(copied) and _bytes(inputs, copied) <= MOST_COPIED:
                return True
        self.restless = before
        return False

    def _moving(self) -> list[int]:
        """The inputs that are not static."""
        pairs = enumerate(self.streaks)
        return [i for i, streak in pairs if streak < self.steady or i in self.restless]

    def _at_rest(self, inputs: Tensors) -> bool:
        """Whether every input is static or may be copied."""
        if self.runs <= self.steady:
            return False
        moving = self._moving()
        if any(i in self.written for i in moving):
            return False
        if self.runs <= PATIENCE and moving:
            return False
        size = _bytes(inputs, moving)
        if size > MOST_COPIED:
            self.restless = set()
            if self.runs > LAST:
                self._give_up(f"inputs of {size >> 20} MiB come at new addresses")
            return False
        return True

    def _captured(
        self, memory: GraphMemory, code: Compiled, inputs: Tensors, addresses: list[int]
    ) -> CapturedGraph | None:
        copied = self._moving()
        stay = sorted({*range(len(inputs))}.difference(copied))
        buffers = [clone_strided(inputs[i]) for i in copied]
        generators = [torch.Generator(self.device) for _ in self.turns]
        offsets = [inputs[offset].data_ptr() for _, offset in self.turns]
        turns = dict(zip(offsets, generators, strict=True))
        parts = _taken_out(memory, inputs, stay)
        foreign = [i for i in stay if i not in parts and i not in self.numbers]
        memories = dict(zip(foreign, _torch.weak_memories([inputs[i] for i in foreign])))
        pool, spared = self._room(memory)
        consumed: dict[int, ResultView] = {}
        if spared is not None:
            consumed = {
                i: part
                for i, part in parts.items()
                if part.graph.pool == pool and part.place not in spared[part.graph.serial]
            }
        given = {i: part.tensor() for i, part in parts.items()}
        if spared is not None:
            _make_room(memory, pool, spared)
        for i, part in parts.items():
            inputs[i] = part.tensor()
        given.update(zip(copied, buffers, strict=True))
        run = functools.partial(_run_anew, code, [given.pop(i, t) for i, t in enumerate(inputs)])
        try:
            results, replay = memory.capture(run, pool, self.draws, turns)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return None
        memory.serial += 1
        self.strays = 0
        metrics.count("CudaGraphCaptured")
        resting = item_getter(stay)
        out = [
            i for i, result in enumerate(results)
            if i in self.kept or (result.numel() == 1 and i not in self.unseen)
        ]  # fmt: skip
        self.graph = CapturedGraph(
            memory.serial, pool, resting(addresses), stay, memories, resting, copied,
            list(map(_once, buffers)), results, out, replay, generators, consumed, spared or {},
        )  # fmt: skip
        memory.captured.add(self.graph)
        return self.graph

    def _room(self, memory: GraphMemory) -> tuple[Any, dict[int, set[int]] | None]:
        """The pool for the next capture, and the results to spare there, by serial.

        None to spare if the pool is private.
        """
        pool = memory.shared_pool()
        spared: dict[int, set[int]] = {}
        for other in memory.captured:
            spared[other.serial] = held = set(other.held())
            if other.pool == pool and not held <= other.owned:  # it might be overwritten
                self.apart = True
        return (memory.new_pool(), None) if self.apart else (pool, spared)

    def _give_up(self, reason: str) -> None:
        self.off, self.graph = reason, None
        metrics.count("CudaGraphsGivenUp")

    def _in_use(self, memory: GraphMemory, graph: CapturedGraph) -> bool:
        """Whether somebody holds a result that the replay would overwrite."""
        nothing: set[int] = set()
        for other in list(memory.graphs):
            held = other.held()
            if not held:
                memory.graphs.discard(other)
            elif other.pool == graph.pool and not graph.spared.get(
                other.serial, nothing
            ).issuperset(held):
                self._press(held if other is graph else [])
                return True
        self.pressure = max(0, self.pressure - FREE)
        return False

    def _press(self, held: list[int]) -> None:
        """Handle results that are held repeatedly: capture anew, handing out copies of them.

        If another graph's results are held, this one gets a pool of its own.
        """
        self.pressure += HELD
        metrics.count("CudaGraphInUse")
        if self.pressure >= TOO_OFTEN:
            self.pressure = 0
            self.kept.update(held)
            self.apart |= not held
            self.graph = None

    def _replayed(self, memory: GraphMemory, graph: CapturedGraph, inputs: Tensors) -> Tensors:
        if graph.copied:
            _torch.copy_each(graph.buffers, [_once(inputs[i]) for i in graph.copied])
        for (seed, offset), generator in zip(self.turns, graph.generators, strict=True):
            set_turn(generator, inputs[seed], inputs[offset])
        inputs.clear()
        results = [result.detach() for result in graph.results]
        copies = [_room_for(results[place]) for place in graph.copied_out]  # may fail
        try:
            graph.replay()
            metrics.count("CudaGraphReplayed")
            memory.graphs.add(graph)
            for place, copy in zip(graph.copied_out, copies, strict=True):
                made = results[place]
                results[place] = clone_strided(made) if copy is None else copy.copy_(made)
        except BaseException as error:
            note_writes(error, bool(self.written))
            raise
        return results


def _room_for(tensor: torch.Tensor) -> torch.Tensor | None:
    """Memory for a copy of `tensor`; None if its layout is unusual."""
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return torch.empty_like(tensor) if plain or tensor.numel() == 1 else None


def _run_anew(code: Compiled, inputs: Tensors) -> Tensors:
    """The results of `code`, copied where they alias its inputs."""
    given = _torch.weak_memories(inputs)
    taken = {memory.cdata for memory in given}
    results = code(inputs)
    return [clone_strided(one) if _torch.memory_of(one) in taken else one for one in results]


def _bytes(inputs: Tensors, places: Collection[int]) -> int:
    return sum(inputs[i].numel() * inputs[i].element_size() for i in places)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with each of its memory's elements once, as `copy_` into it requires."""
    if 0 in tensor.stride():
        for dim in repeated_dims(TensorType.of_tensor(tensor)):
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _taken_out(memory: GraphMemory, inputs: Tensors, stay: Sequence[int]) -> dict[int, ResultView]:
    """Remove the inputs that are results of graphs, which nobody else may hold, from the list.

    They are replaced by None, and returned as views of those results.
    """
    places = {
        address: (graph, place)
        for graph in memory.captured
        for place, address in enumerate(graph.memories)
    }
    parts: dict[int, ResultView] = {}
    for i in stay:
        found = places.get(_torch.memory_of(inputs[i]))
        plain = not (inputs[i].is_conj() or inputs[i].is_neg())
        if found is not None and plain and inputs[i].dtype is found[0].results[found[1]].dtype:
            parts[i] = ResultView.of(inputs[i], *found)
            inputs[i] = None  # type: ignore[call-overload]  # see above
    return parts


def _make_room(memory: GraphMemory, pool: Any, spared: dict[int, set[int]]) -> None:
    """Let the next graph captured reuse the memory of all results that it does not spare."""
    for other in memory.captured:
        if other.pool == pool:
            for place in other.owned - spared[other.serial]:
                other.let_go(place, memory.window)


def unsafe(program: Program, may_draw: bool) -> str | None:
    """Why a program cannot be a CUDA graph; None if it can.

    Programs that run in program order (`may_draw`) may draw: a replay draws what the kernels would.
    """
    device = program.device
    if device.type != "cuda":
        return f"it runs on {device}"
    numbers = {register for turn in _turns(program) for register in turn}
    for register, type_ in program.types.items():
        if type_ is not None and not is_number(type_) and register not in numbers:
            where = device if type_.device.type == "lazy" else type_.device
            if where != device:
                return f"a tensor is on {where}"
    if _draws(program) and not may_draw:
        return "it draws random numbers, while the program does"
    for step in program.steps:
        if isinstance(step, Instruction) and _has_numbers(step, program.types):
            return f"{step.node.op.name}, which runs by itself, takes a number that changes"
    return None


def _draws(program: Program) -> bool:
    return any(i.spec.draws(i.args) or i.spec.target in IN_ORDER for i in program.reference[0])


def _turns(program: Program) -> list[tuple[int, int]]:
    """The seed and offset parameters of ops that draw in their turn."""
    found: dict[tuple[int, int], None] = {}
    for instruction in program.reference[0]:
        if instruction.spec.target in IN_TURN:
            seed, offset = instruction.args[:2]
            if max(seed, offset) < program.parameters:
                found[seed, offset] = None
    return list(found)


def _has_numbers(instruction: Instruction, types: dict[int, Any]) -> bool:
    return any(is_number(types[register]) for register in registers_in(instruction.args))


def replayed(program: Program, may_draw: bool) -> GraphedCode | None:
    """A program whose steps are replayed as one CUDA graph; None if that is unsafe."""
    if unsafe(program, may_draw) is not None:
        return None
    parameters = program.tensors
    written = [parameters.index(parameter) for parameter in program.donated]
    over = set(program.donated.values())
    memory = functools.partial(cuda_memory, program.device)
    turns = [(parameters.index(seed), parameters.index(offset)) for seed, offset in _turns(program)]
    returned = [register for register in program.results if register not in over]
    unseen = [place for place, register in enumerate(returned) if register in program.free_strides]
    return GraphedCode(written, memory, _draws(program), turns, program.device, unseen)
