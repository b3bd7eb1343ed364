"""Twelve programs that are slower than they should be: `torpor.explain()` names line and cause.

Each marks the line at fault with `# <- here`; the first finding must name that very line.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torpor
from tests.comparison import Put
from torpor.debug.explain import Explanation
from torpor.debug.findings import Finding
from torpor.ir.node import TABLE
from torpor.observe.history import HISTORY
from torpor.symbols.leaves import SIZES

MARK = "# <- here"


@pytest.fixture(autouse=True)
def fresh(on_the_reference_backend: None) -> Iterator[None]:
    """A node keeps the line that met it first, so none may be known before."""
    torpor.sync(wait=True)
    TABLE.clear()
    HISTORY.clear()
    SIZES.clear()
    torpor.metrics.reset()
    yield
    torpor.sync(wait=True)
    TABLE.clear()


def marked_line(depth: int = 2) -> str:
    """`file.py:LINE` of the line that bears the mark, in the function that many calls up."""
    frame = inspect.stack()[depth]
    source, start = inspect.getsourcelines(frame.frame)
    offset = next(number for number, line in enumerate(source) if MARK in line)
    return f"{os.path.basename(frame.filename)}:{start + offset} "


def first_finding() -> tuple[Finding, Explanation]:
    """What is named first, which must be the marked line."""
    torpor.wait()
    explanation = torpor.explain()
    assert explanation.findings, str(explanation)
    found = explanation.findings[0]
    assert found.line.startswith(marked_line()), str(explanation)
    assert found.line in str(explanation)
    return found, explanation


@pytest.mark.usefixtures("fixed_sizes")
def test_a_sequence_that_grows_where_sizes_are_fixed(put: Put) -> None:
    table = put(torch.randn(10, 4))
    for length in range(3, 9):
        tokens = put(torch.arange(length).repeat(2, 1))
        hidden = nn.functional.embedding(tokens, table)  # <- here
        hidden.tanh().sum()
        result = hidden.mean()
        torpor.sync()
        del result
    found, explanation = first_finding()
    assert found.cause == "shape"
    assert found.count == 5
    assert "dim 1 of [2, 3] -> [2, 4]" in str(explanation)
    assert "Pad" in found.advice


def test_a_sequence_that_grows(put: Put) -> None:
    table = put(torch.randn(10, 4))
    for length in range(3, 9):
        tokens = put(torch.arange(length).repeat(2, 1))
        hidden = nn.functional.embedding(tokens, table)  # <- here
        hidden.tanh().sum()
        result = hidden.mean()
        torpor.sync()
        del result
    text = str(torpor.explain())
    assert "[2, 4] -> [2, s0]" in text  # the third length, and none after it
    assert len(torpor.explain().graphs) == 3
    found = {finding.cause: finding for finding in torpor.explain().findings}
    assert found["sizes"].count == found["shape"].count == 1
    assert found["sizes"].line == found["shape"].line
    assert found["sizes"].line.startswith(marked_line(1))
    assert "no further compile" in found["sizes"].advice


def test_a_last_batch_that_is_smaller(put: Put) -> None:
    weight = put(torch.ones(3, 2))
    data = torch.ones(20, 3)
    for _ in range(3):
        for batch in data.split(8):
            x = put(batch)
            y = x @ weight  # <- here
            torpor.sync()
            del y
    found = {finding.cause: finding for finding in torpor.explain().findings}
    assert found["shape"].count == found["sizes"].count == 1
    assert found["sizes"].line.startswith(marked_line(1))
    assert "dim 0 of [8, 3] -> [4, 3]" in found["shape"].details[0]


def test_a_python_branch_on_a_tensor(put: Put) -> None:
    x = put(torch.ones(4))
    for step in range(10):
        y = x + step % 2
        if y.sum() > 6:  # <- here
            z = y.exp()
        else:
            z = y.sqrt().neg()
        torpor.sync()
        del z
    found, explanation = first_finding()
    assert found.cause == "branch on a tensor"
    assert found.count == 10
    assert "aten.sqrt.default -> aten.exp.default" in str(explanation)
    assert "torch.where" in found.advice


def test_a_learning_rate_that_is_a_python_float(put: Put) -> None:
    weight = put(torch.ones(4))
    rate = 0.1
    for _ in range(6):
        gradient = weight * weight
        weight = weight - rate * gradient  # <- here
        rate *= 0.9
        torpor.sync()
    found, _ = first_finding()
    assert found.cause == "promoted"
    assert found.count == 1
    assert found.over
    assert "was 0.1" in found.details[0]


def test_item_in_the_loop(put: Put) -> None:
    x = put(torch.ones(4))
    total = 0.0
    for _ in range(5):
        x = x * 2
        total += x.sum().item()  # <- here
        torpor.sync()
    found, _ = first_finding()
    assert found.cause == "sync"
    assert found.count == 5
    assert ".item()" in found.title
    assert found.seconds > 0


def test_an_op_that_cannot_be_recorded(put: Put) -> None:
    with torch.library._scoped_library("stories", "FRAGMENT") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x * 3, "CPU")
        x = put(torch.ones(4))
        for _ in range(3):
            y = x + 1
            z = torch.ops.stories.unknown(y)  # <- here
            torpor.sync()
        assert z.tolist() == [6.0] * 4
        del z
    found, _ = first_finding()
    assert found.cause == "fallback"
    assert found.count == 3
    assert "stories::unknown" in found.title
    assert found.seconds > 0


def test_a_loss_that_is_printed(put: Put, capsys: Any) -> None:
    x = put(torch.ones(4))
    for _ in range(4):
        x = x * 2
        loss = x.sum()
        print(loss)  # <- here
        torpor.sync()
    assert capsys.readouterr().out.count("tensor(") == 4
    found, _ = first_finding()
    assert found.cause == "sync"
    assert found.count == 4
    assert "printed" in found.title


def test_a_dropout_whose_probability_changes(put: Put) -> None:
    x = put(torch.ones(4, 4))
    for step in range(4):
        y = nn.functional.dropout(x, 0.1 + 0.1 * step)  # <- here
        torpor.sync()
        del y
    found, _ = first_finding()
    assert found.cause in ("promoted", "constant")
    assert "0.9" in found.details[0]


@pytest.mark.usefixtures("fixed_sizes")
def test_a_last_batch_that_is_smaller_where_sizes_are_fixed(put: Put) -> None:
    weight = put(torch.ones(3, 2))
    data = torch.ones(20, 3)
    for _ in range(2):
        for batch in data.split(8):
            x = put(batch)
            y = x @ weight  # <- here
            torpor.sync()
            del y
    found, _ = first_finding()
    assert found.cause == "shape"
    assert found.count == 1
    assert "dim 0 of [8, 3] -> [4, 3]" in found.details[0]
    assert "drop_last" in found.advice


def test_a_python_loop_over_a_size(put: Put) -> None:
    for length in (2, 3, 4, 5):
        x = put(torch.ones(length, 3))
        state = x[0]
        for row in range(1, len(x)):
            state = (state + x[row]).tanh()  # <- here
        torpor.sync()
        del state
    found, _ = first_finding()
    assert found.cause == "loop"
    assert found.count == 3
    assert "loop" in found.advice


def test_one_more_tensor_each_step(put: Put) -> None:
    x = put(torch.ones(3))
    history = []
    for _ in range(5):
        x = x * 2
        history.append(x)
        mean = torch.stack(history).mean()  # <- here
        torpor.sync()
        del mean
    found, _ = first_finding()
    assert found.cause == "list"
    assert found.count >= 3
    assert "holding" in found.advice


def test_a_dtype_that_flips(put: Put) -> None:
    for step in range(4):
        x = put(torch.ones(4, dtype=torch.float64 if step % 2 else torch.float32))
        y = x.exp()  # <- here
        torpor.sync()
        del y
    found, _ = first_finding()
    assert found.cause == "dtype"
    assert "float32 -> float64" in found.details[0]


def test_a_module_that_is_swapped(put: Put) -> None:
    small, large = put(nn.Linear(4, 8)), put(nn.Linear(4, 16))
    torpor.sync()
    x = put(torch.ones(2, 4))
    for step in range(8):
        module = small if step < 4 else large
        y = module(x).tanh()  # <- here
        torpor.sync()
        del y
    found, _ = first_finding()
    assert found.cause == "module"
    assert "[8,4]" in found.details[0]
    assert "[16,4]" in found.details[0]
