"""XLA on a CUDA device that torch uses too: memory changes hands on the card, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torpor
from torpor.ir.types import TensorType

jax = pytest.importorskip("jax", reason="jax is not installed (pip install 'torpor[xla]')")

from torpor.backends.xla import XlaBackend  # noqa: E402  # needs jax


def _jax_has_one() -> bool:
    return any(device.platform == "gpu" for device in jax.devices())


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and _jax_has_one()),
        reason="torch and jax do not both have a CUDA device",
    ),
]


@pytest.fixture(autouse=True)
def on_xla(back_to_the_reference: None, monkeypatch: pytest.MonkeyPatch) -> XlaBackend:
    monkeypatch.setattr(torpor.config, "strict", True)
    backend = torpor.use("xla")
    assert isinstance(backend, XlaBackend)
    torpor.metrics.reset()
    return backend


def fallbacks() -> list[str]:
    return [name for name in torpor.metrics.counters() if name.startswith("fallback::")]


@pytest.mark.parametrize("place", ["cuda", "cpu", "pinned"])
def test_a_tensor_may_be_written_to_when_its_data_are_made(on_xla: XlaBackend, place: str) -> None:
    device = on_xla.backend_device(torch.device("lazy"))
    assert device.type.name == "cuda"
    for step in range(20):
        tensor = torch.full((4_000_000,), float(step))
        tensor = tensor.pin_memory() if place == "pinned" else tensor.to(place)
        type_ = TensorType.of_tensor(tensor, torch.device("lazy"))
        data = on_xla.data_from_tensor(tensor, type_, device)
        tensor.fill_(-1.0)
        assert [d.platform for d in data.array.devices()] == ["gpu"]
        assert bool((on_xla.tensor_from_data(data) == step).all())


def test_what_was_read_stays_as_it_was_while_steps_go_on() -> None:
    x = torch.zeros(4_000_000, device="cuda")
    lazy = x.to("lazy")
    read = []
    for _ in range(20):
        lazy.add_(1)
        read.append(torpor.eager(lazy.detach().clone()))
    torpor.sync(wait=True)
    assert [float(t.float().mean()) for t in read] == [float(n) for n in range(1, 21)]


def test_an_op_without_a_lowering_runs_on_the_card_in_the_middle_of_a_graph() -> None:
    x = torch.randn(64, 32, device="cuda")
    lazy = torch.geqrf(x.to("lazy") * 2)[0] + 1
    torch.testing.assert_close(lazy.cpu(), (torch.geqrf(x * 2)[0] + 1).cpu())
    assert fallbacks() == ["fallback::aten.geqrf.default"]


class Attending(nn.Module):
    """One layer of attention on words, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.mixed = nn.Linear(64, 192)
        self.out = nn.Linear(64, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mixed = self.mixed(self.words(words)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*mixed.unbind(), is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


def _losses(place: Any) -> list[float]:
    torch.manual_seed(0)
    model = place(Attending().cuda())
    words = torch.randint(50, (8, 33)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            made = model(place(words[:, :-1].contiguous()))
            loss = nn.functional.cross_entropy(made.flatten(0, 1), place(words[:, 1:].flatten()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_training_with_fused_attention_agrees_with_eager_and_nothing_falls_back() -> None:
    expected = _losses(lambda thing: thing)
    assert _losses(torpor.lazy) == pytest.approx(expected, rel=1e-2)
    assert fallbacks() == []
