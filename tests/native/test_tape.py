"""Compiled steps on a tape: they do what the same kernels do when Python calls them."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torpor
from torpor.backend.device import cores
from torpor.backend.native_library import NATIVE
from torpor.backends.inductor import taped
from torpor.backends.inductor.tape import NotUnderstood
from torpor.backends.inductor.taped import Taped
from torpor.errors import StepError

Actions = list[tuple[Any, ...]]


def run(library: Any, actions: Actions, inputs: list[Tensor], results: list[int]) -> Any:
    tape = library.tape(actions, 9, list(range(len(inputs))), results)
    return library.run_tape(tape, list(inputs), False)


# -- actions ---------------------------------------------------------------------------------------


def test_allocating_and_calling(library: Any) -> None:
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    made = run(
        library,
        [
            ("empty", 2, (2, 4), (4, 1), torch.float32),
            ("call", "aten::mm", "out", {}, [(0, 0), (1, 1), (2, 2)], [], []),
            ("part", 3, 2, (8,), (1,), 0),
        ],
        [a, b], [2, 3],
    )  # fmt: skip
    assert torch.equal(made[0], a @ b)
    assert torch.equal(made[1], (a @ b).flatten())
    assert made[0].untyped_storage()._cdata == made[1].untyped_storage()._cdata


def test_several_results_lists_and_constants(library: Any) -> None:
    a, constant = torch.randn(4, 3), torch.ones(4, 3)
    made = run(
        library,
        [
            ("constant", 1, constant),
            ("call", "aten::cat", "", {1: 1}, [], [(0, [(True, 0), (True, 1)])], [2]),
            ("call", "aten::max", "dim", {1: 0}, [(0, 2)], [], [6, 3]),
            ("call", "aten::index", "Tensor", {},
             [(0, 0)], [(1, [(False, 0), (True, 4)])], [5]),
        ],
        [a, torch.empty(0), torch.empty(0), torch.empty(0), torch.tensor([2, 0])], [2, 3, 5],
    )  # fmt: skip
    both = torch.cat([a, constant], 1)
    assert torch.equal(made[0], both)
    assert torch.equal(made[1], both.max(0).indices)
    assert torch.equal(made[2], a[:, [2, 0]])


def test_what_is_freed_is_gone_and_inputs_are_let_go_of(library: Any) -> None:
    given = torch.randn(3)
    seen = weakref.ref(given.untyped_storage())
    tape = library.tape([("free", [0])], 1, [0], [])
    inputs = [given]
    assert library.run_tape(tape, inputs, False) == []
    assert inputs == []
    del given
    gc.collect()
    assert seen() is None


def test_other_sizes_than_compiled_for_are_refused(library: Any) -> None:
    with pytest.raises(RuntimeError, match=r"input: sizes \[4, 2\] and strides"):
        run(library, [("shaped", 0, (4, 2), (2, 1), "input")], [torch.ones(2, 4).t()], [0])
    run(library, [("shaped", 0, (1, 2), (99, 1), "input")], [torch.ones(1, 2)], [0])


def test_another_dtype_than_compiled_for_is_refused(library: Any) -> None:
    action = ("shaped", 0, (2,), (1,), "mm", torch.float32)
    run(library, [action], [torch.ones(2)], [0])
    with pytest.raises(RuntimeError, match="mm: dtype Long where the code was compiled for"):
        run(library, [action], [torch.ones(2, dtype=torch.int64)], [0])


def test_memory_that_is_not_aligned_is_refused(library: Any) -> None:
    run(library, [("aligned", 0, 16)], [torch.ones(8)], [0])
    with pytest.raises(RuntimeError, match="not aligned to 16 bytes"):
        run(library, [("aligned", 0, 16)], [torch.ones(8)[1:]], [0])
    unlucky = torch.frombuffer(bytearray(100), dtype=torch.uint8)[: 3 * 16]
    run(library, [("aligned", 0, 16)], [unlucky], [0])  # as by torch: wherever it lies


def test_a_flag_that_is_not_set_ends_the_run(library: Any) -> None:
    written = torch.zeros(1)
    actions: Actions = [
        ("flag", 0, 7),
        ("call", "aten::add_", "Tensor", {}, [(0, 1), (1, 1)], [], []),
    ]
    assert run(library, actions, [torch.tensor(False), written], [1]) == 7
    (kept,) = run(library, actions, [torch.tensor(True), written + 1], [1])
    assert kept.item() == 2
    assert written.item() == 0


def test_an_error_of_an_op_is_told(library: Any) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run(
            library,
            [("call", "aten::mm", "", {}, [(0, 0), (1, 1)], [], [2])],
            [torch.ones(2, 3), torch.ones(2, 3)], [2],
        )  # fmt: skip


def test_bad_tapes_are_refused(library: Any) -> None:
    with pytest.raises(ValueError, match="no action"):
        library.tape([("sing", 0)], 1, [], [])
    with pytest.raises(ValueError, match="takes 1 tensors, not 0"):
        library.run_tape(library.tape([], 1, [0], []), [], False)
    with pytest.raises(TypeError, match="takes tensors"):
        library.run_tape(library.tape([], 1, [0], []), [5], False)
    with pytest.raises(ValueError, match="PyCapsule"):
        library.run_tape(5, [], False)


def test_python_goes_on_while_a_tape_runs(library: Any) -> None:
    big = torch.randn(700, 700)
    actions: Actions = [("call", "aten::mm", "", {}, [(0, 0), (1, 0)], [], [1])] * 40
    tape = library.tape(actions, 2, [0], [1])
    thread = threading.Thread(target=library.run_tape, args=(tape, [big], True))
    thread.start()
    count = 0
    while thread.is_alive():
        count += 1
    assert count > 1000


def test_one_core_is_one_core_for_this_thread_and_this_run(library: Any) -> None:
    threads, seen = torch.get_num_threads(), []
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(torch.get_num_threads()))
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    tape = library.tape([("kernel", address, [(True, 0)])], 1, [0], [])
    for one_core in (False, True, False):
        library.run_tape(tape, [torch.ones(1)], one_core)
    assert seen == [threads, 1, threads]
    there: list[int] = []
    thread = threading.Thread(target=lambda: there.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert there == [threads]  # what new threads start with has not changed


def test_kernels_get_addresses_and_numbers(library: Any) -> None:
    seen: list[tuple[int | None, int]] = []
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(
        lambda address, number: seen.append((address, number))
    )
    given = torch.ones(3)
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    run(library, [("kernel", address, [(True, 0), (False, -7)])], [given], [0])
    assert seen == [(given.data_ptr(), -7)]
    with pytest.raises(ValueError, match="too many"):
        library.tape([("kernel", address, [(False, 0)] * 3000)], 1, [], [])


@pytest.mark.parametrize("count", [1, 6, 7, 16, 17, 192, 193, 511, 1000])
def test_kernels_may_have_any_number_of_arguments(count: int, library: Any) -> None:
    seen: list[tuple[int, ...]] = []
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(
        lambda *numbers: seen.append(numbers)
    )
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    run(library, [("kernel", address, [(False, i) for i in range(count)])], [torch.ones(3)], [0])
    assert seen == [tuple(range(count))]


# -- steps -----------------------------------------------------------------------------------------


@pytest.fixture
def compiling(library: Any) -> Iterator[None]:
    pytest.importorskip("torch._inductor")
    with torpor.using("inductor", compile_after=1):
        yield


def tapes() -> list[Taped]:
    """Those of all programs compiled so far."""
    return [one for one in gc.get_objects() if type(one) is Taped]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.one = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.two = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.one(self.token(tokens))))
        return F.cross_entropy(self.two(x).flatten(0, 1), tokens.flatten())


def trained(steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    net = torpor.lazy(Net())
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        tokens = torpor.lazy((torch.arange(12).view(3, 4) * (step + 2)) % 11)
        optimizer.zero_grad()
        loss = net(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)  # one op returns a list of norms
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


@pytest.mark.usefixtures("compiling")
def test_training_on_a_tape_equals_training_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    by_tape = trained()
    assert tapes()
    monkeypatch.setattr(NATIVE, "library", None)
    torpor.use("inductor", compile_after=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as a small step on a tape has
    by_python = trained()
    torch.set_num_threads(threads)
    assert by_tape == by_python


@pytest.mark.usefixtures("compiling")
def test_a_small_step_runs_beside_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    call = Taped.__call__

    def watched(self: Taped, code: Any, tensors: list[Tensor]) -> Any:
        ran.append((self.one_core, threading.current_thread().name))
        return call(self, code, tensors)

    monkeypatch.setattr(Taped, "__call__", watched)
    monkeypatch.setattr(taped, "is_light", lambda program: True)
    trained()
    trained()
    assert ran
    assert all(light and name.startswith("torpor-") for light, name in ran)


@pytest.mark.usefixtures("compiling")
@pytest.mark.skipif(cores() < 2, reason="there is no core to record on meanwhile")
def test_a_step_of_one_thread_runs_beside_the_program_however_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []
    call = Taped.__call__

    def watched(self: Taped, code: Any, tensors: list[Tensor]) -> Any:
        ran.append((torch.get_num_threads(), threading.current_thread().name[:7]))
        return call(self, code, tensors)

    monkeypatch.setattr(Taped, "__call__", watched)
    monkeypatch.setattr(taped, "is_light", lambda program: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trained()
        trained()
    finally:
        torch.set_num_threads(threads)
    assert set(ran) == {(1, "torpor-")}


@pytest.mark.usefixtures("compiling")
def test_attention_with_dropout_on_the_device_lazy_is_on_a_tape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is recorded on the physical device: copies to it and back are no other device's."""
    q = torch.randn(2, 4, 16, 8).to("lazy").requires_grad_()
    known = set(map(id, tapes()))
    with caplog.at_level("INFO", "torpor.backends.inductor.taped"):
        for _ in range(4):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True).sum().backward()
            torpor.sync()
    assert "run by Python" not in caplog.text
    assert [one for one in tapes() if id(one) not in known]


def losses_of_an_lstm() -> list[float]:
    torch.manual_seed(0)
    model = torpor.lazy(torch.nn.LSTM(5, 6, num_layers=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(7, 3, 5), []
    for _ in range(6):
        optimizer.zero_grad()
        made, (hidden, cells) = model(torpor.lazy(x))
        loss = made.square().mean() + hidden.sum() * cells.mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("compiling")
def test_a_recurrent_layer_is_on_a_tape_with_all_cores_and_trains_as_by_python(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = set(map(id, tapes()))
    with caplog.at_level("INFO", "torpor.backends.inductor.taped"):
        by_tape = losses_of_an_lstm()
    assert "run by Python" not in caplog.text
    new = [one for one in tapes() if id(one) not in known]
    assert any(not one.one_core for one in new)
    monkeypatch.setattr(NATIVE, "library", None)
    torpor.use("inductor", compile_after=1)
    assert by_tape == losses_of_an_lstm()


@pytest.mark.usefixtures("compiling")
def test_an_index_out_of_range_is_told_and_the_next_step_runs() -> None:
    table = torpor.lazy(torch.randn(5, 3))

    def look_up(index: int) -> Tensor:
        return (F.embedding(torpor.lazy(torch.tensor([index])), table) * 2).sum()

    for _ in range(4):
        look_up(1).item()
    with pytest.raises((IndexError, StepError)):
        look_up(99).item()
    assert look_up(1).item() == pytest.approx(2 * torpor.eager(table)[1].sum().item())


@pytest.mark.usefixtures("compiling")
def test_numbers_that_change_reach_a_tape() -> None:
    x = torpor.lazy(torch.ones(4))
    for step in range(8):
        y = ((x + step) * (0.5 + step)).sum()
        assert y.item() == 4 * (1 + step) * (0.5 + step)


@pytest.mark.usefixtures("compiling")
def test_a_step_that_is_not_understood_is_run_by_python(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Any) -> Any:
        raise NotUnderstood("a word nobody knows")

    monkeypatch.setattr(taped, "tape_of", refuse)
    with caplog.at_level("INFO", "torpor.backends.inductor.taped"):
        x = torpor.lazy(torch.arange(6.0))
        for _ in range(3):
            assert (x * 2 + 1).sum().item() == 36
    assert "is run by Python: a word nobody knows" in caplog.text


@pytest.mark.usefixtures("compiling")
def test_large_steps_are_not_light() -> None:
    """What a step costs is estimated from its types alone, so that every run decides alike."""
    light = {}
    for width in (8, 1024):
        x = torpor.lazy(torch.randn(width, width))
        known = set(map(id, tapes()))
        for _ in range(3):
            torpor.sync()
            y = (x @ x).relu() @ x
        (new,) = [one for one in tapes() if id(one) not in known]
        light[width] = new.one_core
        del y
    assert light == {8: cores() > 1, 1024: False}


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum(),
        lambda x: torch.linalg.svdvals(x[:400, :400]) + 1,
        lambda x: torch.fft.fft(x),
    ],
    ids=["reads much", "takes long by nature", "another"],
)
def test_what_takes_long_is_not_light(step: Any) -> None:
    x = torpor.lazy(torch.randn(2000, 2000))
    known = set(map(id, tapes()))
    y = step(x).abs().sum()
    for _ in range(10):
        y = y.detach().relu()  # small ops beside it
    y.item()
    assert not any(one.one_core for one in tapes() if id(one) not in known)


@pytest.mark.usefixtures("compiling")
def test_kernels_with_a_number_of_threads_compiled_in_run_with_all_cores() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads((os.cpu_count() or 1) + 1)
    try:
        x = torpor.lazy(torch.randn(300, 400))
        known = set(map(id, tapes()))
        y = x.relu()
        for _ in range(60):  # as many nodes as make it light
            y = (y + 1).sin()
        y.sum().item()
        new = [one for one in tapes() if id(one) not in known]
        assert any("num_threads(" in step.text() for one in new for step in one.steps)
        assert not any(one.one_core for one in new)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("compiling")
def test_an_error_while_a_tape_is_made_costs_the_tape_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Any) -> Any:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(taped, "tape_of", fail)
    assert (torpor.lazy(torch.arange(7.0)) * 3 + 2).sum().item() == 77
    assert "is run by Python: RuntimeError('a mistake')" in caplog.text
