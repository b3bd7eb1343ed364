"""A step is a transaction: one that fails or is interrupted leaves everything as it was."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torpor
from tests.comparison import Put, assert_same, line_below, message, plain, raised_by
from tests.instrumented_ops import failing, gated, open_gate
from torpor.backend.data import Failure
from torpor.execute.plan import Plan
from torpor.execute.queue import queues

ROOT = Path(__file__).resolve().parents[2]
GOOD, BAD = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 9, 1])


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))


class Loop:
    """A model in training, eager or lazy."""

    def __init__(self, put: Callable, optimizer: type[torch.optim.Optimizer], **options) -> None:
        self.put = put
        self.model = put(_model())
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)

    def step(self, words: torch.Tensor, read: str = "") -> None:
        loss = self.model(self.put(words)).square().mean()
        if read == "before backward":
            loss.item()
        loss.backward()
        if read == "before the optimizer":
            loss.item()
        self.optimizer.step()
        if read == "after the step":
            loss.item()
        self.optimizer.zero_grad()

    def try_step(self, words: torch.Tensor, read: str = "") -> type[BaseException] | None:
        try:
            self.step(words, read)
            torpor.wait()
        except Exception as error:
            return type(error)
        return None

    def state(self) -> list[torch.Tensor]:
        own = [plain(p) for p in self.model.parameters()]
        kept = [v for s in self.optimizer.state.values() for v in s.values()]
        return own + [plain(v) for v in kept if isinstance(v, torch.Tensor)]


OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (torch.optim.NAdam, {}),
    (torch.optim.Adam, {"foreach": False}), (torch.optim.Adagrad, {}),
]  # fmt: skip
READS = ("before backward", "before the optimizer", "after the step", "")


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@pytest.mark.parametrize("first", [0, 2], ids=["at first", "later"])
def test_training_goes_on_after_a_bad_batch_as_eagers_does(
    put: Put, optimizer: type, options: dict, read: str, first: int
) -> None:
    eager, lazy = Loop(lambda t: t, optimizer, **options), Loop(put, optimizer, **options)
    for loop in (eager, lazy):
        for _ in range(first):
            loop.step(GOOD)
    assert eager.try_step(BAD) is lazy.try_step(BAD, read) is IndexError
    assert_same(lazy.state(), eager.state())
    for loop in (eager, lazy):
        for _ in range(3):
            loop.step(GOOD, read)
    assert_same(lazy.state(), eager.state())


def test_every_tensor_a_failed_step_was_to_write_holds_what_it_held(put: Put) -> None:
    added, copied, zeroed, viewed = (put(torch.full((3,), float(i))) for i in range(4))
    bad = failing(added)
    added.add_(bad)
    copied.copy_(bad)
    zeroed.zero_()
    viewed[1:].mul_(bad[1:])
    assert type(raised_by(lambda: torpor.sync(wait=True))) is ArithmeticError
    assert_same([added, copied, viewed], [torch.full((3,), float(i)) for i in (0, 1, 3)])
    assert_same(zeroed, torch.full((3,), 2.0))


def test_two_tensors_with_the_same_new_contents_go_back_to_their_own_old_ones(put: Put) -> None:
    one, other = put(torch.ones(2)), put(torch.zeros(2))
    bad = failing(put(torch.ones(2)))
    one.copy_(bad)
    other.copy_(bad)
    raised_by(lambda: torpor.sync(wait=True))
    assert_same([one, other], [torch.ones(2), torch.zeros(2)])
    assert type(raised_by(lambda: bad.tolist())) is ArithmeticError


def test_whoever_reads_first_is_told_with_the_line_and_nobody_again(put: Put) -> None:
    weight = put(torch.ones(2, 5))
    line = line_below()
    weight.mul_(F.embedding(put(torch.tensor([7])), put(torch.ones(3, 5))))
    torpor.sync()
    error = raised_by(lambda: weight.tolist())
    assert type(error) is IndexError
    assert line in message(error)
    assert_same(weight, torch.ones(2, 5))
    torpor.sync(wait=True)
    torpor.wait()


def test_who_is_told_by_a_later_step_is_not_told_of_the_failed_one_again(put: Put) -> None:
    weight = put(torch.ones(2))
    bad = failing(weight)
    weight.mul_(bad)
    torpor.sync()
    assert type(raised_by(lambda: (bad + 1).tolist())) is ArithmeticError
    assert_same(weight, torch.ones(2))
    torpor.sync(wait=True)


def test_a_step_recorded_before_an_error_was_told_does_not_tell_it_again(put: Put) -> None:
    weight, total = put(torch.ones(2)), put(torch.zeros(2))
    bad = failing(weight)
    torpor.sync()
    bad._lazy_storage.data.done.wait()
    total.add_(bad)
    held = gated(weight)
    assert type(raised_by(torpor.sync)) is ArithmeticError  # the step behind has not run yet
    open_gate()
    torpor.sync(wait=True)
    assert_same([total, held], [torch.zeros(2), torch.ones(2)])


def test_bad_batches_without_gradients_are_told_once_each(put: Put) -> None:
    model, reported = put(nn.Sequential(nn.Embedding(4, 3), nn.BatchNorm1d(3))), []
    with torch.no_grad():
        for batch, words in enumerate((GOOD, BAD, GOOD, BAD, BAD, GOOD)):
            try:
                model(put(words)).square().mean().item()
                [plain(buffer) for buffer in model.buffers()]
            except IndexError:
                reported.append(batch)
    assert reported == [1, 3, 4]


def test_an_error_told_by_a_sync_is_not_raised_by_a_tensor_that_went_back(put: Put) -> None:
    weight = put(torch.ones(2))
    weight.mul_(failing(weight))
    raised_by(lambda: torpor.sync(wait=True))
    assert_same(weight, torch.ones(2))


def test_steps_behind_a_failed_one_go_on_from_what_was_before_it(put: Put) -> None:
    weight = put(torch.ones(2))
    weight.add_(failing(gated(weight)))
    torpor.sync()
    weight.add_(1)
    torpor.sync()
    open_gate()
    assert type(raised_by(torpor.wait)) is ArithmeticError
    assert_same(weight, torch.full((2,), 2.0))


def test_a_gradient_keeps_what_it_had_accumulated_before_a_bad_batch(put: Put) -> None:
    weights = [torch.ones(4, 3, requires_grad=True), put(torch.ones(4, 3, requires_grad=True))]
    for words in (GOOD, BAD, GOOD):
        for weight, lay in zip(weights, (lambda t: t, put), strict=True):
            try:
                loss = F.embedding(lay(words), weight).square().sum()
                loss.backward()
                loss.item()
            except IndexError:
                continue
    assert_same(plain(weights[1].grad), weights[0].grad)


def test_gradients_of_a_bad_batch_go_though_torch_refuses_to_look_at_a_view(put: Put) -> None:
    """Its base was written to since: asked for `is_leaf`, torch raises. It is looked at first."""
    loop = Loop(put, torch.optim.SGD)
    gc.collect()
    gc.disable()  # what is new stands before what was collected
    try:
        with torch.no_grad():
            held = loop.model[1].weight.t()
            loop.model[1].weight.add_(1)
        assert loop.try_step(BAD, "before the optimizer") is IndexError
    finally:
        gc.enable()
    with pytest.raises(RuntimeError):
        assert held.is_leaf
    assert [parameter.grad for parameter in loop.model.parameters()] == [None] * 3


def test_all_is_undone_though_one_undo_raises_and_the_error_says_so() -> None:
    undone: list[int] = []
    steps = (lambda: undone.append(1), lambda: 1 / 0, lambda: undone.append(2))
    with pytest.raises(IndexError) as reported:
        Failure(IndexError("told"), steps).tell()
    assert undone == [1, 2]
    assert "division by zero" in message(reported.value)


def test_an_interrupt_comes_when_all_is_undone() -> None:
    undone: list[int] = []
    steps = (lambda: signal.raise_signal(signal.SIGINT), lambda: undone.append(1))
    with pytest.raises(KeyboardInterrupt):
        Failure(IndexError("told"), steps).tell()
    assert undone == [1]


def test_what_was_recorded_before_a_failed_read_and_does_not_depend_on_it_is_kept(put: Put) -> None:
    total, x = put(torch.zeros(2)), put(torch.ones(2))
    total.add_(x)
    assert type(raised_by(lambda: failing(x).tolist())) is ArithmeticError
    total.add_(x)
    assert_same(total, torch.full((2,), 2.0))


def test_running_statistics_go_back_with_a_failed_forward(put: Put) -> None:
    norm = put(nn.BatchNorm1d(2))
    before = [plain(b).clone() for b in norm.buffers()]
    y = norm(failing(put(torch.ones(3, 2))))
    assert type(raised_by(lambda: y.tolist())) is ArithmeticError
    assert_same([plain(b) for b in norm.buffers()], before)


def test_a_failed_result_that_replaces_nothing_fails_again_and_what_else_was_computed_stays(
    put: Put,
) -> None:
    x = put(torch.ones(2))
    fine, bad = x + 1, failing(x)
    x.add_(bad)
    raised_by(lambda: torpor.sync(wait=True))
    assert_same([x, fine], [torch.ones(2), torch.full((2,), 2.0)])
    for _ in range(2):
        assert type(raised_by(lambda: bad.tolist())) is ArithmeticError


def test_a_donated_buffer_goes_back_if_the_backend_has_not_written_it(put: Put) -> None:
    from torpor.backend import register
    from torpor.backends.reference import ReferenceBackend

    class Donating(ReferenceBackend):
        takes_donations = True

    register("tests-donating", Donating)
    with torpor.using("tests-donating"):
        weight = put(torch.ones(2))
        weight.mul_(failing(weight))
        raised_by(lambda: torpor.sync(wait=True))
        assert_same(weight, torch.ones(2))


def test_a_donated_buffer_that_was_written_all_the_same_carries_the_error(put: Put) -> None:
    from torpor.backend import register
    from torpor.backends.reference import ReferenceBackend

    class Careless(ReferenceBackend):
        takes_donations = True
        broken = False

        def execute(self, *args):
            if not Careless.broken:
                return super().execute(*args)
            error = FloatingPointError("half way")
            error.inputs_written = True
            raise error

    register("tests-careless", Careless)
    with torpor.using("tests-careless"):
        weight = put(torch.ones(2))
        weight.mul_(2)
        Careless.broken = True
        raised_by(lambda: torpor.sync(wait=True))
        Careless.broken = False
        for _ in range(2):
            assert type(raised_by(lambda: weight.tolist())) is FloatingPointError


def _faults(backend: str, *options: str) -> dict:
    reported = {"TORPOR_BACKEND": backend, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "scripts.faults", "--json", *options]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | reported, capture_output=True, text=True, timeout=300
    )
    assert run.stdout, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("native", ["auto", "off"])
def test_interrupts_and_bad_batches_lose_nothing_on_the_reference(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_NATIVE", native)
    found = _faults("reference", "--interrupts", "12", "--bad-batches", "12", "--seed", "5")
    assert found["problems"] == []


def test_interrupts_lose_nothing_as_torpor_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORPOR_CACHE", raising=False)
    found = _faults("inductor", "--interrupts", "8", "--bad-batches", "0", "--seed", "5")
    assert found["problems"] == []


def test_a_read_that_fails_keeps_what_does_not_depend_on_the_failure() -> None:
    table = torpor.lazy(torch.zeros(2, 1))
    torpor.sync(wait=True)
    table.add_(1)
    picked = nn.functional.embedding(torpor.lazy(torch.tensor([7])), table)
    table.mul_(picked.sum())
    with pytest.raises(IndexError):
        picked.tolist()
    assert table.tolist() == [[1.0], [1.0]]


def test_a_step_that_another_thread_runs_while_this_one_prepares_it_runs_once(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = put(torch.ones(3)) * 5 + 2
    found: list[object] = []
    slot = vars(Plan)["kept_inputs"]

    def read(plan: Plan) -> Callable[[object], object]:
        def kept(inputs: object) -> object:
            if type(inputs) is list and not found:  # of a job, not of the graph
                found.append("begun")
                thread = threading.Thread(target=lambda: found.append(y.tolist()))
                thread.start()
                thread.join(30)
            return slot.__get__(plan)(inputs)

        return kept

    monkeypatch.setattr(Plan, "kept_inputs", property(read, slot.__set__))
    torpor.sync()
    assert found == ["begun", [7, 7, 7]]
    assert not any(queue.budget.jobs for queue in queues())
