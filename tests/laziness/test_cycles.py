"""Loops that end no step in words: a read that comes back to its place ends one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import torpor
from tests.comparison import Put, agree
from torpor.observe.history import HISTORY

Update = Callable[[Tensor], object]


def _subtract(p: Tensor) -> object:
    with torch.no_grad():
        p -= 0.1 * p.grad  # type: ignore[operator]  # it has one
    return p


def _copy(p: Tensor) -> object:
    with torch.no_grad():
        return p.copy_(p - 0.1 * p.grad)  # type: ignore[operator]  # it has one


UPDATES: dict[str, Update] = {
    "subtract": _subtract,
    "copy": _copy,
    "add to data": lambda p: p.data.add_(p.grad, alpha=-0.1),  # type: ignore[arg-type]  # it has one
}


def new_graphs() -> int:
    """Graphs that were not met before, compiled or not."""
    return HISTORY.serial


def graphs_of(steps: Callable[[int], object], first: int, more: int) -> int:
    """Run `first` steps, and `more`: how many graphs the latter need that were not met before."""
    counted = []
    for number in (first, more):
        steps(number)
        counted.append(new_graphs())
    return counted[1] - counted[0]


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_by_hand_is_the_same_graph_in_every_step(put: Put, update: str) -> None:
    network = put(_network())
    x = put(torch.randn(3, 4))

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = (network(x) - x).pow(2).mean()
            network.zero_grad()
            loss.backward()
            for p in network.parameters():
                UPDATES[update](p)
            loss.item()

    assert graphs_of(train, 4, 10) == 0


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("read_early", [False, True])
def test_an_update_by_hand_is_eagers(put: Put, update: str, read_early: bool) -> None:
    def program(network: nn.Module, x: Tensor) -> object:
        losses = []
        for step in range(6):
            loss = (network(x) - x).pow(2).mean()
            if read_early:
                losses.append(loss.item())
            loss.backward()
            for p in network.parameters():
                UPDATES[update](p)
                p.grad = None
            losses.append(loss.item())
            if step == 3:
                losses.append(next(network.parameters()).tolist())
        return losses, list(network.parameters())

    agree(put, program, _network(), torch.randn(3, 4))


def test_a_running_mean_kept_by_hand_is_the_same_graph_in_every_step(put: Put) -> None:
    mean, x = put(torch.zeros(3)), put(torch.randn(5, 3))

    def watch(steps: int) -> None:
        for _ in range(steps):
            mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            float((x * 2).sum())

    assert graphs_of(watch, 4, 10) == 0


def test_reads_in_the_closure_of_an_optimizer_come_back(put: Put) -> None:
    network, x = put(_network()), put(torch.randn(3, 4))
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.1, max_iter=4, history_size=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (network(x) - x).pow(2).mean()
        loss.backward()
        return loss

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.step(closure)  # type: ignore[arg-type]  # torch takes a tensor too

    assert graphs_of(train, 4, 4) == 0


class Policy:
    """Steps of an environment by sampled actions, and one update at the end of each episode."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.optimizer = torch.optim.SGD(network.parameters(), 0.1)
        self.device = next(network.parameters()).device

    def episode(self, length: int) -> list[int]:
        actions, log_probs = [], []
        state = torch.linspace(-1, 1, 4)
        for _ in range(length):
            chances = Categorical(logits=self.network(state.to(self.device)))
            action = chances.sample()
            log_probs.append(chances.log_prob(action))
            actions.append(int(action.item()))
            state = state.roll(actions[-1]) * 0.9
        loss = -torch.stack(log_probs).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return actions


def test_a_policy_that_samples_an_action_at_a_time_meets_the_same_graph_again(put: Put) -> None:
    policy = Policy(put(_network()))
    policy.episode(6)
    before = new_graphs()
    policy.episode(12)
    assert new_graphs() - before <= 1  # the update is of another length


def test_a_policy_samples_and_learns_what_eager_does(put: Put) -> None:
    def program(network: nn.Module) -> object:
        torch.manual_seed(0)
        policy = Policy(network)
        return [policy.episode(length) for length in (5, 5, 3)], list(network.parameters())

    agree(put, program, _network())


def test_a_read_in_the_middle_of_a_step_computes_its_cone(put: Put) -> None:
    x, other = put(torch.randn(3)), put(torch.randn(3))
    for _ in range(3):
        pending = other * 2
        (x + 1).sum().item()
        assert torpor.is_pending(pending)
        torpor.sync()


def test_reads_one_after_the_other_leave_the_rest_pending(put: Put) -> None:
    x = put(torch.randn(3))
    pending = x * 3
    for number in range(3):
        (x + number).sum().item()
    assert torpor.is_pending(pending)


def test_two_callers_of_one_function_that_reads_are_two_places(put: Put) -> None:
    x = put(torch.randn(3))

    def log(value: Tensor) -> float:
        return value.item()

    log((x + 1).sum())
    pending = x * 3
    log((x + 2).sum())
    assert torpor.is_pending(pending)


def test_steps_end_only_where_they_are_told_to_if_that_is_wanted(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "cut_after_reads", False)
    x = put(torch.zeros(3))
    for _ in range(4):
        x.add_(1)
        put(torch.ones(2)).sum().item()
    assert torpor.is_pending(x)


def test_a_step_that_a_read_ended_is_rolled_back_alone_if_it_fails(put: Put) -> None:
    table, total = put(torch.ones(4)), put(torch.zeros(()))
    x = put(torch.randn(3))

    def step(index: int) -> float:
        total.add_(table[put(torch.tensor([index]))].sum())
        return float((x * 2).sum())

    for index in (0, 1, 2):
        step(index)
    with pytest.raises(IndexError):
        step(99)
        torpor.sync(wait=True)
    assert total.item() == 3.0
    step(3)
    assert total.item() == 4.0
