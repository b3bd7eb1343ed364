"""What must not run, and what must run once."""

import copy
import pickle

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torpor
from tests.comparison import Put, agree, assert_same, plain
from tests.instrumented_ops import counted, runs

X = torch.arange(6.0).view(2, 3)

READS = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "bool": lambda t: bool(t.sum()),
    "int": lambda t: int(t.sum()),
    "float": lambda t: float(t.sum()),
    "repr": repr,
    "format": lambda t: f"{t.sum():.2f}",
    "numpy": lambda t: t.cpu().numpy() if t.device.type == "lazy" else t.numpy(),
    "array": lambda t: numpy.asarray(t.cpu()),
    "nonzero": lambda t: t.nonzero().shape,
    "equal": lambda t: torch.equal(t, t.clone()),
    "mask": lambda t: t[t > 2].tolist(),
    "deepcopy": lambda t: copy.deepcopy(t).tolist(),
    "pickle": lambda t: pickle.dumps(t),
    "sync": lambda t: torpor.sync(t, wait=True),
}


def test_recording_runs_nothing(put: Put) -> None:
    y = counted(put(X) + 1) * 2
    assert torpor.is_pending(y)
    assert runs() == 0


def test_metadata_runs_nothing(put: Put) -> None:
    y = counted(put(X)).t()
    assert (y.shape, y.stride(), y.dtype, y.dim()) == ((3, 2), (1, 3), torch.float32, 2)
    assert (y.numel(), len(y), y.is_contiguous(), y.size(0)) == (6, 3, False, 3)
    assert y.device.type == put.device.type
    assert not y.is_floating_point() or y.element_size() == 4
    assert runs() == 0


def test_a_value_nobody_holds_is_never_computed(put: Put) -> None:
    x = put(X)
    counted(x)
    counted(x + 1).sum()
    torpor.sync(wait=True)
    assert runs() == 0


@pytest.mark.parametrize("name", READS)
def test_a_read_computes_a_value_once(put: Put, name: str) -> None:
    y = counted(put(X))
    READS[name](y)
    assert runs() == 1
    READS[name](y)
    torpor.sync(wait=True)
    assert plain(y).tolist() == X.tolist()
    assert runs() == 1


def test_a_value_that_was_read_is_data(put: Put) -> None:
    y = counted(put(X)).sum()
    assert torpor.is_pending(y)
    y.item()
    assert not torpor.is_pending(y)


def test_what_was_computed_on_the_way_to_a_read_is_data_too(put: Put) -> None:
    h = counted(put(X))
    loss = (h * 2).sum()
    loss.item()
    assert (h + 1).tolist() == (X + 1).tolist()
    assert runs() == 1


def test_backward_after_a_read_uses_the_activations_of_the_read(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        h = counted(x.exp())
        loss = (h * h).sum()
        loss.item()
        loss.backward()
        return x.grad

    agree(put, program, torch.randn(3, requires_grad=True))
    assert runs() == 2, "once for eager, once for torpor"


def test_reading_every_intermediate_value_computes_each_once(put: Put) -> None:
    y = put(X)
    for number in range(5):
        y = counted(y)
        y.sum().item()
        assert runs() == number + 1


def test_a_read_computes_only_what_it_needs(put: Put) -> None:
    x = put(X)
    wanted, unrelated = x + 1, counted(x * 2)
    assert wanted.sum().item() == 21.0
    assert runs() == 0
    assert torpor.is_pending(unrelated)
    assert unrelated.tolist() == (X * 2).tolist()
    assert runs() == 1


def test_a_read_does_not_run_a_later_write(put: Put) -> None:
    x = put(X)
    y = x + 1
    x.copy_(counted(x))
    assert y.tolist() == (X + 1).tolist()
    assert runs() == 0
    assert x.tolist() == X.tolist()
    assert runs() == 1


def test_syncing_one_tensor_leaves_unrelated_ones_pending(put: Put) -> None:
    x = put(X)
    wanted, unrelated = x + 1, counted(x * 2)
    torpor.sync(wanted, wait=True)
    assert not torpor.is_pending(wanted)
    assert torpor.is_pending(unrelated)
    assert runs() == 0


def test_syncing_several_tensors_runs_what_they_share_once(put: Put) -> None:
    x = put(X)
    shared = counted(x)
    first, second = shared + 1, shared * 2
    del shared
    torpor.sync(first, second, wait=True)
    assert_same([first, second], [X + 1, X * 2])
    assert runs() == 1


def test_syncing_everything_runs_each_value_once(put: Put) -> None:
    values = [counted(put(X) + number) for number in range(4)]
    torpor.sync(wait=True)
    assert runs() == 4
    assert not any(torpor.is_pending(value) for value in values)
    torpor.sync(wait=True)
    assert [value.sum().item() for value in values] == [15.0, 21.0, 27.0, 33.0]
    assert runs() == 4


def test_equal_pure_expressions_run_once(put: Put) -> None:
    x = put(X)
    first, second = counted(x), counted(x)
    torpor.sync(wait=True)
    assert_same([first, second], [X, X])
    assert runs() == 1


def test_a_cached_graph_still_runs_every_step(put: Put) -> None:
    x = put(X)
    for number in range(5):
        x.add_(1)
        assert counted(x).sum().item() == 15.0 + 6 * (number + 1)
        assert runs() == number + 1


def test_random_draws_happen_once_when_read_in_between(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        noise = torch.rand_like(x)
        total = noise.sum().item()
        dropped = F.dropout(x + noise, 0.5)
        middle = dropped.sum().item()
        torpor.sync()
        return total, middle, noise, dropped, torch.rand_like(x)

    agree(put, program, X)


def test_batch_norm_statistics_move_once_a_step(put: Put) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        values = []
        for _ in range(3):
            y = model(x)
            values.append(y.sum().item())
            values.append(model[0].running_mean.sum().item())
            torpor.sync()
            values.append(model[0].num_batches_tracked.item())
        return values, dict(model.named_buffers())

    agree(put, program, nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), torch.randn(4, 3))


def test_a_write_that_was_read_is_not_written_again(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        values = []
        for _ in range(4):
            x.add_(1)
            values.append(x.sum().item())
            torpor.sync()
        return values, x

    agree(put, program, X)


def test_a_sync_with_nothing_to_do_runs_nothing(put: Put) -> None:
    y = counted(put(X))
    for _ in range(3):
        torpor.sync(wait=True)
        torpor.sync(y, wait=True)
    assert runs() == 1


def test_is_lazy_and_is_pending_run_nothing(put: Put) -> None:
    y = counted(put(X))
    assert torpor.is_lazy(y)
    assert torpor.is_pending(y)
    assert runs() == 0
    assert not torpor.is_lazy(X)
    assert not torpor.is_pending(X)


def test_a_leaf_is_not_pending(put: Put) -> None:
    x = put(X)
    torpor.sync(x, wait=True)
    assert torpor.is_lazy(x)
    assert not torpor.is_pending(x)
