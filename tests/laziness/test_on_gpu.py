"""Lazy tensors on a CUDA device: eager's numbers, on the reference backend bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torpor
import torpor.compat.dynamo
from torpor.backends.inductor import cuda
from torpor.overrides import cudnn_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.usefixtures("on_the_reference_backend"),
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.1)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.mixed(x, x, x, need_weights=False)
        out: Tensor = self.out(self.norm(x + y)).mean(1)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(32, 16, 2, batch_first=True), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(x)[0][:, -1])
        return out


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(320, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 10)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8),
    )  # fmt: skip


NETWORKS = {
    "mlp": mlp, "convolutions": convolutions, "attention": Attention, "recurrent": Recurrent,
}  # fmt: skip


def _train(make: Callable[[], nn.Module], lazy: bool, autocast: bool) -> list[Tensor]:
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    model = make().cuda()
    x, target = torch.randn(6, 10, 32).cuda(), torch.randint(8, (6,)).cuda()
    if lazy:
        model, x, target = torpor.lazy(model), torpor.lazy(x), torpor.lazy(target)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    numbers = [*losses, *model.state_dict().values()]
    return [t.cpu() for t in numbers]


@pytest.fixture(autouse=True)
def the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_equals_eager(name: str, autocast: bool) -> None:
    eager = _train(NETWORKS[name], False, autocast)
    lazy = _train(NETWORKS[name], True, autocast)
    assert [torch.equal(a, b) for a, b in zip(eager, lazy, strict=True)] == [True] * len(eager)


def test_a_lazy_tensor_keeps_its_device() -> None:
    x = torpor.lazy(torch.ones(3, device="cuda"))
    y = (x * 2 + 1).sum()
    assert torpor.is_pending(y)
    assert y.device == torch.device("cuda", 0)
    assert y.item() == 9.0


def test_a_copy_on_the_cpu_is_on_the_cpu_before_and_after_its_graph_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", 1)
    for _ in range(3):
        lengths = (torpor.lazy(torch.arange(3, device="cuda")) + 1).cpu()
        assert torch.ops.aten.add.Tensor(lengths, torch.ones(3, dtype=torch.int64)).sum() == 9
        assert lengths.numpy().tolist() == [1, 2, 3]


def test_compiling_leaves_the_generator_and_cudnns_dropout_alone() -> None:
    torch.manual_seed(0)
    with torpor.using("inductor"):
        before = torch.cuda.get_rng_state()
        torpor.lazy(torch.ones(3, device="cuda")).sin().add(1).tolist()
        assert torch.equal(torch.cuda.get_rng_state(), before)


# -- steps replayed as CUDA graphs -----------------------------------------------------------------


def _replays() -> int:
    return torpor.metrics.counters().get("CudaGraphReplayed", 0)


def _train_on(place: Callable[[Any], Any], steps: int = 30) -> tuple[Tensor, Tensor]:
    """The losses, and the state of the generator: each step has dropout and a fresh batch."""
    torch.manual_seed(0)
    batches = torch.Generator().manual_seed(1)
    model = place(mlp().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        x = place(torch.randn(6, 320, generator=batches).cuda())
        target = place(torch.randint(8, (6,), generator=batches).cuda())
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack([loss.cpu() for loss in losses]), torch.cuda.get_rng_state()


def test_a_step_that_is_replayed_is_eagers_step() -> None:
    torpor.metrics.reset()
    expected, state = _train_on(lambda thing: thing)
    with torpor.using("inductor"):
        actual, state_after = _train_on(torpor.lazy)
    assert _replays() > 8
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(state, state_after)


def test_what_a_graph_returned_stays_as_it_was() -> None:
    torpor.metrics.reset()
    model = nn.Linear(64, 64).cuda().requires_grad_(False)
    inputs = [torch.randn(8, 64, device="cuda") for _ in range(4)]
    expected = [model(inputs[step % 4]) for step in range(40)]
    lazy, held = torpor.lazy(model), []
    with torpor.using("inductor"), torch.no_grad():
        for step in range(40):
            held.append(lazy(torpor.lazy(inputs[step % 4])))
        actual = [t.cpu() for t in held]
    assert _replays() > 8
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other.cpu())


def test_compiled_by_torch_a_graph_draws_eagers_numbers() -> None:
    torpor.metrics.reset()
    model = mlp().cuda()
    options = {"backend": "inductor"}
    fast = torch.compile(model, backend=torpor.compat.dynamo.torpor, options=options)
    x = torch.randn(6, 320, device="cuda")
    for seed in range(16):
        torch.manual_seed(seed)
        expected, state = model(x), torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        actual = fast(x)
        actual.sum().backward()
        torch.testing.assert_close(actual, expected)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        del actual
    assert _replays() > 8


class Dropping(nn.Module):
    """Layers with dropout in and after attention, and more results than a multiple of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.ModuleList(nn.Linear(64, 192) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.out = nn.Linear(64, 1001)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.1)
        for mix, norm in zip(self.mixing, self.norms, strict=True):
            q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in mix(norm(x)).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
            x = x + nn.functional.dropout(y.transpose(1, 2).flatten(2), 0.3)
        found: Tensor = self.out(x)
        return found


def _dropped(
    function: Callable[[Tensor], Tensor], model: nn.Module, late: bool, twice: bool
) -> tuple[list[Tensor], Tensor]:
    """Losses and gradients; gradients of the last step go before the next one, or `late` in it."""
    torch.manual_seed(5)
    found = []
    for step in range(24):
        x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
        if not late:
            model.zero_grad()
        logits = function(x)
        loss = logits.float().square().mean()
        if late:
            model.zero_grad()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        if step > 12:
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        del logits, loss
    return [t.float().cpu() for t in found], torch.cuda.get_rng_state()


@pytest.mark.parametrize(
    ("late", "twice"), [(False, False), (True, False), (False, True)], ids=["", "late", "twice"]
)
def test_compiled_by_torch_dropout_is_eagers_in_graphs_that_share_memory(
    late: bool, twice: bool
) -> None:
    torpor.metrics.reset()
    model = Dropping().cuda().bfloat16()
    options = {"backend": "inductor"}
    fast = torch.compile(model, backend=torpor.compat.dynamo.torpor, options=options)
    expected, state = _dropped(model, model, late, twice)
    with torch._functorch.config.patch(donated_buffer=not twice):
        actual, state_after = _dropped(fast, model, late, twice)
    assert _replays() > (8 if twice else 24)
    assert torch.equal(state, state_after)
    fallbacks = [name for name in torpor.metrics.counters() if name.startswith("fallback")]
    assert fallbacks == []
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2 * float(other.abs().max()))


def test_backward_uses_the_memory_of_what_forward_kept_for_it() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    model = model.cuda().bfloat16()
    x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16)
    options = {"backend": "inductor"}
    fast = torch.compile(model, backend=torpor.compat.dynamo.torpor, options=options)
    torpor.metrics.reset()
    for _ in range(20):
        fast(x).float().mean().backward()
        model.zero_grad()
    assert _replays() > 16
    captured = [graph for memory in cuda._memories.values() for graph in memory.captured]
    backward = max(captured, key=lambda graph: len(graph.consumed))
    assert len(backward.consumed) >= 8
    for part in backward.consumed.values():
        assert part.place not in part.graph.owned


# -- attention with dropout: recorded, and drawn in its turn ---------------------------------------


def _attend(place: Callable[[Any], Any], steps: int) -> tuple[list[Tensor], Tensor]:
    """Results and gradients of attention in bfloat16, with draws before, between and after."""
    torch.manual_seed(3)
    found = []
    inputs = [torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    query, key, value = (place(t).requires_grad_() for t in inputs)
    attend = nn.functional.scaled_dot_product_attention
    for _ in range(steps):
        x = query + place(torch.rand(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16))
        y = attend(x, key, value, dropout_p=0.3, is_causal=True)
        z = attend(nn.functional.dropout(y, 0.5), key, value, dropout_p=0.2)
        gradients = torch.autograd.grad(z.float().square().mean(), (query, key, value))
        if place is torpor.lazy:
            assert all(map(torpor.is_pending, (y, z, *gradients)))
            torpor.sync()
        found += [t.detach().float() for t in (y, z, *gradients)]
        del x, y, z, gradients
    return [t.cpu() for t in found], torch.cuda.get_rng_state()


def test_attention_with_dropout_is_recorded_and_eagers_bit_for_bit() -> None:
    expected, state = _attend(lambda thing: thing, 3)
    actual, state_after = _attend(torpor.lazy, 3)
    assert torch.equal(state, state_after)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)  # sums of gradients by atomics


def test_attention_with_dropout_in_a_replayed_step_drops_what_eager_drops() -> None:
    torpor.metrics.reset()
    expected, state = _attend(lambda thing: thing, 30)
    with torpor.using("inductor"):
        actual, state_after = _attend(torpor.lazy, 30)
    assert _replays() > 8
    assert torch.equal(state, state_after)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_a_seed_that_is_set_between_two_draws() -> None:
    def draw(place: Callable[[Any], Any]) -> list[Tensor]:
        x = place(torch.ones(1, 2, 64, 32, device="cuda", dtype=torch.bfloat16))
        attend = nn.functional.scaled_dot_product_attention
        drawn = []
        for seed in (1, 2**63 + 5, 1):
            torch.manual_seed(seed)
            drawn += [attend(x, x, x, dropout_p=0.5) for _ in range(2)]
        return [t.cpu() for t in drawn]

    expected, actual = draw(lambda thing: thing), draw(torpor.lazy)
    assert torch.equal(expected[0], expected[4])
    assert not torch.equal(expected[0], expected[1])
    assert [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)] == [True] * 6


def test_cudnns_dropout_is_left_alone_by_attention() -> None:
    def run(place: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        cells = place(nn.LSTM(32, 32, 2, dropout=0.5).cuda())
        x = place(torch.ones(5, 3, 32, device="cuda"))
        y = place(torch.ones(1, 2, 64, 32, device="cuda", dtype=torch.bfloat16))
        found = []
        for _ in range(3):
            found.append(cells(x)[0])
            found.append(nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5))
        return [t.detach().cpu() for t in found]

    expected, actual = run(lambda thing: thing), run(torpor.lazy)
    assert [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)] == [True] * 6


def test_weights_of_recurrent_layers_are_packed_once_while_they_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = cudnn_weights.aten._cudnn_rnn_flatten_weight.default
    packs: list[int] = []

    class Counted:
        class _cudnn_rnn_flatten_weight:
            @staticmethod
            def default(*args: Any) -> Tensor:
                packs.append(1)
                return pack(*args)  # type: ignore[no-any-return]  # made by torch

    monkeypatch.setattr(cudnn_weights, "aten", Counted)
    model = torpor.lazy(nn.LSTM(8, 8, 2).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torpor.lazy(torch.ones(5, 3, 8, device="cuda"))
    for steps in (1, 2):
        (model(x)[0].sum() + model(x)[0].sum()).backward()  # no warning that weights are apart
        optimizer.step()
        torpor.sync(wait=True)
        assert len(packs) == steps


@pytest.mark.parametrize("channels", [5, 32])
def test_bilinear_upsampling_of_channels_last_is_compiled_or_left_to_its_kernel(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", 0)
    picture = torch.randn(2, channels, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    expected = nn.functional.interpolate(picture, (32, 32), mode="bilinear")
    with torpor.using("inductor"):
        actual = nn.functional.interpolate(torpor.lazy(picture), (32, 32), mode="bilinear")
        assert actual.stride() == expected.stride()
        assert torch.equal(actual.cpu(), expected.cpu())


@pytest.mark.parametrize("channels", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_enlarged_pictures_lie_as_eagers(channels: int, mode: str, backend: str) -> None:
    torpor.use(backend)
    picture = torch.randn(2, channels, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    expected = nn.functional.interpolate(picture, scale_factor=2, mode=mode)
    lazily = nn.functional.interpolate(torpor.lazy(picture), scale_factor=2, mode=mode)
    assert lazily.stride() == expected.stride()
    torch.testing.assert_close(torpor.eager(lazily), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_weights_of_recurrent_networks_are_one_chunk_of_memory(kind: Any) -> None:
    """cuDNN warns, and copies them at each call, if they are not; warnings are errors here."""
    module = torpor.lazy(kind(8, 8, 2).cuda())
    for _ in range(3):
        module(torpor.lazy(torch.randn(3, 2, 8, device="cuda")))[0].sum().backward()
        torpor.sync(wait=True)
