"""deepcopy, pickle, torch.save and torch.load."""

import copy
import io
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor, nn

import torpor
from tests.comparison import Put, assert_same, plain
from tests.instrumented_ops import counted, reset, runs
from torpor.backends.equality import same_bits

X = torch.arange(6.0).view(2, 3)


def _round_trip(thing: object, **keywords: object) -> object:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, **keywords)


def test_a_deep_copy_is_another_memory(put: Put) -> None:
    original = put(X) + 1
    twin = copy.deepcopy(original)
    original.zero_()
    assert torpor.is_lazy(twin)
    assert twin.device == original.device
    assert_same(twin, X + 1)


def test_a_deep_copy_keeps_aliasing_inside_what_is_copied(put: Put) -> None:
    base = put(X)
    pair = copy.deepcopy({"base": base, "view": base[0], "again": base})
    pair["base"].add_(1)
    assert pair["again"] is pair["base"]
    assert_same(pair["view"], X[0] + 1)
    assert_same(base, X)


def test_a_deep_copy_keeps_gradients_and_strides(put: Put) -> None:
    leaf = put(X.t().clone(memory_format=torch.preserve_format).requires_grad_())
    leaf.square().sum().backward()
    twin = copy.deepcopy(leaf)
    assert twin.requires_grad
    assert twin.is_leaf
    assert twin.stride() == leaf.stride()
    assert twin.grad is not leaf.grad
    assert twin.grad.stride() == leaf.grad.stride()
    assert plain(twin.grad).tolist() == (2 * X.t()).tolist()


def test_a_deep_copy_of_a_result_with_history_is_refused(put: Put) -> None:
    result = put(X.clone().requires_grad_()) * 2
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(result)


def test_a_deep_copied_parameter_is_a_parameter(put: Put) -> None:
    parameter = nn.Parameter(put(X))
    parameter.tag = "mine"
    twin = copy.deepcopy(parameter)
    assert isinstance(twin, nn.Parameter)
    assert torpor.is_lazy(twin)
    assert_same(twin.detach(), X)


def test_a_deep_copied_module_keeps_its_ties(put: Put) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    twin = copy.deepcopy(put(module))
    assert twin[0].weight is twin[1].weight
    assert_same(dict(twin.state_dict()), dict(module.state_dict()))


def test_a_shallow_copy_shares_memory(put: Put) -> None:
    original = put(X)
    twin = copy.copy(original)
    original.add_(1)
    assert_same(twin, X + 1)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_tensor_survives_pickle(put: Put, protocol: int) -> None:
    loaded = pickle.loads(pickle.dumps(put(X) + 1, protocol))
    assert loaded.device.type == put.device.type
    assert_same(loaded, X + 1)


def test_a_parameter_and_a_module_survive_pickle(put: Put) -> None:
    parameter = pickle.loads(pickle.dumps(nn.Parameter(put(X))))
    assert isinstance(parameter, nn.Parameter)
    assert_same(parameter.detach(), X)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    loaded = pickle.loads(pickle.dumps(put(module)))
    assert_same(dict(loaded.state_dict()), dict(module.state_dict()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_dtype_survives_saving(put: Put, dtype: torch.dtype) -> None:
    original = X.to(dtype)
    loaded = _round_trip(put(original))
    assert loaded.dtype == dtype
    assert same_bits(plain(loaded), original)


def test_a_saved_tensor_loads_where_it_was(put: Put) -> None:
    loaded = _round_trip(put(X) * 2)
    assert loaded.device.type == put.device.type
    assert_same(loaded, X * 2)


def test_a_saved_tensor_is_computed_once(put: Put) -> None:
    reset()
    y = counted(put(X))
    _round_trip(y)
    _round_trip(y)
    assert runs() == 1


@pytest.mark.parametrize(
    "target",
    ["cpu", "lazy", "lazy:0", "lazy:1", torch.device("cpu"), torch.device("lazy")],
    ids=str,
)
def test_map_location_moves_a_saved_tensor(put: Put, target: str | torch.device) -> None:
    loaded = _round_trip({"x": put(X), "n": 3}, map_location=target)
    wanted = torch.device(target)
    assert loaded["x"].device.type == wanted.type
    assert loaded["x"].device.index in (wanted.index, wanted.index or 0)
    assert loaded["n"] == 3
    assert_same(loaded["x"], X)


@pytest.mark.parametrize("target", ["cpu", "lazy"])
def test_a_plain_saved_tensor_loads_anywhere(target: str) -> None:
    loaded = _round_trip(X, map_location=target)
    assert loaded.device.type == target
    assert_same(loaded, X)
    loaded.add_(1)
    assert_same(loaded, X + 1)


def test_map_location_may_be_a_function_or_a_table(put: Put) -> None:
    assert _round_trip(put(X), map_location=lambda storage, _: storage).tolist() == X.tolist()
    assert _round_trip(put(X), map_location={"lazy:0": "cpu"}).tolist() == X.tolist()


def test_loading_on_the_cpu_gives_a_plain_tensor(put: Put) -> None:
    assert type(_round_trip(put(X), map_location="cpu")) is Tensor


@pytest.mark.parametrize("weights_only", [True, False])
def test_both_loaders_read_a_saved_tensor(put: Put, weights_only: bool) -> None:
    loaded = _round_trip({"a": [put(X), X], "b": put(X)[0]}, weights_only=weights_only)
    assert_same(loaded["a"][0], X)
    assert type(loaded["a"][1]) is Tensor
    assert_same(loaded["b"], X[0])


def test_shared_memory_is_shared_after_loading(put: Put) -> None:
    base = put(X)
    loaded = _round_trip({"base": base, "row": base[1]}, map_location="cpu")
    loaded["base"].add_(1)
    assert_same(loaded["row"], X[1] + 1)


def test_a_saved_view_does_not_lose_its_strides(put: Put) -> None:
    loaded = _round_trip(put(X).t()[1:], map_location="cpu")
    assert_same(loaded, X.t()[1:])


def test_requires_grad_survives_saving(put: Put) -> None:
    loaded = _round_trip(put(X.clone().requires_grad_()))
    assert loaded.requires_grad
    (loaded * 2).sum().backward()
    assert_same(loaded.grad, torch.full((2, 3), 2.0))


def test_a_whole_model_survives_saving(put: Put) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    loaded = _round_trip(put(module), weights_only=False)
    assert_same(loaded(put(X)).detach(), module(X).detach())


def test_a_saved_state_is_read_by_a_program_without_torpor(put: Put, tmp_path) -> None:
    """A checkpoint must not tie its reader to torpor: on the CPU it is an ordinary one."""
    path = tmp_path / "state.pt"
    torch.save({"weight": put(X) + 1}, path)
    script = f"""
        import sys, torch
        state = torch.load({str(path)!r}, map_location="cpu")
        assert type(state["weight"]) is torch.Tensor
        assert "torpor" not in sys.modules
        print(state["weight"].tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str((X + 1).tolist())


def test_saving_does_not_change_the_tensor(put: Put) -> None:
    x = put(X)
    view = x[0]
    _round_trip(x)
    view.add_(1)
    expected = X.clone()
    expected[0] += 1
    assert_same(x, expected)
    assert torpor.is_lazy(x)
