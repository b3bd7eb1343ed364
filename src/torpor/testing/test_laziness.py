"""What runs, when, and how often; and the state after each step."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torpor
from torpor.testing.instruments import counted, need_custom_ops, runs
from torpor.testing.kit import Kit

X = torch.tensor([[1.0, -2.0, 0.5], [-0.25, 4.0, 3.0]])
Y = torch.tensor([[0.5, 0.5, -3.0], [2.0, -1.0, 8.0]])


# -- when --------------------------------------------------------------------------------------


def test_recording_neither_compiles_nor_runs(kit: Kit) -> None:
    with kit.watched("compile", "execute") as calls:
        x, y = kit.put(X), kit.put(Y)
        z = ((x + y) * 2).relu() @ y.t()
        z.add_(1)
        w = z[0].view(1, 2)
        assert torpor.is_pending(w)
        assert w.shape == (1, 2)
    assert calls.made == []


def test_a_training_step_runs_nothing_before_it_is_asked_for(kit: Kit) -> None:
    model = kit.put(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    with kit.watched("execute") as calls:
        model(kit.put(X)).square().mean().backward()
        assert all(torpor.is_pending(p.grad) for p in model.parameters())
    assert calls.made == []


def test_a_read_runs_one_graph_and_a_second_read_none(kit: Kit) -> None:
    with kit.watched("execute") as calls:
        z = kit.put(X) * kit.put(Y)
        kit.plain(z)
        assert calls.count("execute") == 1
        kit.plain(z)
        z.tolist()
        assert calls.count("execute") == 1


def test_a_sync_computes_all_that_is_alive_in_one_run(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    sums = [x + y, x - y, x * y]
    with kit.watched("execute") as calls:
        torpor.sync(wait=True)
        kit.check(sums, [kit.eager(t) for t in (X + Y, X - Y, X * Y)])
    assert calls.count("execute") == 1


def test_a_read_does_not_run_what_it_does_not_need(kit: Kit) -> None:
    need_custom_ops(kit)
    x = kit.put(X)
    other = counted(x + x)
    kit.plain(x * x)
    assert runs() == 0
    kit.check(other, kit.eager(X + X))
    assert runs() == 1


def test_what_nobody_holds_is_not_computed(kit: Kit) -> None:
    need_custom_ops(kit)
    x = kit.put(X)
    counted(x)
    kit.plain(x + x)
    torpor.sync(wait=True)
    assert runs() == 0


# -- how often ---------------------------------------------------------------------------------


def test_an_op_runs_once_for_all_who_use_it(kit: Kit) -> None:
    need_custom_ops(kit)
    shared = counted(kit.put(X))
    left, right = shared + shared, shared.relu()
    torpor.sync(wait=True)
    kit.check([left, right, shared], [kit.eager(t) for t in (X + X, X.relu(), X)])
    assert runs() == 1


def test_a_value_read_in_the_middle_of_a_step_is_not_computed_again(kit: Kit) -> None:
    need_custom_ops(kit)
    y = counted(kit.put(X))
    z = y * y
    y.sum().item()
    kit.check(z, kit.eager(X * X))
    torpor.sync(wait=True)
    kit.check(y, kit.eager(X))
    assert runs() == 1


def test_each_step_runs_once(kit: Kit) -> None:
    need_custom_ops(kit)
    x = kit.put(X)
    for _ in range(5):
        x = counted(x * x)
        torpor.sync(wait=True)
    assert runs() == 5


def test_equal_steps_are_compiled_once(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    with kit.watched("compile") as calls:
        for _ in range(4):
            x = x * y - x
            torpor.sync(wait=True)
    assert calls.count("compile") == 1


def test_a_warm_training_step_compiles_nothing_and_is_one_run(kit: Kit) -> None:
    model, x = kit.put(nn.Linear(3, 2)), kit.put(X)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torpor.wait()

    for _ in range(5):
        step()
    with kit.watched("compile", "execute") as calls:
        step()
    assert [call.name for call in calls.made] == ["execute"]


# -- values from step to step ------------------------------------------------------------------


def test_a_step_takes_the_numbers_of_its_own_inputs(kit: Kit) -> None:
    for number in range(5):
        own = X + number
        kit.check(kit.put(own) * kit.put(Y), kit.eager(own * Y))
        torpor.sync(wait=True)


def test_a_state_carried_through_steps_is_right_after_each(kit: Kit) -> None:
    x, y, expected = kit.put(X), kit.put(Y), X
    for _ in range(6):
        x, expected = x * y + x, expected * Y + expected
        x, expected = x.relu() - y, expected.relu() - Y
        torpor.sync()
        kit.check(x, kit.eager(expected))


def test_steps_queued_without_waiting_run_in_order(kit: Kit) -> None:
    x, expected, kept = kit.put(X), X, []
    for _ in range(6):
        x, expected = x - kit.put(Y), expected - Y
        kept.append((x, expected))
        torpor.sync()
    torpor.wait()
    for got, wanted in kept:
        kit.check(got, kit.eager(wanted))


def test_a_number_that_changes_every_step_is_right(kit: Kit) -> None:
    x = kit.put(X)
    for step in range(6):
        kit.check(x * (0.5 + step) + step, kit.eager(X * (0.5 + step) + step))
        torpor.sync(wait=True)


def test_values_that_were_read_stay_what_they_were(kit: Kit) -> None:
    x = kit.put(X)
    y = x + x
    before = kit.plain(y).clone()
    x.mul_(3)
    torpor.sync(wait=True)
    kit.check(y, before)


# -- memory ------------------------------------------------------------------------------------


def test_a_write_after_a_sync_reaches_views_taken_before_it(kit: Kit) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> object:
        base = x * 1
        row, column = base[0], base.t()[1]
        if torpor.is_lazy(base):
            torpor.sync(wait=True)
        base.add_(y)
        row.mul_(2)
        if torpor.is_lazy(base):
            torpor.sync(wait=True)
        column.sub_(1)
        return base, row, column

    kit.agree(program, X, Y)


def test_writing_one_result_leaves_the_others_alone(kit: Kit) -> None:
    """Two results may be equal, but must not share memory."""

    def program(x: torch.Tensor) -> object:
        left, right = x + x, (x + x).clone()
        copied = torch.empty_like(x).copy_(left)
        if torpor.is_lazy(x):
            torpor.sync(wait=True)
        left.add_(1)
        if torpor.is_lazy(x):
            torpor.sync(wait=True)
        copied.mul_(2)
        return left, right, copied, x

    kit.agree(program, X)


def test_an_input_keeps_its_numbers(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    for _ in range(3):
        kit.plain((x + y).mul_(2).relu_())
        torpor.sync(wait=True)
    kit.check([x, y], [kit.eager(X), kit.eager(Y)])


def test_strides_of_results_are_those_the_tensor_promises(kit: Kit) -> None:
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    kit.agree(lambda x, y: ((x * y).t(), (x.t() + y.t()), (x + y).t().contiguous()), X, Y)
    kit.agree(lambda x: (x * 2, (x + x).permute(0, 2, 3, 1), x.contiguous()), image)
    kit.agree(lambda x: (x.expand(4, 3), x.expand(4, 3) + 1), X[:1].clone())


def test_empty_tensors_keep_their_shape(kit: Kit) -> None:
    kit.agree(lambda x: (x + x, x @ x.t(), x.sum(0), x.relu(), x.t()), torch.ones(0, 3))


def test_zero_dim_tensors_work(kit: Kit) -> None:
    kit.agree(lambda x, y: (x * y, x + y[0, 0], x.relu().view(1)), torch.tensor(-1.5), Y)


def test_nan_infinity_and_the_sign_of_zero_go_through_ops(kit: Kit) -> None:
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 2.5])
    ones = torch.ones(6)
    x = kit.put(odd)
    for got, expected in ((x * kit.put(ones), odd * ones), (x - kit.put(ones), odd - ones)):
        bits = [kit.plain(got).cpu(), expected]
        bits = [b.nan_to_num(nan=123.0, posinf=9e9, neginf=-9e9).view(torch.int32) for b in bits]
        assert torch.equal(*bits), f"{kit.plain(got)} in the place of {expected}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.bfloat16], ids=str)
def test_results_keep_their_dtype_and_precision(kit: Kit, dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 0, 3], [0, 5, 6]], dtype=dtype)
    if dtype.is_floating_point:
        x = x / 3
    if dtype is torch.int64:
        x = x * (2**40 + 1)
    kit.agree(lambda x: (x & x, ~x) if dtype is torch.bool else (x + x, x * x, x - 1), x)


def test_a_long_chain_is_no_trouble(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    for _ in range(2000):
        x = x + y
    kit.exact = False
    expected = X.double() + 2000 * Y.double()
    kit.check(x, kit.eager(expected.float()))


# -- random numbers ----------------------------------------------------------------------------


def test_random_numbers_are_eagers_and_drawn_once(kit: Kit) -> None:
    def program(x: torch.Tensor) -> object:
        first = F.dropout(x, 0.5)
        first.sum().item()
        second = torch.rand_like(x) + torch.randn(2, 3, device=x.device)
        third = torch.empty_like(x).normal_() * first
        return first, second, third, torch.rand(3)

    kit.agree(program, X)


def test_an_early_read_updates_statistics_once(kit: Kit) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        loss = model(x).square().sum()
        loss.item()
        loss.backward()
        return [loss.detach(), *model.buffers()]

    torch.manual_seed(3)
    kit.agree(program, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), X)


# -- threads and devices -----------------------------------------------------------------------


def test_four_threads_get_their_own_results(kit: Kit) -> None:
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        x = kit.put(X + number)
        for _ in range(3):
            x = x * kit.put(Y) - x
            torpor.sync(x, wait=True)
        results[number] = kit.plain(x)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        expected = X + number
        for _ in range(3):
            expected = expected * Y - expected
        kit.check(results[number], kit.eager(expected))


def test_two_devices_work_side_by_side(kit: Kit) -> None:
    if len(kit.backend.devices()) < 2:
        pytest.skip("the backend has one device")
    left, right = X.to("lazy:0"), Y.to("lazy:1")
    total = (left + left).to("lazy:1") * right
    assert total.device == torch.device("lazy", 1)
    kit.check(total.cpu(), (X + X) * Y)
    kit.check((right - right).cpu(), Y - Y)
