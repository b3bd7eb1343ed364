"""Compiled graphs on disk: what another process makes of them, and when there are none."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from torpor import _torch, config, metrics
from torpor.backend import registry
from torpor.backends import provenance
from torpor.backends.blocks import saved as fx_saved
from torpor.backends.equality import same_bits
from torpor.backends.fx.backend import FxBackend
from torpor.backends.inductor import InductorBackend
from torpor.backends.inductor import runtime as inductor_runtime
from torpor.backends.reference.lowering import Instruction
from torpor.cache import graphs
from torpor.cache import store as persistent
from torpor.cache.store import Store
from torpor.compiling.compilation import compile_graph
from torpor.ir.graph import Graph
from torpor.trace.values import value_of

pytestmark = pytest.mark.skipif(
    inductor_runtime.unavailable() is not None, reason=str(inductor_runtime.unavailable())
)

PROGRAM = """
import hashlib, json, sys, time, warnings
import torch, torpor
from torch import nn
{before}
torpor.use("inductor")
torch.manual_seed(0)
words, mix, out = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 11)
model = nn.Sequential(words, nn.LayerNorm(16), mix, nn.ReLU(), out).to("lazy")
tokens = torch.randint(11, (4, 6)).to("lazy")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
losses, seconds = [], []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        seconds.append(time.perf_counter() - start)
parameters = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
print(json.dumps({{
    "losses": losses,
    "digest": hashlib.sha256(parameters.numpy().tobytes()).hexdigest(),
    "first": seconds[0],
    "counters": torpor.metrics.counters(),
    "lowered": "torch._inductor.compile_fx" in sys.modules,
    "warnings": [str(one.message) for one in caught if one.category is torpor.errors.TorporWarning],
    "explained": str(torpor.explain()),
}}))
"""


@dataclasses.dataclass
class Outcome:
    """What the program printed at its end."""

    losses: list[str]
    digest: str
    first: float
    counters: dict[str, int]
    lowered: bool
    warnings: list[str]
    explained: str

    def counted(self, name: str) -> int:
        return self.counters.get(name, 0)


def start(cache: Path, inductor: Path, before: str = "", **variables: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TORPOR_CACHE": "1",
        "TORPOR_CACHE_DIR": str(cache),
        "TORPOR_COMPILE_AFTER": "0",
        "TORPOR_COMPILE_ASYNC": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
        "TRITON_CACHE_DIR": str(inductor / "triton"),
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(before=textwrap.dedent(before))],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> Outcome:
    reported, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return Outcome(**json.loads(reported.splitlines()[-1]))


def run(cache: Path, inductor: Path, before: str = "", **variables: str) -> Outcome:
    return finish(start(cache, inductor, before, **variables))


@dataclasses.dataclass
class Cold:
    """The first process of all: what it found out and what it left behind."""

    outcome: Outcome
    cache: Path
    inductor: Path


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Cold:
    folder = tmp_path_factory.mktemp("cold")
    outcome = run(folder / "cache", folder / "inductor")
    return Cold(outcome, folder / "cache", folder / "inductor")


@pytest.fixture
def cache(cold: Cold, tmp_path: Path) -> Path:
    """A copy of what the first process left behind."""
    return Path(shutil.copytree(cold.cache, tmp_path / "cache"))


# -- another process -------------------------------------------------------------------------------


def test_the_first_process_keeps_what_it_compiles(cold: Cold) -> None:
    compiled = cold.outcome.counted("UncachedCompile")
    assert compiled >= 1
    assert cold.outcome.counted("DiskCacheWrite") == compiled
    assert cold.outcome.counted("DiskCacheMiss") == compiled
    assert len(Store(cold.cache).entries()) == compiled
    assert cold.outcome.warnings == []


def test_the_second_process_compiles_nothing(
    cold: Cold, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "inductor"
    warm = run(cache, empty)
    assert warm.counted("UncachedCompile") == 0
    assert warm.counted("DiskCacheHit") == cold.outcome.counted("UncachedCompile")
    assert warm.counted("DiskCacheMiss") == warm.counted("DiskCacheWrite") == 0
    assert (warm.losses, warm.digest) == (cold.outcome.losses, cold.outcome.digest)
    assert not warm.lowered  # nor did it need Inductor
    assert not [path for path in empty.rglob("*") if path.is_file()]  # nor a C++ compiler
    assert warm.warnings == []
    with capsys.disabled():
        ratio = warm.first / cold.outcome.first
        print(f"\nfirst step: {warm.first:.3f} s, {ratio:.1%} of {cold.outcome.first:.3f} s")


def test_a_graph_that_is_found_need_not_be_met_often(
    cold: Cold, cache: Path, tmp_path: Path
) -> None:
    warm = run(cache, tmp_path / "inductor", TORPOR_COMPILE_AFTER="4")
    assert warm.counted("InterpretedGraph") == 0
    assert warm.counted("DiskCacheHit") >= 1
    assert warm.losses == cold.outcome.losses


def test_explain_does_not_call_it_a_compile(cold: Cold, cache: Path, tmp_path: Path) -> None:
    warm = run(cache, tmp_path / "inductor")
    assert ", 0 compiled in " in warm.explained
    assert "found on disk, loaded in" in warm.explained
    assert "found on disk" not in cold.outcome.explained


def test_switched_off_nothing_is_found_or_kept(cold: Cold, cache: Path) -> None:
    assert Store(cache).clear()
    outcome = run(cache, cold.inductor, TORPOR_CACHE="0")
    assert not [name for name in outcome.counters if name.startswith("DiskCache")]
    assert Store(cache).entries() == []
    assert outcome.losses == cold.outcome.losses


@pytest.mark.slow
def test_eight_processes_at_once_agree(cold: Cold, tmp_path: Path) -> None:
    crowd = [start(tmp_path / "cache", cold.inductor) for _ in range(8)]
    outcomes = [finish(process) for process in crowd]
    assert len({outcome.digest for outcome in outcomes}) == 1
    assert [outcome.warnings for outcome in outcomes] == [[]] * 8
    store = Store(tmp_path / "cache")
    entries = store.entries()
    assert len(entries) == cold.outcome.counted("UncachedCompile")
    assert all(store.read(entry.key) is not None for entry in entries)
    after = run(tmp_path / "cache", tmp_path / "empty")
    assert after.counted("UncachedCompile") == 0
    assert after.digest == outcomes[0].digest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_second_process_compiles_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    cold = run(tmp_path / "cache", tmp_path / "first", **visible)
    warm = run(tmp_path / "cache", tmp_path / "second", **visible)
    assert warm.counted("UncachedCompile") == 0
    assert warm.counted("DiskCacheHit") == cold.counted("DiskCacheWrite") >= 1
    assert warm.warnings == cold.warnings == []
    assert warm.losses == cold.losses
    with capsys.disabled():
        print(
            f"\nfirst step: {warm.first:.3f} s, {warm.first / cold.first:.1%} of {cold.first:.3f}"
        )


# -- what goes wrong -------------------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "damage", ["flipped", pytest.param("cut", marks=SLOW), pytest.param("foreign", marks=SLOW)]
)
def test_damaged_entries_are_compiled_anew_and_replaced(
    cold: Cold, cache: Path, tmp_path: Path, damage: str
) -> None:
    for entry in Store(cache).entries():
        data = entry.path.read_bytes()
        place = len(data) // 2
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        entry.path.write_bytes({"flipped": flipped, "cut": data[:place], "foreign": data}[damage])
    if damage == "foreign":
        (cache / "secret").write_bytes(os.urandom(32))
    outcome = run(cache, cold.inductor)
    assert outcome.counted("DiskCacheRefused") == cold.outcome.counted("UncachedCompile")
    assert outcome.counted("UncachedCompile") == cold.outcome.counted("UncachedCompile")
    assert outcome.losses == cold.outcome.losses
    assert outcome.warnings == []
    again = run(cache, tmp_path / "inductor")
    assert again.counted("DiskCacheHit") == cold.outcome.counted("UncachedCompile")


def test_a_process_killed_while_it_writes_does_no_damage(cold: Cold, tmp_path: Path) -> None:
    killed = start(
        tmp_path / "cache",
        cold.inductor,
        """
        import os, signal
        from torpor.cache import store as persistent
        def die(path, data, write=persistent._write_through):
            if path.parent.name != "entries":
                return write(path, data)
            write(path, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        persistent._write_through = die
        """,
    )
    killed.communicate(timeout=600)
    assert killed.returncode == -signal.SIGKILL
    left = os.listdir(tmp_path / "cache" / "entries")
    assert len(left) == 1
    assert left[0].startswith(".unfinished")
    outcome = run(tmp_path / "cache", cold.inductor)
    assert outcome.losses == cold.outcome.losses
    assert outcome.counted("DiskCacheWrite") == outcome.counted("UncachedCompile")
    assert outcome.warnings == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, 64 KiB large."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_costs_one_warning(cold: Cold, small_disk: Path) -> None:
    outcome = run(small_disk / "cache", cold.inductor)
    assert outcome.losses == cold.outcome.losses
    assert outcome.counted("DiskCacheWrite") < outcome.counted("UncachedCompile")
    (reported,) = outcome.warnings
    assert "No space left on device" in reported


def test_a_disk_that_can_only_be_read_costs_one_warning(cold: Cold, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    outcome = run(small_disk / "cache", cold.inductor)
    assert outcome.losses == cold.outcome.losses
    assert outcome.counted("DiskCacheWrite") == 0
    (reported,) = outcome.warnings
    assert "Read-only file system" in reported


def test_a_cache_others_can_write_to_is_not_used(cold: Cold, cache: Path) -> None:
    os.chmod(cache, 0o777)
    outcome = run(cache, cold.inductor)
    assert outcome.counted("DiskCacheHit") == 0
    assert outcome.counted("UncachedCompile") >= 1
    assert outcome.losses == cold.outcome.losses
    (reported,) = outcome.warnings
    assert "others can write to" in reported


# -- keys ------------------------------------------------------------------------------------------


def test_every_option_has_a_key_of_its_own() -> None:
    keys = [
        InductorBackend(**options).cache_key()
        for options in (
            {}, {"rng": "fast"}, {"equal_subgraphs": False}, {"max_nodes": 9},
            {"max_autotune": True},
        )
    ]  # fmt: skip
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert InductorBackend().cache_key() == keys[0]


@pytest.mark.parametrize("name", ["software", "settings_of_torch", "processor", "graphics"])
def test_versions_settings_and_the_machine_are_in_the_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = InductorBackend().cache_key()
    monkeypatch.setattr(provenance, name, lambda: "something else")
    assert InductorBackend().cache_key() != key


def test_the_compiler_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = InductorBackend().cache_key()
    other = tmp_path / "c++"
    other.write_text("#!/bin/sh\necho another compiler\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    provenance.compiler.cache_clear()
    try:
        assert "another compiler" in provenance.compiler()
        assert InductorBackend().cache_key() != key
    finally:
        provenance.compiler.cache_clear()


def test_what_a_user_sets_is_in_the_key() -> None:
    key = InductorBackend().cache_key()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert InductorBackend().cache_key() != key
    finally:
        torch.set_default_dtype(before)
    assert InductorBackend().cache_key() == key


def place(backend: InductorBackend, donated: dict[int, int], *tensors: torch.Tensor) -> str | None:
    graph = Graph.of([value_of(tensor) for tensor in tensors])  # type: ignore[arg-type]  # lazy
    device = backend.backend_device(torch.device("lazy"))
    found = graphs.place_of(graph, backend, device, donated, "key")
    return None if found is None else found.key


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Graphs of this process are kept too."""
    monkeypatch.setattr(config, "cache", True)
    monkeypatch.setattr(config, "cache_dir", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.mark.usefixtures("kept")
def test_what_may_be_written_over_is_in_the_key() -> None:
    backend = torpor.use("inductor")
    assert isinstance(backend, InductorBackend)
    x = torch.ones(3).to("lazy")
    y = x + 1
    assert place(backend, {}, y) != place(backend, {0: 0}, y)
    assert place(backend, {}, y) == place(backend, {}, y)
    assert place(backend, {}, x + 2) != place(backend, {}, y)


@pytest.mark.usefixtures("kept")
def test_a_graph_with_an_op_of_somebodys_own_is_not_kept() -> None:
    @torch.library.custom_op("tests_disk_cache::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    backend = torpor.use("inductor")
    assert isinstance(backend, InductorBackend)
    x = torch.ones(3).to("lazy")
    assert place(backend, {}, x + 1) is not None
    assert place(backend, {}, twice(x) + 1) is None


# -- there and back --------------------------------------------------------------------------------


def there_and_back(
    backend: FxBackend, *tensors: torch.Tensor, donated: dict[int, int] | None = None
) -> tuple[Any, Any, Graph]:
    """A graph compiled, and the same from the bytes of the first, by another backend."""
    graph = Graph.of([value_of(tensor) for tensor in tensors])  # type: ignore[arg-type]  # lazy
    device = backend.backend_device(torch.device("lazy"))
    first = compile_graph(graph, "first", backend, device, donated or {})
    data = backend.dump(first)
    assert data is not None
    other = registry.make("inductor", **dict(backend.options))
    return first, compile_graph(graph, "again", other, device, donated or {}, data), graph


def arguments(graph: Graph, seed: int = 0) -> list[Any]:
    backend = registry.get_backend()
    generator = torch.Generator().manual_seed(seed)
    made: list[Any] = []
    for value in graph.inputs:
        if not hasattr(value.type, "shape"):
            made.append(value.type.kind(seed + 1.5))
            continue
        if value.type.dtype.is_floating_point:
            tensor = torch.randn(value.type.shape, generator=generator)
        else:
            tensor = torch.randint(0, 3, value.type.shape, generator=generator)
        device = backend.backend_device(value.type.device)
        made.append(backend.data_from_tensor(tensor.to(value.type.dtype), value.type, device))
    return made


def check(backend: FxBackend, *tensors: torch.Tensor, **options: Any) -> Any:
    """Both compute the same, bit for bit; the program from bytes."""
    first, again, graph = there_and_back(backend, *tensors, **options)
    for seed in (0, 1):
        expected = backend.execute(first, arguments(graph, seed), first.device)
        got = backend.execute(again, arguments(graph, seed), first.device)
        for one, other in zip(got, expected, strict=True):
            assert one.error is None
            assert one.tensor.stride() == other.tensor.stride()
            assert same_bits(one.tensor, other.tensor)
    assert again.program.broken is None
    return again.program


@pytest.fixture
def inductor() -> InductorBackend:
    backend = torpor.use("inductor")
    assert isinstance(backend, InductorBackend)
    return backend


def lazy(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype).to("lazy")


PROGRAMS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "fused": lambda: [(lazy(5, 7) * 2).relu().sum(1)],
    "kernels of eager's": lambda: [torch.addmm(lazy(4), lazy(3, 5), lazy(5, 4)) @ lazy(4, 2)],
    "convolution": lambda: [torch.conv2d(lazy(1, 2, 6, 6), lazy(3, 2, 3, 3)).relu()],
    "strides": lambda: [(lazy(4, 6) + 1).t(), (lazy(4, 6) - 1)[:, ::2]],
    "integers": lambda: [lazy(9, dtype=torch.int64) * 3 + 1, lazy(9, dtype=torch.bool).any()],
    "an index": lambda: [lazy(5, 2)[lazy(3, dtype=torch.int64)] * 2],
    "nothing to compute": lambda: [lazy(0, 3) * 2],
    "a fallback": lambda: [torch.linalg.eigvals(lazy(3, 3)).real * 2 + lazy(3)],
    "a constant": lambda: [lazy(3) * torch.tensor([1.0, 2.0, 3.0]).to("lazy")],
    "draws": lambda: [torch.bernoulli(lazy(6) * 0.5) + 1],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_from_bytes_computes_the_same(name: str, inductor: InductorBackend) -> None:
    check(inductor, *PROGRAMS[name]())


def test_numbers_at_run_time_stay_such(inductor: InductorBackend) -> None:
    x = lazy(4)
    for number in (2.0, 3.0, 4.5):
        torpor.sync(y := x * number, wait=True)
    y = x * 7.25 + 1
    program = check(inductor, y)
    assert any(step.numbers for step in program.steps if not isinstance(step, Instruction))


def test_donated_buffers_are_written_over_again(inductor: InductorBackend) -> None:
    x = lazy(6)
    _, again, graph = there_and_back(inductor, x + 1, donated={0: 0})
    (given,) = arguments(graph)
    before = given.tensor.clone()
    (result,) = inductor.execute(again, [given], again.device)
    assert torch.equal(result.tensor, before + 1)
    assert result.tensor.data_ptr() == given.tensor.data_ptr()


def test_a_graph_in_several_pieces_is_put_together(inductor: InductorBackend) -> None:
    backend = torpor.use("inductor", max_nodes=2)
    assert isinstance(backend, InductorBackend)
    x = lazy(5)
    program = check(backend, (((x + 1) * 2).relu() - 3).exp().sum())
    assert len(program.steps) >= 3


def test_an_index_out_of_range_is_still_told(inductor: InductorBackend) -> None:
    x, index = lazy(5, 2), lazy(3, dtype=torch.int64)
    _, again, graph = there_and_back(inductor, x[index] * 2)
    given = arguments(graph)
    for data in given:
        if data.type.dtype is torch.int64:
            data.tensor = data.tensor + 99
    (result,) = inductor.execute(again, given, again.device)
    assert isinstance(result.error, IndexError)


def test_what_runs_alone_runs_alone_again_and_is_counted(
    inductor: InductorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "miscompiles", lambda node: "neg" in node.op.name)
    x = lazy(4)
    before = counted("fallback::aten.neg.default")
    program = check(inductor, (-(x * 2) + 1).relu(), -x)
    assert sum(isinstance(step, Instruction) for step in program.steps) == 2
    assert len(program.steps) == 4
    assert counted("fallback::aten.neg.default") == before + 4


def test_its_text_is_that_of_the_first(inductor: InductorBackend) -> None:
    first, again, _ = there_and_back(inductor, (lazy(3) * 2).relu())
    text = inductor.computation_text(again)
    assert text == inductor.computation_text(first)
    assert "kernel(" in text


def test_shared_code_is_kept_once(inductor: InductorBackend) -> None:
    first, _, _ = there_and_back(inductor, (lazy(3) * 2).relu())
    program = first.program
    alone = len(inductor.dump(first) or b"")
    program.steps = program.steps * 3
    assert len(inductor.dump(first) or b"") < alone * 1.5


def test_what_inductor_alone_can_keep_comes_back(
    inductor: InductorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "inductor_module", lambda code: None)  # as for a GPU
    _, again, graph = there_and_back(inductor, (lazy(4, 4) @ lazy(4, 4)).relu())
    (result,) = inductor.execute(again, arguments(graph), again.device)
    one, other = (data.tensor for data in arguments(graph))
    torch.testing.assert_close(result.tensor, (one @ other).relu())
    assert "kernel(" in inductor.computation_text(again)


def test_a_module_that_is_not_understood_is_not_kept(
    inductor: InductorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def puzzling(code: Any, real: Any = _torch.inductor_module) -> Any:
        source, names, constants = real(code)
        return f"{source}\nfor _ in (): pass\n", names, constants

    graph = Graph.of([value_of((lazy(4) * 2).relu())])  # type: ignore[arg-type]  # lazy
    device = inductor.backend_device(torch.device("lazy"))
    computation = compile_graph(graph, "puzzling", inductor, device)
    assert inductor.dump(computation) is not None
    monkeypatch.setattr(_torch, "inductor_module", puzzling)
    assert inductor.dump(computation) is None


def test_a_graph_that_was_not_compiled_whole_is_not_kept(
    inductor: InductorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("the compiler was killed")

    monkeypatch.setattr(inductor, "compile_module", fail)
    graph = Graph.of([value_of(lazy(3) * 2)])  # type: ignore[arg-type]  # lazy
    device = inductor.backend_device(torch.device("lazy"))
    with pytest.warns(torpor.errors.TorporWarning, match="the compiler was killed"):
        computation = compile_graph(graph, "failed", inductor, device)
    assert inductor.dump(computation) is None


def test_bytes_of_another_version_are_refused(
    inductor: InductorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, graph = there_and_back(inductor, (lazy(3) * 2).relu())
    data = inductor.dump(first)
    monkeypatch.setattr(fx_saved, "VERSION", 99)
    with pytest.raises(torpor.errors.CompileError, match="version 3, not 99"):
        compile_graph(graph, "again", inductor, first.device, {}, data)


# -- in one process --------------------------------------------------------------------------------


def compute() -> list[float]:
    x = torch.arange(6.0).to("lazy")
    result: list[float] = ((x * 3 - 2).relu() + 0.5).tolist()
    return result


def counted(name: str) -> int:
    return metrics.counters().get(name, 0)


@pytest.mark.usefixtures("kept")
def test_another_backend_of_this_process_finds_it() -> None:
    torpor.use("inductor")
    before = counted("UncachedCompile"), counted("DiskCacheHit")
    first = compute()
    assert (counted("UncachedCompile"), counted("DiskCacheHit")) == (before[0] + 1, before[1])
    torpor.use("inductor")
    assert compute() == first
    assert (counted("UncachedCompile"), counted("DiskCacheHit")) == (before[0] + 1, before[1] + 1)
    torpor.use("inductor", max_nodes=77)
    compute()
    assert counted("UncachedCompile") == before[0] + 2


@pytest.mark.usefixtures("kept")
def test_what_is_found_is_no_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    for use in ("warm", "found"):
        torpor.use("inductor")
        monkeypatch.setattr(config, "on_recompile", "ignore" if use == "warm" else "raise")
        for scale in (2.0, 5):
            (torch.ones(3).to("lazy") * scale).tolist()


def test_an_entry_that_the_backend_refuses_is_replaced(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torpor.use("inductor")
    first = compute()
    (entry,) = Store(kept).entries()
    refused, written = counted("DiskCacheRefused"), counted("DiskCacheWrite")
    with monkeypatch.context() as patched:
        patched.setattr(fx_saved, "VERSION", 99)
        torpor.use("inductor")
        assert compute() == first
    assert counted("DiskCacheRefused") == refused + 1
    (again,) = Store(kept).entries()
    assert again.key == entry.key
    assert counted("DiskCacheWrite") == written + 1


def test_a_backend_that_cannot_keep_a_graph_goes_on(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no bytes today")

    backend = torpor.use("inductor")
    monkeypatch.setattr(persistent, "_warned", set())
    monkeypatch.setattr(backend, "dump", fail)
    with pytest.warns(torpor.errors.TorporWarning, match="no bytes today"):
        found = compute()
    assert found == [0.5, 1.5, 4.5, 7.5, 10.5, 13.5]
    assert Store(kept).entries() == []


def test_settings_that_have_no_text_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "inductor_settings", lambda: None)
    assert InductorBackend().cache_key() is None
