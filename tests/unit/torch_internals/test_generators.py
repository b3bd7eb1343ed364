"""What `_torch.generators` takes from inside torch still is what torpor takes it for."""

import inspect
from typing import Any

import pytest
import torch

import torpor
from torpor import _torch


class FakeGenerator:
    """A generator of a GPU, on a CPU: its state is a list that others may hold."""

    def __init__(self, state: list[int]) -> None:
        self.state = state

    def clone_state(self) -> Any:
        return FakeGenerator(list(self.state))

    def set_state(self, state: torch.Tensor) -> None:
        self.state[:] = state.tolist()

    def graphsafe_set_state(self, other: Any) -> None:
        self.state = other.state


@pytest.mark.parametrize("device", [0, "cuda:0", torch.device("cuda", 0)])
def test_set_cuda_states_by_copies_leaves_the_old_state_as_it_was(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [1, 2]
    generator = FakeGenerator(old)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    with _torch.set_cuda_states_by_copies():
        torch.cuda.set_rng_state(torch.tensor([3, 4]), device)
    assert generator.state == [3, 4]
    assert old == [1, 2]


def test_leave_states_alone_holds_for_this_thread() -> None:
    from torch._dynamo.utils import preserve_rng_state

    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    with _torch.leave_states_alone(), preserve_rng_state():
        first = torch.rand(1)
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)
    with preserve_rng_state():
        drawn = torch.rand(1)
    assert torch.equal(torch.rand(1), drawn)


def test_set_cuda_states_by_copies_is_what_inductor_meets() -> None:
    from torch._dynamo.utils import preserve_rng_state

    assert "torch.cuda.set_rng_state(" in inspect.getsource(preserve_rng_state)
    assert hasattr(torch.Generator, "graphsafe_set_state")
    assert hasattr(torch.Generator, "clone_state")


def test_accept_lazy_states_of_generators() -> None:
    state = torch.get_rng_state()
    expected = torch.rand(1)
    torch.set_rng_state(torpor.lazy(state))
    assert torch.equal(torch.rand(1), expected)
