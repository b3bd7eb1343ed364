"""Recurrent layers are one node each; packing and padding wait for nothing. Any lengths do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import torpor
from tests.comparison import Put, loads_jit_decompositions, raised_by
from tests.instrumented_ops import failing
from torpor.execute.sync import PLANS
from torpor.overrides.rnn_ops import KEPT

CELLS: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "dropout": {"num_layers": 3, "dropout": 0.5, "bidirectional": True},
    "all dropped": {"num_layers": 2, "dropout": 1.0},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True, "num_layers": 2, "dropout": 0.25},
    "double": {"dtype": torch.float64},
}
LENGTHS = ([5, 2, 4, 4], [3, 6, 1, 6])


def _same(lazy: list[Tensor], eager: list[Tensor]) -> None:
    assert len(lazy) == len(eager)
    for one, other in zip(lazy, eager, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(torpor.eager(one.detach()), other.detach())


def _states(hidden: Any) -> tuple[Tensor, ...]:
    return hidden if isinstance(hidden, tuple) else (hidden,)


def _data(model: nn.Module, put: Callable[[Any], Any]) -> Tensor:
    shape = (4, 6, 3) if model.batch_first else (6, 4, 3)
    dtype = next(model.parameters()).dtype
    x: Tensor = put(torch.randn(shape, dtype=dtype))
    return x.requires_grad_()


def _packed(x: Tensor, lengths: list[int], first: bool = False) -> PackedSequence:
    return pack_padded_sequence(x, torch.tensor(lengths), first, enforce_sorted=False)


def _train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, gradients, and what the generator gives next, for two batches."""
    found = []
    for lengths in LENGTHS:
        output, hidden = model(_packed(x, lengths, model.batch_first))
        padded, back = pad_packed_sequence(output, model.batch_first, padding_value=0.5)
        loss = padded.pow(2).sum() + sum(state.sin().sum() for state in _states(hidden))
        inputs = [x, *model.parameters()]
        found += [padded, back, *_states(hidden), *torch.autograd.grad(loss, inputs)]
        found.append(torch.rand(2))
    return found


def _both(run: Callable[..., list[Tensor]], model: nn.Module, put: Put) -> None:
    results = []
    for place in (lambda thing: thing, put):
        torch.manual_seed(1)
        moved = place(model)
        results.append(run(moved, _data(model, place)))
    _same(results[1], results[0])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cell", CELLS)
def test_packed_layers_have_eagers_bits(put: Put, cell: str, variant: str) -> None:
    _both(_train, CELLS[cell](3, 5, **VARIANTS[variant]), put)


def test_projections_have_eagers_bits(put: Put) -> None:
    _both(_train, nn.LSTM(3, 5, num_layers=2, proj_size=2, bidirectional=True), put)


@pytest.mark.parametrize("variant", ["both directions", "batch first"])
@pytest.mark.parametrize("cell", CELLS)
def test_padded_batches_have_eagers_bits(put: Put, cell: str, variant: str) -> None:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        output, hidden = model(x)
        loss = output.sin().sum() + sum(state.pow(2).sum() for state in _states(hidden))
        return [output, *torch.autograd.grad(loss, [x, *model.parameters()]), torch.rand(2)]

    _both(run, CELLS[cell](3, 5, **VARIANTS[variant]), put)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients_bits_are_eagers(put: Put, guard: Any) -> None:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        with guard():
            output, hidden = model(_packed(x.detach(), LENGTHS[0]))
            padded, lengths = pad_packed_sequence(output)
            return [padded, lengths, *hidden]

    _both(run, nn.LSTM(3, 5, num_layers=2), put)


def test_initial_states_get_gradients(put: Put) -> None:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        hx = x.detach()[:1, :, :1].expand(1, 4, 5).clone().requires_grad_()
        output, last = model(_packed(x, LENGTHS[0]), hx)
        return [*torch.autograd.grad(last.sum() + output.data.pow(2).sum(), [hx, x])]

    _both(run, nn.GRU(3, 5), put)


def test_a_second_backward_runs_forward_again(put: Put) -> None:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        output, _ = model(_packed(x, LENGTHS[0]))
        loss = output.data.pow(2).sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, [x, *model.parameters()])]

    _both(run, nn.LSTM(3, 5, num_layers=2, dropout=0.5), put)


def test_backward_may_come_after_a_read(put: Put) -> None:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        output, _ = model(_packed(x, LENGTHS[0]))
        loss = output.data.pow(2).sum()
        loss.item()
        return [*torch.autograd.grad(loss, [x, *model.parameters()])]

    _both(run, nn.LSTM(3, 5), put)


def test_gradients_of_gradients_are_right(put: Put) -> None:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        output, _ = model(_packed(x, LENGTHS[0]))
        padded, _ = pad_packed_sequence(output)
        (first,) = torch.autograd.grad(padded.pow(3).sum(), x, create_graph=True)
        return [*torch.autograd.grad(first.pow(2).sum(), list(model.parameters()))]

    model = nn.GRU(3, 5, dtype=torch.float64)
    torch.manual_seed(1)
    eager = run(model, _data(model, lambda t: t))
    torch.manual_seed(1)
    lazy = run(put(model), _data(model, put))
    for one, other in zip(lazy, eager, strict=True):
        torch.testing.assert_close(torpor.eager(one.detach()), other.detach())


@loads_jit_decompositions
def test_forward_mode_goes_through_the_parts(put: Put) -> None:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        with forward_ad.dual_level():
            rows = x.detach().flatten(0, 1)
            dual = forward_ad.make_dual(rows, torch.ones_like(rows))
            output, _ = model(PackedSequence(dual, torch.tensor([6, 6, 5, 4, 2, 1])))
            padded, _ = pad_packed_sequence(output)
            return [forward_ad.unpack_dual(padded).tangent.detach().clone()]

    _both(run, nn.RNN(3, 5), put)


def test_autocast_goes_through_the_parts(concrete: Put) -> None:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            output, _ = model(_packed(x, LENGTHS[0]))
        return [output.data, *torch.autograd.grad(output.data.float().sum(), x)]

    _both(run, nn.GRU(3, 5), concrete)


# -- what is recorded ------------------------------------------------------------------------------


def _step(model: nn.Module, optimizer: Any, put: Callable[[Any], Any], lengths: Tensor) -> Tensor:
    x = put(torch.randn(int(lengths.max()), len(lengths), 3))
    output, _ = model(pack_padded_sequence(x, lengths, enforce_sorted=False))
    padded, _ = pad_packed_sequence(output)
    loss: Tensor = padded.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _batches(model: nn.Module, put: Callable[[Any], Any], count: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = [torch.randint(1, 13, (6,)) for _ in range(count)]
    return [_step(model, optimizer, put, each) for each in lengths]


@pytest.mark.parametrize("cell", CELLS)
def test_batches_of_other_lengths_are_few_graphs(concrete: Put, cell: str) -> None:
    model = concrete(CELLS[cell](3, 5, num_layers=2, dropout=0.2))
    _batches(model, concrete, 20)
    before = PLANS.serial
    _batches(model, concrete, 20)
    assert PLANS.serial - before <= 2


def test_training_over_changing_lengths_is_eagers(put: Put) -> None:
    results = []
    for place in (lambda thing: thing, put):
        torch.manual_seed(0)
        model = place(nn.LSTM(3, 5, num_layers=2, dropout=0.2))
        results.append(_batches(model, place, 20))
    _same(results[1], results[0])


def test_a_packed_layer_is_one_node_each_way(put: Put) -> None:
    model = put(nn.LSTM(3, 5, num_layers=2, bidirectional=True))
    x = _data(model, put)
    output, _ = model(_packed(x, LENGTHS[0]))
    output.data.sum().backward()
    text = str(torpor.graph(x.grad))
    assert text.count("torpor.rnn.default") == text.count("torpor.rnn_backward.default") == 1
    assert "slice" not in text


def test_forward_waits_for_nothing(put: Put) -> None:
    model = put(nn.GRU(3, 5))
    x = _data(model, put) * 2
    torpor.metrics.reset()
    output, _ = model(pack_padded_sequence(x, torch.tensor([5, 4, 2, 1])))
    padded, _ = pad_packed_sequence(output)
    assert torpor.is_pending(x)
    assert torpor.is_pending(padded)
    counters = torpor.metrics.counters()
    assert not [name for name in counters if name.startswith(("Sync::", "aten::", "Fallback"))]


def test_plain_data_go_into_lazy_layers_whole() -> None:
    model = torpor.lazy(nn.GRU(3, 5))
    output, _ = model(_packed(torch.randn(6, 4, 3), LENGTHS[0]))
    assert "torpor.rnn.default" in str(torpor.graph(output.data))


def test_nothing_is_kept_after_training_steps(put: Put) -> None:
    model = put(nn.LSTM(3, 5, num_layers=2, dropout=0.5))
    _batches(model, put, 3)
    torpor.wait()
    gc.collect()
    assert not KEPT


def test_nothing_is_kept_of_a_forward_that_is_dropped(put: Put) -> None:
    model = put(nn.GRU(3, 5))
    output, hidden = model(_packed(_data(model, put), LENGTHS[0]))
    output.data.sum().item()
    assert len(KEPT) == 1
    del output, hidden
    torpor.sync()
    torpor.wait()
    gc.collect()
    assert not KEPT


def test_in_a_mode_lengths_may_be_lazy() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.GRU(3, 5)
        packed = pack_padded_sequence(torch.randn(6, 4, 3), torch.tensor([6, 4, 4, 1]))
        output, hidden = model(packed)
        return [pad_packed_sequence(output)[0], hidden]

    eager = run()
    with torpor.mode():
        lazy = run()
    _same(lazy, eager)


# -- mistakes --------------------------------------------------------------------------------------

BAD_LENGTHS = {
    "not sorted": [2, 6, 1, 1],
    "zero": [6, 4, 2, 0],
    "too few": [6, 4],
}


@pytest.mark.parametrize("lengths", BAD_LENGTHS.values(), ids=BAD_LENGTHS)
def test_wrong_lengths_are_refused_where_they_are_packed(put: Put, lengths: list[int]) -> None:
    x = torch.randn(6, 4, 3)
    with pytest.raises(RuntimeError) as eagers:
        pack_padded_sequence(x, torch.tensor(lengths))
    message = str(eagers.value).partition("\n")[0]
    with pytest.raises(RuntimeError) as ours:
        pack_padded_sequence(put(x), torch.tensor(lengths))
    assert message in str(ours.value)


def test_an_empty_batch_is_refused(put: Put) -> None:
    with pytest.raises(RuntimeError, match="Cannot pack empty"):
        pack_padded_sequence(put(torch.randn(0, 2, 3)), torch.tensor([1, 1]))


def test_rows_of_the_wrong_width_are_refused_at_the_call(put: Put) -> None:
    model = nn.GRU(3, 5)
    with pytest.raises(RuntimeError):
        model(_packed(torch.randn(6, 4, 2), LENGTHS[0]))
    with pytest.raises(RuntimeError):
        put(model)(_packed(put(torch.randn(6, 4, 2)), LENGTHS[0]))


def test_lengths_beyond_the_data_are_cut_short_as_in_eager(put: Put) -> None:
    x = torch.randn(4, 2, 3)
    eager = pack_padded_sequence(x, torch.tensor([6, 2]))
    lazy = pack_padded_sequence(put(x), torch.tensor([6, 2]))
    _same([lazy.data, lazy.batch_sizes], [eager.data, eager.batch_sizes])


def test_a_step_that_fails_leaves_the_layer_as_it_was(concrete: Put) -> None:
    model = concrete(nn.LSTM(3, 5))
    _batches(model, concrete, 2)
    before = [torpor.eager(p.detach()) for p in model.parameters()]
    torpor.wait()
    output, _ = model(_packed(concrete(torch.randn(6, 4, 3)), LENGTHS[0]))
    failing(output.data.sum()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert type(raised_by(lambda: torpor.sync(wait=True))) is ArithmeticError
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(torpor.eager(parameter.detach()), old)
    torpor.wait()
