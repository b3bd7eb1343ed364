"""A wrong kernel is found to the node, and the reproduction fails alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torpor
from tests.unit.debug import planted
from tests.unit.debug.steps import training_step
from torpor.backends.equality import same_bits
from torpor.debug import bisect as bisecting
from torpor.debug.bisect import bisect
from torpor.debug.judge import Judge, run_graph
from torpor.debug.load import open_record
from torpor.debug.replay import backend_named, bisect_record
from torpor.debug.reproduction import write_reproduction
from torpor.debug.subgraph import cut_out
from torpor.errors import UnsupportedError
from torpor.ir.graph import Graph
from torpor.testing.networks import NETWORKS
from torpor.text.torch_parser import parse

ROOT = Path(__file__).resolve().parents[3]
PLANTED = "tests.unit.debug.planted"


@pytest.fixture(scope="module")
def large_file(tmp_path_factory):
    """One training step of more than 2,000 nodes."""
    torpor.use("reference")
    path = tmp_path_factory.mktemp("record") / "large.torpor"
    step = training_step(65)
    step()
    with torpor.record(path):
        step()
    return path


def found_in(path, suspect, trusted="reference"):
    with open_record(path) as record:
        ((_, fault),) = bisect_record(record, trusted, f"{PLANTED}:{suspect}")
        return fault


def run_alone(script, **changes):
    """Run a reproduction in a process of its own: its status and what it prints."""
    text = script.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    script.write_text(text)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment, capture_output=True, text=True, timeout=120, cwd=script.parent,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("suspect", ["Planted", "WrongInOneBit", "WrongWhenFused"])
def test_a_planted_kernel_in_a_large_training_graph_is_found_to_the_node(
    large_file, suspect, tmp_path
):
    with open_record(large_file) as record:
        nodes = record.graph(record.runs[0]).nodes
    (planted_at,) = (
        i
        for i, node in enumerate(nodes)
        if node.op.name == "aten.tanh.default" and node.outputs[0].type.shape == planted.MARK
    )
    fault = found_in(large_file, suspect)
    assert fault.length > 2000
    assert fault.position == planted_at
    assert fault.op == "aten.tanh.default"
    assert fault.node.outputs[0].type.shape == planted.MARK
    assert "# the marked line" in fault.line
    assert fault.gap.place == (0, 5)
    assert fault.hidden == (suspect == "WrongWhenFused")
    assert len(fault.part.graph) == (2 if suspect == "WrongWhenFused" else 1)
    script = tmp_path / "repro.py"
    assert write_reproduction(fault, script)
    status, printed = run_alone(script)
    assert status == 1, printed
    assert "WRONG" in printed
    status, printed = run_alone(script, **{f"{PLANTED}:{suspect}": f"{PLANTED}:Sound"})
    assert status == 0, printed


def test_the_right_side_of_a_reproduction_needs_no_torpor(large_file, tmp_path):
    script = tmp_path / "repro.py"
    write_reproduction(found_in(large_file, "WrongWhenFused"), script)
    text = script.read_text()
    assert "torch.ops.aten.tanh.default(" in text
    body = text[text.index("def right(") : text.index("def distances(")]
    assert "torpor" not in body


def test_what_is_found_is_told_to_people_and_programs(large_file):
    fault = found_in(large_file, "Planted")
    text = str(fault)
    for part in ("aten.tanh.default", "recorded at: steps.py:", "allowed", "in the node alone"):
        assert part in text
    facts = fault.to_json()
    assert facts["op"] == "aten.tanh.default"
    assert facts["nodes"] > 2000
    assert float(facts["off"]) > float(facts["allowed"])


def test_a_file_without_data_is_enough(tmp_path):
    step = training_step(5)
    step()
    with torpor.record(tmp_path / "f", data=False):
        step()
    fault = found_in(tmp_path / "f", "Planted")
    assert fault.op == "aten.tanh.default"
    assert "# the marked line" in fault.line


def test_a_sound_backend_is_not_accused(large_file):
    assert found_in(large_file, "Sound") is None


@pytest.mark.parametrize("name", ["perceptron_adamw", "convolution_batch_norm", "lstm"])
def test_sound_kernels_of_another_compiler_are_not_accused(name, tmp_path):
    """Inductor rounds otherwise than eager everywhere; none of it is wrong."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.build().to("lazy")

    def step():
        x, y = network.batch(0)
        torch.nn.functional.cross_entropy(model(x.to("lazy")), y.to("lazy")).backward()

    with torpor.record(tmp_path / "f"):
        step()
    with open_record(tmp_path / "f", trust=True) as record:
        assert [f for _, f in bisect_record(record, "reference", "inductor")] == [None]


def test_a_large_graph_is_looked_at_in_windows(large_file, monkeypatch):
    monkeypatch.setattr(bisecting, "WINDOW_BYTES", 20_000)
    fault = found_in(large_file, "Planted")
    assert fault.op == "aten.tanh.default"
    assert fault.node.outputs[0].type.shape == planted.MARK


def test_a_trusted_backend_that_is_not_the_reference(large_file):
    fault = found_in(large_file, "Planted", trusted="torchscript")
    assert fault.trusted.name == "torchscript"
    assert "# the marked line" in fault.line


GRAPH = """
graph(%0 = leaf 0 : float32[13,7] @cpu, %1 = leaf 1 : float32[13,7] @cpu, %2 = scalar 0 : float) {
  %3 = aten.mul.Tensor(%0, %2) : float32[13,7] @cpu
  %4 = aten.tanh.default(%3) : float32[13,7] @cpu
  %5 = aten.add_.Tensor(%4, %1) : float32[13,7] @cpu
  %6, %7 = aten.sort.default(%5) : float32[13,7] @cpu, int64[13,7] @cpu
  %8, %9 = aten.split.Tensor(%6, 7) : float32[7,7] @cpu, float32[6,7] offset 49 @cpu
  %10 = aten.t.default(%8) : float32[7,7] stride [1,7] @cpu
  %11 = aten.mm.default(%9, %10) : float32[6,7] @cpu
  %12, %13 = aten._foreach_add.Scalar([%11, %9], 2.5) : float32[6,7] @cpu, float32[6,7] @cpu
  %14, %15 = aten._foreach_mul_.Scalar([%12, %13], -inf) : float32[6,7] @cpu, float32[6,7] @cpu
  %16 = aten.gelu.default(%13, approximate="tanh") : float32[6,7] @cpu
  %17 = aten._to_copy.default(%16, dtype=torch.float64) : float64[6,7] @cpu
  return %17, %14, %11
}
"""


def arguments():
    torch.manual_seed(0)
    return [torch.randn(13, 7), torch.randn(13, 7), 0.75]


def test_every_kind_of_node_can_be_written_as_plain_torch(tmp_path):
    """In-place ops, lists, several results, keywords, odd numbers: the program is the graph."""
    graph = parse(GRAPH)
    fault = bisect(graph, arguments(), torpor_reference(), backend_named(f"{PLANTED}:Planted"))
    assert fault is not None
    judge = Judge(graph, arguments(), torpor_reference())
    for output, value in enumerate(graph.outputs):
        whole, needed = cut_out(graph.nodes, [value])
        known = dict(zip(graph.inputs, arguments(), strict=True))
        expected = judge.expected([value], exact=False)[value]
        fault.part = bisecting.FaultyPart(whole, [known[v] for v in needed], expected)
        script = tmp_path / f"repro{output}.py"
        assert write_reproduction(fault, script)
        scope = {"__name__": "repro"}
        exec(compile(script.read_text(), str(script), "exec"), scope)
        right = scope["right"](*scope["INPUTS"])
        assert same_bits(right, judge.values([value])[value])


def torpor_reference():
    return torpor.backend.registry.make("reference")


def test_large_data_go_to_a_file_beside_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr("torpor.debug.reproduction.LARGEST_INSIDE", 100)
    graph = parse(GRAPH)
    fault = bisect(graph, arguments(), torpor_reference(), backend_named(f"{PLANTED}:Planted"))
    script = tmp_path / "repro.py"
    assert write_reproduction(fault, script)
    assert (tmp_path / "repro.data").stat().st_size == 13 * 7 * 4
    assert run_alone(script)[0] == 1
    (tmp_path / "repro.data").write_bytes(bytes(364))
    assert "AssertionError" in run_alone(script)[1]


def test_a_number_that_is_not_one_is_found_where_it_appears():
    class MakesNaN(planted.Planted):
        def spoil(self, tensor):
            spoilt = tensor.clone()
            spoilt[1, 1] = float("nan")
            return spoilt

    suspect = MakesNaN()
    suspect.name = "nan"
    fault = bisect(parse(GRAPH), arguments(), torpor_reference(), suspect)
    assert fault.op == "aten.tanh.default"
    assert fault.gap.off == float("inf")
    assert fault.gap.place == (1, 1)


def test_integers_and_truth_values_have_to_agree_unless_rounding_decides_them():
    text = """graph(%0 = leaf 0 : float32[13,7] @cpu) {
      %1 = aten.gt.Scalar(%0, 0.5) : bool[13,7] @cpu
      %2 = aten.sum.default(%1) : int64[] @cpu
      return %2
    }"""

    class Flips(planted.Planted):
        def is_wrong(self, node, outputs):
            return node.op.name == "aten.gt.Scalar"

        def spoil(self, tensor):
            return ~tensor

    suspect = Flips()
    suspect.name = "flips"
    fault = bisect(parse(text), [torch.randn(13, 7)], torpor_reference(), suspect)
    assert fault.op == "aten.gt.Scalar"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_kernels_of_any_dtype_are_judged(dtype):
    name = str(dtype).removeprefix("torch.")
    text = GRAPH[: GRAPH.index("  %5")].replace("float32", name) + "  return %4\n}"
    given = [torch.randn(13, 7).to(dtype), torch.randn(13, 7).to(dtype), 0.75]
    reference = torpor_reference()
    assert bisect(parse(text), given, reference, backend_named(f"{PLANTED}:Sound")) is None

    class Off(planted.Planted):
        def spoil(self, tensor):
            return tensor * 1.25

    suspect = Off()
    suspect.name = "off"
    assert bisect(parse(text), given, reference, suspect).op == "aten.tanh.default"


def test_a_graph_that_does_not_compile_with_all_its_values_is_halved():
    class Few(planted.Planted):
        def compile(self, computations):
            if any(len(computation.graph.outputs) > 4 for computation in computations):
                raise RuntimeError("too many results")
            return super().compile(computations)

    suspect = Few()
    suspect.name = "few"
    fault = bisect(parse(GRAPH), arguments(), torpor_reference(), suspect)
    assert fault.op == "aten.tanh.default"
    assert fault.hidden


def test_random_nodes_are_refused():
    text = """graph(%0 = leaf 0 : float32[4] @cpu) {
      %1 = aten.rand_like.default(%0) : float32[4] @cpu
      return %1
    }"""
    reference = torpor_reference()
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        bisect(parse(text), [torch.ones(4)], reference, reference)


def test_arguments_are_not_written_to():
    class Writes(planted.Planted):
        def execute(self, computation, arguments, device):
            for argument in arguments:
                if hasattr(argument, "tensor"):
                    argument.tensor.zero_()
            return super().execute(computation, arguments, device)

    given = arguments()
    run_graph(parse(GRAPH), given, Writes())
    assert same_bits(given[0], arguments()[0])


def test_a_value_computed_before_is_an_input_like_any_other():
    x = torch.randn(13, 7).to("lazy")
    y = x * 2
    y.sum().item()
    z = torch.tanh(y)
    assert "computed" in torpor.graph(z) or "leaf" in torpor.graph(z)
    graph = Graph.of([z._lazy_storage.value], [y._lazy_storage.value])
    suspect = backend_named(f"{PLANTED}:Planted")
    fault = bisect(graph, [torch.randn(13, 7)], torpor_reference(), suspect)
    assert fault.op == "aten.tanh.default"


def test_marked_views_go_into_a_reproduction_as_they_are(tmp_path):
    text = """graph(%0 = leaf 0 : complex64[3,4] @cpu, %1 = leaf 1 : float8_e4m3fn[4] @cpu) {
      %2 = aten._conj.default(%0) : complex64[3,4] conj @cpu
      %3 = aten.mul.Tensor(%2, 2) : complex64[3,4] @cpu
      %4 = aten._to_copy.default(%1, dtype=torch.float32) : float32[4] @cpu
      %5 = aten.add.Tensor(%3, %4) : complex64[3,4] @cpu
      return %5
    }"""

    class Off(planted.Planted):
        def is_wrong(self, node, outputs):
            return node.op.name == "aten.mul.Tensor"

        def spoil(self, tensor):
            return tensor * (1 + 0.01j)

    suspect = Off()
    suspect.name = f"{PLANTED}:Sound"
    small = torch.ones(4).to(torch.float8_e4m3fn)
    given = [torch.randn(3, 4, dtype=torch.complex64), small]
    fault = bisect(parse(text), given, torpor_reference(), suspect)
    assert fault.op == "aten.mul.Tensor"
    assert fault.part.arguments[0].is_conj()
    script = tmp_path / "repro.py"
    assert write_reproduction(fault, script)
    scope = {"__name__": "repro"}
    exec(compile(script.read_text(), str(script), "exec"), scope)
    assert same_bits(scope["INPUTS"][0], given[0].conj())
    assert same_bits(scope["right"](*scope["INPUTS"]), given[0].conj() * 2)
    assert run_alone(script)[0] == 0  # the backend of that name is right


def test_small_floats_are_judged():
    text = """graph(%0 = leaf 0 : float8_e5m2[13,7] @cpu) {
      %1 = aten._to_copy.default(%0, dtype=torch.float32) : float32[13,7] @cpu
      %2 = aten.tanh.default(%1) : float32[13,7] @cpu
      %3 = aten._to_copy.default(%2, dtype=torch.float8_e4m3fn) : float8_e4m3fn[13,7] @cpu
      return %3, %2
    }"""
    given = [torch.randn(13, 7).to(torch.float8_e5m2)]
    reference = torpor_reference()
    for name, found in (("Sound", None), ("Planted", "aten.tanh.default")):
        fault = bisect(parse(text), given, reference, backend_named(f"{PLANTED}:{name}"))
        assert (fault and fault.op) == found
    assert bisect(parse(text), given, reference, torpor_reference()) is None
