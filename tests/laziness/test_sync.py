"""Where the trace is cut, by whom, and what waits for it."""

import threading

import pytest
import torch
from torch import nn

import torpor
from tests.comparison import Put, agree, assert_same, plain, raised_by
from tests.instrumented_ops import counted, gate_timed_out, gated, open_gate, runs

X = torch.arange(6.0).view(2, 3)


# --- sync and wait ---------------------------------------------------------------------------


def test_sync_materialises_all_that_is_live(put: Put) -> None:
    x = put(X)
    first, second = x + 1, x * 2
    assert torpor.is_pending(first)
    torpor.sync()
    assert not torpor.is_pending(first)
    assert not torpor.is_pending(second)
    assert_same([first, second], [X + 1, X * 2])


def test_sync_of_one_device_leaves_the_other_pending() -> None:
    here, there = X.to("lazy:0") + 1, X.to("lazy:1") + 2
    torpor.sync(device="lazy:1")
    assert not torpor.is_pending(there)
    assert torpor.is_pending(here)
    assert_same([here, there], [X + 1, X + 2])


def test_sync_takes_a_device_object(put: Put) -> None:
    y = put(X) + 1
    torpor.sync(device=y.device)
    assert not torpor.is_pending(y)


def test_sync_takes_tensors_that_are_not_lazy(put: Put) -> None:
    y = put(X) + 1
    torpor.sync(X, y, wait=True)
    assert not torpor.is_pending(y)


def test_sync_of_a_view_computes_the_view(put: Put) -> None:
    base = put(X) + 1
    view = base[0]
    torpor.sync(view, wait=True)
    assert not torpor.is_pending(view)
    assert view.tolist() == [1.0, 2.0, 3.0]
    base.add_(1)
    assert view.tolist() == [2.0, 3.0, 4.0]


def test_wait_with_an_empty_queue_returns(put: Put) -> None:
    torpor.wait()
    torpor.wait(device=put(X).device)
    torpor.sync()
    torpor.wait()


def test_sync_does_not_change_what_follows(put: Put) -> None:
    def program(x: torch.Tensor, every: int) -> object:
        for number in range(12):
            x = (x * 1.1 + number).sin()
            x[0, number % 3] = number
            if every and number % every == 0:
                torpor.sync()
        return x

    for every in (0, 1, 2, 5):
        agree(put, program, X, every)


# --- the queue -------------------------------------------------------------------------------


def test_results_are_handles_before_they_have_values(put: Put) -> None:
    y = gated(put(X)) + 1
    torpor.sync()  # returns though the value cannot exist yet
    assert not torpor.is_pending(y)
    z = y * 2  # the next step is traced meanwhile
    assert z.shape == X.shape
    torpor.sync()
    open_gate()
    assert z.tolist() == ((X + 1) * 2).tolist()
    assert not gate_timed_out()


def test_many_steps_queue_up_behind_a_running_one(put: Put) -> None:
    x = gated(put(X))
    for _ in range(4):
        x = x + 1
        torpor.sync()
    open_gate()
    assert x.tolist() == (X + 4).tolist()
    assert not gate_timed_out()


def test_in_place_steps_queue_up_behind_a_running_one(put: Put) -> None:
    x = put(X)
    view = x[0]
    x.add_(gated(x))
    for _ in range(4):
        view.mul_(2)
        torpor.sync()
    open_gate()
    expected = X * 2
    expected[0] *= 16
    assert x.tolist() == expected.tolist()
    assert view.tolist() == expected[0].tolist()
    assert not gate_timed_out()


def test_training_steps_queue_up_behind_a_running_one(put: Put) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(gated(x)).square().mean().backward()
            optimizer.step()
        open_gate()
        return [p.detach() for p in model.parameters()]

    model, x = nn.Linear(3, 2), X / 6
    open_gate()
    expected = program(_copy(model), x)
    _shut_gate()
    assert_same(program(put(model), put(x)), expected)
    assert not gate_timed_out()


def test_sync_with_wait_returns_when_the_values_are_there(put: Put) -> None:
    y = counted(put(X))
    torpor.sync(wait=True)
    assert runs() == 1
    assert y.tolist() == X.tolist()


def test_wait_returns_when_the_queue_is_empty(put: Put) -> None:
    y = counted(gated(put(X)))
    torpor.sync()
    assert runs() == 0
    threading.Timer(0.05, open_gate).start()
    torpor.wait()
    assert runs() == 1
    assert not torpor.is_pending(y)


def test_a_leaf_changed_by_its_owner_while_a_step_runs_keeps_the_steps_value(put: Put) -> None:
    x = put(X)
    y = gated(x) + x
    torpor.sync()
    x.fill_(100)  # recorded after the step: the step must not see it
    torpor.sync()
    open_gate()
    assert y.tolist() == (X + X).tolist()
    assert x.tolist() == [[100.0] * 3] * 2
    assert not gate_timed_out()


def test_a_plain_tensor_may_change_once_it_was_used(put: Put) -> None:
    source = torch.ones(3)
    target = put(torch.zeros(3))
    target.copy_(source)
    source.fill_(7)  # the program order says: copied before
    assert target.tolist() == [1.0] * 3


def test_a_plain_scalar_tensor_may_change_once_it_was_used(put: Put) -> None:
    number = torch.tensor(2.0)
    y = put(X) * number
    number.fill_(100.0)
    assert_same(y, X * 2.0)


def test_a_queue_that_is_full_makes_recording_wait_not_fail(put: Put) -> None:
    x = put(X)
    for _ in range(200):
        x = x + 1
        torpor.sync()
    assert x.tolist() == (X + 200).tolist()


# --- automatic cuts --------------------------------------------------------------------------


def test_the_trace_is_cut_after_an_optimizer_step(put: Put) -> None:
    model = put(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(put(X)).sum()
    loss.backward()
    assert torpor.is_pending(loss)
    optimizer.step()
    assert not torpor.is_pending(loss)
    assert not any(torpor.is_pending(p) for p in model.parameters())


def test_the_trace_is_cut_after_an_optimizer_step_with_a_closure(put: Put) -> None:
    model, x = put(nn.Linear(3, 2)), put(X)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert not torpor.is_pending(loss)


def test_an_optimizer_step_on_plain_tensors_cuts_nothing(put: Put) -> None:
    pending = counted(put(X))
    model = nn.Linear(3, 2)
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torpor.is_pending(pending)
    assert runs() == 0


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_the_trace_is_cut_after_the_outermost_module_call_without_gradients(
    put: Put, guard: type
) -> None:
    model, x = put(nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.ReLU()))), put(X)
    inside = []
    model[0].register_forward_hook(lambda _, __, out: inside.append(torpor.is_pending(out)))
    model[1].register_forward_hook(lambda _, __, out: inside.append(torpor.is_pending(out)))
    with guard():
        y = model(x)
    assert inside == [True, True]
    assert not torpor.is_pending(y)


def test_a_module_call_with_gradients_cuts_nothing(put: Put) -> None:
    y = put(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))(put(X))
    assert torpor.is_pending(y)


def test_a_module_call_that_fails_leaves_the_next_one_outermost(put: Put) -> None:
    model, x = put(nn.Linear(3, 2)), put(X)
    with torch.no_grad():
        assert type(raised_by(lambda: model(x.t()))) is RuntimeError
        y = model(x)
    assert not torpor.is_pending(y)


def test_a_no_grad_loop_over_modules_does_not_grow_one_endless_graph(put: Put) -> None:
    model = put(nn.Linear(3, 3))
    state = put(X)
    with torch.no_grad():
        for _ in range(5):
            state = model(state)
            assert not torpor.is_pending(state)


def test_the_cut_after_an_optimizer_step_can_be_switched_off(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "cut_after_optimizer", False)
    model = put(nn.Linear(3, 2))
    loss = model(put(X)).sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torpor.is_pending(loss)


def test_the_cut_after_a_module_call_can_be_switched_off(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "cut_after_module", False)
    model, x = put(nn.Linear(3, 2)), put(X)
    with torch.no_grad():
        assert torpor.is_pending(model(x))


def test_the_trace_is_cut_when_it_holds_the_greatest_number_of_nodes(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "max_trace_nodes", 50)
    x = put(X)
    held = []
    for number in range(200):
        x = x + number
        held.append(x)
    assert not torpor.is_pending(held[0])
    assert sum(torpor.is_pending(one) for one in held) <= 50
    expected = X.clone()
    for number in range(200):
        expected = expected + number
    assert_same(x, expected)


def test_the_cap_changes_no_result(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> object:
        y = x
        for _ in range(10):
            y = torch.dropout(model(y), 0.3, True)
            y[0] = y[1] * 2
        y.sum().backward()
        return y.detach(), [p.grad for p in model.parameters()]

    for cap in (1, 2, 7, 1000):
        monkeypatch.setattr(torpor.config, "max_trace_nodes", cap)
        agree(put, program, nn.Linear(3, 3), X)


CUT_IN_THE_MIDDLE = {
    "draws": lambda x: (x.view(-1).uniform_(), x[0].normal_(), x.t()[1:].bernoulli_()),
    "lists": lambda x: torch._foreach_add_([x[0], x[1], x.view(-1)[4:]], 1.0),
    "outs": lambda x: torch.max(x.clone(), 0, out=(x[0], torch.empty_like(x[0]).long())),
    "masks": lambda x: x[1:].masked_fill_(x[1:] > 2, 1).t()[0].add_(x[0, 0]),
    "statistics": lambda x: torch.nn.functional.batch_norm(x.clone(), x[0], x[1], training=True),
    "dropout": lambda x: x[1].copy_(torch.nn.functional.dropout(x[0] + 1)),
}


@pytest.mark.parametrize("cap", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CUT_IN_THE_MIDDLE)
def test_a_cut_in_the_middle_of_an_op_does_nothing_twice(
    put: Put, monkeypatch: pytest.MonkeyPatch, name: str, cap: int
) -> None:
    """The cap counts new nodes, so the shape is one that nothing else uses."""
    monkeypatch.setattr(torpor.config, "max_trace_nodes", cap)

    def program(x: torch.Tensor) -> object:
        y = x + 1
        CUT_IN_THE_MIDDLE[name](y)
        return y, y * 2, torch.rand_like(y)

    columns = 31 + 10 * list(CUT_IN_THE_MIDDLE).index(name) + cap
    agree(put, program, torch.arange(3.0 * columns).view(3, columns))


# --- step closures ---------------------------------------------------------------------------


def test_a_closure_runs_at_the_end_of_the_step(put: Put) -> None:
    seen = []
    y = put(X) + 1
    torpor.at_step_end(lambda t: seen.append(t.tolist()), y)
    assert seen == []
    torpor.sync()
    assert seen == [(X + 1).tolist()]


def test_a_closure_runs_once(put: Put) -> None:
    seen = []
    torpor.at_step_end(seen.append, 1)
    for _ in range(3):
        y = put(X) + 1
        torpor.sync()
    assert seen == [1]
    assert y.shape == X.shape


def test_closures_run_in_the_order_they_were_given(put: Put) -> None:
    seen = []
    y = put(X)
    for number in range(5):
        torpor.at_step_end(lambda n, t: seen.append((n, t.sum().item())), number, y + number)
    torpor.sync()
    assert seen == [(n, 15.0 + 6 * n) for n in range(5)]


def test_a_closures_tensors_are_not_pending(put: Put) -> None:
    seen = []
    torpor.at_step_end(lambda t: seen.append(torpor.is_pending(t)), put(X) + 1)
    torpor.sync()
    assert seen == [False]


def test_a_read_is_not_the_end_of_a_step(put: Put) -> None:
    seen = []
    y = put(X) + 1
    torpor.at_step_end(seen.append, 1)
    y.sum().item()
    torpor.sync(y)
    assert seen == []
    torpor.sync()
    assert seen == [1]


def test_an_optimizer_step_is_the_end_of_a_step(put: Put) -> None:
    seen = []
    model = put(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(put(X)).sum()
    loss.backward()
    torpor.at_step_end(lambda t: seen.append(t.item()), loss)
    optimizer.step()
    assert len(seen) == 1


def test_a_closure_may_record_and_ask_for_another_closure(put: Put) -> None:
    seen = []
    y = put(X)

    def again(t: torch.Tensor) -> None:
        seen.append((t * 2).sum().item())
        torpor.at_step_end(seen.append, "next step")

    torpor.at_step_end(again, y + 1)
    torpor.sync()
    assert seen == [42.0]
    torpor.sync()
    assert seen == [42.0, "next step"]


def test_an_asynchronous_closure_runs_on_another_thread(put: Put) -> None:
    done = threading.Event()
    seen = []

    def closure(t: torch.Tensor) -> None:
        seen.append((threading.get_ident(), t.tolist()))
        done.set()

    torpor.at_step_end(closure, put(X) + 1, run_async=True)
    torpor.sync()
    assert done.wait(30)
    assert seen[0][1] == (X + 1).tolist()
    assert seen[0][0] != threading.get_ident()


def test_an_asynchronous_closure_does_not_hold_up_the_step(put: Put) -> None:
    release, done = threading.Event(), threading.Event()
    timely = []

    def closure() -> None:
        timely.append(release.wait(30))
        done.set()

    torpor.at_step_end(closure, run_async=True)
    torpor.sync()
    y = put(X) + 1
    torpor.sync()
    assert y.tolist() == (X + 1).tolist()
    release.set()
    assert done.wait(30)
    assert timely == [True]


def test_asynchronous_closures_run_in_the_order_they_were_given(put: Put) -> None:
    seen, done = [], threading.Event()
    for step in range(3):
        y = put(X) + step
        for number in range(3):
            torpor.at_step_end(lambda *a: seen.append(a), step, number, run_async=True)
        torpor.sync()
        assert y.shape == X.shape
    torpor.at_step_end(done.set, run_async=True)
    torpor.sync()
    assert done.wait(30)
    assert seen == [(step, number) for step in range(3) for number in range(3)]


def test_an_asynchronous_closure_sees_its_own_steps_values(put: Put) -> None:
    seen, done = [], threading.Event()
    total = put(torch.zeros(()))
    for _ in range(4):
        total = total + 1
        torpor.at_step_end(lambda t: seen.append(t.item()), total, run_async=True)
        torpor.sync()
    torpor.at_step_end(done.set, run_async=True)
    torpor.sync()
    assert done.wait(30)
    assert seen == [1.0, 2.0, 3.0, 4.0]


def test_a_closures_error_reaches_the_caller_of_sync(put: Put) -> None:
    def closure() -> None:
        raise KeyError("from the closure")

    y = put(X) + 1
    torpor.at_step_end(closure)
    assert type(raised_by(torpor.sync)) is KeyError
    assert y.tolist() == (X + 1).tolist()
    torpor.sync()


# --- data-dependent ops ----------------------------------------------------------------------

DATA_DEPENDENT = {
    "nonzero": lambda x: x.nonzero(),
    "nonzero_tuple": lambda x: x.nonzero(as_tuple=True),
    "argwhere": lambda x: torch.argwhere(x > 2),
    "where": lambda x: torch.where(x > 2),
    "boolean_index": lambda x: x[x > 2],
    "masked_select": lambda x: torch.masked_select(x, x > 2),
    "unique": lambda x: torch.unique(x % 2, return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(x // 2),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[0], x[1].long()),
    "bincount": lambda x: torch.bincount(x.long().flatten()),
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long()),
    "item_as_size": lambda x: x.new_zeros(int(x.max().item()) + 1),
    "slice_by_value": lambda x: x.flatten()[: int(x.max())],
    "tensor_split_by_tensor": lambda x: torch.tensor_split(x, torch.tensor([1])),
    "histc": lambda x: torch.histc(x),
    "branch": lambda x: x + 1 if x.sum() > 3 else x - 1,
    "loop": lambda x: [x * i for i in range(int(x.max()))],
    "linspace": lambda x: torch.linspace(x.min().item(), x.max().item(), 4, device=x.device),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_a_data_dependent_op_gives_eagers_result(put: Put, name: str) -> None:
    agree(put, lambda x: DATA_DEPENDENT[name](x * 1), X)


@pytest.mark.parametrize("name", ["nonzero", "boolean_index", "unique"])
def test_the_results_of_a_data_dependent_op_are_lazy(put: Put, name: str) -> None:
    result = DATA_DEPENDENT[name](put(X))
    first = result[0] if isinstance(result, tuple) else result
    assert torpor.is_lazy(first)
    assert first.device == put(X).device
    assert_same(plain(first + 1), plain(first) + 1)


@pytest.mark.parametrize("name", ["nonzero", "boolean_index", "unique"])
def test_a_data_dependent_op_computes_its_input_once(put: Put, name: str) -> None:
    x = counted(put(X))
    DATA_DEPENDENT[name](x)
    assert x.tolist() == X.tolist()
    assert runs() == 1


def test_writing_through_a_boolean_mask_needs_no_sync(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        y = x * 1
        y[y > 2] = -1.0
        y[y < 0] *= 3
        return y

    agree(put, program, X)


def test_boolean_indexing_has_a_gradient(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        (x[x > 2] * 3).sum().backward()
        return x.grad

    agree(put, program, X.clone().requires_grad_())


def _copy(module: nn.Module) -> nn.Module:
    twin = nn.Linear(3, 2)
    twin.load_state_dict(module.state_dict())
    return twin


def _shut_gate() -> None:
    from tests import instrumented_ops

    instrumented_ops.reset()
