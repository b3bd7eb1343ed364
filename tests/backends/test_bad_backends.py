"""A backend that misbehaves: the user sees which, in which graph, at which line, and goes on."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import torpor
from tests.comparison import line_below, message, raised_by
from torpor.backend import Backend, BackendData, BackendDevice, Computation, registry
from torpor.backends.reference import ReferenceBackend
from torpor.errors import BackendError, CompileError, TorporWarning

_widths = itertools.count(301)


class Misbehaving(ReferenceBackend):
    """Sound, until one of its two halves is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.on_compile: Callable[[], None] = lambda: None
        self.on_execute: Callable[[list[BackendData]], Any] = lambda results: results

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        self.on_compile()
        return super().compile(computations)

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        return self.on_execute(super().execute(computation, arguments, device))


torpor.backend.register("tests-misbehaving", Misbehaving)


@pytest.fixture
def bad() -> Misbehaving:
    backend = torpor.use("tests-misbehaving")
    assert isinstance(backend, Misbehaving)
    return backend


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "strict", True)


def fresh() -> torch.Tensor:
    """A lazy tensor of a size that no other test met: no node of it is known yet."""
    return torch.arange(float(next(_widths))).to("lazy")


def fail() -> None:
    raise ValueError("the toolchain is out of order")


def assert_reported(error: BaseException, line: str) -> None:
    text = message(error)
    for part in ("'tests-misbehaving'", "graph", line):
        assert part in text, text


def assert_goes_on(x: torch.Tensor) -> None:
    """The input is there, and the next step runs."""
    expected = torch.arange(float(x.shape[0]))
    torpor.sync(wait=True)
    assert torch.equal(x.cpu(), expected)
    assert torch.equal((x * 2 + 1).cpu(), expected * 2 + 1)


# -- factories ---------------------------------------------------------------------------------


def unusable(reason: str) -> Callable[[], Backend]:
    def make() -> Backend:
        raise ImportError(reason)

    return make


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(registry, "_available", dict(registry._available))


@pytest.mark.usefixtures("own_registry")
def test_a_factory_that_raises_leaves_the_old_backend_and_pending_work() -> None:
    torpor.backend.register("tests-broken", unusable("no toolchain"))
    x = fresh()
    y = x + 1
    with pytest.raises(BackendError, match=r"'tests-broken'.*no toolchain"):
        torpor.use("tests-broken")
    assert torpor.is_pending(y)
    assert torpor.backend.get_backend().name == "reference"
    assert_goes_on(x)


@pytest.mark.usefixtures("own_registry")
def test_a_factory_that_makes_something_else_is_named() -> None:
    torpor.backend.register("tests-odd", lambda: 42)  # type: ignore[arg-type,return-value]
    with pytest.raises(BackendError, match=r"'tests-odd'.*int, not a Backend"):
        torpor.use("tests-odd")


@pytest.mark.usefixtures("own_registry")
def test_a_backend_that_cannot_initialize_is_named() -> None:
    class Uninitialized(ReferenceBackend):
        def initialize(self) -> None:
            raise OSError("no such chip")

    torpor.backend.register("tests-chipless", Uninitialized)
    with pytest.raises(BackendError, match=r"'tests-chipless'.*no such chip"):
        torpor.use("tests-chipless")


@pytest.mark.usefixtures("own_registry")
def test_what_is_not_a_factory_is_refused_when_registered() -> None:
    with pytest.raises(BackendError, match="a factory to call"):
        torpor.backend.register("tests-none", None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("own_registry")
def test_a_backend_says_why_it_is_not_available() -> None:
    torpor.backend.register("tests-gone", ReferenceBackend, available=lambda: "no chip here")
    torpor.backend.register("tests-here", ReferenceBackend, available=lambda: None)
    assert torpor.backends()["tests-gone"] == "no chip here"
    assert torpor.backends()["tests-here"] == "available"
    assert torpor.backends()["reference"] == "available"
    with pytest.raises(BackendError, match=r"'tests-gone'.*no chip here"):
        torpor.use("tests-gone")


@pytest.mark.usefixtures("own_registry")
def test_an_availability_check_that_raises_is_a_reason() -> None:
    def broken() -> str | None:
        raise OSError("cannot look")

    torpor.backend.register("tests-unsure", ReferenceBackend, available=broken)
    assert "cannot look" in torpor.backends()["tests-unsure"]


@pytest.mark.usefixtures("own_registry")
def test_a_class_may_say_itself_whether_it_is_available() -> None:
    class Picky(ReferenceBackend):
        @staticmethod
        def available() -> str | None:
            return "only on Tuesdays"

    torpor.backend.register("tests-picky", Picky)
    assert torpor.backends()["tests-picky"] == "only on Tuesdays"


def test_an_entry_point_that_fails_to_load_shows_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Point:
        name = "tests-entry"

        def load(self) -> Any:
            raise ImportError("acme is half installed")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    assert "acme is half installed" in torpor.backends()["tests-entry"]
    with pytest.raises(BackendError, match="acme is half installed"):
        torpor.use("tests-entry")


# -- results -----------------------------------------------------------------------------------


def with_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    def spoil(results: list[BackendData]) -> list[BackendData]:
        for result in results:
            assert result.tensor is not None
            result.tensor = change(result.tensor)
        return results

    return spoil


def emptied(results: list[BackendData]) -> list[BackendData]:
    return [BackendData(result.device, result.type) for result in results]


BAD_RESULTS: dict[str, Callable[[list[BackendData]], Any]] = {
    "too_few": lambda results: results[:-1],
    "too_many": lambda results: [*results, results[0]],
    "none": lambda results: None,
    "tensors": lambda results: [result.tensor for result in results],
    "dtype": with_tensor(lambda tensor: tensor.double()),
    "shape": with_tensor(lambda tensor: tensor.view(1, -1)),
    "strides": with_tensor(lambda tensor: tensor.repeat_interleave(2)[::2]),
    "offset": with_tensor(lambda tensor: torch.cat([tensor[:1], tensor])[1:]),
    "empty": emptied,
}


@pytest.mark.parametrize("kind", BAD_RESULTS)
def test_bad_results_are_told_with_backend_graph_and_line(bad: Misbehaving, kind: str) -> None:
    x = fresh()
    bad.on_execute = BAD_RESULTS[kind]
    line = line_below()
    y = x + 1
    error = raised_by(lambda: y.tolist())
    bad.on_execute = lambda results: results
    assert isinstance(error, BackendError)
    assert_reported(error, line)
    assert isinstance(raised_by(lambda: y.tolist()), BackendError)
    assert_goes_on(x)


def test_one_bad_result_does_not_take_the_others_with_it(bad: Misbehaving) -> None:
    def spoil(results: list[BackendData]) -> list[BackendData]:
        assert results[1].tensor is not None
        results[1].tensor = results[1].tensor.double()
        return results

    x = fresh()
    first, second = x + 1, x * 3
    bad.on_execute = spoil
    error = raised_by(lambda: torpor.sync(wait=True))
    assert isinstance(error, BackendError)
    assert torch.equal(first.cpu(), torch.arange(float(x.shape[0])) + 1)
    assert raised_by(lambda: second.tolist()) is error


def test_results_are_checked_until_a_run_was_right_and_then_no_more(
    bad: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torpor.transactions import transaction

    checks: list[Any] = []
    real = transaction.checked
    monkeypatch.setattr(transaction, "checked", lambda *args: checks.append(args) or real(*args))
    x = fresh()
    for _ in range(3):
        y = x * x
        torpor.sync(wait=True)
        del y
    assert len(checks) == 1


# -- runs --------------------------------------------------------------------------------------


def test_a_run_that_raises_keeps_its_type_and_is_told(bad: Misbehaving) -> None:
    def refuse(results: list[BackendData]) -> Any:
        raise FloatingPointError("the chip is too hot")

    x = fresh()
    bad.on_execute = refuse
    line = line_below()
    y = x + 1
    error = raised_by(lambda: torpor.sync(wait=True))
    bad.on_execute = lambda results: results
    assert type(error) is FloatingPointError
    assert "the chip is too hot" in str(error)
    assert_reported(error, line)
    assert raised_by(lambda: y.tolist()) is error
    assert_goes_on(x)


def test_a_failed_step_leaves_parameters_to_the_next(bad: Misbehaving) -> None:
    def refuse(results: list[BackendData]) -> Any:
        raise FloatingPointError("once")

    x = fresh()
    bad.on_execute = refuse
    raised_by(lambda: (x + 1).tolist())
    bad.on_execute = lambda results: results
    total = torch.zeros_like(x)
    for _ in range(3):
        total.add_(x)
        torpor.sync(wait=True)
    assert torch.equal(total.cpu(), 3 * torch.arange(float(x.shape[0])))


# -- compiling ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("strict")
def test_a_compile_error_is_told_in_strict_mode(bad: Misbehaving) -> None:
    x = fresh()
    bad.on_compile = fail
    line = line_below()
    y = x + 1
    error = raised_by(lambda: y.tolist())
    assert isinstance(error, CompileError)
    assert isinstance(error.__cause__, ValueError)
    assert_reported(error, line)
    assert "out of order" in str(error)


@pytest.mark.usefixtures("strict")
def test_nothing_is_lost_by_a_compile_error_in_strict_mode(bad: Misbehaving) -> None:
    x = fresh()
    state = torch.zeros_like(x)
    state.add_(x)
    bad.on_compile = fail
    for _ in range(2):
        with pytest.raises(CompileError):
            torpor.sync(wait=True)
    assert torpor.is_pending(state)
    bad.on_compile = lambda: None
    state.add_(x)
    assert torch.equal(state.cpu(), 2 * torch.arange(float(x.shape[0])))


@pytest.mark.usefixtures("strict")
def test_another_backend_takes_over_what_one_could_not_compile(bad: Misbehaving) -> None:
    x = fresh()
    y = x + 1
    bad.on_compile = fail
    raised_by(lambda: y.tolist())
    torpor.use("reference")
    assert torch.equal(y.cpu(), torch.arange(float(x.shape[0])) + 1)


@pytest.mark.usefixtures("strict")
def test_an_op_that_cannot_be_lowered_is_named_with_its_own_line(bad: Misbehaving) -> None:
    class Choosy(Misbehaving):
        def lowering_context(self, *args: Any, **kwargs: Any) -> Any:
            context = super().lowering_context(*args, **kwargs)
            real = context.lower

            def lower(node: Any) -> None:
                if "exp" in node.op.name:
                    raise NotImplementedError("no exp here")
                real(node)

            context.lower = lower
            return context

    registry.activate(Choosy())
    x = fresh()
    y = x + 1
    line = line_below()
    z = y.exp()
    error = raised_by(lambda: (z * 2).tolist())
    assert isinstance(error, CompileError)
    assert "aten.exp" in str(error)
    assert line in str(error)


def test_a_graph_that_cannot_be_compiled_runs_on_the_reference_with_one_warning(
    bad: Misbehaving,
) -> None:
    x = fresh()
    bad.on_compile = fail
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            y = x * number + 1
            torpor.sync(wait=True)
            assert torch.equal(y.cpu(), torch.arange(float(x.shape[0])) * number + 1)
    reported = [w for w in caught if issubclass(w.category, TorporWarning)]
    assert len(reported) == 1
    assert_reported(reported[0].message, "test_bad_backends.py")  # type: ignore[arg-type]
    assert "reference backend" in str(reported[0].message)
    assert reported[0].filename == __file__
    assert torpor.metrics.counters()["CompileFailed"] >= 1
    bad.on_compile = lambda: None
    assert_goes_on(x)


def test_another_reason_is_another_warning(bad: Misbehaving) -> None:
    def other() -> None:
        raise ValueError("another reason")

    x = fresh()
    bad.on_compile = fail
    with pytest.warns(TorporWarning, match="out of order"):
        (x + 1).tolist()
    bad.on_compile = other
    with pytest.warns(TorporWarning, match="another reason"):
        (x * x).tolist()


@pytest.mark.parametrize("answer", [None, [], [1], ["a", "b"]], ids=str)
@pytest.mark.usefixtures("strict")
def test_compile_that_returns_something_else_is_a_compile_error(
    bad: Misbehaving, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad, "compile", lambda computations: answer)
    x = fresh()
    y = x + 1
    assert isinstance(raised_by(lambda: y.tolist()), CompileError)
    monkeypatch.undo()
    assert_goes_on(x)


def test_the_stand_in_gives_the_backend_its_own_data() -> None:
    """A backend whose data are not torch tensors keeps them, whoever ran the graph."""
    backend = torpor.use("tests-foreign")
    assert isinstance(backend, Foreign)
    x = torch.arange(4.0).to("lazy")
    y = x + 1
    with pytest.warns(TorporWarning, match="compiles nothing"):
        numbers = y.tolist()
    assert numbers == [1.0, 2.0, 3.0, 4.0]
    assert type(y._lazy_storage.data) is Numbers
    assert (y * y).tolist() == [1.0, 4.0, 9.0, 16.0]


class Numbers(BackendData):
    """Data that are a list of Python numbers."""

    __slots__ = ("numbers",)

    def filled(self) -> bool:
        return getattr(self, "numbers", None) is not None

    def assign(self, other: BackendData) -> None:
        assert isinstance(other, Numbers) or other.error is not None
        self.error = other.error
        self.numbers = getattr(other, "numbers", None)


class Foreign(ReferenceBackend):
    """Compiles nothing, and keeps lists of numbers."""

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        raise NotImplementedError("this backend compiles nothing")

    def placeholder(self, device: BackendDevice, type_: Any) -> BackendData:
        return Numbers(device, type_)

    def data_from_tensor(
        self, tensor: torch.Tensor, type_: Any, device: BackendDevice
    ) -> BackendData:
        data = Numbers(device, type_)
        data.numbers = tensor.tolist()
        return data

    def tensor_from_data(
        self, data: BackendData, logical_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        assert isinstance(data, Numbers)
        return torch.tensor(data.numbers, dtype=logical_dtype or data.type.dtype)


torpor.backend.register("tests-foreign", Foreign)


# -- the end -----------------------------------------------------------------------------------


def test_a_backend_that_fails_at_exit_does_not_keep_others_from_being_told() -> None:
    program = """
import torpor
from torpor.backends.reference import ReferenceBackend
class Told(ReferenceBackend):
    def prepare_to_exit(self):
        print("told", self.name, flush=True)
        raise OSError("stuck")
torpor.backend.register("first", Told)
torpor.backend.register("second", Told)
first = torpor.use("first")
second = torpor.use("second")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["first", "second", "told", "told"]
    assert done.stderr.count("failed at exit: stuck") == 2
