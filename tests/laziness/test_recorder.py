"""Programs with every kind of result that `record` makes: eager's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torpor
from tests.comparison import Put
from torpor.ops.spec import spec_of
from torpor.trace.overlap import WritesPlain
from torpor.trace.recorder import make_recorder

aten = torch.ops.aten
Program = Callable[[Tensor], list[Tensor]]


def _views_and_writes(x: Tensor) -> list[Tensor]:
    row, column = x[1], x.t()[0]
    row.mul_(2)
    column.add_(row.sum())
    parts = x.split(1)
    parts[0].fill_(3)
    return [x, row, column, *parts]


def _lists(x: Tensor) -> list[Tensor]:
    made = torch._foreach_add([x, x * 2], [x, x], alpha=3)
    torch._foreach_mul_(made, 2.0)
    return [*made, torch.cat(made, 1), torch.stack(made)]


def _out(x: Tensor) -> list[Tensor]:
    total = torch.zeros_like(x)
    torch.add(x, x, alpha=2, out=total)
    values, indices = torch.empty(0).to(x.device), torch.empty(0, dtype=torch.int64).to(x.device)
    torch.max(x, 1, out=(values, indices))
    return [total, values, indices]


def _numbers(x: Tensor) -> list[Tensor]:
    return [x.add(1), x.add(1.0), x.add(-0.0), torch.where(x > 0, x, 2.0), x.clamp(max=1), x * x]


def _several_results(x: Tensor) -> list[Tensor]:
    mean, var = torch.zeros(3).to(x.device), torch.ones(3).to(x.device)
    y = torch.nn.functional.batch_norm(x, mean, var, training=True)
    return [y, mean, var, *x.sort(1), *torch.native_layer_norm(x, (3,), None, None, 1e-5)]


def _itself(x: Tensor) -> list[Tensor]:
    x.add_(x)
    x[1:].copy_(x[:1])
    return [x]


PROGRAMS: dict[str, Program] = {
    "views and writes": _views_and_writes,
    "lists": _lists,
    "out=": _out,
    "numbers": _numbers,
    "several results": _several_results,
    "itself": _itself,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_equals_eager(name: str) -> None:
    start = torch.linspace(-2, 3, 6).reshape(2, 3)
    expected = PROGRAMS[name](start.clone())
    for result, wanted in zip(PROGRAMS[name](start.to("lazy")), expected, strict=True):
        assert torch.equal(result.cpu(), wanted)
        assert result.stride() == wanted.stride()


def test_a_plain_tensor_is_not_written_to() -> None:
    plain, lazy = torch.ones(2), torch.ones(2).to("lazy")
    with pytest.raises(WritesPlain):
        make_recorder(spec_of(aten.add_.Tensor))(plain, lazy)


def test_a_plain_tensor_that_is_passed_twice_is_one_input(concrete: Put) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.linspace(-1, 1, 64).view(2, 4, 8)
    with torch.no_grad():
        expected = attention(x, x, x)[0]  # its kernel asks whether they are the same tensor
        result = concrete(attention)(x, x, x)[0]
    assert torch.equal(torpor.eager(result), expected)


def test_a_plain_tensor_is_read_again_at_the_next_call(concrete: Put) -> None:
    weight, x = concrete(torch.ones(2)), torch.ones(2)
    before = weight * x
    x.numpy()[:] = 3
    assert (weight * x).tolist() == [3, 3]
    assert before.tolist() == [1, 1]
