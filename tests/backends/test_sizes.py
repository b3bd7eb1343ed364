"""Sizes that change, on backends that compile for some of them: few compiles, eager's numbers."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from tests.comparison import Put
from tests.tagger import random_shapes, train
from torpor import config, metrics
from torpor.backend import Computation
from torpor.backend.registry import register
from torpor.backends.inductor import InductorBackend
from torpor.backends.inductor import runtime as inductor_runtime
from torpor.backends.inductor.compile import COMPILE_AFTER
from torpor.backends.reference.compile import ReferenceBackend
from torpor.backends.reference.lowering import ReferenceLowering
from torpor.cache.store import Store
from torpor.compiling.background import COMPILER
from torpor.execute.plan import MAX_VARIANTS
from torpor.execute.sync import PLANS
from torpor.symbols.expressions import Symbol
from torpor.symbols.leaves import SIZES

KINDS = 10


@dataclasses.dataclass
class Program:
    """What the reference runs, for sizes of one kind."""

    inner: Any
    kind: int | None  # the last digit of a size; None: there are no sizes

    def accepts_sizes(self, sizes: Mapping[Symbol, int]) -> bool:
        return self.kind is None or all(size % KINDS == self.kind for size in sizes.values())


class KindsLowering(ReferenceLowering):
    def build(self) -> Computation:
        computation = super().build()
        kind = next((size % KINDS for size in self.hints.values()), None)
        computation.program = Program(computation.program, kind)
        return computation


class KindsBackend(ReferenceBackend):
    """The reference, whose code is for sizes that end with the same digit."""

    name = "kinds"
    gate = threading.Event()  # nothing is compiled before it is open
    runs = 0
    key: str | None = None

    def lowering_context(self, *args: Any) -> KindsLowering:
        return KindsLowering(*args)

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        assert KindsBackend.gate.wait(60)
        return list(computations)

    def execute(self, computation: Computation, *args: Any) -> Any:
        KindsBackend.runs += 1
        program = computation.program
        assert program.accepts_sizes(computation.sizes_in(args[0])), "run with sizes it is not for"
        return super().execute(dataclasses.replace(computation, program=program.inner), *args)

    def accepts_sizes(self, computation: Computation, sizes: Mapping[Symbol, int]) -> bool:
        accepts_sizes: bool = computation.program.accepts_sizes(sizes)
        return accepts_sizes

    def cache_key(self) -> str | None:
        return KindsBackend.key

    def dump(self, computation: Computation) -> bytes:
        return json.dumps(computation.program.kind).encode()

    def load(self, computation: Computation, saved: bytes) -> Computation:
        computation.program.kind = json.loads(saved)
        return computation


register("kinds", KindsBackend)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    KindsBackend.gate.set()
    KindsBackend.runs, KindsBackend.key = 0, None
    PLANS.clear()
    metrics.reset()
    yield
    KindsBackend.gate.set()
    COMPILER.wait()
    PLANS.clear()


@pytest.fixture
def kinds() -> Iterator[None]:
    with torpor.using("kinds"):
        yield


def step(size: int) -> None:
    """A step of that size, which is a symbol from the start."""
    x = torch.arange(float(size))
    lazy = x.to("lazy")
    torpor.mark_dynamic(lazy, 0)
    y = lazy * 2 + 1
    torpor.sync(wait=True)
    assert torch.equal(y.cpu(), x * 2 + 1)


def counted(name: str) -> int:
    return metrics.counters().get(name, 0)


def compiled() -> int:
    return counted("UncachedCompile")


# -- one graph, compiled for several kinds of sizes ------------------------------------------------


@pytest.mark.usefixtures("kinds")
def test_a_graph_is_compiled_once_for_each_kind_of_sizes() -> None:
    for size in (12, 13, 22, 23, 14, 32, 44, 13):
        step(size)
    assert compiled() == 3
    assert KindsBackend.runs == 8


@pytest.mark.usefixtures("kinds")
def test_more_kinds_than_enough_run_on_the_reference() -> None:
    for size in (*range(10, 20), *range(20, 30)):
        step(size)
    assert compiled() == 1 + MAX_VARIANTS
    assert KindsBackend.runs == 2 * (1 + MAX_VARIANTS)


@pytest.mark.usefixtures("kinds")
def test_no_more_are_compiled_than_a_structure_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "max_graphs_per_structure", 2)
    for size in (12, 13, 14, 22, 23, 24, 15):
        step(size)
    assert compiled() == 2
    assert KindsBackend.runs == 4


@pytest.mark.usefixtures("kinds")
def test_graphs_of_one_structure_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "max_graphs_per_structure", 2)
    for size in (5, 7, 9, 11, 13):  # two graphs of numbers before sizes are symbols
        y = -torch.ones(size).to("lazy")  # no number, which another test may have made an input
        torpor.sync(wait=True)
        assert y.tolist() == [-1.0] * size
    assert compiled() == 2


# -- compiled in the background -------------------------------------------------------------------


@pytest.fixture
def in_background(kinds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "compile_async", True)
    KindsBackend.gate.clear()


def compile_all() -> None:
    KindsBackend.gate.set()
    COMPILER.wait()
    KindsBackend.gate.clear()


@pytest.mark.usefixtures("in_background")
def test_a_variant_is_compiled_beside_the_program_too() -> None:
    step(12)
    compile_all()
    step(22)
    assert KindsBackend.runs == 1
    for size in (13, 23, 33):  # for another kind, which is compiled meanwhile
        step(size)
    assert (KindsBackend.runs, compiled()) == (1, 2)
    compile_all()
    for size in (43, 12, 53):
        step(size)
    assert (KindsBackend.runs, compiled()) == (4, 2)


@pytest.mark.usefixtures("in_background")
def test_it_is_compiled_for_the_sizes_that_asked_for_it() -> None:
    COMPILER.submit("", KindsBackend.gate.wait)
    step(12)
    step(13)  # before that is begun
    compile_all()
    step(22)
    assert (KindsBackend.runs, compiled()) == (1, 1)


@pytest.mark.usefixtures("in_background")
def test_one_variant_is_compiled_after_the_other() -> None:
    step(10)
    compile_all()
    for size in range(11, 20):
        step(size)
        step(size + 10)
        compile_all()
        step(size + 20)
    assert compiled() == 1 + MAX_VARIANTS
    assert KindsBackend.runs == MAX_VARIANTS
    for size in range(30, 40):
        step(size)
    assert KindsBackend.runs == 2 * MAX_VARIANTS + 1


@pytest.mark.usefixtures("in_background")
def test_a_variant_that_cannot_be_compiled_runs_on_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such kind")

    step(12)
    compile_all()
    monkeypatch.setattr(KindsBackend, "compile", fail)
    step(13)
    COMPILER.wait()
    with pytest.warns(torpor.errors.TorporWarning, match="no such kind"):
        step(23)
    step(33)
    step(22)
    assert (KindsBackend.runs, compiled()) == (1, 2)


# -- on disk ---------------------------------------------------------------------------------------


@pytest.fixture
def disk(kinds: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(config, "cache", True)
    monkeypatch.setattr(config, "cache_dir", str(tmp_path / "cache"))
    KindsBackend.key = "kinds"
    return Store(tmp_path / "cache")


def begin_anew() -> None:
    """As in a process that has done other things before, and numbers its symbols otherwise."""
    PLANS.clear()
    SIZES.clear()
    x = torch.ones(4, 6).to("lazy")
    torpor.mark_dynamic(x, 1)
    torpor.sync(x.sum(), wait=True)
    PLANS.clear()
    metrics.reset()


def test_every_variant_finds_its_entry(disk: Store) -> None:
    for size in (12, 13, 14, 22):
        step(size)
    assert (compiled(), counted("DiskCacheWrite")) == (3, 3)
    begin_anew()
    for size in (24, 22, 33, 54, 12):
        step(size)
    assert (compiled(), counted("DiskCacheHit"), counted("DiskCacheMiss")) == (0, 3, 0)
    step(15)
    assert (compiled(), counted("DiskCacheMiss"), counted("DiskCacheWrite")) == (1, 1, 1)
    sizes = [disk.about(entry)["sizes"] for entry in disk.entries()]
    assert sorted(sizes) == [[6], [12], [13], [14], [15]]


def test_an_entry_that_is_gone_leaves_the_others_to_be_found(disk: Store) -> None:
    for size in (12, 13, 14):
        step(size)
    (first,) = [entry for entry in disk.entries() if disk.about(entry)["sizes"] == [12]]
    disk.remove(first.key)
    begin_anew()
    for size in (14, 13):
        step(size)
    assert compiled() == 0
    step(12)
    assert (compiled(), counted("DiskCacheWrite")) == (1, 1)
    assert {entry.key for entry in disk.entries()} >= {first.key}


def test_two_processes_that_compile_the_same_keep_it_once(
    disk: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(12)
    begin_anew()
    with monkeypatch.context() as patched:
        patched.setattr(Store, "read", lambda *_: None)  # both looked before either had written
        step(22)
    assert (compiled(), counted("DiskCacheWrite")) == (1, 1)
    assert [disk.about(e)["sizes"] for e in disk.entries()].count([12]) == 0
    assert [disk.about(e)["sizes"] for e in disk.entries()].count([22]) == 1


def test_no_more_kinds_are_kept_than_a_process_compiles(disk: Store) -> None:
    for size in range(10, 10 + KINDS):
        step(size)
    kept = len(disk.entries())
    assert kept == 1 + MAX_VARIANTS
    begin_anew()
    for size in range(29, 19, -1):
        step(size)
    assert counted("DiskCacheHit") == 1 + MAX_VARIANTS


def test_a_variant_from_disk_needs_no_room_to_compile(
    disk: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (12, 13):
        step(size)
    begin_anew()
    monkeypatch.setattr(config, "max_graphs_per_structure", 0)
    for size in (12, 13, 14):
        step(size)
    assert (compiled(), counted("DiskCacheHit"), KindsBackend.runs) == (0, 2, 2 + 1 + 2)


# -- a training on Inductor ------------------------------------------------------------------------

inductor = pytest.mark.skipif(
    inductor_runtime.unavailable() is not None, reason=str(inductor_runtime.unavailable())
)
STEPS = 25


@pytest.fixture(scope="module")
def shapes() -> list[tuple[int, int]]:
    return random_shapes(STEPS, fewest=2)


@pytest.fixture(scope="module")
def expected(shapes: list[tuple[int, int]]) -> list[float]:
    return train(None, STEPS, shapes)


@inductor
@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])
def test_a_training_of_random_sizes_compiles_a_few_times(
    in_background: bool,
    shapes: list[tuple[int, int]],
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "compile_after", COMPILE_AFTER)  # as in a long training
    monkeypatch.setattr(config, "compile_async", in_background)
    with torpor.using("inductor"):
        assert train(Put("lazy"), STEPS, shapes) == pytest.approx(expected, abs=1e-4)
        COMPILER.wait()
        before = counted("CachedCompile")
        assert train(Put("lazy"), STEPS, shapes) == pytest.approx(expected, abs=1e-4)
        assert 1 <= compiled() <= 4
        assert counted("CachedCompile") > before  # what was compiled is run


@inductor
def test_a_training_may_be_kept_from_compiling(
    shapes: list[tuple[int, int]], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "max_graphs_per_structure", 0)
    with torpor.using("inductor"):
        assert train(Put("lazy"), STEPS, shapes) == expected  # by eager's own kernels
    assert compiled() == 0


# -- sizes that turn out to be fixed ---------------------------------------------------------------


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "strict", True)  # what cannot be compiled is an error
    with torpor.using("inductor"):
        yield


def normalised(model: torch.nn.Module, size: int, device: str) -> list[torch.Tensor]:
    """Batch norm forward and backward, by a gradient whose size is a number."""
    x = torch.arange(size * 6.0).reshape(size, 3, 2).sin().to(device)
    if device == "lazy":
        torpor.mark_dynamic(x, 0)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    torpor.sync(wait=True)
    return [y, model.weight.grad, model.running_var]


def assert_normalises(sizes: Sequence[int]) -> None:
    eager, lazy = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3).to("lazy")
    for size in sizes:
        expected, made = normalised(eager, size, "cpu"), normalised(lazy, size, "lazy")
        for one, other in zip(expected, made, strict=True):
            torch.testing.assert_close(torpor.eager(other), one)


@inductor
@pytest.mark.usefixtures("strictly")
def test_arithmetic_on_a_size_that_is_found_fixed_after_it_is_compiled() -> None:
    assert_normalises((32, 12))
    assert compiled()
    assert not counted("CompiledForFixedSizes")


@pytest.fixture
def no_symbols(strictly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails wherever there are symbols."""
    compile_module = InductorBackend.compile_module

    def fail(self: InductorBackend, traced: Any, piece: Any) -> Any:
        if traced.open_sizes is not None:
            raise TypeError("Cannot convert expression to float")
        return compile_module(self, traced, piece)

    monkeypatch.setattr(InductorBackend, "compile_module", fail)


@inductor
@pytest.mark.usefixtures("no_symbols")
def test_what_fails_for_open_sizes_is_compiled_for_those_that_occur() -> None:
    for size in (12, 13, 12, 13, 14):
        step(size)
    assert compiled() == counted("CompiledForFixedSizes") == 3


@inductor
@pytest.mark.usefixtures("no_symbols")
def test_no_more_fixed_sizes_are_compiled_than_a_structure_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "max_graphs_per_structure", 2)
    for size in (12, 13, 14, 15, 13):
        step(size)
    assert compiled() == 2


@inductor
@pytest.mark.usefixtures("no_symbols")
def test_code_for_fixed_sizes_is_kept_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "cache", True)
    monkeypatch.setattr(config, "cache_dir", str(tmp_path / "cache"))
    for size in (12, 13):
        step(size)
    assert (compiled(), counted("DiskCacheWrite")) == (2, 2)
    PLANS.clear()
    SIZES.clear()
    metrics.reset()
    for size in (13, 12, 14):
        step(size)
    assert (compiled(), counted("DiskCacheHit")) == (1, 2)


@inductor
@pytest.mark.usefixtures("no_symbols")
def test_what_is_compiled_for_fixed_sizes_writes_over_statistics() -> None:
    assert_normalises((12, 13))
    assert counted("CompiledForFixedSizes")


def test_rows_that_are_computed_side_by_side_do_not_share_a_buffer() -> None:
    """Inductor's C++ fused loops over sixteen rows at once through a buffer of one row."""

    def gradient(tensor: torch.Tensor) -> torch.Tensor:
        x = tensor.clone().requires_grad_()
        y = x.t().softmax(-1).cumsum(0)
        weight = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape)
        (y * weight).sum().backward()
        assert x.grad is not None
        return x.grad

    with torpor.using("inductor", compile_after=0):
        for rows, columns in ((2, 3), (4, 5), (7, 4), (3, 6)):
            x = torch.arange(rows * columns, dtype=torch.float64).mul(7).remainder(11)
            x = x.view(rows, columns)
            torch.testing.assert_close(gradient(torpor.lazy(x)).cpu(), gradient(x))
