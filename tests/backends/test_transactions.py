"""A donated buffer is not written by a step that fails, on compiled backends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torpor
from torpor.backend.data import BackendData
from torpor.backends.blocks.program import Piece, Program
from torpor.backends.inductor import InductorBackend
from torpor.backends.inductor import runtime as inductor_runtime

pytestmark = pytest.mark.skipif(
    inductor_runtime.unavailable() is not None, reason=str(inductor_runtime.unavailable())
)


@pytest.fixture(autouse=True)
def on_inductor() -> Iterator[None]:
    with torpor.using("inductor", compile_after=0):
        yield


class Caught:
    """The last compiled graph with donated parameters, and copies of what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program: Program | None = None
        self.calls: list[tuple[Any, ...]] = []
        original = InductorBackend.execute

        def execute(backend: Any, computation: Any, arguments: Any, device: Any) -> Any:
            if computation.program.donated:
                self.program = computation.program
                given = [_copied(a) for a in arguments]
                self.calls.append((given, lambda: original(backend, computation, given, device)))
            return original(backend, computation, arguments, device)

        monkeypatch.setattr(InductorBackend, "execute", execute)

    def run_again(self) -> tuple[Callable[[], list[BackendData]], list[Tensor], list[Tensor]]:
        """A run of the same graph, its donated inputs, and copies of these."""
        assert self.program is not None
        arguments, run = self.calls[-1]
        donated = [arguments[register].tensor for register in self.program.donated]
        return run, donated, [tensor.clone() for tensor in donated]


def _copied(argument: Any) -> Any:
    if not isinstance(argument, BackendData):
        return argument
    return BackendData(argument.device, argument.type, argument.wait().tensor.clone())


def _train(steps: int = 2) -> None:
    """Steps of a small program that updates a table, a matrix and statistics."""
    torch.manual_seed(0)
    table, matrix, mean = (torch.rand(n, 4).to("lazy") for n in (10, 4, 1))
    for _ in range(steps):
        indices = torch.tensor([1, 2, 3, 4]).to("lazy")
        torpor.sync(wait=True)
        made = nn.functional.embedding(indices, table) @ matrix
        mean.copy_(mean.flip(1) + made.mean(0, keepdim=True))
        table.sub_(table * made.sum(), alpha=0.1)
        matrix.mul_(0.9).add_(made.t() @ made)
        del indices, made
        torpor.sync(wait=True)


def _train_with(rule: Any, options: dict[str, Any]) -> None:
    model = nn.Linear(4, 3).to("lazy")
    optimizer = rule(model.parameters(), **options)
    for _ in range(4):
        loss = model(torch.ones(2, 4).to("lazy")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torpor.sync(wait=True)


def test_a_bad_index_leaves_donated_parameters_as_they_were(monkeypatch: Any) -> None:
    caught = Caught(monkeypatch)
    _train()
    again, donated, before = caught.run_again()
    assert caught.program is not None
    assert len(before) == 3
    arguments = caught.calls[-1][0]
    (indices,) = [
        a for a in arguments if isinstance(a, BackendData) and a.type.dtype is torch.int64
    ]
    indices.tensor.fill_(99)
    results = again()
    assert all(torch.equal(now, then) for now, then in zip(donated, before, strict=True))
    errors = [result.error for result in results if result.error is not None]
    assert errors
    assert all(isinstance(error, IndexError) for error in errors)
    assert "test_transactions.py" in str(errors[0])
    assert caught.program.broken is None


def _optimizer_cases() -> list[Any]:
    return [
        pytest.param(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}, id="momentum"),
        pytest.param(torch.optim.AdamW, {"lr": 0.1}, id="adamw"),
        pytest.param(torch.optim.AdamW, {"lr": 0.1, "foreach": True}, id="foreach"),
    ]


@pytest.mark.parametrize(("rule", "options"), _optimizer_cases())
def test_what_updates_parameters_runs_last_and_calls_no_kernel_of_eager(
    monkeypatch: Any, rule: Any, options: dict[str, Any]
) -> None:
    caught = Caught(monkeypatch)
    _train_with(rule, options)
    program = caught.program
    assert program is not None
    late = program.steps[program.commit :]
    assert late, "nothing is written over by compiled code"
    for step in late:
        assert isinstance(step, Piece)
        assert not step.checked
        called = step.text().partition("def call(")[2].partition("return ")[0]
        assert "torch.ops." not in called
        assert "extern_kernels." not in called
    assert not program.copied


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("planted"), MemoryError("planted"), ValueError("planted")]
)
def test_an_error_in_a_compiled_piece_leaves_inputs_alone_and_eager_goes_on(
    monkeypatch: Any, error: Exception
) -> None:
    caught = Caught(monkeypatch)
    _train()
    program = caught.program
    assert program is not None
    again, donated, before = caught.run_again()
    monkeypatch.setattr(program, "replayed", None)
    pieces = [step for step in program.steps[: program.commit] if isinstance(step, Piece)]
    monkeypatch.setattr(pieces[-1], "run", _raises(error))
    results = again()
    assert all(torch.equal(now, then) for now, then in zip(donated, before, strict=True))
    assert all(result.error is None for result in results)
    assert (program.broken is error) == isinstance(error, ValueError)


def _raises(error: BaseException) -> Callable[..., Any]:
    def run(inputs: list[Tensor]) -> Any:
        raise error

    return run


def test_an_interrupt_before_the_writes_leaves_inputs_alone(monkeypatch: Any) -> None:
    caught = Caught(monkeypatch)
    _train()
    program = caught.program
    assert program is not None
    again, donated, before = caught.run_again()
    monkeypatch.setattr(program, "replayed", None)
    monkeypatch.setattr(program.steps[0], "run", _raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as raised:
        again()
    assert not getattr(raised.value, "inputs_written", False)
    assert all(torch.equal(now, then) for now, then in zip(donated, before, strict=True))


def test_an_interrupt_between_writes_waits_until_all_is_written(monkeypatch: Any) -> None:
    caught = Caught(monkeypatch)
    _train()
    program = caught.program
    assert program is not None
    _expected, _, _ = caught.run_again()
    monkeypatch.setattr(program, "replayed", None)
    again, donated, before = caught.run_again()
    late = program.steps[program.commit]
    assert isinstance(late, Piece)
    compiled = late.run

    def interrupted(inputs: list[Tensor]) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return compiled(inputs)

    monkeypatch.setattr(late, "run", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        again()
    assert raised.value.inputs_written  # type: ignore[attr-defined]  # a mark
    assert not any(torch.equal(now, then) for now, then in zip(donated, before, strict=True))


def test_an_error_while_parameters_are_written_says_so(monkeypatch: Any) -> None:
    caught = Caught(monkeypatch)
    _train()
    program = caught.program
    assert program is not None
    again, _, _ = caught.run_again()
    monkeypatch.setattr(program, "replayed", None)
    monkeypatch.setattr(program.steps[program.commit], "run", _raises(MemoryError("planted")))
    with pytest.raises(MemoryError) as raised:
        again()
    assert raised.value.inputs_written  # type: ignore[attr-defined]  # a mark


@pytest.fixture
def failing_op() -> Iterator[dict[str, bool]]:
    fails = {"now": False}
    with torch.library._scoped_library("torpor_transactions", "FRAGMENT") as library:
        library.define("maybe(Tensor x) -> Tensor")

        def maybe(x: Tensor) -> Tensor:
            if fails["now"]:
                raise FloatingPointError("planted")
            return x.clone()

        library.impl("maybe", maybe, "CompositeExplicitAutograd")
        torch.library.register_fake("torpor_transactions::maybe", torch.empty_like, lib=library)
        yield fails


def test_an_op_of_somebodys_own_that_raises_comes_before_the_writes(
    monkeypatch: Any, failing_op: dict[str, bool]
) -> None:
    caught = Caught(monkeypatch)
    x, y = torch.ones(4).to("lazy"), torch.ones(4).to("lazy")
    torpor.sync(wait=True)
    for _ in range(2):
        x.add_(1)
        y.copy_(torch.ops.torpor_transactions.maybe(y * 2))
        torpor.sync(wait=True)
    again, donated, before = caught.run_again()
    failing_op["now"] = True
    results = again()
    assert all(torch.equal(now, then) for now, then in zip(donated, before, strict=True))
    failed = [result.error for result in results if result.error is not None]
    assert [type(error) for error in failed] == [FloatingPointError]
    (fine,) = [result for result in results if result.error is None]
    assert torch.equal(fine.wait().tensor, before[0] + 1)


def test_what_is_kept_of_a_parameter_is_not_written_with_it() -> None:
    x = torch.arange(4.0).to("lazy")
    torpor.sync(wait=True)
    for step in range(3):
        old = x.clone()
        x.mul_(2)
        torpor.sync(wait=True)
        assert torch.equal(old.cpu(), torch.arange(4.0) * 2**step)
    assert torch.equal(x.cpu(), torch.arange(4.0) * 8)
