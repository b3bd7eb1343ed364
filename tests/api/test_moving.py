"""Moving tensors and modules: `.to` in every direction, `copy_` both ways."""

import copy
import importlib
import io
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torpor
from tests.comparison import Put, agree, assert_same, line_below, message, plain, raised_by

X = torch.arange(6.0).view(2, 3)

TO_LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "to_string": lambda t: t.to("lazy"),
    "to_numbered": lambda t: t.to("lazy:0"),
    "to_device": lambda t: t.to(torch.device("lazy")),
    "to_keyword": lambda t: t.to(device="lazy"),
    "to_other": lambda t: t.to(torch.empty(0, device="lazy")),
    "to_non_blocking": lambda t: t.to("lazy", non_blocking=True),
    "to_copy": lambda t: t.to("lazy", copy=True),
    "as_tensor": lambda t: torch.as_tensor(t, device="lazy"),
}
TO_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda t: t.cpu(),
    "to_string": lambda t: t.to("cpu"),
    "to_device": lambda t: t.to(torch.device("cpu")),
    "to_keyword": lambda t: t.to(device="cpu"),
    "to_other": lambda t: t.to(torch.empty(0)),
    "to_non_blocking": lambda t: t.to("cpu", non_blocking=True),
}


@pytest.mark.parametrize("name", TO_LAZY)
def test_a_plain_tensor_moves_to_the_lazy_device(name: str) -> None:
    moved = TO_LAZY[name](X)
    assert moved.device == torch.device("lazy:0")
    assert torpor.is_lazy(moved)
    assert_same(moved, X)


@pytest.mark.parametrize("name", TO_PLAIN)
def test_a_lazy_device_tensor_moves_to_a_plain_one(virtual: Put, name: str) -> None:
    moved = TO_PLAIN[name](virtual(X) + 1)
    assert type(moved) is Tensor
    assert moved.device == torch.device("cpu")
    assert_same(moved, X + 1)


def test_the_moved_copy_shares_nothing_with_the_original() -> None:
    original = X.clone()
    moved = original.to("lazy")
    moved.add_(1)
    back = moved.cpu()
    back.mul_(0)
    assert original.tolist() == X.tolist()
    assert moved.tolist() == (X + 1).tolist()


def test_the_original_may_change_after_the_move() -> None:
    original = X.clone()
    moved = original.to("lazy")
    original.zero_()
    assert moved.tolist() == X.tolist()


def test_moving_where_it_already_is_gives_the_same_tensor(virtual: Put) -> None:
    moved = virtual(X)
    assert moved.to("lazy") is moved
    assert moved.to("lazy:0") is moved
    assert moved.to("lazy", copy=True) is not moved


def test_cpu_of_a_concrete_tensor_is_itself(concrete: Put) -> None:
    lazy = concrete(X)
    assert lazy.cpu() is lazy
    assert lazy.to("cpu") is lazy


def test_a_tensor_moves_between_lazy_devices() -> None:
    first = torch.ones(2, 3, device="lazy:0") * 2
    second = first.to("lazy:1")
    third = second.to("lazy:0")
    assert [t.device.index for t in (first, second, third)] == [0, 1, 0]
    second.add_(1)
    assert_same([first, second, third], [torch.full((2, 3), v) for v in (2.0, 3.0, 2.0)])


def test_copies_between_lazy_devices_write_in_place() -> None:
    target = torch.zeros(2, 3, device="lazy:1")
    target[0].copy_(X.to("lazy:0")[1] * 2)
    assert target.tolist() == [[6.0, 8.0, 10.0], [0.0, 0.0, 0.0]]


def test_a_concrete_lazy_tensor_moves_to_the_lazy_device_and_back(concrete: Put) -> None:
    moved = (concrete(X) + 1).to("lazy")
    assert moved.device.type == "lazy"
    assert_same(moved, X + 1)
    again = torpor.lazy(moved.cpu())
    assert again.device == torch.device("cpu")
    assert_same(again, X + 1)


def test_a_tensor_on_the_meta_device_is_a_plain_one(put: Put) -> None:
    """torch itself goes there, in forward-mode differentiation for one, to ask for shapes."""
    for made in (put(X).to("meta"), torch.empty_like(put(X), device="meta")):
        assert type(made) is Tensor
        assert (made.device.type, made.shape, made.stride()) == ("meta", X.shape, X.stride())


def test_a_move_may_change_the_dtype_at_once(put: Put) -> None:
    agree(put, lambda x: [x.to(x.device, d) for d in (torch.int64, torch.float16)], X)
    assert_same(X.to("lazy", torch.float64), X.double())
    assert_same(X.to("lazy", torch.float64).to("cpu", torch.int32), X.int())


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    name: lambda x, name=name: getattr(x, name)()
    for name in "float double half bfloat16 int long short char byte bool cfloat cdouble".split()
}
CASTS |= {
    "type": lambda x: x.type(torch.int16),
    "type_as": lambda x: x.type_as(x.double()),
    "to_dtype": lambda x: x.to(torch.float64),
    "to_dtype_copy": lambda x: x.to(torch.float32, copy=True),
    "to_channels_last": lambda x: x[None, None].to(memory_format=torch.channels_last),
    "to_dtype_and_format": lambda x: x[None, None].to(
        torch.float64, memory_format=torch.channels_last
    ),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_gives_eagers_values_and_stays_lazy(put: Put, name: str) -> None:
    got = agree(put, CASTS[name], X)
    assert torpor.is_lazy(got)


def test_a_cast_to_the_same_dtype_is_the_tensor_itself(put: Put) -> None:
    x = put(X)
    assert x.float() is x
    assert x.to(torch.float32) is x


def test_a_move_keeps_strides(put: Put) -> None:
    strided = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    moved = put(strided)
    assert moved.stride() == strided.stride()
    assert_same(moved, strided)
    if put.name == "lazy":
        assert (moved * 1).cpu().stride() == strided.stride()


def test_every_dtype_moves_there_and_back() -> None:
    values = torch.tensor([0.0, 1.0, 2.0])
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    ):
        original = values.to(dtype)
        back = original.to("lazy").cpu()
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), original.view(torch.uint8))


def test_an_empty_tensor_moves() -> None:
    for shape in ((0,), (2, 0, 3), ()):
        original = torch.ones(shape)
        assert_same(original.to("lazy"), original)


# --- copy_ -----------------------------------------------------------------------------------


def test_copy_into_lazy_from_plain(put: Put) -> None:
    target = put(torch.zeros(2, 3))
    view = target[0]
    target.copy_(X)
    assert_same([target, view], [X, X[0]])


def test_copy_into_plain_from_lazy(put: Put) -> None:
    target = torch.zeros(2, 3)
    target.copy_(put(X) * 2)
    assert target.tolist() == (X * 2).tolist()


def test_copy_into_a_view_of_a_plain_tensor(put: Put) -> None:
    target = torch.zeros(3, 2)
    target.t()[:, 1].copy_(put(X)[:, 2])
    assert target.tolist() == [[0.0, 0.0], [2.0, 5.0], [0.0, 0.0]]


def test_copy_broadcasts_and_casts(put: Put) -> None:
    def program(x: Tensor) -> object:
        target = x.new_zeros((4, 2, 3), dtype=torch.int32)
        return target.copy_(x + 0.7)

    agree(put, program, X)
    plain_target = torch.zeros(4, 2, 3, dtype=torch.int32)
    plain_target.copy_(put(X) + 0.7)
    assert plain_target.tolist() == [(X + 0.7).int().tolist()] * 4


def test_copy_between_the_lazy_and_the_concrete_place(virtual: Put, concrete: Put) -> None:
    there, here = virtual(torch.zeros(2, 3)), concrete(torch.zeros(2, 3))
    there.copy_(concrete(X) + 1)
    here.copy_(there * 2)
    assert_same([there, here], [X + 1, (X + 1) * 2])


def test_non_blocking_copies_are_correct(put: Put) -> None:
    target = put(torch.zeros(2, 3))
    source = X.clone()
    target.copy_(source, non_blocking=True)
    assert_same(target, X)


def test_setting_items_from_plain_values(put: Put) -> None:
    x = put(X)
    x[0] = torch.tensor([7.0, 8.0, 9.0]).to(x.device)
    x[1, 1] = torch.tensor(5.0)
    x[1, 2] = 6
    assert x.tolist() == [[7.0, 8.0, 9.0], [3.0, 5.0, 6.0]]


# --- modules ---------------------------------------------------------------------------------


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.arange(3), persistent=False)
        self.register_buffer("alias", self.mask)


def test_a_module_moves_with_parameters_and_buffers(put: Put) -> None:
    original = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2))
    moved = put(original)
    for tensor in (*moved.parameters(), *moved.buffers()):
        assert torpor.is_lazy(tensor)
        assert tensor.device.type == put.device.type
    assert all(isinstance(p, nn.Parameter) for p in moved.parameters())
    assert all(p.requires_grad and p.is_leaf for p in moved.parameters())
    assert_same(dict(moved.state_dict()), dict(original.state_dict()))


def test_a_module_moves_in_place(put: Put) -> None:
    module = nn.Linear(3, 2)
    assert put.module(module) is module


def test_tied_weights_stay_tied(put: Put) -> None:
    moved = put(_Tied())
    assert moved.head.weight is moved.embed.weight
    assert len(list(moved.parameters())) == 1
    with torch.no_grad():
        moved.embed.weight.zero_()
    assert plain(moved.head.weight).abs().sum().item() == 0.0


def test_frozen_parameters_stay_frozen(put: Put) -> None:
    module = nn.Linear(3, 2)
    module.weight.requires_grad_(False)
    moved = put(module)
    assert not moved.weight.requires_grad
    assert moved.bias.requires_grad


def test_gradients_move_with_their_parameters(put: Put) -> None:
    module = nn.Linear(3, 2)
    module(X).sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    moved = put.module(module)
    assert_same([plain(p.grad) for p in moved.parameters()], grads)
    assert all(torpor.is_lazy(p.grad) for p in moved.parameters())


def test_a_module_moves_back(virtual: Put) -> None:
    original = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    moved = virtual(original)
    moved(virtual(X))
    expected = copy.deepcopy(original)
    expected(X)
    back = moved.cpu()
    assert all(type(b) is Tensor for b in back.buffers())
    assert all(type(p.data) is Tensor for p in back.parameters())
    assert_same(dict(back.state_dict()), dict(expected.state_dict()))


def test_a_module_casts(put: Put) -> None:
    for cast in (lambda m: m.double(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)):
        agree(put, lambda m, cast=cast: dict(cast(m).state_dict()), nn.Linear(3, 2))


def test_a_module_is_made_empty_on_the_device() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    module = module.to_empty(device="lazy")
    assert module.weight.device.type == "lazy"
    module.load_state_dict(nn.Linear(3, 2).state_dict())


def test_a_modules_output_is_eagers(put: Put) -> None:
    agree(put, lambda m, x: m(x).detach(), nn.Linear(3, 2), X)


def test_a_state_dict_is_lazy_and_shares_memory(put: Put) -> None:
    module = put(nn.Linear(3, 2))
    state = module.state_dict()
    assert isinstance(state, OrderedDict)
    assert all(torpor.is_lazy(value) for value in state.values())
    with torch.no_grad():
        module.weight.fill_(3)
    assert plain(state["weight"]).tolist() == [[3.0] * 3] * 2


@pytest.mark.parametrize("assign", [False, True])
def test_a_lazy_module_loads_a_plain_state(put: Put, assign: bool) -> None:
    source = nn.Linear(3, 2)
    module = put(nn.Linear(3, 2))
    module.load_state_dict(source.state_dict(), assign=assign)
    assert_same({k: plain(v) for k, v in module.state_dict().items()}, dict(source.state_dict()))


def test_a_plain_module_loads_a_lazy_state(put: Put) -> None:
    original = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module.load_state_dict(put(original).state_dict())
    assert all(type(b) is Tensor for b in module.buffers())
    assert_same(dict(module.state_dict()), dict(original.state_dict()))


def test_a_lazy_module_loads_a_lazy_state(put: Put) -> None:
    original = nn.Linear(3, 2)
    module = put(nn.Linear(3, 2))
    source = put(original)
    module.load_state_dict(source.state_dict())
    with torch.no_grad():
        source.weight.zero_()
    assert_same(dict(module.state_dict()), dict(original.state_dict()))


def test_loading_a_state_of_the_wrong_shape_is_refused(put: Put) -> None:
    module = put(nn.Linear(3, 2))
    assert (
        type(raised_by(lambda: module.load_state_dict(nn.Linear(3, 4).state_dict())))
        is RuntimeError
    )


def test_a_model_saves_and_loads_through_a_file(put: Put, tmp_path) -> None:
    original = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.save(put(original).state_dict(), tmp_path / "state.pt")
    plain_module = copy.deepcopy(original)
    plain_module.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu"))
    lazy_module = put(copy.deepcopy(original))
    lazy_module.load_state_dict(torch.load(tmp_path / "state.pt"))
    for module in (plain_module, lazy_module):
        assert_same(
            {k: plain(v) for k, v in module.state_dict().items()}, dict(original.state_dict())
        )


def test_an_optimizers_state_moves_between_places(put: Put) -> None:
    def train(module: nn.Module, x: Tensor, state: dict | None = None) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(module.parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()
        return optimizer

    original = nn.Linear(3, 2)
    eager = copy.deepcopy(original)
    train(eager, X, train(eager, X).state_dict())
    lazy = put(original)
    first = train(lazy, put(X))
    buffer = io.BytesIO()
    torch.save((lazy.state_dict(), first.state_dict()), buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer, map_location="cpu")
    plain_module = nn.Linear(3, 2)
    plain_module.load_state_dict(weights)
    train(plain_module, X, state)
    assert_same(dict(plain_module.state_dict()), dict(eager.state_dict()))


def test_a_parameter_wraps_a_lazy_tensor(put: Put) -> None:
    parameter = nn.Parameter(put(X))
    assert isinstance(parameter, nn.Parameter)
    assert torpor.is_lazy(parameter)
    assert parameter.requires_grad
    (parameter * 2).sum().backward()
    assert_same(parameter.grad, torch.full((2, 3), 2.0))
    assert not nn.Parameter(put(X), requires_grad=False).requires_grad


def test_a_parameter_shares_memory_with_its_tensor(put: Put) -> None:
    tensor = put(X)
    parameter = nn.Parameter(tensor)
    with torch.no_grad():
        parameter.add_(1)
    assert_same(tensor, X + 1)


def test_a_module_registers_a_lazy_parameter_and_buffer(put: Put) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(put(X))
    module.register_buffer("mean", put(X))
    module.many = nn.ParameterList([put(X), put(X)])
    module.named = nn.ParameterDict({"a": nn.Parameter(put(X))})
    assert len(list(module.parameters())) == 4
    assert sorted(module.state_dict()) == ["many.0", "many.1", "mean", "named.a", "weight"]


def test_a_mistake_in_a_move_names_the_users_line(virtual: Put) -> None:
    x = virtual(X)
    with pytest.raises(RuntimeError) as caught:
        line = line_below()
        x.copy_(torch.zeros(5))
    assert line in message(caught.value)


def test_swapping_module_parameters_on_conversion_works(put: Put) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        moved = put(nn.Linear(3, 2))
        assert all(torpor.is_lazy(p) for p in moved.parameters())
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


# --- what a module keeps when it moves ---------------------------------------------------------


JOURNEYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda m: m.to("lazy"),
    "lazy": torpor.lazy,
    "and back": lambda m: m.to("lazy").cpu(),
    "twice": lambda m: m.to("lazy").cpu().to("lazy"),
    "lazy and back": lambda m: torpor.eager(torpor.lazy(m)),
    "from one to the other": lambda m: torpor.lazy(m).to("lazy"),
    "casts": lambda m: m.to("lazy").double().float(),
    "casts at once": lambda m: m.double().to("lazy", torch.float32),
    "lazy casts": lambda m: torpor.lazy(m).double().float(),
    "casts on the way back": lambda m: m.double().to("lazy").to("cpu", torch.float32),
}


def journey(module: nn.Module, name: str) -> tuple[nn.Module, Tensor]:
    """The module at its end, and data for it."""
    moved = JOURNEYS[name](module)
    return moved, X.to(next(moved.parameters()).device)


@pytest.mark.parametrize("name", JOURNEYS)
def test_hooks_stay_when_a_module_moves(name: str) -> None:
    module, calls = nn.Linear(3, 1), []
    handle = module.weight.register_hook(lambda g: (calls.append("hook"), g * 0)[1])
    after = module.weight.register_post_accumulate_grad_hook(lambda p: calls.append("grad"))
    moved, x = journey(module, name)
    moved(x).sum().backward()
    assert calls == ["hook", "grad"]
    assert moved.weight.grad.abs().sum().item() == 0
    handle.remove()
    after.remove()
    moved(x).sum().backward()
    assert calls == ["hook", "grad"]
    assert_same(plain(moved.weight.grad), X.sum(0, keepdim=True))


@pytest.mark.parametrize("name", JOURNEYS)
def test_parameters_stay_the_optimizers_when_a_module_moves(name: str) -> None:
    module = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.weight.tag = "mine"
    before, held, grad = module.weight.tolist(), module.weight, torch.full((1, 3), 2.0)
    module.weight.grad = grad.clone()
    moved, _ = journey(module, name)
    assert moved.weight is held is optimizer.param_groups[0]["params"][0]
    assert isinstance(held, nn.Parameter)
    assert held.requires_grad
    assert held.tag == "mine"
    assert_same(plain(held.grad), grad)
    optimizer.step()
    assert_same(plain(held), torch.tensor(before) - grad)


def test_a_module_that_moved_back_is_a_plain_one() -> None:
    module = nn.BatchNorm1d(3)
    before = set(vars(module.weight))
    torpor.eager(torpor.lazy(module))
    assert type(module.weight) is nn.Parameter
    assert set(vars(module.weight)) == before
    assert {type(buffer) for buffer in module.buffers()} == {Tensor}


def test_a_module_moves_while_a_finished_graph_lives(put: Put) -> None:
    module = nn.Linear(3, 1)
    loss = module(X).sum()
    loss.backward()
    module = put.module(module)
    assert_same(plain(module.weight.grad), X.sum(0, keepdim=True))
    module(put(X)).sum().backward()
    assert_same(plain(module.weight.grad), 2 * X.sum(0, keepdim=True))
    assert loss.grad_fn is not None


def test_a_graph_recorded_before_a_move_refuses_to_go_backward(put: Put) -> None:
    """Its gradients would go to tensors that nobody has."""
    module = nn.Linear(3, 1, bias=False)
    loss = module(X.clone().requires_grad_()).exp().sum()
    error = raised_by(lambda: (put.module(module), loss.backward()))
    assert isinstance(error, RuntimeError)
    assert "graph" in message(error)


def test_a_plain_module_moves_as_torch_moves_it() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    weight = module[0].weight
    assert module.double() is module
    assert module[0].weight is weight
    assert {t.dtype for t in module.parameters()} == {torch.float64}
    assert module.float().to("meta")[0].weight.is_meta


def test_a_module_with_plain_and_lazy_parameters_moves() -> None:
    module = nn.Linear(3, 1)
    torpor.lazy(nn.ParameterList([module.weight]))
    assert (torpor.is_lazy(module.weight), torpor.is_lazy(module.bias)) == (True, False)
    assert [name for name, _ in module.double().named_parameters()] == ["weight", "bias"]
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert (torpor.is_lazy(module.weight), torpor.is_lazy(module.bias)) == (True, False)


def test_a_plain_parameter_takes_lazy_data() -> None:
    """As target networks that follow others do."""
    module = nn.Linear(3, 1, bias=False)
    weight, calls = module.weight, []
    weight.register_hook(lambda g: calls.append(1))
    weight.grad = torch.ones(1, 3)
    lazy = torpor.lazy(torch.full((1, 3), 2.0))
    weight.data = lazy * 2
    assert torpor.is_lazy(weight)
    assert module.weight is weight
    module(X).sum().backward()
    assert calls == [1]
    assert_same(plain(weight), torch.full((1, 3), 4.0))
    assert_same(plain(weight.grad), 1 + X.sum(0, keepdim=True))


def test_a_plain_parameter_that_a_graph_holds_takes_the_numbers_of_lazy_data() -> None:
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * 2).sum()
    weight.data = torpor.lazy(torch.zeros(3)) + 1
    assert type(weight) is nn.Parameter
    loss.backward()
    assert (weight.tolist(), weight.grad.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_sizes_among_tensors_stay_sizes() -> None:
    importlib.import_module("torch.fx.experimental.proxy_tensor")  # torch's trees take sizes apart
    there = torpor.lazy({"x": torch.ones(2), "size": torch.Size([2])})
    assert type(there["size"]) is torch.Size
    assert type(torpor.eager(there)["size"]) is torch.Size
