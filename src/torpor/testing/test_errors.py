"""Failures: the user sees what failed and where, loses no data, and can continue."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

import torpor
from torpor.errors import BackendError, CompileError, TorporWarning
from torpor.testing.instruments import failing, need_custom_ops, user_program
from torpor.testing.kit import Kit, message_of, raised_by

X = torch.tensor([[1.0, -2.0, 0.5], [-0.25, 4.0, 3.0]])
_widths = itertools.count(101)


def unmet() -> torch.Tensor:
    """A tensor of a size that no other test uses, so that its nodes have no other lines."""
    return torch.linspace(-1.0, 1.0, next(_widths))


def refuse(*_: Any, **__: Any) -> Any:
    raise ValueError("the toolchain is out of order")


def assert_reported(error: BaseException, kit: Kit, line: str) -> None:
    """Assert that the message names the backend, the graph and the user's line."""
    text = message_of(error)
    for part in (repr(kit.name), "graph", line):
        assert part in text, f"{part} is not in:\n{text}"


# -- a kernel fails ----------------------------------------------------------------------------


def test_a_failing_kernel_is_not_swallowed(kit: Kit) -> None:
    need_custom_ops(kit)
    bad = failing(kit.put(X))
    assert type(raised_by(lambda: bad.tolist())) is ArithmeticError


def test_a_failing_kernel_is_told_with_backend_graph_and_line(kit: Kit) -> None:
    need_custom_ops(kit)
    names, file = user_program("y = x + x\nbad = failing(y)\n", x=kit.put(unmet()), failing=failing)
    error = raised_by(lambda: names["bad"].tolist())
    assert_reported(error, kit, f"{file}:2")
    assert "the kernel failed" in message_of(error)


def test_a_failed_tensor_fails_again_when_it_is_read_again(kit: Kit) -> None:
    need_custom_ops(kit)
    bad = failing(kit.put(X))
    for _ in range(2):
        assert type(raised_by(lambda: bad.tolist())) is ArithmeticError
    assert type(raised_by(lambda: (bad + 1).tolist())) is ArithmeticError


def test_the_step_after_a_failed_one_runs_and_inputs_survive(kit: Kit) -> None:
    need_custom_ops(kit)
    x = kit.put(X)
    bad = failing(x)
    raised_by(lambda: torpor.sync(wait=True))
    assert bad.shape == X.shape
    kit.check(x + x, kit.eager(X + X))
    kit.check(x, kit.eager(X))


def test_an_error_is_raised_once_by_syncs_that_do_not_read_it(kit: Kit) -> None:
    need_custom_ops(kit)
    bad = failing(kit.put(X))
    raised_by(lambda: torpor.sync(wait=True))
    torpor.sync(wait=True)
    torpor.wait()
    assert bad.shape == X.shape


# -- the backend fails -------------------------------------------------------------------------


def test_a_run_that_raises_is_told_with_backend_graph_and_line(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kit.backend, "execute", refuse)
        own = unmet()
        names, file = user_program("y = x + x\n", x=kit.put(own))
        error = raised_by(lambda: names["y"].tolist())
    assert type(error) is ValueError
    assert_reported(error, kit, f"{file}:1")
    x = names["x"]
    kit.check(x * x, kit.eager(own * own))
    kit.check(x, kit.eager(own))


def test_a_missing_result_is_told(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kit.backend.execute
    with monkeypatch.context() as patch:
        patch.setattr(kit.backend, "execute", lambda *args: list(real(*args))[1:])
        own = unmet()
        names, file = user_program("y = x - x\n", x=kit.put(own))
        error = raised_by(lambda: names["y"].tolist())
    assert isinstance(error, BackendError)
    assert_reported(error, kit, f"{file}:1")
    kit.check(names["x"] + names["x"], kit.eager(own + own))


def test_a_result_of_another_type_is_told(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    other = kit.data(torch.ones(5, dtype=torch.int64))
    with monkeypatch.context() as patch:
        patch.setattr(kit.backend, "execute", lambda *args: [other])
        names, file = user_program("y = x.relu()\n", x=kit.put(unmet()))
        error = raised_by(lambda: names["y"].tolist())
    assert isinstance(error, BackendError)
    assert_reported(error, kit, f"{file}:1")


def test_a_graph_that_cannot_be_compiled_is_an_error_in_strict_mode(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kit.backend, "compile", refuse)
        own = unmet()
        names, file = user_program("y = x * x\n", x=kit.put(own))
        error = raised_by(lambda: names["y"].tolist())
    assert isinstance(error, CompileError)
    assert_reported(error, kit, f"{file}:1")
    assert "out of order" in message_of(error)
    kit.check(names["y"], kit.eager(own * own))


def test_a_graph_that_cannot_be_compiled_runs_on_the_reference_with_one_warning(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kit.name == "reference":
        pytest.skip("nothing stands in for the reference backend")
    monkeypatch.setattr(torpor.config, "strict", False)
    x = kit.put(X)
    with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(kit.backend, "compile", refuse)
        for _ in range(2):
            y = x * x + x
            kit.check(y, kit.eager(X * X + X))
            torpor.sync(wait=True)
    messages = [str(w.message) for w in caught if issubclass(w.category, TorporWarning)]
    assert len(messages) == 1
    assert repr(kit.name) in messages[0]
    kit.check(y + x, kit.eager(X * X + X + X))
