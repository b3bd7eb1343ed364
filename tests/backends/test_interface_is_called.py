"""Every method of `Backend` is called by the core: for each a program that makes it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from torpor.backend import Backend, BackendData, BackendDevice, Computation, IrBuilder, registry
from torpor.backends.reference import ReferenceBackend
from torpor.compiling.compilation import passes_of
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType


class Watched(ReferenceBackend):
    """Notes which of its methods are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        for name in METHODS:
            setattr(self, name, self._noting(name, getattr(self, name)))

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            return method(*args, **kwargs)

        return call


METHODS = sorted(
    name
    for name, member in vars(Backend).items()
    if inspect.isfunction(member) and not name.startswith("_")
)
PROPERTIES = sorted(name for name, member in vars(Backend).items() if isinstance(member, property))

torpor.backend.register("tests-watched", Watched)


def lazy() -> torch.Tensor:
    return torch.arange(4.0).to("lazy")


def read() -> None:
    (lazy() + 1).tolist()


def fall_back() -> None:
    lazy().nonzero()


def other_sizes() -> None:
    for length in range(3, 15, 2):
        x = torch.arange(float(length)).to("lazy") + 1
        torpor.sync()
        x.tolist()


def compiled_by_torch() -> None:
    torch.compiler.reset()
    torch.compile(lambda x: x + 1, backend="torpor")(torch.ones(2))


def list_passes() -> None:
    backend = torpor.backend.get_backend()
    passes_of(backend, backend.backend_device(torch.device("lazy", 0)))


PROGRAMS: dict[str, Callable[[], object]] = {
    "backend_device": lazy,
    "bucket_sizes": lambda: torpor.pad(lazy(), 0),
    "compilation_devices": read,
    "compile": read,
    "computation_text": lambda: torpor.graph(lazy() + 1, "backend"),
    "data_from_tensor": lazy,
    "data_of": read,
    "device_count": lambda: torch.lazy.device_count(),  # type: ignore[attr-defined]
    "decompositions": read,
    "devices": read,
    "eager_fallback_device_type": fall_back,
    "execute": read,
    "expect": compiled_by_torch,
    "accepts_sizes": other_sizes,
    "function": compiled_by_torch,
    "lowering_context": read,
    "memory_info": torpor.memory,
    "metric_report": torpor.metrics.report,
    "metrics": torpor.metrics.report,
    "passes": list_passes,
    "placeholder": read,
    "runs_on_one_core": read,
    "runs_here": read,
    "set_rng_seed": lambda: torpor.manual_seed(3),
    "tensor_from_data": read,
}
ELSEWHERE = {
    "initialize": "test_initialize_is_called_when_a_backend_is_made",
    "prepare_to_exit": "test_prepare_to_exit_is_called_for_every_backend_at_exit",
    "ir_builder": "test_the_builder_of_the_backend_makes_leaves_and_numbers",
    "data_from_scalar": "test_numbers_enter_as_data_where_the_backend_asks_for_it",
    "copy_data": "test_a_donated_buffer_that_others_hold_is_copied_by_the_backend",
    "is_shared": "test_a_donated_buffer_that_others_hold_is_copied_by_the_backend",
    "cache_key": "test_a_backend_that_keeps_graphs_is_asked_for_them_and_given_them_back",
    "dump": "test_a_backend_that_keeps_graphs_is_asked_for_them_and_given_them_back",
    "load": "test_a_backend_that_keeps_graphs_is_asked_for_them_and_given_them_back",
}


FLAGS = {
    "compile_after": "laziness/test_compile_after.py",
    "compiles_in_background": "laziness/test_compile_async.py",
    "cuts_at_zero_grad": "laziness/test_cuts_at_zero_grad.py",
    "draws": "laziness/test_backends_that_draw.py",
    "draws_from_seed": "laziness/test_backends_that_draw.py",
    "dynamic": "laziness/test_sizes.py",
    "exact": "unit/debug/planted.py",
    "functional": "backends/test_interface_is_called.py",
    "host_devices": "backends/test_own_buffers.py",
    "name": "backends/test_interface_is_called.py",
    "options": "unit/backend/test_registry.py",
    "scalars_as_data": "backends/test_interface_is_called.py",
    "takes_donations": "laziness/test_donation.py",
}
"""What a backend says of itself, and the tests of what the core makes of it."""


def test_all_that_a_backend_says_of_itself_has_tests() -> None:
    said = {n for n, member in vars(Backend).items() if not n.startswith("_")}
    assert said - {*METHODS, *PROPERTIES} == set(FLAGS)
    folder = Path(__file__).resolve().parents[1]
    assert [n for n, file in FLAGS.items() if n not in (folder / file).read_text()] == []


def test_every_method_has_a_program() -> None:
    assert sorted([*PROGRAMS, *ELSEWHERE]) == METHODS
    assert all(name in globals() for name in ELSEWHERE.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_core_calls(name: str) -> None:
    backend = torpor.use("tests-watched")
    assert isinstance(backend, Watched)
    backend.called.clear()
    PROGRAMS[name]()
    assert name in backend.called


def test_initialize_is_called_when_a_backend_is_made() -> None:
    calls: list[Backend] = []

    class Counting(ReferenceBackend):
        def initialize(self) -> None:
            calls.append(self)

    torpor.backend.register("tests-counting-init", Counting)
    backend = torpor.use("tests-counting-init")
    read()
    assert calls == [backend]


def test_a_backend_that_keeps_graphs_is_asked_for_them_and_given_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Keeping(ReferenceBackend):
        def cache_key(self) -> str | None:
            return "key"

        def compile(self, computations: Sequence[Computation]) -> list[Computation]:
            calls.append("compile")
            return super().compile(computations)

        def dump(self, computation: Computation) -> bytes | None:
            calls.append("dump")
            return b"kept"

        def load(self, computation: Computation, saved: bytes) -> Computation:
            calls.append(saved)
            return computation

    torpor.backend.register("tests-keeping", Keeping)
    monkeypatch.setattr(torpor.config, "cache", True)
    monkeypatch.setattr(torpor.config, "cache_dir", str(tmp_path / "cache"))
    torpor.use("tests-keeping")
    read()
    assert calls == ["compile", "dump"]
    torpor.use("tests-keeping")
    read()
    assert calls == ["compile", "dump", b"kept"]


def test_prepare_to_exit_is_called_for_every_backend_at_exit() -> None:
    program = """
import torch, torpor
from torpor.backends.reference import ReferenceBackend
class Told(ReferenceBackend):
    def prepare_to_exit(self):
        print(self.name, pending.cpu().tolist(), flush=True)
for name in ("one", "two"):
    torpor.backend.register(name, Told)
with torpor.using("one") as one:
    pending = torch.ones(2).to("lazy") + 1
    torpor.sync()
two = torpor.use("two")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["one [2.0, 2.0]", "two [2.0, 2.0]"]


class OwnBuilder(IrBuilder):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def device_data(self, slot: int, type_: TensorType) -> Value:
        self.asked.append((slot, type_))
        return super().device_data(slot, type_)

    def scalar(self, slot: int, number: Any) -> Value:
        self.asked.append((slot, number))
        return super().scalar(slot, number)


class Building(ReferenceBackend):
    """Brings a builder of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.builder = OwnBuilder()

    def ir_builder(self) -> IrBuilder:
        return self.builder


def test_the_builder_of_the_backend_makes_leaves_and_numbers() -> None:
    backend = Building()
    registry.activate(backend)
    x = lazy()
    for number in (17.5, 18.5, 19.5):
        (x * number).tolist()
        torpor.sync(wait=True)
    types = [what for _, what in backend.builder.asked]
    assert TensorType.of_tensor(torch.arange(4.0), torch.device("lazy", 0)) in types
    assert 19.5 in types


class Carrying(ReferenceBackend):
    """Has data of its own for a leaf: its graphs never see the one that was recorded."""

    def data_of(self, node: Node) -> BackendData | None:
        type_ = node.outputs[0].type
        if type_.shape != (7,):
            return None
        return BackendData(self.backend_device(type_.device), type_, torch.full((7,), 5.0))


def test_data_that_a_leaf_carries_are_what_a_graph_is_run_on() -> None:
    registry.activate(Carrying())
    assert (torch.zeros(7).to("lazy") + 1).tolist() == [6.0] * 7
    assert (torch.zeros(6).to("lazy") + 1).tolist() == [1.0] * 6


class ScalarsAsData(ReferenceBackend):
    """Wants run-time numbers as data, and turns them back itself."""

    scalars_as_data = True

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[Any] = []

    def data_from_scalar(self, scalar: Any, device: BackendDevice) -> BackendData:
        self.entered.append(scalar)
        return super().data_from_scalar(scalar, device)

    def execute(self, computation: Any, arguments: Any, device: BackendDevice) -> list[BackendData]:
        given = [
            argument if isinstance(type_, TensorType) else argument.tensor.item()
            for argument, type_ in zip(arguments, computation.parameter_types)
        ]
        return super().execute(computation, given, device)


def test_numbers_enter_as_data_where_the_backend_asks_for_it() -> None:
    backend = ScalarsAsData()
    registry.activate(backend)
    x = lazy()
    for number in (21.5, 22.5, 23.5):
        assert (x * number).tolist() == [0.0, number, 2 * number, 3 * number]
        torpor.sync(wait=True)
    assert 23.5 in backend.entered


class Donated(ReferenceBackend):
    """Takes donations, and says itself whose buffers are shared."""

    takes_donations = True

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[bool] = []
        self.copied = 0

    def is_shared(self, data: BackendData) -> bool:
        self.shared.append(super().is_shared(data))
        return self.shared[-1]

    def copy_data(self, data: BackendData) -> BackendData:
        self.copied += 1
        return super().copy_data(data)


def test_a_donated_buffer_that_others_hold_is_copied_by_the_backend() -> None:
    backend = Donated()
    registry.activate(backend)
    x = lazy()
    x.add_(1)
    torpor.sync(wait=True)
    assert (backend.shared, backend.copied) == ([False], 0)
    assert x._lazy_storage.data is not None
    held = x._lazy_storage.data.tensor
    x.add_(1)
    torpor.sync(wait=True)
    assert (backend.shared, backend.copied) == ([False, True], 1)
    assert held is not None
    assert held.tolist() == [1.0, 2.0, 3.0, 4.0]


class Functional(ReferenceBackend):
    """Wants ops that write to nothing, one for each tensor."""

    functional = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        self.seen += [node.op.name for c in computations for node in c.graph.nodes]
        return super().compile(computations)


def test_ops_that_write_become_functional_where_the_backend_asks_for_it() -> None:
    backend = Functional()
    registry.activate(backend)
    x = lazy()
    torch._foreach_add_([x, x.clone()], 1.0)
    assert x.mul_(2).tolist() == [2.0, 4.0, 6.0, 8.0]
    assert "aten.mul.Tensor" in backend.seen
    assert not [name for name in backend.seen if "foreach" in name or "_." in name]


# -- properties --------------------------------------------------------------------------------


def test_the_properties_are_the_default_device_and_what_a_backend_says_of_compiles() -> None:
    assert PROPERTIES == ["default_device_ordinal", "default_device_type", "weighs_compiles"]


def test_the_default_ordinal_is_the_device_behind_lazy() -> None:
    backend = torpor.backend.get_backend()
    backend.default_device_ordinal = 2
    try:
        assert torch.ones(2, device="lazy").device == torch.device("lazy", 2)
    finally:
        backend.default_device_ordinal = 0


def test_the_default_type_is_the_physical_device_behind_lazy() -> None:
    backend = torpor.backend.get_backend()
    backend.default_device_type = "meta"  # type: ignore[assignment]  # names are taken too
    try:
        assert backend.backend_device(torch.device("lazy", 0)).torch_device.type == "meta"
    finally:
        backend.default_device_type = "cpu"  # type: ignore[assignment]  # as above


# -- the device on which single ops fall back --------------------------------------------------


def test_an_op_that_falls_back_runs_where_the_backend_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torpor.overrides import eager

    backend = torpor.use("reference")
    monkeypatch.setattr(backend, "eager_fallback_device_type", lambda: "meta")
    assert eager._read_for_fallback(lazy()).device.type == "meta"  # type: ignore[arg-type]


# -- compilation devices and the builder's nodes -----------------------------------------------


def test_the_computation_knows_the_devices_it_is_compiled_for() -> None:
    seen: list[tuple[str, ...]] = []

    class Several(ReferenceBackend):
        def compilation_devices(self, device: str, devices: Any) -> list[str]:
            return [device, "cpu:7"]

        def compile(self, computations: Any) -> Any:
            seen.extend(computation.devices for computation in computations)
            return super().compile(computations)

    registry.activate(Several())
    read()
    assert seen == [("cpu:0", "cpu:7")]


def test_a_builder_expands_casts_lists_and_makes_any_node() -> None:
    builder = torpor.backend.get_backend().ir_builder()
    type_ = TensorType.of_tensor(torch.ones(1, 3), torch.device("lazy", 0))
    leaf = builder.device_data(0, type_)
    wide = builder.expand(leaf, (4, 3))
    assert (wide.type.shape, wide.type.stride) == ((4, 3), (0, 1))
    assert builder.expand(leaf, (4, 3)) is wide
    double = builder.cast(leaf, torch.float64)
    assert double.type.dtype == torch.float64
    assert builder.cast(leaf, torch.float32) is leaf
    pair = builder.tensor_list([leaf, wide])
    joined = builder.generic(torch.ops.aten.cat.default, [pair, 0])
    assert joined.outputs[0].type.shape == (5, 3)
    assert [builder.size(joined.outputs[0], dim) for dim in (0, 1, -1)] == [5, 3, 3]
    with pytest.raises(IndexError, match="no dimension 2"):
        builder.size(leaf, 2)


def test_built_nodes_run() -> None:
    from torpor.compiling.compilation import compile_graph
    from torpor.ir.graph import Graph

    backend = torpor.backend.get_backend()
    builder = backend.ir_builder()
    plain = torch.tensor([[1.5, -2.0, 3.0]])
    device = backend.backend_device(torch.device("lazy", 0))
    leaf = builder.device_data(0, TensorType.of_tensor(plain, torch.device("lazy", 0)))
    whole = builder.cast(builder.expand(leaf, (2, 3)), torch.int64)
    computation = compile_graph(Graph.of([whole]), "built", backend, device)
    data = backend.data_from_tensor(plain, leaf.type, device)
    (result,) = backend.execute(computation, [data], device)
    assert torch.equal(backend.tensor_from_data(result), plain.expand(2, 3).long())
