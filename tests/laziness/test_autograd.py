"""Autograd above lazy tensors: backward, hooks, modes, checkpointing, autocast."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torpor
from tests.comparison import Put, agree, assert_same, loads_jit_decompositions, plain, raised_by

X = torch.linspace(-1, 1, 12).view(3, 4)
LEAF = X.clone().requires_grad_()


def _net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))


def _grads(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


# --- backward --------------------------------------------------------------------------------


def test_backward_gives_eagers_gradients(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach(), _grads(model), x.grad

    agree(put, program, _net(), LEAF)


def test_backward_runs_nothing_by_itself(put: Put) -> None:
    model, x = put(_net()), put(X)
    model(x).sum().backward()
    assert all(torpor.is_pending(grad) for grad in _grads(model))


def test_gradients_are_lazy_and_on_their_parameters_device(put: Put) -> None:
    model = put(_net())
    model(put(X)).sum().backward()
    for parameter in model.parameters():
        assert torpor.is_lazy(parameter.grad)
        assert parameter.grad.device == parameter.device


def test_backward_takes_a_gradient(put: Put) -> None:
    def program(x: Tensor, weight: Tensor) -> object:
        (x.exp() * 2).backward(weight)
        return x.grad

    agree(put, program, LEAF, torch.rand(3, 4))


def test_backward_may_run_twice_on_a_retained_graph(put: Put) -> None:
    def program(x: Tensor) -> object:
        loss = (x.exp() * x).sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        torpor.sync()
        loss.backward()
        return first, x.grad

    agree(put, program, LEAF)


def test_a_second_backward_without_the_graph_is_refused(put: Put) -> None:
    loss = (put(LEAF).exp() * 2).sum()
    loss.backward()
    assert type(raised_by(loss.backward)) is RuntimeError


def test_backward_on_a_tensor_without_gradient_is_refused(put: Put) -> None:
    assert type(raised_by(lambda: put(X).sum().backward())) is RuntimeError


def test_a_saved_tensor_that_was_overwritten_is_refused(put: Put) -> None:
    x = put(LEAF) * 1
    y = x.exp()
    y.add_(1)
    error = raised_by(lambda: y.sum().backward())
    assert type(error) is RuntimeError
    assert "modified by an inplace operation" in str(error)


def test_an_in_place_write_to_a_leaf_is_refused(put: Put) -> None:
    assert type(raised_by(lambda: put(LEAF).add_(1))) is RuntimeError


def test_autograd_grad_gives_gradients_without_storing_them(put: Put) -> None:
    def program(x: Tensor, y: Tensor) -> object:
        grads = torch.autograd.grad((x * y).sin().sum(), [x, y])
        assert x.grad is None
        return grads

    agree(put, program, LEAF, LEAF * 2)


def test_autograd_grad_of_an_unused_input_is_none(put: Put) -> None:
    def program(x: Tensor, y: Tensor) -> object:
        grads = torch.autograd.grad(x.sum(), [x, y], allow_unused=True)
        zeros = torch.autograd.grad(x.sum(), [x, y], materialize_grads=True)
        assert grads[1] is None
        return grads[0], zeros

    agree(put, program, LEAF, LEAF)


def test_autograd_grad_takes_batched_gradients(put: Put) -> None:
    def program(x: Tensor) -> object:
        y = x.exp().sum(1)
        basis = torch.stack([torch.ones_like(y.detach()), y.detach() * 2])
        return torch.autograd.grad(y, x, basis, is_grads_batched=True)

    agree(put, program, LEAF)


def test_gradients_flow_through_views_and_in_place_ops(put: Put) -> None:
    def program(x: Tensor) -> object:
        y = x * 1
        y[0].mul_(2)
        y[:, 1] = y[:, 2].clone()
        y.t()[0].add_(y[1, 1])
        y.relu_()
        y.square().sum().backward()
        return y.detach(), x.grad

    agree(put, program, LEAF)


def test_gradient_accumulation_adds_up(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            (model(x * (step + 1)).square().mean() / 3).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        model(x).sum().backward()
        return [p.detach() for p in model.parameters()], _grads(model)

    agree(put, program, _net(), X)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_empties_the_gradients(put: Put, set_to_none: bool) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            model(x).sum().backward()
        return _grads(model)

    agree(put, program, _net(), X)


def test_a_gradient_may_be_assigned_and_changed(put: Put) -> None:
    def program(x: Tensor, grad: Tensor) -> object:
        x.grad = grad
        (x * 2).sum().backward()
        x.grad.mul_(0.5)
        x.grad.data.add_(1)
        return x.grad

    agree(put, program, LEAF, torch.ones(3, 4))


def test_a_gradient_keeps_its_identity_when_it_is_accumulated_into(put: Put) -> None:
    x = put(LEAF)
    x.sum().backward()
    grad = x.grad
    x.sum().backward()
    assert x.grad is grad
    assert_same(grad, torch.full((3, 4), 2.0))


def test_retain_grad_keeps_an_inner_gradient(put: Put) -> None:
    def program(x: Tensor) -> object:
        inner = x.exp()
        inner.retain_grad()
        inner.square().sum().backward()
        return inner.grad, x.grad

    agree(put, program, LEAF)


def test_a_shared_parameter_gets_both_gradients(put: Put) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    def program(model: nn.Module, ids: Tensor) -> object:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        assert model.head.weight is model.embed.weight
        return model.embed.weight.grad

    agree(put, program, Tied(), torch.tensor([[1, 2, 3], [4, 5, 6]]))


def test_a_sparse_gradient_is_eagers(put: Put) -> None:
    def program(table: nn.Module, ids: Tensor) -> object:
        table(ids).square().sum().backward()
        grad = table.weight.grad
        assert grad.is_sparse
        return grad.coalesce().indices().tolist(), grad.to_dense()

    agree(put, program, nn.Embedding(5, 3, sparse=True), torch.tensor([1, 3, 1]))


# --- higher derivatives ----------------------------------------------------------------------


def test_create_graph_gives_the_second_derivative(put: Put) -> None:
    def program(x: Tensor) -> object:
        first = torch.autograd.grad(x.sin().pow(3).sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
        third = torch.autograd.grad(second.sum(), x)[0]
        return first.detach(), second.detach(), third

    agree(put, program, LEAF)


def test_a_gradient_penalty_trains(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            grad = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            (grad.norm(dim=1) - 1).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    agree(put, program, _net(), LEAF)


def test_hessian_vector_products_work(put: Put) -> None:
    def program(x: Tensor, v: Tensor) -> object:
        return torch.autograd.functional.hvp(lambda t: t.pow(3).sum(), x, v)

    agree(put, program, X, torch.ones(3, 4))


def test_autograd_functional_jacobian_works(put: Put) -> None:
    agree(put, lambda x: torch.autograd.functional.jacobian(lambda t: t.exp().sum(0), x), X)


def test_gradcheck_passes(put: Put) -> None:
    x = put(torch.linspace(0.1, 1, 4, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda t: (t.sin() * t.exp()).sum(), (x,))


# --- forward mode ----------------------------------------------------------------------------


@loads_jit_decompositions
def test_forward_mode_through_a_module(put: Put) -> None:
    def program(model: nn.Module, x: Tensor, v: Tensor) -> object:
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(model(forward_ad.make_dual(x, v)))
            return out.primal.detach(), out.tangent.detach()

    agree(put, program, _net(), X, torch.ones(3, 4))


@loads_jit_decompositions
def test_forward_over_reverse_gives_a_hessian_vector_product(put: Put) -> None:
    def program(x: Tensor, v: Tensor) -> object:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, v)
            grad = torch.autograd.grad(dual.sin().pow(2).sum(), dual, create_graph=True)[0]
            return forward_ad.unpack_dual(grad).tangent.detach()

    agree(put, program, LEAF, torch.ones(3, 4))


@loads_jit_decompositions
def test_forward_mode_through_views_and_in_place(put: Put) -> None:
    def program(x: Tensor, v: Tensor) -> object:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, v) * 1
            dual[0].mul_(3)
            dual.t()[1] = 2
            out = forward_ad.unpack_dual(dual.view(-1).cumsum(0))
            return out.primal.clone(), out.tangent.clone()

    agree(put, program, X, torch.ones(3, 4))


# --- hooks -----------------------------------------------------------------------------------


def test_a_tensor_hook_sees_and_changes_the_gradient(put: Put) -> None:
    def program(x: Tensor) -> object:
        seen = []
        y = x.exp()
        y.register_hook(lambda grad: seen.append(grad) or grad * 2)
        handle = x.register_hook(seen.append)
        y.sum().backward(retain_graph=True)
        handle.remove()
        y.sum().backward()
        return seen, x.grad

    agree(put, program, LEAF)


def test_a_hook_may_read_the_gradients_values(put: Put) -> None:
    def program(x: Tensor) -> object:
        norms = []
        x.register_hook(lambda grad: norms.append(grad.norm().item()))
        (x * x).sum().backward()
        return norms, x.grad

    agree(put, program, LEAF)


def test_a_post_accumulate_hook_sees_the_accumulated_gradient(put: Put) -> None:
    def program(x: Tensor) -> object:
        seen = []
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for _ in range(2):
            (x * 3).sum().backward()
        return seen

    agree(put, program, LEAF)


def test_an_optimizer_may_step_inside_backward(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            model(x).square().mean().backward()
        return [p.detach() for p in model.parameters()]

    agree(put, program, _net(), X)


def test_module_hooks_see_lazy_tensors(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        seen = []
        model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        model[1].register_forward_hook(lambda _, __, out: seen.append(out.detach()) or out + 1)
        model[3].register_full_backward_hook(lambda _, gi, go: seen.append((gi[0], go[0])))
        model[0].register_full_backward_pre_hook(lambda _, go: seen.append(go[0]))
        model(x).sum().backward()
        return seen, _grads(model)

    agree(put, program, _net(), LEAF)


def test_a_state_dict_hook_sees_lazy_tensors(put: Put) -> None:
    model = put(nn.Linear(4, 2))
    seen = []
    model.register_state_dict_post_hook(lambda m, state, *_: seen.extend(state.values()))
    model.state_dict()
    assert all(torpor.is_lazy(value) for value in seen)
    assert len(seen) == 2


def test_saved_tensor_hooks_pack_and_unpack(put: Put) -> None:
    def program(x: Tensor) -> object:
        packed = []

        def pack(t: Tensor) -> Tensor:
            packed.append(t.shape)
            return t.detach() * 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = (x.exp() * x).sum()
        y.backward()
        return x.grad, len(packed)

    agree(put, program, LEAF)


def test_saved_tensors_may_wait_on_the_cpu(put: Put) -> None:
    def program(x: Tensor) -> object:
        with torch.autograd.graph.save_on_cpu():
            y = (x.exp() * x).sum()
        y.backward()
        return x.grad

    agree(put, program, LEAF)


# --- modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients_results_need_none(put: Put, guard: type) -> None:
    x = put(LEAF)
    with guard():
        y = (x * 2).exp()
        y[0] = 1
    assert not y.requires_grad
    expected = (X * 2).exp()
    expected[0] = 1
    assert plain(y).tolist() == expected.tolist()


def test_inference_tensors_are_marked(put: Put) -> None:
    with torch.inference_mode():
        y = put(X) * 2
    assert y.is_inference()
    error = raised_by(lambda: (y * put(LEAF)).sum().backward())
    assert type(error) is RuntimeError


def test_views_and_writes_work_in_inference_mode(put: Put) -> None:
    x = put(X)
    with torch.inference_mode():
        y = x * 2
        y.t()[0].add_(1)
        torpor.sync()
        y.view(-1)[-1] = 5
        values = y.tolist()
    expected = X * 2
    expected.t()[0].add_(1)
    expected.view(-1)[-1] = 5
    assert values == expected.tolist()


def test_enable_grad_inside_no_grad_records_gradients(put: Put) -> None:
    def program(x: Tensor) -> object:
        with torch.no_grad():
            a = x * 2
            with torch.enable_grad():
                b = x * 3
        with torch.set_grad_enabled(False):
            c = x * 4
        b.sum().backward()
        return a, c, a.requires_grad, b.requires_grad, c.requires_grad, x.grad

    agree(put, program, LEAF)


def test_parameters_may_be_updated_by_hand(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        for _ in range(3):
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        return [p.detach() for p in model.parameters()]

    agree(put, program, _net(), X)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode_names_the_function_that_gave_nan(put: Put) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        x = put(torch.zeros(2, requires_grad=True))
        with pytest.warns(UserWarning, match="Error detected in"):
            error = raised_by(lambda: (torch.sqrt(x) * 0).sum().backward())
    assert "returned nan values" in str(error)


# --- custom functions ------------------------------------------------------------------------


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * x * factor

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad * ctx.factor, None


class _InPlaceDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_custom_function_differentiates_twice(put: Put) -> None:
    def program(x: Tensor) -> object:
        first = torch.autograd.grad(_Cube.apply(x, 0.5).sum(), x, create_graph=True)[0]
        return first.detach(), torch.autograd.grad(first.sum(), x)[0]

    agree(put, program, LEAF)


def test_a_custom_function_may_write_in_place(put: Put) -> None:
    def program(x: Tensor) -> object:
        y = x * 1
        z = _InPlaceDouble.apply(y)
        z.sum().backward()
        return y.detach(), z.detach(), x.grad

    agree(put, program, LEAF)


# --- checkpointing ---------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("read", [False, True], ids=["unread", "read_before_backward"])
def test_checkpointing_replays_dropout_exactly(put: Put, use_reentrant: bool, read: bool) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        inner = checkpoint(model, x, use_reentrant=use_reentrant)
        loss = F.dropout(inner, 0.5).square().sum()
        value = loss.item() if read else None
        loss.backward()
        return value, loss.detach(), _grads(model), x.grad

    agree(put, program, _net(dropout=0.5), LEAF)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_train(put: Put, use_reentrant: bool) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant).sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    agree(put, program, _net(dropout=0.3), LEAF)


# --- autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["forward", "train"])
def test_autocast_on_the_concrete_cpu_gives_eagers_bits(concrete: Put, step: str) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
            loss = y.float().square().mean()
        if step == "forward":
            return y.detach(), y.dtype
        loss.backward()
        return loss.detach(), _grads(model)

    agree(concrete, program, _net(), X)


def test_autocast_may_be_nested_and_switched_off(concrete: Put) -> None:
    def program(x: Tensor) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = x @ x.t()
            with torch.autocast("cpu", enabled=False):
                b = x @ x.t()
            c = (x @ x.t()).softmax(-1)
        return a, b, c

    agree(concrete, program, X)


def test_autocast_casts_a_weight_once_for_many_uses(concrete: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x) + model(x * 2)).float().sum()
        loss.backward()
        return _grads(model)

    agree(concrete, program, nn.Linear(4, 3), X)


PRODUCTS = {
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "matmul": torch.matmul,
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, x * y, dropout_p=0.3),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
def test_backward_in_the_body_of_autocast(concrete: Put, product: str, inside: bool) -> None:
    def program(x: Tensor) -> object:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y = PRODUCTS[product](x.sin(), x.cos())
        with torch.autocast("cpu", torch.bfloat16):
            y.float().square().mean().backward()
        return y.detach(), x.grad

    agree(concrete, program, torch.linspace(-1, 1, 16).view(4, 4).requires_grad_())


# --- copies ----------------------------------------------------------------------------------


def test_gradients_flow_from_device_to_device(put: Put) -> None:
    x = put(LEAF)
    (x.exp().to("cpu") * 2).sum().backward()
    expected = LEAF.detach().clone().requires_grad_()
    (expected.exp() * 2).sum().backward()
    assert_same(x.grad, expected.grad)


def test_gradients_flow_into_a_plain_leaf(virtual: Put) -> None:
    plain_leaf = X.clone().requires_grad_()
    (plain_leaf.to("lazy") * 3).sum().backward()
    assert type(plain_leaf.grad) is Tensor
    assert_same(plain_leaf.grad, torch.full((3, 4), 3.0))


def test_gradients_flow_between_lazy_devices() -> None:
    x = X.to("lazy:0").requires_grad_()
    (x.to("lazy:1") * 3).sum().backward()
    assert x.grad.device == torch.device("lazy:0")
    assert_same(x.grad, torch.full((3, 4), 3.0))


def test_a_model_may_be_copied_and_trained_apart(put: Put) -> None:
    model, x = put(_net()), put(X)
    twin = copy.deepcopy(model)
    before = [plain(p).clone() for p in model.parameters()]
    twin(x).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert all(p.grad is None for p in model.parameters())
    assert_same([plain(p) for p in model.parameters()], before)
    assert not torch.equal(plain(twin[0].weight), before[0])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(F, name)
    for name in (
        "relu gelu silu mish elu selu celu softplus softsign tanhshrink hardswish hardtanh "
        "hardsigmoid leaky_relu logsigmoid softshrink hardshrink relu6 glu normalize"
    ).split()
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_eagers_gradient(put: Put, name: str) -> None:
    def program(x: Tensor) -> object:
        y = ACTIVATIONS[name](x)
        y.square().sum().backward()
        return y.detach(), x.grad

    agree(put, program, LEAF)
