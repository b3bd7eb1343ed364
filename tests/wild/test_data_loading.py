"""Data are loaded as in eager: what a `DataLoader` does stays plain, in workers too."""

from __future__ import annotations

import io
import multiprocessing.reduction
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torpor
from tests.wild.datasets import Calls, Holds, Makes, Numpy

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)


EIGHT = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def loaded(dataset: Any, context: str) -> list[float]:
    loader = DataLoader(dataset, 4, num_workers=1, multiprocessing_context=context)
    batches = list(loader)
    assert not any(torpor.is_lazy(batch) for batch in batches)
    return [number for batch in batches for number in batch.flatten().tolist()]


@pytest.fixture(params=["enable", "mode"])
def lazily(request: pytest.FixtureRequest) -> Iterator[str]:
    """A program that says `torpor.enable()`, or runs inside `torpor.mode()`."""
    if request.param == "enable":
        torpor.enable()
    with torpor.mode() if request.param == "mode" else nullcontext():
        yield request.param


@pytest.mark.parametrize("kind", [Holds, Makes, Numpy])
def test_workers_by_fork_yield_what_eager_yields(lazily: str, kind: type[Holds]) -> None:
    dataset = kind()
    assert loaded(dataset, "fork") == EIGHT
    assert dataset.x.tolist() == EIGHT


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_by_spawn_yield_what_eager_yields(lazily: str, context: str) -> None:
    for dataset in (Holds(), Makes()):
        assert loaded(dataset, context) == EIGHT
        assert dataset.x.tolist() == EIGHT


def test_a_module_called_in_a_worker_stays_plain_there() -> None:
    torpor.enable()
    dataset = Calls()
    assert loaded(dataset, "fork") == [2.0 * i + 1 for i in range(8)]
    assert not torpor.is_lazy(dataset.net.weight)


def test_a_data_set_of_tensors_gives_plain_batches_and_eagers_losses(backend: str) -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        x = torch.randn(24, 4)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        losses = []
        for inputs, labels in DataLoader(data, 8, shuffle=True):
            assert not torpor.is_lazy(inputs)
            loss = nn.functional.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train()
    torpor.enable()
    assert train() == pytest.approx(expected, rel=0 if backend == "reference" else 1e-6)


# -- what data loading asks of tensors ----------------------------------------------------------


class Marked(Tensor):
    """A subclass as libraries make them: `tv_tensors.Image` is one."""


ASKED: dict[str, Callable[[], Any]] = {
    "byte tensor": lambda: isinstance(
        torch.from_numpy(np.zeros((2, 2), np.uint8)), torch.ByteTensor
    ),
    "float tensor": lambda: isinstance(torch.ones(2), torch.FloatTensor),
    "type": lambda: type(torch.ones(2)) is Tensor,
    "subclass": lambda: type(torch.ones(2).as_subclass(Marked) + 1).__name__,
    "made subclass": lambda: type(torch.Tensor._make_subclass(Marked, torch.ones(2))).__name__,
    "subclass of a list": lambda: Marked([1.0, 2.0]).tolist(),
    "storage clone": lambda: torch.arange(3.0).untyped_storage().clone().tolist(),
    "shared": lambda: torch.arange(3.0).share_memory_().tolist(),
    "set rng state": lambda: torch.set_rng_state(resumed(torch.get_rng_state())),
    "generator": lambda: torch.Generator().set_state(resumed(torch.get_rng_state())) is not None,
    "quantized": lambda: (torch.ones(2) * 3).to(torch.uint8).numpy().tolist(),
}


def resumed(tensor: Tensor) -> Tensor:
    """A tensor from a checkpoint."""
    file = io.BytesIO()
    torch.save({"it": tensor}, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)["it"]
    return loaded


@pytest.mark.parametrize("what", ASKED)
def test_data_answer_as_in_eager_while_enabled(what: str) -> None:
    expected = ASKED[what]()
    torpor.enable()
    assert ASKED[what]() == expected


def test_storages_are_copied_and_shared_inside_the_mode() -> None:
    plain = torch.tensor([1.0, 2.0, 3.0])
    with torpor.mode():
        memory = plain.untyped_storage()
        other = torch.UntypedStorage(memory.nbytes())
        other.copy_(memory)
        assert memory.clone().tolist() == other.tolist() == memory.tolist()
        assert plain.share_memory_().tolist() == [1.0, 2.0, 3.0]
        x = torch.ones(3) * 5
        multiprocessing.reduction.ForkingPickler.dumps(x)
        assert x.tolist() == [5.0, 5.0, 5.0]


def test_a_state_of_the_generator_is_set_inside_the_mode() -> None:
    state = torch.get_rng_state()
    expected = torch.rand(2)
    with torpor.mode():
        torch.set_rng_state(resumed(state))
        assert torch.equal(torch.rand(2), expected)
        torch.set_rng_state(state.clone())
        assert torch.equal(torch.rand(2), expected)
        with pytest.raises(RuntimeError, match="data"):
            torch.Generator().set_state(state.clone())


@pytest.mark.filterwarnings("ignore:as_subclass")  # which is told once
def test_a_lazy_tensor_as_a_subclass_is_a_plain_one_with_eagers_gradients() -> None:
    with torpor.mode():
        x = torch.ones(2).requires_grad_()
        marked = (x * 3).as_subclass(Marked)
        assert type(marked) is Marked
        assert marked.tolist() == [3.0, 3.0]
        (marked * 2).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [6.0, 6.0]


@pytest.mark.filterwarnings("ignore:as_subclass")  # which is told once
def test_tensors_of_a_subclass_go_through_a_model(backend: str) -> None:
    def run() -> tuple[list[float], str, list[list[float]]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        out = net(torch.arange(6.0).view(2, 3).as_subclass(Marked))
        out.sum().backward()
        return out.flatten().tolist(), type(out).__name__, net[0].weight.grad.tolist()

    expected = run()
    torpor.enable()
    got = run()
    assert got[0] == pytest.approx(expected[0])
    assert got[1:] == expected[1:]
