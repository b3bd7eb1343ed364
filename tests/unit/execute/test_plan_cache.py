"""Plans: compiled graphs by the values they compute, a bounded number of them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.unit.ir.graphs import MATRIX, chain, record
from torpor import config, metrics
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.errors import GraphError
from torpor.execute.plan import COMPUTED, SCALARS, needed_graph
from torpor.execute.plan_cache import PlanCache
from torpor.ir.graph import Graph
from torpor.ir.node import leaf, scalar

aten = torch.ops.aten
DEVICE = BackendDevice(BackendDeviceType("cpu"), 0)


class Compiler(Backend):
    """Notes what it compiles, and never runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[Computation] = []

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        self.compiled += computations
        return list(computations)

    def execute(self, *args: Any) -> list[BackendData]:
        raise AssertionError("nothing here runs")


def cached(cache: PlanCache, key: int) -> bool:
    return (key,) in cache.plans


def test_a_plan_is_found_under_its_key_and_counted() -> None:
    cache, graph = PlanCache(), chain(2)
    before = metrics.counters()
    assert cache.find(graph.outputs) is None
    plan = cache.begin(graph.outputs, graph, Compiler(), DEVICE).result()
    assert cache.find(graph.outputs) is plan
    after = metrics.counters()
    assert after["UncachedCompile"] == before.get("UncachedCompile", 0) + 1
    assert after["CachedCompile"] == before.get("CachedCompile", 0) + 1


def test_the_least_recently_used_plan_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "max_cached_plans", 2)
    cache, graph, backend = PlanCache(), chain(1), Compiler()
    cache.begin((1,), graph, backend, DEVICE).result()
    cache.begin((2,), graph, backend, DEVICE).result()
    cache.find((1,))
    cache.begin((3,), graph, backend, DEVICE).result()
    assert [cached(cache, key) for key in (1, 2, 3)] == [True, False, True]


def test_any_number_of_graphs_leaves_a_bounded_number_of_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "max_cached_plans", 4)
    cache, graph, backend = PlanCache(), chain(1), Compiler()
    for key in range(50):
        cache.begin((key,), graph, backend, DEVICE).result()
    assert len(cache.plans) == 4
    assert len({computation.name for computation in backend.compiled}) == 50


def test_a_plan_knows_where_its_inputs_come_from() -> None:
    known = record(aten.neg.default, leaf(0, MATRIX)).outputs[0]
    total = record(aten.add.Tensor, known, leaf(3, MATRIX), alpha=scalar(1, float)).outputs[0]
    graph = Graph.of([total], {known})
    plan = PlanCache().begin((total,), graph, Compiler(), DEVICE).result()
    assert plan.leaves("abcd") == ("d",)
    assert plan.others == ((0, COMPUTED, known), (2, SCALARS, 1))
    assert plan.positions == {total: 0}


def test_a_broken_graph_is_refused_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "verify_graphs", True)
    whole, backend = chain(2), Compiler()
    broken = Graph(whole.inputs, whole.nodes[1:], whole.outputs)
    cache = PlanCache()
    with pytest.raises(GraphError):
        cache.begin((1,), broken, backend, DEVICE).result()
    assert backend.compiled == []
    assert not cache.plans


def test_a_read_computes_live_values_on_its_way_and_what_others_need() -> None:
    first = record(aten.neg.default, leaf(0, MATRIX)).outputs[0]
    live = record(aten.exp.default, first).outputs[0]
    wanted = record(aten.sin.default, live).outputs[0]
    outside = record(aten.cos.default, first).outputs[0]
    graph = needed_graph([wanted], [live, outside], ())
    assert set(graph.outputs) == {wanted, live, first}
    assert outside.node not in graph.nodes
