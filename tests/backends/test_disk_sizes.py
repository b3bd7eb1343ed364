"""Graphs with sizes that change, compiled by Inductor and kept on disk."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torpor
from tests.tagger import random_shapes, train
from torpor import _torch, config, metrics
from torpor.backend.pack import pack, unpack
from torpor.backend.registry import make
from torpor.backends.equality import same_bits
from torpor.backends.inductor import InductorBackend
from torpor.backends.inductor import runtime as inductor_runtime
from torpor.cache import store
from torpor.cache.store import Store
from torpor.compiling.compilation import compile_graph
from torpor.errors import CompileError
from torpor.execute.sync import PLANS
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF
from torpor.ir.types import SymbolicType, type_at
from torpor.symbols.leaves import SIZES
from torpor.trace.values import value_of

pytestmark = pytest.mark.skipif(
    inductor_runtime.unavailable() is not None, reason=str(inductor_runtime.unavailable())
)

# -- another process -------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
STEPS = 16
PROGRAM = """
import json, sys
import torch, torpor
from tests.comparison import Put
from tests.tagger import random_shapes, train
torpor.use("inductor")
seed, before = int(sys.argv[1]), int(sys.argv[2])
for size in range(2, 2 + before):  # so that other symbols have the numbers of the other process
    x = torch.ones(3, size).to("lazy")
    torpor.mark_dynamic(x, 1)
    (x * 2).tolist()
torpor.metrics.reset()
losses = train(Put("lazy"), {steps}, random_shapes({steps}, fewest=2, seed=seed))
lowered = "torch._inductor.compile_fx" in sys.modules
print(json.dumps({{"losses": losses, "counters": torpor.metrics.counters(), "lowered": lowered}}))
"""


@dataclasses.dataclass
class Outcome:
    """What the program printed at its end."""

    losses: list[float]
    counters: dict[str, int]
    lowered: bool

    def counted(self, name: str) -> int:
        return self.counters.get(name, 0)


def run(cache: Path, seed: int, before: int = 0, **others: str) -> Outcome:
    variables = {
        **os.environ,
        "TORPOR_CACHE": "1",
        "TORPOR_CACHE_DIR": str(cache),
        "TORPOR_COMPILE_ASYNC": "0",
        "TORPOR_COMPILE_AFTER": "4",
        "CUDA_VISIBLE_DEVICES": "",
        **others,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(steps=STEPS), str(seed), str(before)],
        cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    folder = tmp_path_factory.mktemp("cold")
    return run(folder / "cache", seed=2), folder / "cache"


def test_the_second_process_compiles_nothing(cold: tuple[Outcome, Path], tmp_path: Path) -> None:
    first, cache = cold
    assert first.counted("UncachedCompile") == first.counted("DiskCacheWrite") >= 1
    second = run(cache, seed=2, before=1, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "empty"))
    assert second.counted("UncachedCompile") == 0
    assert second.counted("DiskCacheHit") >= 1
    assert second.counted("InterpretedGraph") < first.counted("InterpretedGraph")
    assert second.losses == pytest.approx(first.losses, abs=1e-5)
    assert not second.lowered  # nor did it need Inductor
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # nor a C++ compiler


@pytest.mark.slow
def test_sizes_need_not_be_those_of_the_first_process(cold: tuple[Outcome, Path]) -> None:
    _, cache = cold
    other = run(cache, seed=5)
    assert other.counted("UncachedCompile") == 0
    assert other.counted("DiskCacheHit") >= 1
    expected = train(None, STEPS, random_shapes(STEPS, fewest=2, seed=5))
    assert other.losses == pytest.approx(expected, abs=1e-4)


# -- there and back --------------------------------------------------------------------------------


@pytest.fixture
def inductor() -> Iterator[InductorBackend]:
    backend = torpor.use("inductor")
    assert isinstance(backend, InductorBackend)
    PLANS.clear()
    yield backend
    PLANS.clear()


def lazy(*shape: int, marked: tuple[int, ...] = (0,)) -> Tensor:
    x = torch.ones(shape).to("lazy")
    torpor.mark_dynamic(x, *marked)
    return x


def graph_of(*tensors: Tensor) -> Graph:
    return Graph.of([value_of(tensor) for tensor in tensors]).with_sizes()  # type: ignore[arg-type]  # lazy


def there_and_back(backend: InductorBackend, graph: Graph) -> tuple[Any, Any]:
    """A graph compiled, and the same from the bytes of the first, by another backend."""
    device = backend.backend_device(torch.device("lazy"))
    first = compile_graph(graph, "first", backend, device)
    saved = backend.dump(first)
    assert saved is not None
    return first, compile_graph(graph, "again", make("inductor"), device, saved=saved)


def arguments(backend: InductorBackend, graph: Graph, sizes: tuple[int, ...]) -> list[Any]:
    values = dict(zip(graph.symbols, sizes, strict=True))
    draw = torch.Generator().manual_seed(sum(sizes))
    made: list[Any] = []
    for value in graph.inputs:
        if value.node.op is LEAF:
            type_ = type_at(value.type, values)
            tensor = torch.randn(type_.shape, generator=draw)
            device = backend.backend_device(type_.device)
            made.append(backend.data_from_tensor(tensor, type_, device))
        else:
            made.append(values[value.node.args[0]])
    return made


PROGRAMS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "strides": lambda x: [(x * 2).t(), (x + 1).t()[1:], x.exp()[:, ::2]],
    "expressions": lambda x: [x[1:] @ x[1:].t(), torch.cat([x, x[: len(x) // 2]]).flatten()],
    "in pieces": lambda x: [torch.linalg.eigvals(x.t() @ x).real.sum() * x.t().exp() + x.t()],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_from_bytes_computes_the_same(name: str, inductor: InductorBackend) -> None:
    for length in (6, 9, 8):  # so that sizes computed from it are expressions
        outputs = PROGRAMS[name](lazy(length, 4))
        torpor.sync(wait=True)
    outputs = PROGRAMS[name](lazy(7, 4))
    graph = graph_of(*outputs)
    assert len(graph.symbols) == 1
    first, again = there_and_back(inductor, graph)
    assert [c.text for c in again.program.conditions] == [c.text for c in first.program.conditions]
    assert again.program.types == first.program.types
    for length in (7, 12, 33):
        given = arguments(inductor, graph, (length,))
        assert inductor.accepts_sizes(again, again.sizes_in(given))
        types = again.result_types_for(given)
        expected = inductor.execute(first, given, first.device)
        got = inductor.execute(again, given, first.device)
        for one, other, type_ in zip(got, expected, types, strict=True):
            assert one.error is None
            assert (tuple(one.tensor.shape), one.tensor.stride()) == (type_.shape, type_.stride)
            assert same_bits(one.tensor, other.tensor)
    assert again.program.broken is None


def test_what_lies_otherwise_than_promised_lies_so_again(
    inductor: InductorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "miscompiles", lambda node: "exp" in node.op.name)

    def output(length: int) -> Tensor:
        x = lazy(length, 4)
        return ((x * 2)[1:, ::2]).exp()  # a view that is handed over to what runs alone

    for length in (6, 9, 8):
        torpor.sync(output(length), wait=True)
    graph = graph_of(output(7))
    first, again = there_and_back(inductor, graph)
    types = again.program.types
    assert types == first.program.types
    steps = again.program.reference[0]
    made = [(types[r], v.type) for i in steps for r, v in zip(i.outputs, i.node.outputs)]
    (layouts,) = [type_ for type_, promised in made if type_ is not promised]
    assert type(layouts) is SymbolicType
    for length in (7, 20):
        given = arguments(inductor, graph, (length,))
        (result,) = inductor.execute(again, given, again.device)
        torch.testing.assert_close(result.tensor, (given[0].tensor * 2)[1:, ::2].exp())


def test_two_sizes_keep_their_order(inductor: InductorBackend) -> None:
    x = lazy(5, 7, marked=(0, 1))
    graph = graph_of(x.t() * 2, x.sum(0), x.flatten() + 1)
    first, again = there_and_back(inductor, graph)
    given = arguments(inductor, graph, (3, 11))
    results = [inductor.execute(one, given, one.device) for one in (first, again)]
    assert [r.tensor.shape for r in results[1]] == [(11, 3), (11,), (33,)]
    for one, other in zip(*results, strict=True):
        assert same_bits(one.tensor, other.tensor)


def test_what_inductor_alone_can_keep_comes_back(
    inductor: InductorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "inductor_module", lambda code: None)  # as for a GPU
    graph = graph_of((lazy(6, 4) @ lazy(6, 4).t()).relu())
    _, again = there_and_back(inductor, graph)
    for length in (6, 15):
        given = arguments(inductor, graph, (length,) * len(graph.symbols))
        one, other = (data.tensor for data in given[:2])
        (result,) = inductor.execute(again, given, again.device)
        torch.testing.assert_close(result.tensor, (one @ other.t()).relu())
    assert again.program.broken is None


# -- entries that are not what they should be ------------------------------------------------------


def changed(saved: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    parts = unpack(saved)
    facts = json.loads(parts["steps"])
    change(facts)
    parts["steps"] = json.dumps(facts).encode()
    return pack(parts)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "code": lambda facts: facts["conditions"].append("__import__('os').abort()"),
    "a call": lambda facts: facts["conditions"].append("exit(s0, 1)"),
    "an attribute": lambda facts: facts["conditions"].append("s0.__class__ == 1"),
    "a symbol it does not have": lambda facts: facts["conditions"].append("s1 > 2"),
    "no text": lambda facts: facts["conditions"].append(7),
    "no list": lambda facts: facts.update(conditions=3),
    "nothing": lambda facts: facts.pop("conditions"),
    "a stride of nothing": lambda facts: facts["layouts"].append([1, [None]]),
    "a stride of others": lambda facts: facts["layouts"].append([1, [[[[1, ["s7"]]], 1]]]),
    "other buffers": lambda facts: facts["donated"].append([0, 1]),
}


@pytest.fixture(scope="module")
def saved() -> tuple[Graph, bytes]:
    """A graph with a size that changes, and the bytes it is kept as."""
    backend = torpor.use("inductor")
    assert isinstance(backend, InductorBackend)
    graph = graph_of(lazy(6, 4) * 2)
    device = backend.backend_device(torch.device("lazy"))
    data = backend.dump(compile_graph(graph, "kept", backend, device))
    assert data is not None
    return graph, data


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_in_an_entry_is_refused(
    name: str, saved: tuple[Graph, bytes], inductor: InductorBackend
) -> None:
    graph, data = saved
    device = inductor.backend_device(torch.device("lazy"))
    assert compile_graph(graph, "whole", inductor, device, saved=changed(data, lambda _: None))
    with pytest.raises(CompileError):
        compile_graph(graph, "hostile", inductor, device, saved=changed(data, HOSTILE[name]))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(config, "cache", True)
    monkeypatch.setattr(config, "cache_dir", str(tmp_path / "kept"))
    return Store(tmp_path / "kept")


def begin_anew() -> None:
    """As in a process that knows nothing of the last one."""
    torpor.use("inductor")
    PLANS.clear()
    SIZES.clear()
    metrics.reset()


def double(length: int) -> None:
    x = lazy(length, 4)
    assert (x * 2).tolist() == [[2.0] * 4] * length


def counted(name: str) -> int:
    return metrics.counters().get(name, 0)


def flip(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


@pytest.mark.parametrize("damage", ["flipped", "cut short", "hostile"])
def test_damaged_entries_are_compiled_anew_and_replaced(damage: str, kept: Store) -> None:
    begin_anew()
    double(5)
    (entry,) = kept.entries()
    about, payload = kept.load(entry.path)
    if damage == "hostile":  # and signed
        about.pop("key")
        kept.write(entry.key, about, changed(payload, HOSTILE["code"]))
    else:
        data = entry.path.read_bytes()
        entry.path.write_bytes(flip(data) if damage == "flipped" else data[: len(data) // 2])
    begin_anew()
    double(9)
    assert (counted("DiskCacheRefused"), counted("UncachedCompile")) == (1, 1)
    begin_anew()
    double(6)
    assert (counted("DiskCacheHit"), counted("UncachedCompile")) == (1, 0)


def test_an_entry_of_another_cache_is_none(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_anew()
    double(5)
    (kept.directory / "secret").write_bytes(os.urandom(32))
    monkeypatch.setattr(store, "_stores", {})  # as in a process that has not read it yet
    begin_anew()
    double(5)
    assert (counted("DiskCacheRefused"), counted("UncachedCompile")) == (1, 1)


# -- code for one kind of sizes --------------------------------------------------------------------


def running(length: int) -> None:
    """Inductor's code for this is for two rows alone, or for all but two."""
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(length))
    y = x.to("lazy")
    torpor.mark_dynamic(y, 0)
    expected = torch.cumsum(x, 0)[1:].t() @ x[1:]
    actual = (torch.cumsum(y, 0)[1:].t() @ y[1:]).cpu()
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()


def test_every_variant_finds_its_entry(kept: Store) -> None:
    lengths = (7, 5, 9, 2, 6)
    begin_anew()
    for length in lengths:
        running(length)
    compiled = counted("UncachedCompile")
    sizes = sorted(kept.about(entry)["sizes"] for entry in kept.entries())
    assert compiled == len(sizes) >= 2
    assert [2] in sizes
    for order in (lengths, lengths[::-1]):
        begin_anew()
        for length in order:
            running(length)
        assert counted("UncachedCompile") == counted("DiskCacheMiss") == 0
        assert counted("DiskCacheHit") == compiled
