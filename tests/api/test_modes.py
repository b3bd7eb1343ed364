"""torpor.lazy, mode, enable, disable; backends; metrics."""

import threading

import pytest
import torch
from torch import Tensor, nn

import torpor
from tests.comparison import Put, assert_same, message, plain, raised_by

X = torch.arange(6.0).view(2, 3)


# --- torpor.lazy -----------------------------------------------------------------------------


def test_lazy_keeps_the_device() -> None:
    lazy = torpor.lazy(X)
    assert lazy.device == X.device
    assert torpor.is_lazy(lazy)
    assert_same(lazy, X)


def test_lazy_of_a_lazy_tensor_is_lazy(put: Put) -> None:
    x = put(X)
    again = torpor.lazy(x)
    assert torpor.is_lazy(again)
    assert again.device == x.device
    assert_same(again, X)


def test_lazy_keeps_requires_grad_on_a_leaf() -> None:
    leaf = torpor.lazy(X.clone().requires_grad_())
    assert leaf.requires_grad
    (leaf * 2).sum().backward()


def test_lazy_of_a_parameter_is_a_parameter() -> None:
    parameter = torpor.lazy(nn.Parameter(X.clone()))
    assert isinstance(parameter, nn.Parameter)
    assert torpor.is_lazy(parameter)


def test_lazy_of_a_module_makes_parameters_and_buffers_lazy() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    lazy = torpor.lazy(module)
    assert isinstance(lazy, nn.Sequential)
    assert all(torpor.is_lazy(t) for t in (*lazy.parameters(), *lazy.buffers()))
    assert {t.device.type for t in lazy.parameters()} == {"cpu"}


def test_a_lazy_module_takes_plain_inputs() -> None:
    module = nn.Linear(3, 2)
    expected = module(X).detach()
    result = torpor.lazy(module)(X)
    assert torpor.is_lazy(result)
    assert_same(result.detach(), expected)


def test_lazy_refuses_what_is_neither_tensor_nor_module() -> None:
    error = raised_by(lambda: torpor.lazy("text"))
    assert isinstance(error, TypeError)


# --- modes -----------------------------------------------------------------------------------


def test_what_is_made_inside_the_mode_is_lazy() -> None:
    with torpor.mode():
        made = torch.ones(2, 3)
        derived = X + 1
    assert torpor.is_lazy(made)
    assert not torpor.is_lazy(torch.ones(2))
    assert_same(made, torch.ones(2, 3))
    assert_same(plain(derived), X + 1)


def test_the_mode_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), torpor.mode():
        raise KeyError
    assert not torpor.is_lazy(torch.ones(2))


def test_tensors_on_borrowed_memory_or_without_elements_stay_plain_inside_the_mode() -> None:
    memory = bytearray(8)
    with torpor.mode():
        assert type(torch.frombuffer(memory, dtype=torch.float32)) is Tensor
        assert type(torch.empty(0)) is type(torch.tensor([])) is type(torch.ones(0, 2)) is Tensor
        assert torpor.is_lazy(torch.cat([torch.empty(0), torch.ones(2)]))


def test_the_mode_nests() -> None:
    with torpor.mode():
        with torpor.mode():
            pass
        assert torpor.is_lazy(torch.ones(2))
    assert not torpor.is_lazy(torch.ones(2))


def test_a_training_script_inside_the_mode_gives_eagers_losses() -> None:
    def script() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data, target = torch.randn(8, 3), torch.randn(8, 1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            batch = torch.randperm(8)[:4]
            loss = nn.functional.mse_loss(model(data[batch]), target[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = script()
    with torpor.mode():
        assert script() == expected
    torpor.enable()
    try:
        assert script() == expected
    finally:
        torpor.disable()
    torch.set_default_device("lazy")
    assert script() == expected


def test_enable_holds_until_disable() -> None:
    torpor.enable()
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    assert torpor.is_lazy(first(X))
    torpor.disable()
    assert torpor.is_lazy(first.weight)
    assert not torpor.is_lazy(second(X))


def test_enable_leaves_data_alone() -> None:
    torpor.enable()
    try:
        assert type(torch.ones(2)) is Tensor
        assert type(X + 1) is Tensor
    finally:
        torpor.disable()


def test_enable_holds_in_other_threads() -> None:
    seen = []
    torpor.enable()
    try:
        thread = threading.Thread(target=lambda: seen.append(torpor.is_lazy(nn.Linear(3, 2)(X))))
        thread.start()
        thread.join(30)
    finally:
        torpor.disable()
    assert seen == [True]


def test_enabling_and_disabling_twice_is_harmless() -> None:
    torpor.enable()
    torpor.enable()
    torpor.disable()
    torpor.disable()
    assert not torpor.is_lazy(nn.Linear(3, 2)(X))


def test_tensors_made_lazy_while_enabled_live_on() -> None:
    torpor.enable()
    module = nn.Linear(3, 2)
    x = module(X)
    torpor.disable()
    assert_same(plain(x.detach()) + 1, plain((module(X) + 1).detach()))


# --- backends --------------------------------------------------------------------------------


def test_the_reference_backend_is_available() -> None:
    assert "reference" in torpor.backends()


def test_an_unknown_backend_is_refused_by_name() -> None:
    error = raised_by(lambda: torpor.use("no-such-backend"))
    assert isinstance(error, torpor.errors.TorporError)
    assert "no-such-backend" in message(error)
    assert "reference" in message(error)


def test_using_chooses_a_backend_for_a_while(put: Put) -> None:
    x = put(X)
    with torpor.using("reference"):
        y = x + 1
        torpor.sync()
    assert_same(y, X + 1)


def test_a_backend_may_be_changed_with_work_pending(put: Put) -> None:
    y = put(X) + 1
    torpor.use("reference")
    assert_same(y * 2, (X + 1) * 2)


# --- asking ----------------------------------------------------------------------------------


def test_is_lazy_is_false_for_everything_else() -> None:
    for thing in (X, nn.Parameter(X), 1, None, "lazy", [torch.ones(1)]):
        assert not torpor.is_lazy(thing)


def test_is_pending_is_false_for_everything_else() -> None:
    assert not torpor.is_pending(X)


def test_counters_count_and_reset(put: Put) -> None:
    torpor.metrics.reset()
    assert torpor.metrics.counters().get("lazy::add", 0) == 0
    x = put(X)
    for _ in range(3):
        x = x + 1
    torpor.sync(wait=True)
    counters = torpor.metrics.counters()
    assert any("add" in name and count >= 3 for name, count in counters.items()), counters
    assert all(isinstance(count, int) for count in counters.values())
    assert isinstance(torpor.metrics.report(), str)
    assert isinstance(torpor.metrics.timers(), dict)
    torpor.metrics.reset()
    assert sum(torpor.metrics.counters().values()) == 0


def test_compiles_and_cache_hits_are_counted(put: Put) -> None:
    x = put(torch.ones(5, 7))
    torpor.metrics.reset()
    for _ in range(4):
        y = (x * 3).cos()
        torpor.sync(y, wait=True)
        del y
    counters = torpor.metrics.counters()
    assert counters.get("UncachedCompile") == 1
    assert counters.get("CachedCompile") == 3


def test_memory_reports_something(put: Put) -> None:
    x = put(X) + 1
    torpor.sync(x, wait=True)
    assert torpor.memory() is not None
    assert torpor.memory(device=x.device) is not None


@pytest.mark.parametrize("form", ["text", "dot"])
def test_the_graph_of_a_pending_tensor_is_shown(put: Put, form: str) -> None:
    y = (put(X) + 1).exp()
    shown = torpor.graph(y, format=form)
    assert "exp" in shown
    assert "add" in shown
    assert torpor.is_pending(y)


def test_the_graph_of_a_deep_chain_is_shown(put: Put) -> None:
    y = put(X)
    for _ in range(5000):
        y = y.sin()
    assert torpor.graph(y).count("sin") >= 5000


def test_a_plain_tensor_stays_plain() -> None:
    assert type(torch.ones(2) + 1) is Tensor
    assert type(nn.Linear(2, 2)(torch.ones(1, 2)).data) is Tensor
