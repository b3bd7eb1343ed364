"""An error in a running graph: it reaches the user with the line that recorded the op."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torpor
from tests.comparison import Put, agree, assert_same, line_below, message, plain, raised_by
from tests.instrumented_ops import failing, gated, open_gate

TABLE = torch.arange(6.0).view(3, 2)
BAD_INDEX = torch.tensor([0, 7])
SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 1.0]])

MISTAKES: dict[str, Callable[[Callable], torch.Tensor]] = {
    "embedding": lambda put: F.embedding(put(BAD_INDEX), put(TABLE)),
    "gather": lambda put: put(TABLE).gather(0, put(torch.tensor([[0, 9]]))),
    "index_select": lambda put: put(TABLE).index_select(0, put(BAD_INDEX)),
    "take": lambda put: put(TABLE).take(put(torch.tensor([99]))),
    "index": lambda put: put(TABLE)[put(BAD_INDEX)],
    "index_put": lambda put: put(TABLE).index_put((put(BAD_INDEX),), put(torch.ones(2, 2))),
    "scatter": lambda put: put(TABLE).scatter(0, put(torch.tensor([[8, 0]])), 1.0),
    "cholesky": lambda put: torch.linalg.cholesky(put(SINGULAR)),
    "inverse": lambda put: torch.linalg.inv(put(torch.zeros(2, 2))),
    "cross_entropy": lambda put: F.cross_entropy(put(TABLE), put(torch.tensor([0, 5, 1]))),
    "multinomial": lambda put: torch.multinomial(put(torch.tensor([-1.0, 1.0])), 1),
    "bernoulli": lambda put: torch.bernoulli(put(torch.tensor([2.0]))),
    "integer_division": lambda put: put(torch.tensor([1])) // put(torch.tensor([0])),
    "one_hot": lambda put: F.one_hot(put(BAD_INDEX), 3),
    "custom": lambda put: failing(put(TABLE)),
}

ARRIVALS: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda t: t.tolist(),
    "sync_of_it": lambda t: torpor.sync(t, wait=True),
    "sync": lambda t: torpor.sync(wait=True),
    "sync_then_wait": lambda t: (torpor.sync(), torpor.wait()),
    "sync_then_sync": lambda t: (torpor.sync(), torpor.sync(wait=True)),
    "sync_then_read": lambda t: (torpor.sync(), t.tolist()),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_data_raises_what_eager_raises(put: Put, name: str) -> None:
    expected = raised_by(lambda: MISTAKES[name](lambda t: t))
    got = raised_by(lambda: torpor.sync(MISTAKES[name](put), wait=True))
    assert type(got) is type(expected)
    first_line = str(expected).splitlines()[0]
    assert first_line in message(got)


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_an_error_arrives_wherever_the_step_is_waited_for(put: Put, arrival: str) -> None:
    index, table = put(BAD_INDEX), put(TABLE)
    y = F.embedding(index, table) + 1
    assert type(raised_by(lambda: ARRIVALS[arrival](y))) is IndexError


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_an_error_names_the_line_that_recorded_the_op(put: Put, arrival: str) -> None:
    # A width of its own: no other test records this very op.
    index, table = put(BAD_INDEX), put(torch.ones(3, 11 + list(ARRIVALS).index(arrival)))
    line = line_below()
    y = F.embedding(index, table)
    z = (y + 1).exp()
    error = raised_by(lambda: ARRIVALS[arrival](z))
    assert line in message(error)


def test_an_error_names_its_own_line_though_another_line_recorded_the_same_op(put: Put) -> None:
    """The two lines meet the same interned node: its first line would be the wrong one."""
    index, table = put(torch.tensor([0, 1])), put(torch.ones(3, 9))
    F.embedding(index, table).sum().item()
    index = put(BAD_INDEX)
    line = line_below()
    y = F.embedding(index, table)
    assert line in message(raised_by(lambda: y.tolist()))


def test_an_error_in_backward_names_the_op(put: Put) -> None:
    class FailsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return failing(grad)

    x = put(torch.ones(3, requires_grad=True))
    FailsInBackward.apply(x).sum().backward()
    error = raised_by(lambda: x.grad.tolist())
    assert type(error) is ArithmeticError
    assert "failing" in message(error)


def test_tensors_that_do_not_depend_on_the_failure_stay_usable(put: Put) -> None:
    x = put(TABLE)
    before, bad, after = x + 1, failing(x), x * 2
    raised_by(lambda: torpor.sync(wait=True))
    assert_same([before, after], [TABLE + 1, TABLE * 2])
    assert_same(x, TABLE)
    assert type(raised_by(lambda: bad.tolist())) is ArithmeticError


def test_what_the_failed_op_was_given_stays_usable(put: Put) -> None:
    x = put(TABLE)
    argument = x.exp()
    bad = failing(argument)
    raised_by(lambda: bad.tolist())
    assert_same(argument, TABLE.exp())
    assert_same(argument + 1, TABLE.exp() + 1)


def test_a_failed_tensor_fails_again_when_it_is_read_again(put: Put) -> None:
    bad = failing(put(TABLE))
    for _ in range(3):
        assert type(raised_by(lambda: bad.tolist())) is ArithmeticError


def test_what_is_computed_from_a_failed_tensor_fails_too(put: Put) -> None:
    bad = failing(put(TABLE))
    raised_by(lambda: torpor.sync(wait=True))
    assert type(raised_by(lambda: (bad + 1).tolist())) is ArithmeticError


def test_an_error_is_reported_once_by_syncs_that_do_not_read_it(put: Put) -> None:
    bad = failing(put(TABLE))
    raised_by(lambda: torpor.sync(wait=True))
    torpor.sync(wait=True)
    torpor.wait()
    assert bad.shape == TABLE.shape


def test_the_step_after_a_failed_one_works(put: Put) -> None:
    bad = failing(put(TABLE))
    raised_by(lambda: torpor.sync(wait=True))
    del bad

    def program(model: nn.Module, x: torch.Tensor) -> object:
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.dropout(model(x)).sum()
            loss.backward()
            optimizer.step()
        return loss.item(), [p.detach() for p in model.parameters()]

    agree(put, program, nn.Linear(2, 2), TABLE)


def test_steps_queued_behind_a_failed_one_run(put: Put) -> None:
    x = put(TABLE)
    bad = failing(gated(x))
    torpor.sync()
    good = x + 1
    torpor.sync()
    open_gate()
    raised_by(torpor.wait)
    assert_same(good, TABLE + 1)
    assert type(raised_by(lambda: bad.tolist())) is ArithmeticError


def test_a_tensor_that_a_failed_step_should_have_written_holds_what_it_held(put: Put) -> None:
    x = put(TABLE)
    x.copy_(failing(x) + 1)
    raised_by(lambda: torpor.sync(wait=True))
    assert_same(x, TABLE)
    x.copy_(put(TABLE + 1))
    assert_same(x, TABLE + 1)


def test_parameters_survive_a_step_that_failed_before_the_optimizer(put: Put) -> None:
    model = put(nn.Embedding(3, 2))
    weights = plain(model.weight).clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raised_by(lambda: model(put(BAD_INDEX)).sum().item())
    optimizer.zero_grad()
    torpor.sync(wait=True)
    assert_same(plain(model.weight), weights)
    model(put(torch.tensor([0, 1]))).sum().backward()
    optimizer.step()
    expected = weights.clone()
    expected[:2] -= 0.1
    assert_same(plain(model.weight), expected)


def test_random_numbers_go_on_after_a_failed_step(put: Put) -> None:
    x = put(TABLE)
    torch.manual_seed(0)
    expected = torch.rand_like(TABLE)
    torch.manual_seed(0)
    noise = torch.rand_like(x)
    bad = failing(x)
    raised_by(lambda: torpor.sync(wait=True))
    assert_same(noise, expected)
    assert bad.shape == TABLE.shape


def test_the_same_mistake_on_a_cached_graph_is_reported_again(put: Put) -> None:
    table = put(TABLE)
    for index in ([0, 1], [0, 7], [2, 2], [9, 0], [1, 0]):
        picked = table.index_select(0, put(torch.tensor(index)))
        if max(index) < 3:
            assert_same(picked, TABLE[index])
        else:
            assert isinstance(raised_by(lambda y=picked: y.tolist()), IndexError)


def test_an_interrupted_program_can_go_on(put: Put) -> None:
    x = put(TABLE)
    with pytest.raises(KeyboardInterrupt):
        y = x + 1
        raise KeyboardInterrupt
    assert_same(y, TABLE + 1)


def test_an_error_of_what_was_pending_does_not_keep_a_backend_in_place() -> None:
    before = torpor.backend.get_backend()
    with pytest.raises(RuntimeError, match="index 5"), torpor.using("torchscript"):
        kept = torch.ones(2, 3).to("lazy").gather(0, torch.full((1, 3), 5).to("lazy"))
    assert torpor.backend.get_backend() is before
    del kept
