"""Every optimizer, scheduler and their helpers: five steps equal to eager's, bit for bit."""

import copy
import inspect
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import torpor
from tests.comparison import Put, agree, plain

STEPS = 5
OPTIMIZERS = {
    name: thing
    for name, thing in vars(torch.optim).items()
    if inspect.isclass(thing)
    and issubclass(thing, torch.optim.Optimizer)
    and thing is not torch.optim.Optimizer
}
DENSE = sorted(set(OPTIMIZERS) - {"SparseAdam", "LBFGS"})


def _offers(name: str, argument: str) -> bool:
    return argument in inspect.signature(OPTIMIZERS[name]).parameters


def _with(argument: str) -> list[str]:
    return [name for name in DENSE if _offers(name, argument)]


VARIANTS: dict[str, dict[str, object]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"amsgrad": True, "maximize": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "ASGD": {"t0": 2.0, "weight_decay": 0.1},
    "Rprop": {"etas": (0.4, 1.3)},
    "Adadelta": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "Adafactor": {"weight_decay": 0.1},
    "Muon": {"nesterov": False},
}


class _Net(nn.Module):
    """Small, with matrices only where Muon needs it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(4, 6, bias=bias)
        self.second = nn.Linear(6, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def _net(name: str) -> nn.Module:
    return _Net(bias=name != "Muon")


X = torch.linspace(-1, 1, 20).view(5, 4)


def _five_steps(make: Callable[[Iterator], torch.optim.Optimizer], read: bool = False) -> Callable:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = make(model.parameters())
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item() if read else loss.detach())
        state = {
            f"{index}.{key}": value
            for index, one in enumerate(optimizer.state.values())
            for key, value in one.items()
        }
        gradients = [p.grad for p in model.parameters()]
        return losses, [p.detach() for p in model.parameters()], gradients, state

    return program


@pytest.mark.parametrize("read", [False, True], ids=["unread", "loss_read"])
@pytest.mark.parametrize("name", DENSE)
def test_an_optimizer_with_its_defaults_gives_eagers_weights(
    put: Put, name: str, read: bool
) -> None:
    agree(put, _five_steps(OPTIMIZERS[name], read), _net(name), X)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_an_optimizer_with_other_arguments_gives_eagers_weights(put: Put, name: str) -> None:
    make = lambda p: OPTIMIZERS[name](p, **VARIANTS[name])  # noqa: E731
    agree(put, _five_steps(make), _net(name), X)


def test_nesterov_momentum_leaves_gradients_as_eager_does(put: Put) -> None:
    make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)  # noqa: E731
    agree(put, _five_steps(make), _net("SGD"), X)


@pytest.mark.filterwarnings(
    "ignore:optimizer contains a parameter group with duplicate:UserWarning"
)
@pytest.mark.parametrize("name", DENSE)
def test_a_parameter_that_is_listed_twice_is_updated_twice(put: Put, name: str) -> None:
    def make(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](list(parameters) * 2)

    agree(put, _five_steps(make), _net(name), X)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", _with("foreach"))
def test_an_optimizer_with_foreach_gives_eagers_weights(put: Put, name: str, foreach: bool) -> None:
    make = lambda p: OPTIMIZERS[name](p, foreach=foreach)  # noqa: E731
    agree(put, _five_steps(make), _net(name), X)


@pytest.mark.parametrize("name", _with("fused"))
def test_a_fused_optimizer_gives_eagers_weights(put: Put, name: str) -> None:
    make = lambda p: OPTIMIZERS[name](p, fused=True)  # noqa: E731
    agree(put, _five_steps(make), _net(name), X)


@pytest.mark.parametrize("name", DENSE)
def test_backward_of_what_was_computed_before_a_step_fails_after_it(put: Put, name: str) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = OPTIMIZERS[name](model.parameters())
        losses = model(x).mean(), model(x).square().mean()
        losses[0].backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[1].backward()
        return [p._version > 0 for p in model.parameters()]

    agree(put, program, _net(name), X)


@pytest.mark.parametrize("name", _with("capturable"))
def test_a_capturable_optimizer_does_as_eager(put: Put, name: str) -> None:
    make = lambda p: OPTIMIZERS[name](p, capturable=True)  # noqa: E731
    program = _five_steps(make)
    try:
        expected = program(copy.deepcopy(_net(name)), X)
    except (AssertionError, RuntimeError) as refusal:
        with pytest.raises(type(refusal)):
            program(put(_net(name)), put(X))
    else:
        assert expected is not None
        agree(put, program, _net(name), X)


@pytest.mark.parametrize("name", _with("differentiable"))
def test_a_differentiable_optimizer_gives_eagers_weights(put: Put, name: str) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        weights = [p.clone().requires_grad_() for p in model.parameters()]
        moving = [w.clone() for w in weights]
        optimizer = OPTIMIZERS[name](moving, differentiable=True)
        for one in moving:
            one.grad = (one * 2).detach()
        optimizer.step()
        sum(one.sum() for one in moving).backward()
        return [one.detach() for one in moving], [w.grad for w in weights]

    agree(put, program, _net(name), X)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_gives_eagers_weights(put: Put, line_search: str | None) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn=line_search)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(STEPS)]
        return losses, [p.detach() for p in model.parameters()]

    agree(put, program, _net("LBFGS"), X)


def test_lbfgs_with_its_defaults_gives_eagers_weights(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.LBFGS(model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)
        return [p.detach() for p in model.parameters()]

    agree(put, program, _net("LBFGS"), X)


def test_sparse_adam_gives_eagers_weights(put: Put) -> None:
    def program(table: nn.Module, ids: Tensor) -> object:
        optimizer = torch.optim.SparseAdam(table.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            table(ids).square().sum().backward()
            optimizer.step()
        return table.weight.detach()

    agree(put, program, nn.Embedding(6, 3, sparse=True), torch.tensor([0, 2, 2, 5]))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_learning_rate_may_be_a_tensor(put: Put, name: str) -> None:
    make = lambda p: OPTIMIZERS[name](p, lr=torch.tensor(0.01), foreach=False)  # noqa: E731
    agree(put, _five_steps(make), _net(name), X)


def test_parameter_groups_have_their_own_rates(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.AdamW(
            [
                {"params": model.first.parameters(), "lr": 0.1, "weight_decay": 0.0},
                {"params": model.second.parameters()},
            ],
            lr=0.01,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.param_groups[1]["lr"] *= 0.5
            optimizer.step()
            if step == 2:
                model.first.weight.requires_grad_(False)
        return [p.detach() for p in model.parameters()]

    agree(put, program, _net("AdamW"), X)


@pytest.mark.parametrize("name", DENSE)
def test_an_optimizers_state_survives_saving_and_loading(put: Put, name: str) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        def run(optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        optimizer = OPTIMIZERS[name](model.parameters())
        run(optimizer)
        run(optimizer)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        fresh = OPTIMIZERS[name](model.parameters())
        fresh.load_state_dict(torch.load(buffer))
        run(fresh)
        return [p.detach() for p in model.parameters()]

    agree(put, program, _net(name), X)


@pytest.mark.parametrize("name", DENSE)
def test_a_step_compiles_no_more_once_it_is_warm(put: Put, name: str) -> None:
    model, x = put(_net(name)), put(X)
    optimizer = OPTIMIZERS[name](model.parameters())
    compiles = []
    for _ in range(12):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        compiles.append(torpor.metrics.counters().get("UncachedCompile", 0))
    assert compiles[0] > 0
    assert compiles[7] == compiles[-1], f"compiles after each step: {compiles}"


@pytest.mark.parametrize("name", DENSE)
def test_a_step_falls_back_nowhere(put: Put, name: str) -> None:
    model, x = put(_net(name)), put(X)
    optimizer = OPTIMIZERS[name](model.parameters())
    torpor.metrics.reset()
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    fallbacks = {n: c for n, c in torpor.metrics.counters().items() if n.startswith("aten::")}
    assert fallbacks == {}


# --- learning-rate schedules -----------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4, power=2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
}


def test_every_scheduler_of_torch_is_here() -> None:
    offered = {
        name
        for name, thing in vars(lr_scheduler).items()
        if inspect.isclass(thing)
        and issubclass(thing, lr_scheduler.LRScheduler)
        and not name.startswith("_")
    }
    assert offered - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("optimizer_name", ["SGD", "Adam"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduled_optimizer_gives_eagers_weights(
    put: Put, name: str, optimizer_name: str
) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = OPTIMIZERS[optimizer_name](model.parameters(), lr=0.1)
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step(*([loss.detach()] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates, [p.detach() for p in model.parameters()]

    agree(put, program, _net(optimizer_name), X)


def test_a_changing_rate_compiles_at_most_once_more(put: Put) -> None:
    model, x = put(_net("Adam")), put(X)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    compiles = []
    for _ in range(14):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        compiles.append(torpor.metrics.counters().get("UncachedCompile", 0))
    assert compiles[8] == compiles[-1], f"compiles after each step: {compiles}"


# --- averages, clipping, scaling -------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda m: AveragedModel(m),
        lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        lambda m: AveragedModel(m, avg_fn=lambda a, p, n: 0.5 * a + 0.5 * p),
        lambda m: AveragedModel(m, use_buffers=True),
    ],
    ids=["swa", "ema", "own_function", "with_buffers"],
)
def test_averaged_weights_are_eagers(put: Put, make: Callable) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = make(model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
        return [p.detach() for p in average.parameters()], list(average.buffers())

    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    agree(put, program, model, X)


def test_batch_norm_statistics_of_averaged_weights_are_eagers(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        average = AveragedModel(model)
        update_bn([x, x * 2], average)
        return list(average.buffers())

    agree(put, program, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), X)


CLIPS: dict[str, Callable[[list[Tensor]], object]] = {
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "norm_inf": lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")),
    "norm_one": lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=1.0),
    "norm_foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "norm_no_foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=False),
    "norm_checked": lambda p: nn.utils.clip_grad_norm_(p, 0.1, error_if_nonfinite=True),
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
    "value_foreach": lambda p: nn.utils.clip_grad_value_(p, 0.01, foreach=True),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clipped_gradients_are_eagers(put: Put, name: str) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        results = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            (model(x) * 10).square().mean().backward()
            results.append(CLIPS[name](list(model.parameters())))
            optimizer.step()
        return (
            results,
            [p.grad for p in model.parameters()],
            [p.detach() for p in model.parameters()],
        )

    agree(put, program, _net("SGD"), X)


def test_clipping_by_norm_runs_nothing(put: Put) -> None:
    model = put(_net("SGD"))
    model(put(X)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert torpor.is_pending(norm)


def test_a_gradient_scaler_on_the_concrete_cpu_gives_eagers_weights(concrete: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(x).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), [p.detach() for p in model.parameters()]

    agree(concrete, program, _net("SGD"), X)


def test_an_optimizer_step_is_skipped_for_a_parameter_without_gradient(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.Adam(model.parameters())
        model.first(x).sum().backward()
        optimizer.step()
        assert model.second.weight not in optimizer.state
        return [p.detach() for p in model.parameters()]

    agree(put, program, _net("Adam"), X)


def test_an_optimizers_state_is_lazy_and_on_its_parameters_device(put: Put) -> None:
    model = put(_net("Adam"))
    optimizer = torch.optim.Adam(model.parameters())
    model(put(X)).sum().backward()
    optimizer.step()
    for parameter, state in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torpor.is_lazy(state[key])
            assert state[key].device == parameter.device
        assert plain(state["step"]).item() == 1.0


def test_an_optimizer_made_before_the_model_moved_trains_the_moved_model(virtual: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = model.to(x.device)
        model(x).sum().backward()
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    expected = program(_net("SGD"), X)
    got = program(_net("SGD"), virtual(X))
    for one, other in zip(got, expected):
        assert torpor.is_lazy(one)
        assert torch.equal(plain(one), other)
