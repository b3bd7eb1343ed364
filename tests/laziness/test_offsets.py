"""Views whose offset is another one in every step: one graph for all of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torpor
from tests.comparison import Put, agree
from torpor.observe.history import HISTORY

DATA = torch.randn(40, 6)
OFFSETS = (7, 0, 31, 1, 18, 2, 36, 36, 5)

LOOKS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "select": lambda x, i: x[i],
    "slice": lambda x, i: x[i : i + 4],
    "slice of a dimension inside": lambda x, i: x[:, i % 4 : i % 4 + 2],
    "slice with a step": lambda x, i: x[i : i + 4 : 2],
    "narrow": lambda x, i: x.narrow(0, i, 4),
    "as_strided": lambda x, i: x.as_strided((2, 3), (6, 1), i),
    "two of them": lambda x, i: x[i, i % 6],
    "a view of one": lambda x, i: x[i : i + 4].t()[1:3],
    "many at once": lambda x, i: torch.stack([x[(i * k) % 40] for k in range(5)]),
}


def new_graphs(step: Callable[[int], object]) -> list[int]:
    """How many graphs are new in each step, one for each of the offsets."""
    counted = []
    for offset in OFFSETS:
        before = HISTORY.serial
        step(offset)
        torpor.sync()
        counted.append(HISTORY.serial - before)
    return counted


@pytest.mark.parametrize("look", LOOKS)
def test_an_offset_that_changes_becomes_an_input(put: Put, look: str) -> None:
    x = put(DATA)
    kept: list[Tensor] = []

    def step(offset: int) -> None:
        kept.append(LOOKS[look](x, offset).exp())

    assert sum(new_graphs(step)[4:]) == 0


@pytest.mark.parametrize("look", LOOKS)
def test_what_is_seen_at_an_offset_that_changes_is_eagers(put: Put, look: str) -> None:
    def program(x: Tensor) -> object:
        found = []
        for offset in OFFSETS:
            seen = LOOKS[look](x, offset)
            found.append((seen.exp(), seen, seen.stride(), seen.storage_offset()))
            torpor.sync()
        return found

    agree(put, program, DATA)


def _assign(x: Tensor, i: int) -> None:
    x[i] = x[i + 1] * 2


def _add(x: Tensor, i: int) -> None:
    x[i : i + 3].add_(1)


def _through_an_older_view(x: Tensor, i: int) -> None:
    whole, part = x.view(-1), x[i : i + 3]
    whole[i * 6] = 5.0
    part.mul_(2)
    x[i].sub_(whole[:6])


WRITES: dict[str, Callable[[Tensor, int], None]] = {
    "assign": _assign,
    "add": _add,
    "through an older view": _through_an_older_view,
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_at_an_offset_that_changes_are_one_graph(put: Put, write: str) -> None:
    x = put(DATA)
    assert sum(new_graphs(lambda offset: WRITES[write](x, offset))[5:]) == 0


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("cut", [True, False])
def test_writes_at_an_offset_that_changes_are_eagers(put: Put, write: str, cut: bool) -> None:
    def program(x: Tensor) -> object:
        x = x.clone()
        seen = []
        for offset in OFFSETS:
            WRITES[write](x, offset)
            seen.append(x[offset].sum())
            if cut:
                torpor.sync()
        return x, seen

    agree(put, program, DATA)


def test_a_view_keeps_its_place_in_later_steps(put: Put) -> None:
    def program(x: Tensor) -> object:
        x = x.clone()
        views = []
        for offset in OFFSETS:
            views.append(x[offset : offset + 2])
            views[-1].add_(1)
            torpor.sync()
        views[0].zero_()
        x[3].fill_(9.0)
        return [*views, x], [v.storage_offset() for v in views]

    agree(put, program, DATA)


def test_gradients_flow_through_an_offset_that_changes(put: Put) -> None:
    def program(x: Tensor) -> object:
        x = x.requires_grad_()
        for offset in OFFSETS:
            (x[offset : offset + 3].pow(2).sum() + x[offset, 2]).backward()
            torpor.sync()
        return x.grad

    agree(put, program, DATA.clone())


def test_an_offset_out_of_range_is_an_error_where_it_is_used(put: Put) -> None:
    x = put(DATA)
    for offset in OFFSETS:
        x[offset].exp().sum().item()
    for bad in (40, -41, 1000):
        with pytest.raises(IndexError):
            x[bad]
    with pytest.raises((RuntimeError, IndexError)):
        x.narrow(0, 38, 4)
    assert torch.equal(torpor.eager(x[-1]).cpu(), DATA[-1])


def test_what_is_cut_short_or_counted_from_the_end_is_eagers(put: Put) -> None:
    def program(x: Tensor) -> object:
        found = []
        for start, end in (
            (3, 7),
            (5, 9),
            (38, 42),
            (36, 40),
            (-4, -1),
            (-9, -5),
            (40, 44),
            (9, 5),
        ):
            found += [x[start:end] * 2, x[start:] + 1, x[:end].sum()]
            if -40 <= start < 40:
                found.append(x[start] * 3)
            torpor.sync()
        return found

    agree(put, program, DATA)


def test_a_loop_that_goes_on_longer_keeps_its_constants(put: Put) -> None:
    x = put(DATA)
    before = torpor.metrics.counters().get("OffsetsPromoted", 0)
    for length in (3, 4, 6, 5):
        sum((x[t] for t in range(length)), start=x[0]).sum().item()
    assert torpor.metrics.counters().get("OffsetsPromoted", 0) == before


def test_offsets_stay_constants_if_nothing_is_to_become_an_input(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "dynamic", "off")
    x = put(DATA)
    assert sum(new_graphs(lambda offset: x[offset].exp().sum().item())) >= 7


def test_sizes_and_offsets_may_change_together(put: Put) -> None:
    def program(x: Tensor) -> object:
        found = []
        for offset, size in zip(OFFSETS, (9, 8, 7, 9, 8, 6, 7, 8, 9)):
            batch = torch.ones(size, 6, device=x.device) * offset
            row = x[offset]
            found.append((batch * row).sum(1))
            found.append(batch[size // 2] + row)
            torpor.sync()
        return found

    agree(put, program, DATA)
