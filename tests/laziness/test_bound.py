"""The bound of `torpor.enable()`: what survives when a place changes its way, and what is told."""

import copy
import gc
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torpor
from tests.forced import Forced
from torpor.adaptive import bound as bound_module
from torpor.adaptive.bound import BOUND, MOST_PLACES
from torpor.adaptive.choice import Limits
from torpor.compiling import worth
from torpor.compiling.background import COMPILER
from torpor.errors import PerformanceWarning
from torpor.frontend.switching import ASKED

Outcome = list[Any]


class Clock:
    """Each event takes so long as the way in which the program runs says."""

    def __init__(self, eager: float, recorded: float) -> None:
        self.eager, self.recorded, self.now = eager, recorded, 0.0

    def __call__(self) -> float:
        place = BOUND.events.last
        is_recorded = place is not None and place.choice.is_recorded
        self.now += self.recorded if is_recorded else self.eager
        return self.now


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torpor.config, "bound", "auto")
    monkeypatch.setattr(ASKED, "explicitly", False)
    gc.collect()  # lazy tensors of other tests
    BOUND.__init__()  # type: ignore[misc]  # as new
    BOUND.limits = Limits(start=0.0)
    torpor.enable()
    yield
    torpor.disable()
    BOUND.__init__()  # type: ignore[misc]  # as new


@pytest.fixture
def forced(enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_module, "Choice", Forced)


def batches(steps: int = 11) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator)
        yield x, x.roll(1, 1)


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.tensor(value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 8))


def ordinary(optimizer: Callable[..., Any] = torch.optim.Adam) -> Outcome:
    model = network()
    stepper = optimizer(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 3)
    losses = []
    for x, y in batches():
        stepper.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        stepper.step()
        schedule.step()
        losses.append(loss)
    return [losses, model.state_dict(), stepper.state_dict()["state"], torch.rand(2)]


def gradients_kept() -> Outcome:
    """Gradients add up over steps, and are objects that the program holds."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held = None
    seen = []
    for x, y in batches():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        weight = model[0].weight
        held = weight.grad if held is None else held
        assert held is weight.grad
        seen.append(held.sum())
    return [seen, model.state_dict()]


def gradients_shared() -> Outcome:
    """Two models have the same gradients, as asynchronous actor-critics do."""
    shared, local = network(), network()
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    seen = []
    for x, y in batches():
        local.load_state_dict(shared.state_dict())
        local.zero_grad(set_to_none=False)
        loss = F.mse_loss(local(x), y)
        loss.backward()
        for own, common in zip(local.parameters(), shared.parameters()):
            if common.grad is None:
                common.grad = own.grad
            assert common.grad is own.grad
        optimizer.step()
        seen.append(loss)
    return [seen, shared.state_dict()]


def hooked() -> Outcome:
    model = network()
    weight = model[0].weight
    seen: list[Any] = []
    weight.register_hook(lambda grad: seen.append(grad.sum()) or grad * 2)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append((p is weight, p.grad.sum())))
    model[3].register_forward_hook(lambda module, args, out: seen.append(out.mean()))
    weight.kept = "mine"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        assert model[0].weight is weight
        assert optimizer.param_groups[0]["params"][0] is weight
        assert weight.kept == "mine"
    return [seen, model.state_dict()]


def tied() -> Outcome:
    table = nn.Embedding(10, 8)
    head = nn.Linear(8, 10, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(10)
    for _ in range(11):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert head.weight is table.weight
    return [table.weight, optimizer.state_dict()["state"]]


def averaged() -> Outcome:
    """Averages by a deep copy, by hand and by torch, all made while the place changes."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    copied = copy.deepcopy(model)
    by_hand: list[Tensor] = []
    running = torch.zeros(())
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        by_hand = by_hand or [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for mean, parameter in zip(by_hand, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
            for mean, parameter in zip(copied.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
        running = 0.9 * running + 0.1 * loss.detach()
    return [average.state_dict(), by_hand, copied.state_dict(), running]


def adversarial() -> Outcome:
    maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
    losses = []
    for x, _ in batches():
        fake = maker(torch.randn(4, 4))
        of_judge.zero_grad()
        loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(x)).mean()
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-judge(fake)).mean().backward()  # through a graph from before the last step
        of_maker.step()
        losses.append(loss.item())
    return [losses, maker.state_dict(), judge.state_dict()]


def carried() -> Outcome:
    """A hidden state is carried from step to step, and parameters are updated by hand."""
    model = nn.GRU(8, 8)
    hidden = torch.zeros(1, 8)
    losses = []
    for x, y in batches():
        model.zero_grad()
        out, hidden = model(x, hidden.detach())
        loss = F.mse_loss(out, y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        losses.append(loss.detach())
    return [losses, hidden, model.state_dict()]


def second_order() -> Outcome:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
    losses = []
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return [losses, model.state_dict()]


def mixed_precision() -> Outcome:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [model.state_dict(), scaler.get_scale()]


def looked_at() -> Outcome:
    """Views of parameters, and of their memory, that the program keeps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = data = None
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if flat is None:
            flat, data = model[0].weight.detach().view(-1), model[3].weight.data
        flat[0] += 0.5
        data[0] *= 0.9
    return [flat, data, model.state_dict()]


def checkpointed() -> Outcome:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    file, best = io.BytesIO(), {}
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if step == 4:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            best = copy.deepcopy(optimizer.state_dict())
        if step == 7:
            file.seek(0)
            model.load_state_dict(torch.load(file)["model"])
            optimizer.load_state_dict(best)
    return [model.state_dict(), optimizer.state_dict()["state"]]


def without_modules() -> Outcome:
    weight = torch.randn(8, 8, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.01)
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(x @ weight, y).backward()
        optimizer.step()
    return [weight, optimizer.state_dict()["state"]]


def summed_later() -> Outcome:
    """Losses of several steps go backward after them, through graphs from before a change."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    for x, y in batches(24):
        kept.append(model.bias.sum() + F.mse_loss(model(x), y))
        if len(kept) == 3:
            optimizer.zero_grad()
            sum(kept).backward()
            optimizer.step()
            kept = []
    return [model.state_dict(), model.bias.grad]


def thawed() -> Outcome:
    """Parameters, modules and groups come to a model that runs already."""
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches()):
        if step in (3, 6):
            added = nn.Linear(8, 8)
            model.append(added)
            optimizer.add_param_group({"params": list(added.parameters())})
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [model.state_dict()]


def a_part_called_alone() -> Outcome:
    """A part of a model is called several times in a step, by nobody but the loop."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        loss = F.mse_loss(model(x), y)
        for shift in range(1, 4):
            loss = loss + model[0](x.roll(shift)).square().mean() / shift
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [model.state_dict()]


def stepped_by_hand() -> Outcome:
    """Several calls make a step, and no optimizer says where it ends."""
    model = nn.Linear(8, 8)
    for x, y in batches():
        loss = F.mse_loss(model(x), y)
        for shift in range(1, 5):
            loss = loss + F.l1_loss(model(x.roll(shift)), y) / shift
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    return [model.state_dict()]


def parametrized() -> Outcome:
    """torch swaps tensors that nobody may refer to weakly, while the last loss is alive."""
    model = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(9):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    nn.utils.parametrize.remove_parametrizations(model, "weight")
    return [loss, model.state_dict()]


PROGRAMS = (
    ordinary, gradients_kept, gradients_shared, hooked, tied, averaged, adversarial, carried,
    second_order,
    mixed_precision, looked_at, checkpointed, without_modules, summed_later, thawed,
    a_part_called_alone, stepped_by_hand, parametrized,
)  # fmt: skip


def run(program: Callable[[], Outcome]) -> Any:
    torch.manual_seed(0)
    found = plain(program())
    torpor.sync(wait=True)
    return found


def eagerly(program: Callable[[], Outcome]) -> Any:
    torpor.disable()
    expected = run(program)
    torpor.enable()
    return expected


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def both_choices() -> bool:
    return any(place.choice.steps[True] and place.choice.steps[False] for place in BOUND.places)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_that_changes_its_way_computes_eagers_bits(
    program: Callable[[], Outcome], every: int, forced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forced, "every", every)
    expected = eagerly(program)
    assert_equal(run(program), expected)
    assert both_choices()


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD,
        torch.optim.Adagrad, torch.optim.Rprop, torch.optim.Adafactor,
    ],
)  # fmt: skip
def test_an_optimizer_goes_on_after_a_change(optimizer: Any, forced: None) -> None:
    def program() -> Outcome:
        return ordinary(optimizer)

    expected = eagerly(program)
    assert_equal(run(program), expected)


def test_state_on_the_device_goes_on_after_a_change(forced: None) -> None:
    def program() -> Outcome:
        return ordinary(lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr), foreach=False))

    expected = eagerly(program)
    assert_equal(run(program), expected)


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    return loss


def test_nothing_is_lazy_in_a_place_that_runs_eagerly(forced: None) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    kept, place = [], None
    for x, _ in batches(4):
        kept.append(step(model, optimizer, x).detach())
        place = BOUND.places[0]
    assert place is not None
    assert not place.choice.is_recorded
    assert not any(map(torpor.is_lazy, place.tensors()))
    assert not any(torpor.is_lazy(p.grad) for p in model.parameters())
    assert not any(map(torpor.is_lazy, kept[:3]))  # the last was made after the change
    torpor.metrics.reset()
    step(model, optimizer, torch.ones(4, 8))
    assert torpor.metrics.counters()["OpsRecorded"] == 0


def test_a_place_that_ran_eagerly_is_recorded_once_the_bound_is_off(
    forced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for x, _ in batches(4):
        step(model, optimizer, x)
    assert not BOUND.places[0].choice.is_recorded
    monkeypatch.setattr(torpor.config, "bound", "off")
    assert torpor.is_lazy(step(model, optimizer, torch.ones(4, 8)))
    assert all(map(torpor.is_lazy, model.parameters()))
    monkeypatch.setattr(torpor.config, "bound", "auto")
    step(model, optimizer, torch.ones(4, 8))
    step(model, optimizer, torch.ones(4, 8))


def test_memory_that_a_lazy_view_shares_keeps_a_place_recorded(forced: None) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(3):
        step(model, optimizer, x)
    view = model.weight.data
    place = BOUND.places[0]
    assert torpor.is_lazy(view)
    ASKED.explicitly = True  # the view may be more than `enable` has made
    step(model, optimizer, torch.ones(4, 8))
    assert isinstance(place.choice, Forced)
    assert place.choice.is_recorded
    assert "`.data`" in place.choice.refusal
    del view
    step(model, optimizer, torch.ones(4, 8))
    assert not place.choice.is_recorded


def test_views_of_parameters_become_plain_with_them(forced: None) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(3):
        step(model, optimizer, x)
    view = model.weight.data
    assert torpor.is_lazy(view)
    step(model, optimizer, torch.ones(4, 8))
    assert not torpor.is_lazy(view)
    assert view.data_ptr() == model.weight.data_ptr()


def test_a_place_that_cannot_become_eager_says_why(enabled: None) -> None:
    BOUND.clock = Clock(eager=1.0, recorded=5.0)
    ASKED.explicitly = True
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def look_at_weights() -> None:
        view = None
        for x, _ in batches(60):
            step(model, optimizer, x)
            view = model.weight.data if torpor.is_lazy(model.weight) else None
        assert view is not None

    with pytest.warns(PerformanceWarning, match="cannot run eagerly: another tensor is on"):
        look_at_weights()


def test_loops_of_two_threads_are_two_places(enabled: None) -> None:
    """Each calls its model before the other one's optimizer steps."""
    called = threading.Barrier(2, timeout=60)

    def loop(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in batches(3):
            loss = F.mse_loss(model(x), y)
            called.wait()
            loss.backward()
            optimizer.step()

    threads = [threading.Thread(target=loop, args=(network(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(BOUND.places) == 2
    assert not any(place.is_shared for place in BOUND.places)


def test_places_that_join_on_two_threads_do_not_join_each_other(enabled: None) -> None:
    one, other = (BOUND.meet(nn.Linear(1, 1)) for _ in range(2))
    assert one
    assert other
    BOUND.events.met[:] = [one, other]
    optimizers = [torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0) for _ in range(2)]
    BOUND._joined(optimizers[0], one)
    BOUND._joined(optimizers[1], other)  # read before the lock was had
    assert other.whole() is one
    assert one.whole() is one


def test_more_models_than_places_are_remembered_join(enabled: None) -> None:
    models = [nn.Linear(2, 2) for _ in range(MOST_PLACES + 6)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    torch.stack([model(torch.ones(1, 2)).sum() for model in models]).sum().backward()
    optimizer.step()
    assert len(BOUND.places) == 1


def test_a_place_of_several_threads_stays_what_it_is(forced: None) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, torch.ones(4, 8))
    thread = threading.Thread(target=model, args=(torch.ones(4, 8),))
    thread.start()
    thread.join()
    for x, _ in batches(4):
        step(model, optimizer, x)
    assert not BOUND.places[0].choice.is_recorded


def test_models_that_step_together_are_one_place(forced: None) -> None:
    adversarial()
    place, *others = [place for place in BOUND.places if place.optimizers]
    assert not others
    assert len(place.optimizers) == 2


def test_a_part_of_a_model_is_of_its_place(forced: None) -> None:
    model = network()
    for x, _ in batches(2):
        model[0](model(x))
        model[3](model[:2](x))  # another model of its parts
    assert [place.name for place in BOUND.places] == ["Sequential"]


def test_models_that_never_meet_are_places_of_their_own(forced: None) -> None:
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, _ in batches(3):
            step(model, optimizer, x)
    assert len(BOUND.places) == 2


def test_after_disable_a_place_stays_what_it_is(forced: None) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(3):
        step(model, optimizer, x)
    assert torpor.is_lazy(model.weight)
    torpor.disable()
    for x, _ in batches(5):
        step(model, optimizer, x)
    assert torpor.is_lazy(model.weight)


# -- chosen by measuring ---------------------------------------------------------------------------


def train(steps: int, changing: bool = False) -> nn.Module:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        x = torch.ones(4, 8)
        optimizer.zero_grad()
        out = model(x)
        for _ in range(number % 37 if changing else 0):
            out = out + 1
        out.square().mean().backward()
        optimizer.step()
    return model


def test_what_is_faster_recorded_ends_recorded(enabled: None) -> None:
    BOUND.clock = Clock(eager=1.0, recorded=0.5)
    assert torpor.is_lazy(train(60).weight)
    assert not BOUND.places[0].choice.reason


def test_what_is_slower_recorded_ends_eagerly_and_is_told_once(enabled: None) -> None:
    BOUND.clock = Clock(eager=1.0, recorded=2.0)
    with pytest.warns(PerformanceWarning, match="takes 2.00 times as long") as reported:
        model = train(300)
    assert not torpor.is_lazy(model.weight)
    assert len(reported) == 1
    assert reported[0].filename == __file__


def test_graphs_that_do_not_come_back_end_eagerly_and_the_warning_says_what_changes(
    enabled: None,
) -> None:
    BOUND.clock = Clock(eager=1.0, recorded=5.0)
    with pytest.warns(PerformanceWarning, match="do not come back") as reported:
        model = train(60, changing=True)
    assert not torpor.is_lazy(model.weight)
    assert "what changes: Python took another way" in str(reported[0].message)
    assert 'torpor.config.bound = "off"' in str(reported[0].message)


def test_a_model_without_an_optimizer_is_counted_by_its_calls(enabled: None) -> None:
    BOUND.clock = Clock(eager=1.0, recorded=0.5)
    model = nn.Linear(8, 8).eval()
    with torch.no_grad():
        for _ in range(60):
            model(torch.ones(4, 8)).sum().item()
    assert torpor.is_lazy(model.weight)


def test_off_records_from_the_first_call_on(enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "bound", "off")
    assert torpor.is_lazy(train(1).weight)
    assert not BOUND.places


def test_modules_without_tensors_are_no_places(enabled: None) -> None:
    for _ in range(3):
        nn.MSELoss()(torch.ones(2), torch.ones(2))
    assert not BOUND.places


def test_metrics_and_explain_tell_of_places(enabled: None) -> None:
    BOUND.clock = Clock(eager=1.0, recorded=2.0)
    torpor.metrics.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        train(60)
    gauges = torpor.metrics.gauges()
    assert gauges["Places"] == 1
    assert gauges["StepsEager"] + gauges["StepsRecorded"] == 60
    assert torpor.metrics.counters()["BoundSwitch"] == 2
    explanation = torpor.explain()
    assert len(explanation.places) == 1
    assert "Linear" in explanation.places[0]
    assert "runs eagerly now" in str(explanation)
    assert "places" in explanation.to_json()


def test_a_program_that_leaves_no_core_idle_waits_for_its_compile(
    enabled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the time it has run makes that worth it."""
    clock = BOUND.clock = Clock(eager=1.0, recorded=0.5)
    monkeypatch.setattr(worth, "COSTS", worth.CompileCosts())
    monkeypatch.setattr(bound_module, "COSTS", worth.COSTS)
    worth.COSTS.pending.append(30.0)
    waited: list[float] = []

    def wait() -> float:
        waited.append(clock.now)
        worth.COSTS.pending.clear()
        return 30.0

    def is_compiling() -> bool:
        return not waited and any(place.choice.attempts for place in BOUND.places)

    monkeypatch.setattr(COMPILER, "is_compiling", is_compiling)
    monkeypatch.setattr(COMPILER, "unfinished", [None])
    monkeypatch.setattr(COMPILER, "wait_while_compiling", wait)
    model = train(400)
    (when,) = waited
    assert when * worth.SAVED > 30.0
    assert (when - 10) * worth.SAVED < 30.0
    assert torpor.is_lazy(model.weight)
    assert worth.COSTS.waited == 30.0


def _sparse_steps() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.tensor([1, 1, step % 3])).sum().backward()
        optimizer.step()
    return [model.weight.detach()]


def test_a_place_with_sparse_gradients_may_change(request: pytest.FixtureRequest) -> None:
    expected = _sparse_steps()
    request.getfixturevalue("forced")
    assert torch.equal(torpor.eager(_sparse_steps()[0]), expected[0])


def test_a_place_stays_what_it_is_while_a_profiler_refers_to_its_tensors(forced: None) -> None:
    model = nn.Linear(3, 2)
    with torch.profiler.profile(record_shapes=True):
        for _ in range(8):
            model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[8.0] * 3] * 2
