"""Programs recorded by `record`, unspecialised: eager's numbers, and the same nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import torpor
from torpor.ops.spec import Mode, spec_of
from torpor.specialize.recorders import specialised
from torpor.trace import dispatch
from torpor.trace.overlap import WritesPlain
from torpor.trace.recorder import Recording, record, recording_of
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import value_of

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


@contextmanager
def recorded_generically(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Recording]]:
    """Ops with a specialised recorder are recorded by `record`; the names of those that were."""
    seen: dict[str, Recording] = {}

    def watch(cls: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spec = spec_of(op)
        if spec.mode not in (Mode.RECORD, Mode.VIEW) or spec.name in dispatch.SPECIAL:
            return dispatch.dispatch(cls, op, types, args, kwargs)
        recording = seen.setdefault(spec.name, recording_of(spec))
        return record(recording, args, kwargs or {})

    with monkeypatch.context() as patch:
        patch.setattr(LazyTensor, "__torch_dispatch__", classmethod(watch))
        yield seen


def _input() -> Tensor:
    return torch.linspace(-2, 3, 6).reshape(2, 3)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_recorded_generically_equals_eager(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = PROGRAMS[name](_input())
    with recorded_generically(monkeypatch) as seen:
        results = PROGRAMS[name](_input().to("lazy"))
    assert seen
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result.cpu(), wanted)
        assert result.stride() == wanted.stride()


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_ways_record_the_same_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torpor.sync(wait=True)
    start = _input().to("lazy")
    generated = [value_of(t) for t in PROGRAMS[name](start)]
    torpor.sync(wait=True)
    start = _input().to("lazy")
    with recorded_generically(monkeypatch):
        generic = [value_of(t) for t in PROGRAMS[name](start)]
    assert list(map(id, generic)) == list(map(id, generated))


def test_both_ways_refuse_the_same() -> None:
    plain, lazy = torch.ones(2), torch.ones(2).to("lazy")
    spec = spec_of(aten.add_.Tensor)
    recording = recording_of(spec)
    with pytest.raises(WritesPlain):
        specialised(spec)(plain, lazy)
    with pytest.raises(WritesPlain):
        record(recording, (plain, lazy), {})
