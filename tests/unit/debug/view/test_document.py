"""What the page shows of a graph: groups, equal parts, costs, memory, steps; live and of files."""

import json
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import torpor
from tests.unit.debug.steps import training_step
from tests.unit.debug.test_replay import tampered
from torpor.backend import register
from torpor.backends.reference import ReferenceBackend
from torpor.debug.facts import EventFact
from torpor.debug.file_format import Reader
from torpor.debug.view import folding
from torpor.debug.view.cost import flops, traffic
from torpor.debug.view.document import NODE_FIELDS, graph_document
from torpor.debug.view.folding import MOST_CHILDREN, Fold, fold
from torpor.debug.view.memory_profile import POINTS, memory_of
from torpor.debug.view.repeated_parts import LabelledGraph, RepeatedPart
from torpor.debug.view.sources import FileSource, LiveSource
from torpor.debug.view.steps import steps
from torpor.errors import RecordFileError, TorporWarning
from torpor.ir.graph import Graph
from torpor.observe.history import HISTORY
from torpor.observe.memory import predict
from torpor.passes import Pass
from torpor.text.printer import print_graph
from torpor.trace.values import value_of


def graph_of(*tensors):
    return Graph.of([value_of(t) for t in tensors])


def labels(group):
    return [item.label if isinstance(item, Fold) else item for item in group.items]


def tree_of(graph, scopes=None, lines=None):
    count = len(graph.nodes)
    return fold(graph, scopes or [None] * count, lines or [""] * count)


def groups_in(root):
    found = [root]
    for group in found:
        found.extend(item for item in group.items if isinstance(item, Fold))
    return found


def assert_whole(root, count):
    """Every node stands in one group, and no group is too wide."""
    own = [item for group in groups_in(root) for item in group.items if isinstance(item, int)]
    assert sorted(own) == list(range(count))
    assert all(len(group.items) <= MOST_CHILDREN for group in groups_in(root))


# -- equal parts -------------------------------------------------------------------------------


def test_parts_that_repeat_side_by_side_are_found():
    x = torch.ones(4).to("lazy")
    for _ in range(5):
        x = torch.relu(x * 2 + 1)
    graph = graph_of(torch.exp(x))
    assert LabelledGraph(graph).repeats(range(len(graph.nodes))) == [RepeatedPart(0, 3, 5)]


def test_parts_that_hang_together_otherwise_are_not_equal():
    x = torch.ones(4).to("lazy")
    y = x.exp()
    a = y.sin() + y.cos()
    b = a.sin() + y.cos()  # the same ops, and one operand from elsewhere
    graph = graph_of(b)
    structure = LabelledGraph(graph)
    assert structure.shape_of([1, 2, 3]) == structure.shape_of([1, 2, 3])
    for repeat in structure.repeats(range(len(graph.nodes))):
        assert repeat.period == 1


@pytest.mark.parametrize("change", ["constant", "type"])
def test_parts_with_other_constants_or_types_are_not_equal(change):
    x = torch.ones(4, 4).to("lazy")
    y = torch.relu(x + 1)
    z = torch.relu(y + 2) if change == "constant" else torch.relu(y[:2] + 1)
    graph = graph_of(z)
    assert LabelledGraph(graph).repeats(range(len(graph.nodes))) == []


def test_no_repeat_is_left_out_in_a_long_row():
    x = torch.ones(4).to("lazy")
    for i in range(300):
        x = torch.relu(x * 2)
        if i % 100 == 99:
            x = x.exp()
    graph = graph_of(x)
    found = LabelledGraph(graph).repeats(range(len(graph.nodes)))
    assert sum(repeat.length for repeat in found) >= 600
    assert all(a.start + a.length <= b.start for a, b in pairwise(found))


# -- folding -----------------------------------------------------------------------------------


def recorded_step(path, layers, steps_=1):
    step = training_step(layers)
    step()
    with torpor.record(path, data=False):
        for _ in range(steps_):
            step()
    return FileSource(path)


def test_a_training_step_folds_by_phase_and_module(tmp_path):
    source = recorded_step(tmp_path / "f", 6)
    number = max(range(len(source.graphs)), key=lambda i: len(source.graphs[i]))
    graph, scopes = source.graphs[number], source.facts.graphs[number].scopes
    root = tree_of(graph, scopes)
    assert_whole(root, len(graph.nodes))
    phases = [item.label for item in root.items if isinstance(item, Fold)]
    assert {"forward", "backward", "optimizer"} <= set(phases)
    kinds = {(group.kind, group.label) for group in groups_in(root)}
    assert (folding.MODULE, "Deep") in kinds
    assert (folding.REPEAT, "0 … 5  ×6") in kinds


def test_nodes_without_modules_fold_by_repeats_lines_and_numbers():
    x = torch.ones(4).to("lazy")
    values = []
    for i in range(400):
        x = x * (i + 1)
        values.append(x)
    graph = graph_of(x)
    root = tree_of(graph, lines=[f"train.py:{i // 100}" for i in range(400)])
    assert_whole(root, 400)
    assert labels(root) == [f"train.py:{i}" for i in range(4)]
    assert_whole(tree_of(graph), 400)


def test_a_loop_folds_to_its_body():
    x = torch.ones(4).to("lazy")
    for _ in range(200):
        x = torch.relu(x * 2 + 1)
    graph = graph_of(x)
    root = tree_of(graph)
    assert_whole(root, 600)
    assert labels(root) == ["3 nodes ×200"]


def test_an_empty_graph_has_a_tree():
    assert tree_of(Graph((), (), ())).items == []
    assert graph_document(0, "none", Graph((), (), ()), []).nodes == []


# -- costs and memory --------------------------------------------------------------------------


def test_costs_of_nodes():
    a, b = torch.ones(3, 4).to("lazy"), torch.ones(4, 5).to("lazy")
    product = a @ b
    graph = graph_of(torch.relu(product).t())
    costs = {node.op.name.split(".")[1]: (flops(node), traffic(node)) for node in graph.nodes}
    assert costs["mm"] == (2 * 3 * 4 * 5, 4 * (12 + 20 + 15))
    assert costs["relu"] == (15, 4 * 30)
    assert costs["t"] == (0, 0)


def convolution(x, w):
    y = torch.nn.functional.conv2d(x, w, padding=1)
    return torch.autograd.grad(y.sum(), [x, w])


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(3, 4), (4, 5)]),
        (torch.addmm, [(5,), (3, 4), (4, 5)]),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)]),
        (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
        (torch.nn.functional.linear, [(2, 3, 4), (5, 4), (5,)]),
        (convolution, [(1, 2, 5, 5), (3, 2, 3, 3)]),
    ],
)
def test_products_cost_what_torch_says(function, shapes):
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        function(*given)
    found = function(*(tensor.detach().to("lazy").requires_grad_() for tensor in given))
    graph = graph_of(*(found if isinstance(found, tuple) else [found]))
    counted = [node for node in graph.nodes if node.op.target.overloadpacket in flop_registry]
    assert counted
    assert sum(map(flops, counted)) == counter.get_total_flops()


def test_the_peak_by_line_is_the_predicted_peak(tmp_path):
    source = recorded_step(tmp_path / "f", 3)
    graph = max(source.graphs, key=len)
    memory = memory_of(graph)
    assert memory.peak == max(memory.totals)
    assert sum(line.at_peak for line in memory.lines) == memory.peak
    assert 0 < memory.peak <= predict(graph).peak
    for i, total in enumerate(memory.totals):
        shown = sum(line.points[i] for line in memory.lines if line.points is not None)
        assert shown + memory.others[i] == total


def test_long_graphs_are_shown_by_their_worst_moments():
    x = torch.ones(8).to("lazy")
    for i in range(5 * POINTS):
        x = x + i
    wide = x.expand(100, 8) * 2
    graph = graph_of(wide.sum())
    memory = memory_of(graph)
    assert len(memory.positions) == POINTS
    assert memory.peak >= 100 * 8 * 4
    assert memory.peak in memory.totals


# -- steps -------------------------------------------------------------------------------------


def event(kind, start, end):
    return EventFact(kind, start, end - start)


def test_reading_and_writing_compiled_graphs_counts_as_compiling():
    events = [event("record", 0.0, 1.0), event("load", 1.0, 1.5), event("keep", 1.25, 2.0)]
    (step,) = steps(events)
    assert (step.compile, step.idle) == (1.0, 0.0)


def test_the_time_of_a_step_is_told_apart():
    events = [
        event("record", 0.0, 4.0),
        event("sync", 1.0, 3.0),  # a read in the middle, which compiles first
        event("compile", 1.0, 1.5),
        event("run", 1.5, 3.0),
        event("run", 4.5, 5.0),
        event("record", 6.0, 7.0),
        event("run", 6.5, 8.0),
    ]
    first, second = steps(events)
    assert (first.start, first.seconds, second.start, second.seconds) == (0.0, 6.0, 6.0, 2.0)
    assert (first.record, first.compile, first.run, first.wait) == (2.0, 0.5, 2.0, 1.5)
    assert first.idle == pytest.approx(6.0 - 4.0 - 0.5)
    assert (second.record, second.run, second.idle) == (1.0, 1.5, 0.0)
    assert steps([]) == []


# -- the two sources ---------------------------------------------------------------------------


def test_a_file_shows_what_the_process_shows(tmp_path):
    source = recorded_step(tmp_path / "f", 2, steps_=3)
    live = LiveSource()
    (row,) = [r for r in live.summary().graphs if r.name == source.summary().graphs[-1].name]
    (kept,) = [r for r in source.summary().graphs if r.name == row.name]
    assert (row.nodes, row.hits, row.runs, row.site) == (
        kept.nodes, kept.hits, kept.runs, kept.site,
    )  # fmt: skip
    here = live.graph(row.number).to_json()
    there = source.graph(kept.number).to_json()
    for name in ("nodes", "operands", "outputs", "groups", "parents", "texts", "code"):
        assert here[name] == there[name], name
    json.dumps([here, there], allow_nan=False)


def test_every_row_refers_to_what_is_there(tmp_path):
    document = recorded_step(tmp_path / "f", 2).graph(0)
    for row in document.nodes:
        assert len(row) == len(NODE_FIELDS)
        assert all(0 <= text < len(document.texts) for text in row[:6])
    for place, (parent, kind, label) in enumerate(document.groups):
        assert -1 <= parent < max(place, 1)
        assert max(kind, label) < len(document.texts)
    inputs = len(document.inputs)
    for place, operands in enumerate(document.operands):
        assert all(-inputs <= operand < place for operand in operands)
    assert len(document.parents) == len(document.nodes)


def test_events_and_code_are_in_the_file(tmp_path):
    x = torch.ones(3).to("lazy")
    with torpor.record(tmp_path / "f"):
        for _ in range(3):
            (x * 2).sum().item()
    source = FileSource(tmp_path / "f")
    summary = source.summary()
    assert {"record", "run", "sync"} <= {event.kind for event in summary.events}
    assert summary.events[0].start == 0.0
    assert len(summary.steps) >= 3
    (row,) = summary.graphs
    assert (row.hits, row.runs, row.backend) == (2, 3, "reference")
    assert "aten.mul.Tensor" in source.graph(0).code


def test_the_difference_of_two_graphs_is_told(tmp_path):
    x = torch.ones(3).to("lazy")
    with torpor.record(tmp_path / "f"):
        (x * 2).tolist()
        (x * 2).exp().tolist()
    source = FileSource(tmp_path / "f")
    assert "aten.exp.default" in source.difference(0, 1)
    assert source.difference(0, 0) == "They are alike, node by node."
    assert source.difference(0, 2) is None
    assert source.graph(2) is None
    assert source.graph(-1) is None


def test_a_graph_is_shown_after_each_pass(tmp_path):
    x = torch.ones(3).to("lazy")
    with torpor.record(tmp_path / "f"):
        (x * 2).exp().tolist()
    source = FileSource(tmp_path / "f")
    backend = torpor.backend.registry.make("inductor")
    stages = torpor.debug.view.document.pass_texts(source.graphs[0], backend)
    assert [stage.name for stage in stages[:3]] == ["recorded", "expand", "schedule"]
    recorded, expanded, scheduled = (stage.text for stage in stages[:3])
    assert recorded == print_graph(source.graphs[0])
    assert expanded is None
    assert "compiled 0:" in scheduled
    assert [stage.name for stage in source.passes(0)] == ["recorded", "expand"]  # of the reference
    assert source.passes(1) is None


def test_a_pass_that_fails_is_shown(tmp_path):
    def fail(graph):
        raise RuntimeError("no such luck")

    x = torch.ones(3).to("lazy")
    backend = torpor.backend.get_backend()
    graph = Graph.of([value_of(x + 1)])
    with mock.patch.object(type(backend), "passes", return_value=(Pass("bad", "fails", fail),)):
        stages = torpor.debug.view.document.pass_texts(graph, backend)
    assert (stages[-1].name, stages[-1].text) == ("failed", "no such luck")


def test_numbers_that_enter_at_run_time_are_no_difference(tmp_path):
    model = nn.Linear(2, 1).to("lazy")
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(3, 2).to("lazy")

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for _ in range(4):
        step()
    for name in ("one", "other"):
        with torpor.record(tmp_path / name, data=False):
            step()
    one, other = (max(FileSource(tmp_path / name).graphs, key=len) for name in ("one", "other"))
    assert torpor.debug.view.document.difference_text(one, other) == "They are alike, node by node."


def test_a_graph_that_was_forgotten_is_listed_and_not_shown(monkeypatch):
    x = torch.ones(3).to("lazy")
    (x * 2).tolist()
    monkeypatch.setattr(HISTORY.records[-1], "graph", None)
    live = LiveSource()
    row = live.summary().graphs[-1]
    assert not row.known
    assert live.graph(row.number) is None


def test_the_version_changes_with_the_program():
    live = LiveSource()
    before = live.version()
    assert live.version() == before
    (torch.ones(3).to("lazy") * 2).tolist()
    assert live.version() != before


# -- files of others ---------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    x = torch.ones(3).to("lazy")
    with torpor.record(tmp_path / "f"):
        (x * 2).tolist()
    return tmp_path / "f"


def with_facts(path, change):
    with Reader(path) as reader:
        number = reader.manifest["facts"]
        facts = reader.json(number, "facts")
    change(facts)
    return tampered(path, path.parent, lambda m: None, {number: json.dumps(facts).encode()})


class Speechless(ReferenceBackend):
    """A backend that cannot show its code."""

    def computation_text(self, computation):
        raise ZeroDivisionError("no words")


def test_a_backend_that_cannot_show_its_code_is_recorded(tmp_path):
    register("speechless", Speechless)
    x = torch.ones(3).to("lazy")
    with torpor.using("speechless"), torpor.record(tmp_path / "f"):
        (x * 2).tolist()
    code = FileSource(tmp_path / "f").graph(0).code
    assert code == "speechless cannot show its code: ZeroDivisionError: no words"


def test_a_file_is_written_even_if_there_is_nothing_to_show(tmp_path, monkeypatch):
    def fail(plan, backend):
        raise ZeroDivisionError("no facts")

    monkeypatch.setattr("torpor.debug.record.facts_of_plan", fail)
    x = torch.ones(3).to("lazy")
    with pytest.warns(TorporWarning, match="no timeline: ZeroDivisionError"):  # noqa: SIM117
        with torpor.record(tmp_path / "f"):
            (x * 2).tolist()
    assert torpor.replay(tmp_path / "f").ok
    assert len(FileSource(tmp_path / "f").graph(0).nodes) == 1


def test_a_file_without_facts_can_be_shown(file):
    path = tampered(file, file.parent, lambda manifest: manifest.pop("facts"))
    source = FileSource(path)
    assert source.summary().graphs[0].runs == 1
    assert source.summary().events == []
    assert len(source.graph(0).nodes) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.pop("events"),
        lambda f: f.update(graphs=[]),
        lambda f: f["graphs"][0].update(hits="many"),
        lambda f: f["graphs"][0].update(hits=-1),
        lambda f: f["graphs"][0].pop("code"),
        lambda f: f["graphs"][0].update(code=3),
        lambda f: f["graphs"][0].update(scopes=[]),
        lambda f: f["graphs"][0]["scopes"].update(nodes=[]),
        lambda f: f["graphs"][0]["scopes"].update(nodes=[7]),
        lambda f: f["graphs"][0]["scopes"].update(scopes=[["forward"]]),
        lambda f: f["graphs"][0]["scopes"].update(scopes=[{"__proto__": 1}]),
        lambda f: f.update(events=[["run", 0.0]]),
        lambda f: f.update(events=[["run", "now", 1.0, "", "", 0]]),
        lambda f: f.update(events=[["run", 0.0, -1.0, "", "", 0]]),
        lambda f: f.update(events=[["run", 0.0, 1e300, "", "", 0]]),
        lambda f: f.update(events=[3]),
    ],
)
def test_facts_that_lie_are_refused(file, change):
    with pytest.raises(RecordFileError, match="facts"):
        FileSource(with_facts(file, change))
