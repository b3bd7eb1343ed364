"""What PyTorch's own lazy tensors get wrong (DESIGN §9), one line a test."""

import copy
import io
import pickle
import socket

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import torpor
from tests.comparison import (
    Put,
    agree,
    assert_same,
    loads_jit_decompositions,
    plain,
    raised_by,
)
from tests.instrumented_ops import failing


def test_dropout_draws_once_when_the_loss_is_read_before_backward(put: Put) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        loss = model(x).square().mean()
        value = loss.item()
        loss.backward()
        return value, loss.detach(), [p.grad for p in model.parameters()]

    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    agree(put, program, model, torch.randn(5, 6))


def test_batch_norm_counts_a_batch_once_when_the_loss_is_read_early(put: Put) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        loss = model(x).square().mean()
        value = loss.item()
        loss.backward()
        torpor.sync()
        return value, dict(model.named_buffers()), [p.grad for p in model.parameters()]

    got = agree(put, program, nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), _image())
    assert got[1]["1.num_batches_tracked"].item() == 1


def test_running_statistics_move_after_a_sync_that_follows_to(put: Put) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        torpor.sync()
        model(x)
        torpor.sync()
        return model.running_mean, model.running_var

    running_mean, _ = agree(put, program, nn.BatchNorm2d(3), _image())
    assert plain(running_mean).abs().sum() > 0


@pytest.mark.parametrize("shuffle", [F.pixel_shuffle, F.pixel_unshuffle])
def test_pixel_shuffle_moves_every_pixel_to_its_place(put: Put, shuffle) -> None:
    agree(put, lambda x: shuffle(x, 2), torch.randn(2, 8, 4, 4))


def test_pixel_shuffle_has_a_gradient(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        F.pixel_shuffle(x, 2).square().sum().backward()
        return x.grad

    agree(put, program, torch.randn(2, 8, 3, 3, requires_grad=True))


@pytest.mark.parametrize(
    "pieces",
    [
        lambda x: x.split(2),
        lambda x: x.split([1, 3, 2], dim=1),
        lambda x: x.chunk(3, dim=1),
        lambda x: x.unbind(1),
        lambda x: x.tensor_split(4, dim=1),
        lambda x: torch.hsplit(x, 3),
    ],
    ids=["split", "split_sizes", "chunk", "unbind", "tensor_split", "hsplit"],
)
def test_pieces_of_a_lazy_tensor_are_lazy(put: Put, pieces) -> None:
    parts = agree(put, lambda x: tuple(pieces(x)), torch.randn(4, 6))
    assert all(torpor.is_lazy(part) for part in parts)
    assert {part.device.type for part in parts} == {put.device.type}


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train(put: Put, layer: type, bidirectional: bool) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x)[0].square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach() for p in model.parameters()]

    model = layer(4, 5, num_layers=2, batch_first=True, bidirectional=bidirectional)
    agree(put, program, model, torch.randn(3, 7, 4))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_train(put: Put, cell: type) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        state = None
        for step in x.unbind(0):
            state = model(step, state)
        (state[0] if isinstance(state, tuple) else state).sum().backward()
        return [p.grad for p in model.parameters()]

    agree(put, program, cell(4, 5), torch.randn(6, 3, 4))


def test_attention_with_chunked_qkv_trains(put: Put) -> None:
    def program(project: nn.Module, x: torch.Tensor) -> object:
        q, k, v = (part.view(2, 5, 2, 4).transpose(1, 2) for part in project(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.transpose(1, 2).reshape(2, 5, 8).square().sum().backward()
        return out.detach(), project.weight.grad, project.bias.grad

    agree(put, program, nn.Linear(8, 24), torch.randn(2, 5, 8))


@loads_jit_decompositions
def test_forward_mode_differentiation_works(put: Put) -> None:
    def program(x: torch.Tensor, direction: torch.Tensor) -> object:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, direction)
            value, tangent = forward_ad.unpack_dual((dual.sin() @ dual.T).exp())
            return value.clone(), tangent.clone()

    agree(put, program, torch.randn(3, 4), torch.randn(3, 4))


@pytest.mark.parametrize("length", [15_000])
def test_a_chain_that_crashes_ltc_computes(put: Put, length: int) -> None:
    def program(x: torch.Tensor) -> object:
        for _ in range(length):
            x = x + 1
        return x

    agree(put, program, torch.zeros(2))


def test_a_failed_step_does_not_poison_the_next(put: Put) -> None:
    x = put(torch.ones(3))
    for _ in range(3):
        error = raised_by(lambda: failing(x + 1).sum().item())
        assert type(error) is ArithmeticError
        assert (x * 2).tolist() == [2.0, 2.0, 2.0]
        torpor.sync(wait=True)
    agree(put, lambda y: (y * 3).sum().item(), torch.randn(4))


def test_a_tensor_survives_torch_save(put: Put) -> None:
    original = torch.randn(3, 4)
    buffer = io.BytesIO()
    torch.save({"x": put(original) * 2}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)["x"]
    assert loaded.device.type == put.device.type
    assert_same(loaded, original * 2)


@pytest.mark.parametrize("target", ["cpu", "lazy"])
def test_map_location_chooses_where_a_tensor_lands(put: Put, target: str) -> None:
    original = torch.randn(3, 4)
    buffer = io.BytesIO()
    torch.save(put(original) * 2, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location=target)
    assert loaded.device.type == target
    assert_same(loaded, original * 2)


def test_a_tensor_survives_pickle(put: Put) -> None:
    original = torch.randn(3, 4)
    loaded = pickle.loads(pickle.dumps(put(original) + 1))
    assert loaded.device.type == put.device.type
    assert_same(loaded, original + 1)


def test_a_tensor_survives_deepcopy(put: Put) -> None:
    original = torch.randn(3, 4)
    lazy = put(original)
    twin = copy.deepcopy(lazy)
    lazy.zero_()
    assert twin.device == lazy.device
    assert torpor.is_lazy(twin)
    assert_same(twin, original)


def test_a_plain_tensor_takes_a_lazy_tensors_values(put: Put) -> None:
    original = torch.randn(3, 4)
    target = torch.zeros(3, 4)
    target.copy_(put(original) * 2)
    assert type(target) is torch.Tensor
    assert_same(target, original * 2)


def test_a_tensor_moves_from_one_lazy_device_to_another() -> None:
    original = torch.randn(3, 4)
    first = original.to("lazy:0")
    second = (first * 2).to("lazy:1")
    assert second.device == torch.device("lazy:1")
    assert_same(second + 1, original * 2 + 1)
    assert_same(second.to("lazy:0") - first, original * 2 - original)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_adam_steps_without_a_fallback(put: Put, optimizer_class: type, foreach) -> None:
    model, x = put(nn.Linear(4, 4)), put(torch.randn(2, 4))
    optimizer = optimizer_class(model.parameters(), foreach=foreach)
    torpor.metrics.reset()
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        torpor.sync(wait=True)
    fallbacks = {n: c for n, c in torpor.metrics.counters().items() if n.startswith("aten::") and c}
    assert fallbacks == {}


def test_distributed_data_parallel_starts_and_steps(concrete: Put) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1
    )

    def program(model: nn.Module, x: torch.Tensor) -> object:
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            parallel(x).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    try:
        agree(concrete, program, nn.Linear(4, 3), torch.randn(2, 4))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(put: Put, use_reentrant: bool) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
        return x.grad, [p.grad for p in model.parameters()]

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    agree(put, program, model, torch.randn(3, 4, requires_grad=True))


def _image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8) + 1
