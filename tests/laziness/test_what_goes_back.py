"""What goes back when a step fails: what eager would not have come to, and nothing else."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torpor
from tests.comparison import Put, assert_same, plain
from tests.instrumented_ops import failing

GOOD, BAD = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 9, 1])
READ = pytest.mark.parametrize("read", [True, False], ids=["read", "cut"])


def _same(value: object) -> object:
    return value


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))


def _without_counts(model: nn.Module) -> None:
    """Counts of batches, which depend on nothing, tell not which of them were counted when."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.num_batches_tracked = None
            module.momentum = 0.1


class Training:
    """A model, its optimizer and a program that goes on after bad batches."""

    def __init__(self, put: Callable, read: bool, **options: float) -> None:
        self.put, self.read = put, read
        self.model = put(_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)

    def backward(self, words: torch.Tensor, classes: torch.Tensor = GOOD) -> None:
        loss = F.cross_entropy(self.model(self.put(words)), self.put(classes))
        loss.backward()
        if self.read:
            loss.item()

    def tried(self, *steps: Callable[[], object]) -> bool:
        """Run `steps`; whether none of them has failed."""
        try:
            for step in steps:
                step()
            torpor.sync(wait=True)
        except IndexError:
            return False
        return True

    def train(self, words: torch.Tensor, classes: torch.Tensor = GOOD) -> bool:
        return self.tried(lambda: self.backward(words, classes), self.optimizer.step)

    def state(self) -> list[torch.Tensor]:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [plain(t) for t in (*self.model.state_dict().values(), *grads)]


def _both(put: Put, read: bool, program: Callable[[Training], object], **options: float) -> None:
    eager, lazy = Training(_same, read, **options), Training(put, read, **options)
    torch.manual_seed(0)
    reported = program(eager)
    torch.manual_seed(0)
    assert program(lazy) == reported
    assert_same(lazy.state(), eager.state())


@READ
def test_gradients_that_were_set_to_zero_are_zero(put: Put, read: bool) -> None:
    def program(training: Training) -> list[bool]:
        reported = [training.train(GOOD)]
        training.optimizer.zero_grad(set_to_none=False)
        return [*reported, training.train(BAD)]

    _both(put, read, program)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_keep_what_was_accumulated_before_a_bad_batch(
    put: Put, set_to_none: bool
) -> None:
    def program(training: Training) -> list[bool]:
        _without_counts(training.model)
        reported = [training.train(GOOD)]
        training.optimizer.zero_grad(set_to_none)
        training.backward(GOOD)
        return [*reported, training.train(BAD)]

    _both(put, False, program)


@READ
def test_what_was_written_between_two_steps_stays(put: Put, read: bool) -> None:
    averages = []

    def program(training: Training) -> list[bool]:
        average = training.put(torch.zeros(3, 3))
        reported = []
        for words in (GOOD, BAD, GOOD, BAD):
            training.optimizer.zero_grad()
            reported.append(training.train(words))
            if reported[-1]:
                with torch.no_grad():
                    average.mul_(0.9).add_(training.model[2].weight, alpha=0.1)
        averages.append(average)
        return reported

    _both(put, read, program)
    assert_same(plain(averages[1]), averages[0])


@READ
def test_batches_are_counted_as_eager_counts_them(put: Put, read: bool) -> None:
    def program(training: Training) -> list[bool]:
        return [training.train(words) for words in (GOOD, BAD, GOOD, BAD, BAD)]

    _both(put, read, program)


@READ
def test_statistics_of_a_batch_with_bad_classes_are_counted(put: Put, read: bool) -> None:
    def program(training: Training) -> list[bool]:
        return [training.train(GOOD, classes) for classes in (GOOD, BAD, GOOD, BAD)]

    _both(put, read, program)


@READ
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_weights_that_do_not_depend_on_the_bad_batch_are_not_updated(
    put: Put, read: bool, rate: float | torch.Tensor
) -> None:
    def program(training: Training) -> list[bool]:
        training.optimizer.param_groups[0]["lr"] = rate
        other = training.put(nn.Linear(3, 3))
        training.optimizer.add_param_group({"params": other.parameters(), "lr": rate})
        other(training.put(torch.ones(3))).sum().backward()
        training.model.add_module("other", other)
        with torch.no_grad():
            [parameter.sum().item() for parameter in training.model.parameters()]
        return [training.train(BAD)]

    _both(put, read, program)


def test_weight_decay_by_a_rate_that_changes_goes_back_with_its_step() -> None:
    """Weights that were just moved are listed before the batch."""
    for rate in (0.1, 0.2, 0.3):
        eager, lazy = Training(_same, False), Training(lambda thing: thing.to("lazy"), False)
        for training in (eager, lazy):
            training.optimizer.param_groups[0]["lr"] = rate
        assert eager.train(BAD) == lazy.train(BAD)
        assert_same(lazy.state(), eager.state())


def test_what_was_written_later_goes_back(put: Put) -> None:
    before, later = put(torch.zeros(2)), put(torch.zeros(2))
    before.add_(1)
    failed = failing(put(torch.ones(2)))
    later.add_(1)
    with pytest.raises(ArithmeticError):
        torpor.sync(wait=True)
    assert_same([before, later], [torch.ones(2), torch.zeros(2)])
    with pytest.raises(ArithmeticError):
        failed.tolist()


def test_a_step_goes_on_that_adds_up_what_failed_before(put: Put) -> None:
    weight, total = put(torch.ones(2)), put(torch.zeros(2))
    loss = failing(weight)
    torpor.sync()
    total.add_(loss)
    weight.mul_(2)
    with pytest.raises(ArithmeticError):
        torpor.sync(wait=True)
    assert_same([weight, total], [torch.full((2,), 2.0), torch.zeros(2)])


def test_the_read_that_runs_a_failing_op_is_told_and_the_next_one_reads_what_was_before() -> None:
    out = torch.zeros(2, device="lazy")
    table = torch.ones(3, 2, device="lazy")
    torch.mul(table[torch.tensor([7]).to("lazy")][0], 2, out=out)
    with pytest.raises(IndexError):
        out.tolist()
    assert out.tolist() == [0.0, 0.0]
