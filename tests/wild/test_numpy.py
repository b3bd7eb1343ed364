"""Memory shared with NumPy is shared, and a graph takes numbers as they are when they enter it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torpor

pytestmark = pytest.mark.usefixtures("backend")


def written_through_the_tensor() -> Any:
    array = np.zeros(2, np.float32)
    torch.from_numpy(array)[0] = 7.0
    return array.tolist()


def written_through_the_array() -> Any:
    array = np.zeros(2, np.float32)
    tensor = torch.from_numpy(array)
    taken = tensor * 1
    array[1] = 5.0
    return taken.tolist(), tensor.tolist()


def a_buffer_used_again() -> Any:
    buffer = np.zeros(3, np.float32)
    sums, copies = [], []
    for i in range(3):
        buffer[:] = i
        sums.append(torch.from_numpy(buffer).sum())
        copies.append(torch.as_tensor(buffer) * 1)
    return [s.item() for s in sums], [c.tolist() for c in copies]


def an_index_shuffled_in_place() -> Any:
    x, index = torch.arange(6.0) * 10, np.arange(6)
    taken = []
    for _ in range(3):
        taken.append(x[index[:3]])
        index[:] = index[::-1].copy()
    return [t.tolist() for t in taken]


def a_buffer_by_the_protocol() -> Any:
    memory = bytearray(np.zeros(2, np.float32).tobytes())
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    taken = tensor + 1
    tensor[0] = 3.0
    return np.frombuffer(memory, np.float32).tolist(), taken.tolist(), (tensor + 1).tolist()


def memory_by_dlpack() -> Any:
    array = np.zeros(2, np.float32)
    tensor = torch.from_dlpack(array)
    taken = tensor + 1
    array[0] = 3.0
    return taken.tolist(), (tensor + 1).tolist()


SHARED: list[Callable[[], Any]] = [
    written_through_the_tensor, written_through_the_array, a_buffer_used_again,
    an_index_shuffled_in_place, a_buffer_by_the_protocol, memory_by_dlpack,
]  # fmt: skip


@pytest.mark.parametrize("program", SHARED)
def test_memory_is_shared_while_enabled(program: Callable[[], Any]) -> None:
    expected = program()
    torpor.enable()
    assert program() == expected


@pytest.mark.parametrize("program", SHARED)
def test_memory_is_shared_inside_the_mode(program: Callable[[], Any]) -> None:
    expected = program()
    with torpor.mode():
        assert program() == expected


def test_an_array_of_a_tensor_made_while_enabled_shares_its_memory() -> None:
    torpor.enable()
    y = torch.zeros(2)
    array = y.numpy()
    y.add_(1)
    array[1] = 5.0
    assert array.tolist() == y.tolist() == [1.0, 5.0]


def test_an_array_of_a_lazy_tensor_is_a_snapshot_that_cannot_be_written() -> None:
    with torpor.mode():
        y = torch.zeros(2)
        array = y.numpy()
        y.add_(1)
    assert array.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 3.0


# -- ways into a graph: what the owner writes later is not seen ---------------------------------

F = nn.functional
ENTRANCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "operand": lambda w, x: w * x,
    "operand on the left": lambda w, x: x - w,
    "method": lambda w, x: x.mul(w),
    "in place": lambda w, x: w.clone().add_(x),
    "list": lambda w, x: torch.cat([w, x, x]),
    "stack": lambda w, x: torch.stack([x, w]),
    "where": lambda w, x: torch.where(x > 1, x, w),
    "condition": lambda w, x: torch.where(x > 1, w, 0.0),
    "index": lambda w, x: w[x.long()],
    "mask": lambda w, x: w[x > 1],
    "index put": lambda w, x: w.clone().index_put_((x.long(),), x),
    "assignment": lambda w, x: _assigned(w.clone(), x),
    "copy": lambda w, x: w.clone().copy_(x),
    "out": lambda w, x: torch.add(x, 1, out=torch.empty_like(w)),
    "gather": lambda w, x: w.gather(0, x.long()),
    "embedding": lambda w, x: F.embedding(x.long(), w[:, None]),
    "addcmul": lambda w, x: torch.addcmul(w, x, x),
    "einsum": lambda w, x: torch.einsum("i,j->ij", w, x),
    "linear": lambda w, x: F.linear(x[None], w[None]),
    "matmul": lambda w, x: w @ x,
    "view": lambda w, x: w[:2] + x.view(2, 2)[1],
    "set data": lambda w, x: _with_data(w.clone(), x),
}


def _assigned(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w[1:3] = x[1:3]
    return w


def _with_data(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w.data = x
    return w


@pytest.mark.parametrize("way", ENTRANCES)
@pytest.mark.parametrize("times", [1, 3])
def test_a_graph_takes_numbers_as_they_are_when_they_enter(way: str, times: int) -> None:
    numbers = np.array([0.0, 3.0, 1.0, 2.0], np.float32)
    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = [ENTRANCES[way](w, torch.from_numpy(numbers + 0)).clone() for _ in range(times)]
    lazy = torpor.lazy(w)
    got = []
    for _ in range(times):
        array = numbers.copy()
        got.append(ENTRANCES[way](lazy, torch.from_numpy(array)))
        array[:] = 1.0  # in range for whoever reads too late
        torpor.sync(wait=False)
    assert [g.tolist() for g in got] == [e.tolist() for e in expected]


def test_an_index_array_is_taken_as_it_is() -> None:
    w, index = torpor.lazy(torch.arange(6.0)), np.array([3, 1])
    got = [w[index], w.clone()]
    got[1][index] = 9.0
    index[:] = 0
    assert [g.tolist() for g in got] == [[3.0, 1.0], [0.0, 9.0, 2.0, 9.0, 4.0, 5.0]]


# -- ways out: writes to plain tensors happen at once -------------------------------------------


def _write_each(plain: torch.Tensor, w: torch.Tensor) -> None:
    plain.copy_(w)
    plain[0] = w[3]
    plain[1:3] += w[:2]
    plain += w
    plain.mul_(w)
    torch.add(w, plain, out=plain)
    plain[w > 3] = w[0]
    plain.index_put_((torch.tensor([0]),), w[:1], accumulate=True)
    plain.addcmul_(w, w)
    plain.clamp_(max=w)
    torch._foreach_add_([plain], [w])
    plain.view(2, 2)[1].sub_(w[:2])


def test_writes_to_a_plain_tensor_are_seen_by_its_array_at_once() -> None:
    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = torch.zeros(4)
    _write_each(expected, w)
    array = np.zeros(4, np.float32)
    plain = torch.from_numpy(array)
    _write_each(plain, torpor.lazy(w) * 1)
    assert type(plain) is torch.Tensor
    assert array.tolist() == expected.tolist()
