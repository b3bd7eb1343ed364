"""`torpor.compat.torch_lazy` is `torch._lazy`: its names, its signatures, its use."""

import copy
import importlib
import inspect
import io
import pkgutil
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._lazy
from torch import Tensor, fx, nn

import torpor
import torpor.compat.torch_lazy as lazy
from tests.comparison import assert_same
from torpor.compat.torch_lazy import (
    computation,
    config,
    debug,
    device_context,
    ir_cache,
    metrics,
    ts_backend,
)
from torpor.compat.torch_lazy.closure import AsyncClosureHandler, ClosureHandler
from torpor.compat.torch_lazy.extract_compiled_graph import (
    GraphInputMatcher,
    ReturnValueHandler,
    extract_compiled_graph,
    force_lazy_device,
    get_fallback_ops,
)

DOCS = Path(__file__).parents[2] / "docs" / "torch_lazy_names.md"
OURS = "torpor.compat.torch_lazy"


@pytest.fixture(autouse=True)
def fresh_counters() -> Iterator[None]:
    torpor.sync(wait=True)
    metrics.reset()
    yield
    config.set_force_fallback("")


# -- names and signatures ------------------------------------------------------------------------


def _submodules() -> list[str]:
    return sorted(found.name for found in pkgutil.iter_modules(torch._lazy.__path__))


def _public(module: ModuleType) -> dict[str, Any]:
    """What `module` defines or passes on for others to use."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and name not in ("DEFAULT_PROTOCOL",)  # of `torch.serialization`
        and getattr(value, "__module__", module.__name__).startswith("torch._lazy")
    }


def _names() -> list[str]:
    """Every public name under `torch._lazy`, without that prefix."""
    found = set(_submodules())
    for submodule in ("", *_submodules()):
        module = importlib.import_module(f"torch._lazy.{submodule}".rstrip("."))
        found |= {f"{submodule}.{name}".lstrip(".") for name in _public(module)}
    return sorted(found)


def _resolve(root: str, name: str) -> Any:
    """`metrics.reset` under `root`; submodules win over what has the same name."""
    module, _, attribute = name.rpartition(".")
    if not module and attribute in _submodules():
        return importlib.import_module(f"{root}.{attribute}")
    return getattr(importlib.import_module(f"{root}.{module}".rstrip(".")), attribute)


def _shape(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """What a signature asks of a caller; annotations are ours."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


PASSED_ON = {
    "save": _shape(lambda tensors, *args, **kwargs: None)  # to `torch.save`, whatever that takes
}


def test_torch_lazy_has_the_names_that_this_file_thinks_it_has() -> None:
    for name in ("mark_step", "metrics.counter_value", "closure.AsyncClosureHandler", "save"):
        assert name in _names()


@pytest.mark.parametrize("name", _names())
def test_a_name_is_there_with_the_same_signature(name: str) -> None:
    theirs, ours = _resolve("torch._lazy", name), _resolve(OURS, name)
    assert isinstance(ours, ModuleType) == isinstance(theirs, ModuleType)
    if inspect.isfunction(theirs) or inspect.isclass(theirs):
        assert inspect.getdoc(ours)
        assert _shape(ours) in (_shape(theirs), PASSED_ON.get(name))
    elif not isinstance(theirs, ModuleType):
        assert type(ours) is type(theirs)


def _methods() -> list[str]:
    found = []
    for name in _names():
        value = _resolve("torch._lazy", name)
        if inspect.isclass(value):
            members = {n for n in vars(value) if not n.startswith("_")} | {"__call__"}
            found += [f"{name}.{n}" for n in members if inspect.isfunction(vars(value).get(n))]
    return sorted(found)


@pytest.mark.parametrize("name", _methods())
def test_a_method_is_there_with_the_same_signature(name: str) -> None:
    owner, _, method = name.rpartition(".")
    theirs, ours = (getattr(_resolve(root, owner), method) for root in ("torch._lazy", OURS))
    assert _shape(ours) == _shape(theirs)


def test_the_factory_functions_are_the_same() -> None:
    theirs = _resolve("torch._lazy", "tensor_factory_functions.tensor_factory_functions")
    ours = _resolve(OURS, "tensor_factory_functions.tensor_factory_functions")
    assert set(ours) == set(theirs)


def test_submodules_come_with_the_package() -> None:
    for name in _submodules():
        assert isinstance(getattr(lazy, name), ModuleType)


def test_exported_names_are_sorted_and_there() -> None:
    assert list(lazy.__all__) == sorted(lazy.__all__)
    assert all(hasattr(lazy, name) for name in lazy.__all__)


# -- the table of names --------------------------------------------------------------------------


def _documented() -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", DOCS.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", _names())
def test_a_name_is_in_the_table(name: str) -> None:
    assert name in _documented()


def _counterparts() -> list[str]:
    return sorted(name for name in _documented() if re.fullmatch(r"torpor(\.\w+)+", name))


@pytest.mark.parametrize("name", _counterparts())
def test_a_counterpart_in_the_table_exists(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


# -- a training loop written for torch._lazy -------------------------------------------------------


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def _batches(number: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(number)]


def _train(device: str, steps: int, after_step: Callable[[Tensor], None]) -> nn.Module:
    model = _network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in _batches(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        after_step(loss)
    return model


def _train_eagerly(steps: int) -> tuple[nn.Module, list[float]]:
    losses: list[float] = []
    model = _train("cpu", steps, lambda loss: losses.append(loss.item()))
    return model, losses


@pytest.mark.parametrize("automatic_cuts", [True, False])
def test_a_training_loop_gives_eager_losses_and_weights(
    automatic_cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "cut_after_optimizer", automatic_cuts)
    ts_backend.init()
    losses: list[float] = []

    def after_step(loss: Tensor) -> None:
        lazy.add_step_closure(lambda loss: losses.append(loss.item()), args=(loss.detach(),))
        lazy.mark_step()

    model = _train("lazy", 6, after_step)
    lazy.wait_device_ops()
    eager_model, eager_losses = _train_eagerly(6)
    assert losses == eager_losses
    assert_same(lazy.to_cpu(model.state_dict()), eager_model.state_dict())


@pytest.mark.usefixtures("whole_ops")
def test_a_training_loop_compiles_little_and_reuses_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torpor.config, "cut_after_optimizer", False)
    ir_cache.reset()
    _train("lazy", 10, lambda loss: lazy.mark_step())
    lazy.wait_device_ops(["lazy:0"])
    value = metrics.counter_value
    assert value("MarkStep") == 10
    assert value("UncachedCompile") + value("CachedCompile") == 10
    assert value("UncachedCompile") <= 3
    assert value("CreateLtcTensor") > 100
    assert value("lazy::linear") == 10  # the first layer's input needs no gradient: its parts
    assert 3 <= value("IrNodeReused_torch::lazy::Linear") <= 9
    assert not get_fallback_ops()


def test_mark_step_counts_its_own_calls_and_no_automatic_cut() -> None:
    _train("lazy", 3, lambda loss: lazy.mark_step())
    assert metrics.counter_value("MarkStep") == 3
    assert torpor.metrics.counters()["MarkStep"] == 6


def test_mark_step_takes_a_device_and_waits() -> None:
    x = torch.ones(3, device="lazy") + 1
    assert torpor.is_pending(x)
    lazy.mark_step("lazy:0", wait=True)
    assert not torpor.is_pending(x)
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_sync_multi_computes_what_it_is_given() -> None:
    x = torch.ones(3, device="lazy")
    wanted, other = x + 1, x * 3
    lazy.sync_multi([wanted], [])
    assert not torpor.is_pending(wanted)
    assert torpor.is_pending(other)
    lazy.sync_multi([], [])
    assert torpor.is_pending(other)
    with pytest.raises(TypeError, match="expected tensors, got int"):
        lazy.sync_multi([3], [])


# -- metrics ---------------------------------------------------------------------------------------


def test_a_counter_of_nothing_is_none_and_a_reset_forgets_all() -> None:
    assert metrics.counter_value("NeverHeardOf") is None
    torch.ones(2, device="lazy").add(1)
    assert metrics.counter_names()
    metrics.reset()
    assert metrics.counter_names() == []


def test_the_tenth_step_has_reused_the_nodes_of_the_first() -> None:
    x, y = torch.ones(3).to("lazy"), torch.ones(3).to("lazy")
    z = torch.zeros(3).to("lazy")
    ir_cache.reset()
    for _ in range(10):
        z += x + y
        lazy.mark_step()
    assert z.tolist() == [20.0] * 3
    assert metrics.counter_value("lazy::add") == 20
    assert 14 <= metrics.counter_value("IrNodeReused_torch::lazy::AddTensor") <= 18


def test_overloads_of_an_op_are_counted_under_one_name() -> None:
    x = torch.ones(2, 3, device="lazy")
    x.sum(), x.sum(0), x.sum(1)
    assert metrics.counter_value("lazy::sum") == 3


def test_an_op_that_falls_back_is_counted_as_eagers_and_not_as_lazy() -> None:
    x = torch.ones(3, device="lazy")
    config.set_force_fallback("aten::sin")
    x.sin(), x.sin()
    assert metrics.counter_value("aten::sin") == 2
    assert metrics.counter_value("lazy::sin") is None
    assert get_fallback_ops() == ["aten::sin=2"]


def test_the_report_lists_timers_counters_and_the_backend() -> None:
    (torch.ones(3, device="lazy") + 1).tolist()
    report = metrics.metrics_report()
    assert re.search(r"^Metric: Execute\n  TotalSamples: 1\n", report, re.MULTILINE)
    assert re.search(r"^Counter: lazy::add\n  Value: 1$", report, re.MULTILINE)
    assert report.splitlines()[-1].startswith("reference: ")


# -- closures --------------------------------------------------------------------------------------


def test_closures_run_in_order_after_mark_step_and_only_then() -> None:
    seen: list[Any] = []
    x = torch.ones(2, device="lazy") + 1
    lazy.add_step_closure(lambda t: seen.append((torpor.is_pending(t), t.tolist())), args=(x,))
    lazy.add_step_closure(seen.append, args=("second",))
    torpor.sync()
    assert seen == []
    lazy.mark_step()
    assert seen == [(False, [2.0, 2.0]), "second"]
    lazy.mark_step()
    assert len(seen) == 2


def test_a_failing_closure_fails_mark_step() -> None:
    def closure() -> None:
        raise ValueError("in the closure")

    lazy.add_step_closure(closure)
    with pytest.raises(ValueError, match="in the closure"):
        lazy.mark_step()
    lazy.mark_step()


def test_an_asynchronous_closure_does_not_hold_up_the_program() -> None:
    go, done = threading.Event(), threading.Event()
    total: list[float] = []

    def closure(t: Tensor) -> None:
        go.wait(10)
        total.append(t.sum().item())
        done.set()

    lazy.add_step_closure(closure, args=(torch.ones(3, device="lazy") + 1,), run_async=True)
    lazy.mark_step()
    assert not done.is_set()
    go.set()
    assert done.wait(10)
    assert total == [6.0]


def test_a_failed_asynchronous_closure_fails_the_next_one() -> None:
    handler = AsyncClosureHandler()
    failed, ran = threading.Event(), threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("in the closure")

    handler([fail])
    assert failed.wait(10)
    with pytest.raises(RuntimeError, match="previously raised exception") as caught:
        for _ in range(1000):  # the error is known a moment after the closure has failed
            handler([threading.Event().set])
    assert isinstance(caught.value.__cause__, ValueError)
    handler([ran.set])
    assert ran.wait(10)


def test_a_full_queue_of_closures_holds_up_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTC_MAX_ASYNC_QUEUE", "1")
    handler = AsyncClosureHandler(max_queue_size=50)
    started, go = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        started.set()
        go.wait(10)
        order.append("first")

    handler([first])
    assert started.wait(10)
    handler([lambda: order.append("second")])
    blocked = threading.Thread(target=handler, args=([lambda: order.append("third")],))
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()
    go.set()
    blocked.join(10)
    assert not blocked.is_alive()
    last = threading.Event()
    handler([last.set])
    assert last.wait(10)
    assert order == ["first", "second", "third"]


def test_a_handler_of_the_programs_own_is_used() -> None:
    handled: list[int] = []

    class Handler(ClosureHandler):
        def run(self, closure: Callable[[], Any]) -> None:
            handled.append(closure())

    context = device_context.get_device_context()
    context.closure_handler = Handler()
    try:
        lazy.add_step_closure(lambda: 7)
        assert lazy.run_step_closures() is context
    finally:
        context.closure_handler = None
    assert handled == [7]


def test_a_device_has_one_context() -> None:
    assert device_context.get_device_context() is device_context.get_device_context()
    other = device_context.get_device_context("lazy:1")
    assert other.device == "lazy:1"
    assert other is not device_context.get_device_context()


# -- leaving ---------------------------------------------------------------------------------------


def test_to_cpu_computes_everything_at_once() -> None:
    x = torch.ones(2, device="lazy")
    metrics.reset()
    found = lazy.to_cpu({"a": x + 1, "b": [x * 3, torch.zeros(2)], "epoch": 7})
    expected = {"a": torch.full((2,), 2.0), "b": [torch.full((2,), 3.0), torch.zeros(2)]}
    assert_same(found, {**expected, "epoch": 7})
    assert not any(map(torpor.is_lazy, (found["a"], *found["b"])))
    assert metrics.counter_value("UncachedCompile") == 1


def test_to_cpu_of_a_lazy_cpu_tensor_is_plain() -> None:
    (found,) = lazy.to_cpu([torpor.lazy(torch.ones(2)) + 1])
    assert type(found) is Tensor
    assert found.tolist() == [2.0, 2.0]


def test_a_saved_file_has_nothing_lazy_in_it() -> None:
    model = _network()
    file = io.BytesIO()
    lazy.save(copy.deepcopy(model).to("lazy").state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(t) is Tensor and t.device.type == "cpu" for t in loaded.values())
    assert_same(dict(loaded), dict(model.state_dict()))


# -- debug and the cache of nodes ------------------------------------------------------------------


def test_the_ir_is_shown_as_text_as_a_picture_and_as_the_backend_sees_it() -> None:
    x = torch.ones(2, 3).to("lazy")
    y, z = x + 1, x * 2
    text = debug.dump_ir([y, z], "text")
    assert "aten.add.Tensor" in text
    assert "aten.mul.Tensor" in text
    assert "test_torch_lazy_compat.py" in text
    assert "aten.add.Tensor" in debug.dump_ir([y, z], "backend")
    assert debug.render_ir_graph([y, z]).startswith("digraph")
    assert torpor.is_pending(y)
    with pytest.raises(RuntimeError, match="Unrecognized IR format: svg"):
        debug.dump_ir([y], "svg")
    with pytest.raises(TypeError, match="expected lazy tensors, got Tensor"):
        debug.dump_ir([torch.ones(2)], "text")


def test_the_cache_of_nodes_can_be_dumped_and_emptied(tmp_path: Path) -> None:
    x = torch.ones(2, device="lazy").add(1)
    file = tmp_path / "nodes.dot"
    ir_cache.dump(str(file))
    text = file.read_text()
    assert text.startswith("digraph G {\n")
    assert "aten.add.Tensor" in text
    assert " -> " in text
    ir_cache.reset()
    ir_cache.dump(str(file))
    assert file.read_text() == "digraph G {\n}\n"
    assert x.add(1).tolist() == [3.0, 3.0]


# -- switches --------------------------------------------------------------------------------------


def test_a_forced_fallback_gives_the_same_numbers_and_can_be_undone() -> None:
    x = torch.ones(3, device="lazy")
    expected = torch.ones(3).sin()
    assert config.get_force_fallback() == ""
    config.set_force_fallback("aten::sin, aten::cos")
    assert config.get_force_fallback() == "aten::sin, aten::cos"
    assert_same(x.sin(), expected.to("lazy"))
    assert metrics.counter_value("aten::sin") == 1
    config.set_force_fallback("")
    y = x.sin()
    assert torpor.is_pending(y)
    assert metrics.counter_value("aten::sin") == 1
    with pytest.raises(ValueError, match="torch has no op 'aten::sine'"):
        config.set_force_fallback("aten::sine")


def test_a_forced_fallback_of_an_in_place_op_writes() -> None:
    x = torch.ones(4, device="lazy")
    config.set_force_fallback("aten::add_")
    x[1:3].add_(5)
    assert x.tolist() == [1.0, 6.0, 6.0, 1.0]
    assert metrics.counter_value("aten::add_") == 1


def test_nodes_are_reused_whatever_the_switch_says() -> None:
    for value in (False, True):
        config.set_reuse_ir(value)
        x = torch.ones(2).to("lazy")
        assert (x * 3).tolist() == [3.0, 3.0]
        lazy.mark_step()
    assert metrics.counter_value("IrNodeReused_torch::lazy::MulTensor") >= 1


def test_init_keeps_the_backend_that_was_chosen() -> None:
    before = torpor.backend.get_backend()
    ts_backend.init()
    assert torpor.backend.get_backend() is before


# -- graphs taken out of the trace -----------------------------------------------------------------


def test_a_tensor_has_one_id_and_no_other_tensor_has_it() -> None:
    x = torch.ones(3).to("lazy")
    y = x + 1
    ids = [lazy.get_tensor_id(t) for t in (x, y, x.view(3, 1), copy.deepcopy(x))]
    assert len(set(ids)) == 4
    assert lazy.get_tensor_id(x) == ids[0]
    y.add_(1)
    lazy.mark_step()
    assert lazy.get_tensor_id(y) == ids[1]
    with pytest.raises(TypeError, match="expected a lazy tensor"):
        lazy.get_tensor_id(torch.ones(3))


def test_a_graph_runs_again_on_other_inputs() -> None:
    x, y = torch.ones(3).to("lazy"), torch.full((3,), 2.0).to("lazy")
    out = x * y + 1
    ids, contents = computation.get_tensors_ts_device_data_node([out, x])
    assert sorted(ids) == [-1, -1]
    lazy.get_tensor_id(x)
    ids, contents = computation.get_tensors_ts_device_data_node([out, x])
    assert lazy.get_tensor_id(x) in ids
    assert_same(contents[ids.index(lazy.get_tensor_id(x))], torch.ones(3))
    key = computation.get_graph_hash([out, x])
    given = [torch.full((3,), 5.0), torch.full((3,), 7.0)]
    found = computation.run_cached_graph(key, given)
    assert_same(found[0], torch.full((3,), 36.0))
    assert found[1] is given[ids.index(lazy.get_tensor_id(x))]


def test_equal_graphs_have_equal_hashes_and_others_do_not() -> None:
    def key(make: Callable[[Tensor], Tensor], size: int = 3) -> bytes:
        return computation.get_graph_hash([make(torch.ones(size).to("lazy"))])

    assert key(lambda x: x + 1) == key(lambda x: x + 1)
    different = [
        key(lambda x: x + 1),
        key(lambda x: x + 1.0),
        key(lambda x: x + 2),
        key(lambda x: x * 1),
        key(lambda x: x + 1, size=4),
        key(lambda x: x + x),
    ]
    assert len(set(different)) == len(different)


def test_a_graph_refuses_inputs_it_was_not_recorded_for() -> None:
    key = computation.get_graph_hash([torch.ones(3).to("lazy") + 1])
    with pytest.raises(RuntimeError, match="expected 1 inputs, but got 2"):
        computation.run_cached_graph(key, [torch.ones(3), torch.ones(3)])
    with pytest.raises(RuntimeError, match=r"graph input 0: .* shape \[3\], not .* shape \[4\]"):
        computation.run_cached_graph(key, [torch.ones(4)])
    with pytest.raises(RuntimeError, match=r"graph input 0: .*float32.*int64"):
        computation.run_cached_graph(key, [torch.ones(3, dtype=torch.int64)])
    with pytest.raises(RuntimeError, match="Failed to get computation by hash"):
        computation.run_cached_graph(b"no such graph", [])


def test_a_graph_takes_inputs_with_other_strides() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    key = computation.get_graph_hash([torch.ones(2, 3).to("lazy").view(6) + 1])
    (found,) = computation.run_cached_graph(key, [x.t().contiguous().t()])
    assert_same(found, x.view(6) + 1)


def test_an_error_in_a_graph_is_raised_once_and_the_step_goes_on() -> None:
    index = torch.zeros(2, dtype=torch.int64).to("lazy")
    table = torch.ones(3, 2).to("lazy")
    out = table.index_select(0, index)
    key = computation.get_graph_hash([out, table, index])
    given = [torch.full((2,), 9), torch.ones(3, 2)]
    if computation.get_tensors_ts_device_data_node([out, table, index])[1][0].dim() == 2:
        given.reverse()
    with pytest.raises(IndexError):
        computation.run_cached_graph(key, given)
    torpor.sync(wait=True)
    assert out.tolist() == [[1.0, 1.0]] * 2


# -- extract_compiled_graph ------------------------------------------------------------------------


class Addcmul(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.addcmul(a, b, c, value=5)


class Repeats(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Any:
        c = a + b
        return a - b, c, a + 1, c, a


class Writes(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Any:
        a.sub_(b)
        b[0].mul_(2)
        return b - 1, a


class MakesTensors(nn.Module):
    def forward(self, a: Tensor) -> Any:
        device = torch.device("cpu")
        return a + torch.ones(2, 3), a + torch.ones(3, device=device), torch.tensor((2.0, 3.0))


class Nothing(nn.Module):
    def forward(self, a: Tensor) -> Any:
        return ()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4)
        self.again = self.conv
        self.linear = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.conv(x)).relu().flatten(1))


MODELS: dict[type[nn.Module], list[tuple[int, ...]]] = {
    Addcmul: [(2, 3)] * 3,
    Repeats: [(2, 3)] * 2,
    Writes: [(2, 3)] * 2,
    MakesTensors: [(2, 3)],
    Nothing: [(2, 3)],
    ConvNet: [(4, 2, 3)],
}


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("model_type", MODELS, ids=lambda model: model.__name__)
def test_an_extracted_graph_does_what_the_model_does(
    model_type: type[nn.Module], grad: bool
) -> None:
    torch.manual_seed(0)
    model = model_type()
    twin = copy.deepcopy(model)
    shapes = MODELS[model_type]
    with torch.set_grad_enabled(grad):
        run = extract_compiled_graph(fx.symbolic_trace(model), [torch.rand(s) for s in shapes])
        metrics.reset()
        for _ in range(3):
            args = [torch.rand(shape) for shape in shapes]
            copies = copy.deepcopy(args)
            expected = [t.detach() for t in _as_list(twin(*copies))]
            assert_same(run(*args), expected)
            assert_same(args, copies)
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert not [name for name in metrics.counter_names() if name.startswith("lazy::")]


def test_an_extracted_graph_sees_new_weights() -> None:
    model = nn.Linear(3, 2)
    run = extract_compiled_graph(fx.symbolic_trace(model), [torch.rand(4, 3)])
    with torch.no_grad():
        model.weight.mul_(2)
    x = torch.rand(4, 3)
    assert_same(run(x), [model(x).detach()])


def test_an_argument_that_is_returned_is_the_argument() -> None:
    run = extract_compiled_graph(fx.symbolic_trace(Writes()), [torch.rand(2, 3)] * 2)
    a, b = torch.rand(2, 3), torch.rand(2, 3)
    assert run(a, b)[1] is a


def test_extraction_leaves_nothing_pending_and_no_switch_changed() -> None:
    before = torpor.config.cut_after_module
    with torch.no_grad():
        extract_compiled_graph(fx.symbolic_trace(Addcmul()), [torch.rand(3)] * 3)
    assert torpor.config.cut_after_module is before
    metrics.reset()
    lazy.mark_step()
    assert metrics.counter_value("UncachedCompile") is None


class Looks(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a.masked_select(a > 0)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), "random numbers"),
        (Looks(), "fallback.*masked_select"),
    ],
    ids=["Dropout", "Looks"],
)
def test_what_a_graph_would_not_stand_for_is_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(RuntimeError, match=f"Fail to extract the compiled graph .*{reason}"):
        extract_compiled_graph(fx.symbolic_trace(model), [torch.rand(2, 3)])


def test_a_model_that_falls_back_is_refused() -> None:
    config.set_force_fallback("aten::addcmul")
    with pytest.raises(RuntimeError, match=r"fallback.*aten::addcmul"):
        extract_compiled_graph(fx.symbolic_trace(Addcmul()), [torch.rand(3)] * 3)


def test_an_extracted_graph_refuses_other_arguments() -> None:
    run = extract_compiled_graph(fx.symbolic_trace(Addcmul()), [torch.rand(3)] * 3)
    with pytest.raises(TypeError, match="3 arguments, not 1"):
        run(torch.rand(3))
    with pytest.raises(RuntimeError, match=r"shape \[3\], not torch.float32 of shape \[4\]"):
        run(*[torch.rand(4)] * 3)
    with pytest.raises(TypeError, match="example inputs are tensors, not int"):
        extract_compiled_graph(fx.symbolic_trace(nn.ReLU()), [3])


def _graph_that_makes_tensors() -> fx.GraphModule:
    """What TorchDynamo finds: factories with a device, with its name, and with none."""
    graph = fx.Graph()
    total = graph.placeholder("x")
    for keywords in ({}, {"device": torch.device("cpu")}, {"device": "cpu"}):
        made = graph.call_function(torch.ones, ((2, 3),), keywords)
        total = graph.call_function(torch.add, (total, made))
    moved = graph.call_method("to", (total, torch.device("cpu")))
    graph.output((moved, graph.call_function(torch.tensor, ((2.0, 3.0),)), None))
    return fx.GraphModule(nn.Module(), graph)


def test_devices_in_a_graph_become_lazy() -> None:
    model = _graph_that_makes_tensors()
    force_lazy_device(model)
    x = torch.ones(2, 3, device="lazy")
    moved, made, _ = model(x)
    assert moved.device == made.device == x.device


def test_a_graph_that_makes_tensors_is_extracted() -> None:
    run = extract_compiled_graph(_graph_that_makes_tensors(), [torch.ones(2, 3)])
    x = torch.rand(2, 3)
    assert_same(run(x), list(_graph_that_makes_tensors()(x)))


def test_inputs_are_matched_and_results_given_back_by_identity() -> None:
    matcher = GraphInputMatcher({11: 1, 12: 0}, [11, -1, 12], ["a", "b", "c"])
    assert matcher(["first", "second"]) == ["second", "b", "first"]
    x, y = torch.ones(1), torch.ones(1)
    handler = ReturnValueHandler([x, y, x])
    assert handler.duplicate_eager_tensors(["x", "y"]) == ["x", "y", "x"]
    with pytest.raises(AssertionError):
        handler.duplicate_eager_tensors(["x"])


def test_graphs_are_added_to_the_file_that_ltc_names(tmp_path, monkeypatch) -> None:
    path = tmp_path / "graphs.txt"
    monkeypatch.setenv("LTC_SAVE_TENSORS_FILE", str(path))
    x = torch.ones(2).to("lazy")
    y = x * 5 + 1
    lazy.mark_step()
    text = path.read_text()
    assert re.search(r"Python Stacktrace:\n  mark_step \(.*torch_lazy/__init__.py:\d+\)", text)
    assert "test_graphs_are_added_to_the_file_that_ltc_names" in text
    graph = text.split("## BEGIN_GRAPH\n")[1].split("\n## END_GRAPH")[0]
    assert "aten.mul.Tensor" in graph
    lazy.mark_step()  # nothing is pending: nothing is added
    assert path.read_text() == text
    assert y.tolist() == [6.0, 6.0]


def test_graphs_are_saved_in_the_format_that_ltc_names(tmp_path, monkeypatch) -> None:
    path = tmp_path / "graphs.txt"
    monkeypatch.setenv("LTC_SAVE_TENSORS_FILE", str(path))
    monkeypatch.setenv("LTC_SAVE_TENSORS_FMT", "dot")
    y = torch.ones(2).to("lazy") + 1
    lazy.sync_multi([y], [])
    assert "digraph" in path.read_text()


def test_the_text_of_tensors_is_their_graph() -> None:
    y = torch.ones(2).to("lazy") + 1
    assert lazy._get_tensors_text([y]) == lazy.debug.dump_ir([y], "text")
    assert "aten.add.Tensor" in lazy._get_tensors_text([y])


def test_tensors_that_a_sync_computes_are_counted() -> None:
    torpor.sync(wait=True)
    lazy.metrics.reset()
    x = torch.ones(3).to("lazy")
    held = [x + 1, x + 2, x + 3]
    lazy.mark_step()
    assert lazy.metrics.counter_value("SyncedTensorsWithIR") == 3
    assert len(held) == 3
