"""When compiled code is replayed as a CUDA graph, with a graph that is none: a CPU stands in."""

from __future__ import annotations

import ctypes
import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

import torpor
from torpor._torch import window_on
from torpor.backends.blocks.program import Program
from torpor.backends.inductor import cuda_graphs
from torpor.backends.inductor.cuda_graphs import LAST, PATIENCE, CapturedGraph, GraphedCode, Turns
from torpor.overrides.draws import DRAWING


class Block:
    """Some memory of a pool, which gets it back when nobody owns it any more."""

    def __init__(self, pool: list[bytearray], size: int) -> None:
        matching = [i for i, memory in enumerate(pool) if len(memory) == size]
        self.memory = pool.pop(matching[0]) if matching else bytearray(size)
        weakref.finalize(self, pool.append, self.memory)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor on this memory, which owns it."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        array = type("Owned", (ctypes.c_char * len(self.memory),), {})
        owned = array.from_address(address)
        owned.block = self
        whole = torch.frombuffer(owned, dtype=tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride())


class Stage:
    """Captures by running once with nothing written, replays by running for good.

    Results lie in pools: what nobody owns is used again by the next graph that is captured.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.graphs: set[CapturedGraph] = set()
        self.captured: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
        self.pools: list[list[bytearray]] = [[]]
        self.serial = 0
        self.current = True
        self.dry = False
        self.failure: Exception | None = None

    def is_current(self) -> bool:
        return self.current

    def shared_pool(self) -> int:
        return 0

    def new_pool(self) -> int:
        self.pools.append([])
        return len(self.pools) - 1

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def window(self, tensor: Tensor, replay: Callable[[], object]) -> Tensor:
        return window_on(tensor, (replay, self.pools))

    def capture(
        self,
        run: functools.partial[Sequence[Tensor]],
        pool: int,
        draws: bool,
        turns: Turns,
    ) -> tuple[list[Tensor], Callable[[], object]]:
        if self.failure is not None:
            raise self.failure
        code, inputs = run.args
        read = [window_on(tensor, None) for tensor in inputs]
        self.dry = True
        made = run()
        self.dry = False
        inputs.clear()  # as compiled code lets go of what it is given
        results = [Block(self.pools[pool], one.nbytes).like(one) for one in made]
        addresses = [result.data_ptr() for result in results]
        shapes = [(one.shape, one.stride(), one.dtype) for one in made]

        def replay() -> None:
            for address, shape, new in zip(addresses, shapes, code(list(read)), strict=True):
                memory = (ctypes.c_char * new.nbytes).from_address(address)
                size, stride, dtype = shape
                torch.frombuffer(memory, dtype=dtype).as_strided(size, stride).copy_(new)

        return results, replay


class Code:
    """Twice each input; with `writes`, the first one grows by 1."""

    def __init__(self, stage: Stage, writes: bool = False) -> None:
        self.stage, self.writes = stage, writes

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        if self.writes and not self.stage.dry:
            inputs[0].add_(1)
        return [tensor * 2 for tensor in inputs]


def numbers(*starts: float) -> list[Tensor]:
    return [torch.arange(4.0) + start for start in starts]


class Running(GraphedCode):
    """With the code that it calls."""

    def __init__(self, stage: Stage, written: Sequence[int]) -> None:
        super().__init__(written, lambda: stage)
        self.code = Code(stage, bool(written))

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        return self(self.code, inputs)


def make(stage: Stage, written: Sequence[int] = ()) -> Running:
    return Running(stage, written)


def replays() -> int:
    return torpor.metrics.counters().get("CudaGraphReplayed", 0)


def captures() -> int:
    return torpor.metrics.counters().get("CudaGraphCaptured", 0)


@pytest.fixture(autouse=True)
def _counted_from_here() -> None:
    torpor.metrics.reset()


def run(replayed: Running, inputs: list[Tensor], times: int = 1) -> None:
    """Run and compare; nothing of a run outlives it."""
    for _ in range(times):
        expected = [tensor * 2 for tensor in inputs]
        results = replayed.run(list(inputs))
        assert all(map(torch.equal, results, expected))
        del results


def test_inputs_that_stay_are_read_where_they_are() -> None:
    replayed, inputs = make(Stage()), numbers(0, 10)
    run(replayed, inputs, 2)
    assert replayed.state() == "no CUDA graph yet"
    run(replayed, inputs, 3)
    inputs[0].fill_(7)
    run(replayed, inputs, 2)
    assert replays() == 5
    assert replayed.state() == "replayed as a CUDA graph"
    assert replayed.graph is not None
    assert replayed.graph.copied == []


def moving(count: int) -> list[Tensor]:
    """As many tensors, all at once, so that no address comes back."""
    return [torch.arange(4.0) + start for start in range(count)]


def test_an_input_that_never_comes_to_rest_is_copied() -> None:
    replayed, (still,) = make(Stage()), numbers(0)
    for other in moving(10):
        run(replayed, [still, other])
    assert replays() == 10 - PATIENCE
    assert replayed.graph is not None
    assert replayed.graph.copied == [1]


@pytest.mark.parametrize("look", [lambda t: t.expand(3, 4), lambda t: t.unfold(0, 3, 1)])
def test_an_input_whose_elements_share_memory_is_copied(look: Callable[[Tensor], Tensor]) -> None:
    replayed = make(Stage())
    for other in moving(10):
        run(replayed, [look(other)])
    assert replays() == 10 - PATIENCE


def test_inputs_that_leave_their_places_are_copied_from_then_on_and_what_was_let_go() -> None:
    stage = Stage()
    step, parameter = make(stage), torch.zeros(4)
    places = numbers(1, 2, 3)

    def run() -> Sequence[Tensor]:  # other masks each time, where the last ones lay
        return step.run([*(window_on(place, None) for place in places), parameter])

    for _ in range(10):
        run()
    assert step.graph is not None
    assert step.graph.copied == []
    before = replays()
    for number in range(20):
        places[number % 3] = torch.full((4,), float(number))
        results = run()
        assert torch.equal(results[number % 3], places[number % 3] * 2)
        del results
    assert replays() == before + 19  # all but the first
    assert captures() == 2
    assert step.graph.copied == [0, 1, 2]


def test_inputs_that_are_never_let_go_stay_where_they_are() -> None:
    stage = Stage()
    step, weights, activation = make(stage), numbers(1, 2, 3), torch.zeros(4)
    for _ in range(10):
        step.run([*weights, activation])
    held = []
    for number in range(5):
        held.append(torch.full((4,), float(number)))
        step.run([*weights, held[-1]])
    assert step.graph is not None
    assert step.graph.copied == [3]


def test_an_input_that_is_written_to_is_not_copied_because_another_one_moves() -> None:
    stage = Stage()
    step, state, mask = make(stage, written=[0]), torch.zeros(4), torch.zeros(3)
    for _ in range(10):
        step.run([state, mask])
    step.run([state.clone(), mask])
    step.run([state, mask])
    for _ in range(3):
        step.run([state, mask.clone()])
    assert state[0].item() == 14
    assert step.graph is not None
    assert step.graph.copied == [1]


def test_an_input_that_leaves_its_place_once_is_not_copied() -> None:
    stage = Stage()
    step, batch = make(stage), torch.zeros(4)
    for _ in range(10):
        step.run([batch])
    before = replays()
    (result,) = step.run(numbers(3))
    assert torch.equal(result, numbers(3)[0] * 2)
    for _ in range(3):
        step.run([batch])
    assert replays() == before + 3
    assert captures() == 1
    assert step.graph is not None
    assert step.graph.copied == []


def test_a_graph_that_is_captured_in_inference_mode_is_replayed_outside() -> None:
    stage = Stage()
    step = make(stage)
    with torch.inference_mode():
        for number in range(20):
            step.run(numbers(number))
    assert step.graph is not None
    assert step.graph.copied == [0]
    before = replays()
    (result,) = step.run(numbers(3))
    assert torch.equal(result, numbers(3)[0] * 2)
    assert not result.is_inference()
    assert replays() == before + 1


def test_an_input_that_is_written_to_and_leaves_its_place_is_waited_for() -> None:
    stage = Stage()
    step, batch = make(stage, written=[0]), torch.zeros(3)
    state = torch.zeros(4)
    for _ in range(10):
        step.run([state, batch])
    state = state.clone()
    before = replays()
    step.run([state, batch])
    assert replays() == before
    assert state[0].item() == 11


def test_an_input_may_come_to_rest_first() -> None:
    replayed, inputs = make(Stage()), moving(3)
    for other in inputs:
        run(replayed, [other])
    run(replayed, [inputs[-1]], 3)
    assert replays() == 2
    assert replayed.graph is not None
    assert replayed.graph.copied == []


def test_more_than_is_worth_copying_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_COPIED", 8)
    replayed = make(Stage())
    inputs = moving(LAST + 2)
    for other in inputs[:LAST]:
        run(replayed, [other])
    assert replayed.state() == "no CUDA graph yet"
    for other in inputs[LAST:]:
        run(replayed, [other])
    assert replays() == 0
    assert replayed.state() == "no CUDA graph: inputs of 0 MiB come at new addresses"


def test_a_large_input_may_come_to_rest_after_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_COPIED", 8)
    replayed, inputs = make(Stage()), moving(PATIENCE + 4)
    for other in inputs:
        run(replayed, [other])
    run(replayed, [inputs[-1]], 4)
    assert replays() == 3


def test_what_is_written_to_is_written_to_once_and_never_a_copy() -> None:
    replayed, (state,) = make(Stage(), written=[0]), numbers(0)
    for step in range(6):
        results = replayed.run([state])
        assert torch.equal(state, torch.arange(4.0) + step + 1)
        assert torch.equal(results[0], state * 2)
        del results
    assert replays() == 4
    kept = []
    for _ in range(4):
        kept.append(torch.zeros(4))
        replayed.run([kept[-1]])
        assert kept[-1].tolist() == [1, 1, 1, 1]
    assert replays() == 4


def test_a_parameter_that_moved_is_followed() -> None:
    replayed, inputs = make(Stage()), numbers(0, 10)
    run(replayed, inputs, 4)
    assert replays() == 2
    elsewhere = numbers(20, 30)
    run(replayed, elsewhere, 12)
    assert replays() > 4
    assert torpor.metrics.counters()["CudaGraphCaptured"] == 2


def test_a_result_that_is_held_is_not_written_over() -> None:
    replayed, (x,) = make(Stage()), numbers(0)
    run(replayed, [x], 3)
    (held,) = replayed.run([x])
    part = held[1:]
    del held
    x.fill_(5)
    (other,) = replayed.run([x])
    assert part.tolist() == [2, 4, 6]
    assert other.tolist() == [10] * 4
    assert torpor.metrics.counters()["CudaGraphInUse"] == 1
    before = replays()
    del part, other
    run(replayed, [x])
    assert replays() == before + 1


def test_a_result_that_is_always_held_is_copied() -> None:
    replayed, (x,) = make(Stage()), numbers(0)
    held = []
    for step in range(20):
        x.fill_(step)
        held += replayed.run([x])
    assert [int(result[0]) for result in held] == [2 * step for step in range(20)]
    assert replayed.kept == {0}
    assert replays() > 8


def test_single_numbers_are_always_copies() -> None:
    replayed, x = make(Stage()), torch.zeros(())
    held = []
    for step in range(8):
        x.fill_(step)
        held += replayed.run([x])
    assert [int(result) for result in held] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert replays() == 6


def test_a_graph_spares_what_was_held_when_it_was_captured() -> None:
    stage = Stage()
    first, second = make(stage), make(stage)
    (x,), (y,) = numbers(0), numbers(10)
    for _ in range(4):
        held = first.run([x])
        run(second, [y])
        assert held[0].tolist() == [0, 2, 4, 6]
        del held
    before = replays()
    held = first.run([x])
    run(second, [y])
    assert replays() == before + 2
    assert held[0].tolist() == [0, 2, 4, 6]
    del held
    held = second.run([y])
    run(first, [x])
    assert replays() == before + 3
    assert held[0].tolist() == [20, 22, 24, 26]


def test_a_graph_uses_the_memory_of_results_that_nobody_held_when_it_was_captured() -> None:
    stage = Stage()
    first, second = make(stage), make(stage)
    (x,), (y,) = numbers(0), numbers(10)
    for _ in range(4):
        run(first, [x])
        run(second, [y])
    assert first.graph is not None
    assert second.graph is not None
    assert first.graph.results[0].data_ptr() == second.graph.results[0].data_ptr()
    before = replays()
    held = first.run([x])
    run(second, [y])
    assert replays() == before + 1
    assert held[0].tolist() == [0, 2, 4, 6]


def forward_and_backward(steps: int, keep: bool = False) -> tuple[Running, Running]:
    """A graph that is given what another one returns, by somebody who lets go of it or not."""
    stage = Stage()
    forward, backward = make(stage), make(stage)
    (x,) = numbers(0)
    for step in range(steps):
        x.fill_(step)
        saved = list(forward.run([x]))
        kept = list(saved) if keep else []
        (result,) = backward.run(saved)
        assert result.tolist() == [4 * step] * 4
        assert not kept or kept[0].tolist() == [2 * step] * 4
        del result, kept, saved
    return forward, backward


def test_what_a_graph_is_given_and_nobody_else_holds_is_written_over() -> None:
    forward, backward = forward_and_backward(10)
    assert forward.graph is not None
    assert backward.graph is not None
    assert list(backward.graph.consumed) == [0]
    assert backward.graph.results[0].data_ptr() == forward.graph.results[0].data_ptr()
    assert torpor.metrics.counters()["CudaGraphCaptured"] == 2
    assert replays() > 10


def test_what_a_graph_is_given_and_somebody_holds_is_left_alone() -> None:
    forward, backward = forward_and_backward(10, keep=True)
    assert forward.graph is not None
    assert backward.graph is not None
    assert backward.graph.consumed == {}
    assert backward.graph.results[0].data_ptr() != forward.graph.results[0].data_ptr()
    assert replays() > 10


def test_what_is_held_once_is_left_alone_by_a_graph_that_may_write_over_it() -> None:
    stage = Stage()
    forward, backward = make(stage), make(stage)
    (x,) = numbers(0)
    for step in range(12):
        x.fill_(step)
        saved = list(forward.run([x]))
        kept = saved[0][1:] if step == 8 else None
        (result,) = backward.run(saved)
        assert result.tolist() == [4 * step] * 4
        assert kept is None or kept.tolist() == [2 * step] * 3
        del result, kept, saved
    assert torpor.metrics.counters()["CudaGraphInUse"] == 1


def test_results_that_are_always_held_when_another_graph_runs_do_not_stay_in_its_way() -> None:
    stage = Stage()
    forward, backward = make(stage), make(stage)
    (x,) = numbers(0)
    gradients: list[Tensor] = []
    for step in range(60):
        x.fill_(step)
        saved = list(forward.run([x]))  # while the gradient of the last step is still there
        assert all(gradient.tolist() == [4 * (step - 1)] * 4 for gradient in gradients)
        gradients.clear()
        gradients += backward.run(saved)
        if step == 40:
            before = replays()
    assert replays() == before + 2 * 19


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_is_held_ever_changes(seed: int) -> None:
    """Graphs that read what others return, run in any order, by somebody who holds some of it."""
    chance, stage = random.Random(seed), Stage()
    graphs = [make(stage) for _ in range(4)]
    inputs = numbers(*range(4))
    held: list[tuple[Tensor, list[float]]] = []

    def check() -> None:
        assert all(tensor.tolist() == numbers for tensor, numbers in held)

    for step in range(150):
        chain = [inputs[chance.randrange(4)].fill_(step + chance.random())]
        for graph in graphs if chance.random() < 0.8 else chance.sample(graphs, 2):
            expected = (chain[0] * 2).tolist()
            chain = list(graph.run(chain))
            assert chain[0].tolist() == expected
            if chance.random() < (0.02 if step > 50 else 0.3):
                part = chain[0][chance.randrange(2) :]
                held.append((part, part.tolist()))
            check()
        if chance.random() < 0.3:
            held.clear()
    assert replays() > 100


def test_a_capture_that_fails_is_told_and_costs_nothing_but_the_graph() -> None:
    stage = Stage()
    stage.failure = RuntimeError("operation not permitted\nwhen stream is capturing")
    replayed, inputs = make(stage), numbers(0)
    run(replayed, inputs, 6)
    assert replays() == 0
    assert replayed.state() == "no CUDA graph: RuntimeError: operation not permitted"
    assert torpor.metrics.counters()["CudaGraphsGivenUp"] == 1


def test_on_another_stream_nothing_is_replayed() -> None:
    stage = Stage()
    replayed, inputs = make(stage), numbers(0)
    run(replayed, inputs, 4)
    before = replays()
    stage.current = False
    run(replayed, inputs, 2)
    assert replays() == before


def test_a_graph_that_is_dropped_leaves_its_results_to_those_who_hold_them() -> None:
    replayed, (x,) = make(Stage()), numbers(3)
    run(replayed, [x], 3)
    (held,) = replayed.run([x])
    replayed.graph = None
    assert held.tolist() == [6, 8, 10, 12]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that Inductor is asked to replay."""
    found: list[Program] = []
    inductor = pytest.importorskip("torpor.backends.inductor.compile")
    monkeypatch.setattr(inductor, "replayed", lambda program, may_draw: found.append(program))
    monkeypatch.setattr(torpor.config, "compile_after", 0)
    return found


@pytest.mark.parametrize(("wanted", "asked"), [(True, 1), (False, 0)])
def test_graphs_are_the_users_choice(wanted: bool, asked: int, compiled: list[Program]) -> None:
    with torpor.using("inductor", cuda_graphs=wanted):
        (torpor.lazy(torch.ones(3)) * 2 + 1).tolist()
    assert len(compiled) == asked


def test_the_memory_of_graphs_goes_with_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[weakref.ref[Stage]] = []

    def stage(device: torch.device) -> Stage:
        made = Stage()
        stages.append(weakref.ref(made))
        return made

    monkeypatch.setattr(cuda_graphs, "unsafe", lambda program, may_draw: None)
    monkeypatch.setattr(cuda_graphs, "cuda_memory", stage)
    x = torpor.lazy(torch.ones(3, 3))
    gc.disable()
    try:
        with torpor.using("inductor", compile_after=0):
            for _ in range(6):
                y = (x @ x).relu()
                torpor.sync()
                del y
            torpor.wait()
    finally:
        gc.enable()
    assert replays() > 0
    assert stages
    assert all(made() is None for made in stages)


def test_what_runs_elsewhere_or_draws_is_not_safe(compiled: list[Program]) -> None:
    with torpor.using("inductor"):
        (torpor.lazy(torch.ones(3)) * 2 + 1).tolist()
    with torpor.using("inductor", rng="fast"):
        torch.nn.functional.dropout(torpor.lazy(torch.ones(3))).tolist()
    plain, drawing = compiled[0], compiled[-1]
    assert cuda_graphs.unsafe(plain, False) == "it runs on cpu"
    for program in (plain, drawing):
        program.device = torch.device("cuda", 0)
    assert cuda_graphs.unsafe(plain, False) == "a tensor is on cpu"
    anywhere = torch.device("lazy", 0)
    for program in (plain, drawing):
        program.types = {
            register: type_.on(anywhere) if isinstance(type_, torpor.ir.TensorType) else type_
            for register, type_ in program.types.items()
        }
    assert cuda_graphs.unsafe(plain, False) is None
    assert "draws random numbers" in str(cuda_graphs.unsafe(drawing, False))
    assert cuda_graphs.unsafe(drawing, True) is None


def test_an_op_that_runs_at_once_waits_for_whoever_swaps_generators() -> None:
    x = torpor.lazy(torch.ones(3))
    drawn: list[Tensor] = []
    thread = threading.Thread(target=lambda: drawn.append(x.bernoulli(0.5)))
    with DRAWING:
        thread.start()
        thread.join(0.2)
        assert not drawn
    thread.join(10)
    assert len(drawn) == 1


# -- kernels that draw in their turn ---------------------------------------------------------------


def test_a_turn_is_no_reason_to_copy_and_sets_the_generator_of_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    monkeypatch.setattr(
        cuda_graphs, "set_turn", lambda generator, *turn: taken.append((generator, *map(int, turn)))
    )
    stage, (x,) = Stage(), numbers(0)
    replayed = GraphedCode((), lambda: stage, turns=[(1, 2)])
    for step in range(6):
        results = replayed(
            lambda given: [given[0] * 2], [x, torch.tensor(7), torch.tensor(4 * step)]
        )
        assert torch.equal(results[0], x * 2)
        del results
    assert replayed.graph is not None
    assert replayed.graph.copied == []
    (generator,) = replayed.graph.generators
    assert taken == [(generator, 7, 4 * step) for step in (2, 3, 4, 5)]
