"""A record is replayed with the same numbers; a file that lies is refused before it runs."""

import hashlib
import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torpor
from tests.unit.debug.steps import training_step
from torpor.backend import register
from torpor.backends.reference import ReferenceBackend
from torpor.debug.file_format import END, Reader, Writer
from torpor.debug.load import available_device, open_record
from torpor.debug.replay import CLOSE, DIFFERENT, SAME
from torpor.errors import BackendError, RecordFileError, StepError
from torpor.ops.spec import spec_of
from torpor.testing.networks import NETWORKS

PLANTED = "tests.unit.debug.planted"


@pytest.fixture(scope="module")
def step_file(tmp_path_factory):
    """Two steps of a small network."""
    torpor.use("reference")
    path = tmp_path_factory.mktemp("record") / "step.torpor"
    step = training_step(3)
    step()
    with torpor.record(path):
        for _ in range(2):
            step().item()
    return path


def recorded(path, program, **options):
    with torpor.record(path, **options):
        program()
    return path


def test_a_step_is_replayed_bit_for_bit(step_file):
    replay = torpor.replay(step_file)
    assert replay.ok
    assert replay.backend == "reference"
    assert {run.kind for run in replay.runs} == {SAME}


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize("backend", ["reference", "torchscript"])
def test_networks_are_replayed_bit_for_bit_by_eagers_kernels(tmp_path, name, backend):
    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.build().to("lazy")
    optimizer = network.optimizer(list(model.parameters()))

    def step():
        x, y = network.batch(0)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.to("lazy")), y.to("lazy")).backward()
        optimizer.step()

    path = recorded(tmp_path / "f", step)
    replay = torpor.replay(path, backend=backend, trust=True)
    assert replay.ok
    assert {run.kind for run in replay.runs} == {SAME}


def test_another_compiler_is_close(step_file):
    replay = torpor.replay(step_file, backend="inductor", graph=0)
    assert replay.ok
    assert replay.runs[0].kind in (CLOSE, SAME)


def test_results_come_with_a_replay(tmp_path):
    x = torch.arange(4.0).to("lazy")
    path = recorded(tmp_path / "f", lambda: (x * 3).tolist())
    replay = torpor.replay(path)
    assert replay.runs[0].results[0].tolist() == [0.0, 3.0, 6.0, 9.0]


@pytest.mark.parametrize("results", [False, True])
def test_a_wrong_backend_is_told(tmp_path, results):
    step = training_step(2)
    step()
    path = recorded(tmp_path / "f", step, results=results)
    replay = torpor.replay(path, backend=f"{PLANTED}:Planted")
    assert not replay.ok
    assert replay.runs[0].kind == DIFFERENT
    assert "in the place of" in str(replay) or "was recorded" in str(replay)
    assert json.loads(json.dumps(replay.to_json()))["ok"] is False


def test_a_single_bit_is_told_where_bits_must_agree(tmp_path):
    x = torch.randn(13, 7).to("lazy")
    path = recorded(tmp_path / "f", lambda: torch.tanh(x).tolist())
    replay = torpor.replay(path, backend=f"{PLANTED}:WrongInOneBit")
    assert "other bits" in str(replay)


def test_one_graph_of_several(step_file):
    runs = len(torpor.replay(step_file).runs)
    assert runs >= 2
    assert [run.number for run in torpor.replay(step_file, graph=1).runs] == [1]
    with pytest.raises(IndexError, match=f"no run {runs}: the file has {runs}"):
        torpor.replay(step_file, graph=runs)


def test_made_up_numbers_are_judged_by_the_reference(step_file, tmp_path):
    replay = torpor.replay(step_file, data=False, graph=0)
    assert replay.ok
    assert any("made up" in note for note in replay.notes)
    assert replay.runs[0].against == "the reference backend"
    step = training_step(2)
    step()
    path = recorded(tmp_path / "f", step, data=False)
    assert torpor.replay(path).ok
    assert not torpor.replay(path, backend=f"{PLANTED}:Planted").ok


def test_a_backend_that_is_not_here(tmp_path, step_file):
    with pytest.raises(BackendError, match="no backend 'acme'"):
        torpor.replay(step_file, backend="acme")
    with pytest.raises(BackendError, match=r"no backend 'tests\.nowhere:Backend'"):
        torpor.replay(step_file, backend="tests.nowhere:Backend")
    path = tampered(step_file, tmp_path, lambda m: m["runs"][0].update(backend="acme"))
    replay = torpor.replay(path)
    assert replay.ok
    assert any("'acme', which is not here" in note for note in replay.notes)


def test_a_file_does_not_choose_what_is_imported(step_file, tmp_path):
    named = tampered(
        step_file, tmp_path, lambda m: m["runs"][0].update(backend=f"{PLANTED}:Planted")
    )
    assert torpor.replay(named, graph=0).backend == "reference"


def test_options_of_a_file_are_not_used(step_file, tmp_path):
    path = tampered(step_file, tmp_path, lambda m: m["runs"][0].update(options={"boom": "1"}))
    assert torpor.replay(path, graph=0).ok


def test_tensors_on_a_gpu_are_replayed_on_the_cpu_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    x = torpor.lazy(torch.arange(4.0))
    path = recorded(tmp_path / "f", lambda: (x.to(torch.float64) * 3).tolist())

    def on_gpu(manifest):
        manifest["runs"][0]["device"] = "cuda:0"

    path = with_text(path, tmp_path, lambda text: text.replace("@cpu", "@cuda:0"), on_gpu)
    replay = torpor.replay(path)
    assert replay.ok
    assert any("recorded on cuda:0; replayed on the CPU" in note for note in replay.notes)
    assert available_device(torch.device("mps")) == torch.device("cpu")
    assert available_device(torch.device("lazy:1")) == torch.device("lazy:1")


def test_views_writes_and_expanded_leaves(tmp_path):
    base = torch.randn(6, 4)
    x, wide = torpor.lazy(base), torpor.lazy(torch.randn(3, 1).expand(3, 50))
    z = torpor.lazy(torch.randn(3, 4, dtype=torch.complex64))

    def program():
        x[2:4].mul_(2)
        x.t()[1].add_(1)
        (wide * 2).sum().item()
        (z.conj() * 2).imag.sum().item()
        torch.sort(x, dim=1)[1].tolist()
        x.split(2)[1].tolist()

    assert torpor.replay(recorded(tmp_path / "f", program, results=True)).ok


# -- files that lie ----------------------------------------------------------------------------


def tampered(path, folder, change, changed=None):
    """A copy of a record with another manifest, all its sums right."""
    with Reader(path) as reader:
        manifest = dict(reader.manifest)
        contents = [reader.blob(i, "copy") for i in range(len(manifest.pop("blobs")))]
    manifest = json.loads(json.dumps(manifest))
    change(manifest)
    writer = Writer(folder / "tampered")
    for number, blob in enumerate(contents):
        writer.add((changed or {}).get(number, blob))
    writer.close(manifest)
    return folder / "tampered"


def with_text(path, folder, change, manifest=lambda m: None):
    """A copy of a record with another text for its first graph."""
    with Reader(path) as reader:
        number = reader.manifest["graphs"][0]["text"]
        text = change(reader.text(number, "copy"))
    return tampered(path, folder, manifest, {number: text.encode()})


@pytest.fixture
def small_file(tmp_path):
    x = torch.arange(6.0).reshape(2, 3).to("lazy")
    return recorded(tmp_path / "small", lambda: (x * 2).sum().item())


def refusal(path, **options):
    with pytest.raises(RecordFileError) as caught:
        torpor.replay(path, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("aten.no_such_op.default(%0)", "torch has no op"),
        ('aten.from_file.default("/etc/passwd", size=4)', "does more than compute"),
        ('aten.from_file.default("{target}", True, 4)', "does more than compute"),
        ("aten.item.default(%0)", "does more than compute"),
        ("aten.resize_.default(%0, [100])", "does more than compute"),
        ("aten.set_.source_Tensor(%0, %0)", "does more than compute"),
        ("prims.add.default(%0, %0)", "not torch's own"),
        ("__class__.__init__.__globals__(%0)", "torch has no op"),
        ("aten.mul.Tensor(%0)", "missing"),
        ("aten.mul.Tensor(%0, [1, 2])", "must be no list"),
        ("aten.mul.Tensor(%0, %7)", "used before it is defined"),
        ("aten.mul.Tensor(%0, __import__)", "expected an argument"),
        ("aten.mul.Tensor(%0, [[[[[[[[[[1]]]]]]]]]])", "deep"),
    ],
)
def test_a_graph_that_is_none_or_does_something_is_refused(small_file, tmp_path, statement, what):
    target = tmp_path / "made"
    line = f"%1 = {statement.format(target=target)} : float32[2,3] @lazy:0"
    text = f"graph(%0 = leaf 0 : float32[2,3] @lazy:0) {{\n  {line}\n  return %1\n}}"
    path = with_text(small_file, tmp_path, lambda _: text)
    assert what in refusal(path)
    assert "graph 0" in refusal(path)
    assert not target.exists()


def test_ops_of_others_run_when_they_are_allowed(tmp_path):
    library = torch.library.Library("torpor_replay_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("twice", torch.empty_like, "Meta")
    x = torch.ones(3).to("lazy")
    path = recorded(tmp_path / "f", lambda: torch.ops.torpor_replay_test.twice(x).tolist())
    assert "not torch's own" in refusal(path)
    assert torpor.replay(path, allow=["torpor_replay_test"]).ok


def test_a_file_cannot_teach_types_to_the_recorder(small_file, tmp_path):
    text = (
        "graph(%0 = leaf 0 : float32[17,3] @lazy:0) {\n"
        "  %1 = aten.cosh.default(%0) : float32[17,4] @lazy:0\n  return %1\n}"
    )
    path = with_text(small_file, tmp_path, lambda _: text)
    fix_lines(path, 1)
    known = spec_of(torch.ops.aten.cosh.default).kind.nodes
    before = len(known)
    assert "where the graph has" in refusal(path)
    assert len(known) == before
    assert torch.cosh(torch.ones(17, 3).to("lazy")).shape == (17, 3)


def test_an_output_of_another_shape_than_the_op_has_is_an_error(small_file, tmp_path):
    right = "aten.mul.Tensor(%0, 2) : float32[2,3]"
    wrong = right.replace("[2,3]", "[2,4]")
    path = with_text(small_file, tmp_path, lambda text: text.replace(right, wrong))
    replay = torpor.replay(path)
    assert not replay.ok
    assert "promised float32[2,4]" in str(replay)


def test_a_tensor_of_absurd_size_is_refused_before_it_is_made(small_file, tmp_path):
    text = (
        "graph(%0 = leaf 0 : float32[2,3] @lazy:0) {\n"
        "  %1 = aten.expand.default(%0, [1000000000000, 2, 3]) : "
        "float32[1000000000000,2,3] stride [0,3,1] @lazy:0\n"
        "  %2 = aten.mul.Tensor(%1, 2) : float32[1000000000000,2,3] @lazy:0\n  return %2\n}"
    )
    path = with_text(small_file, tmp_path, lambda _: text, drop_outputs)
    fix_lines(path, 2)
    with pytest.raises(RecordFileError, match="are allowed"):
        torpor.replay(path)
    with pytest.raises(StepError, match="GiB"):
        torpor.replay(path, trust=True)


def drop_outputs(manifest):
    for run in manifest["runs"]:
        run["outputs"] = []


def fix_lines(path, nodes):
    """Let the table of lines have as many nodes as the graph."""
    table = json.dumps({"lines": [], "nodes": [None] * nodes}).encode()
    with Reader(path) as reader:
        number = reader.manifest["graphs"][0]["lines"]
    tampered(path, path.parent, lambda m: None, {number: table})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: m.update(format="other"), "not that of a record"),
        (lambda m: m.update(version=2), "version 2"),
        (lambda m: m.update(version="1"), "not a int"),
        (lambda m: m.update(runs={}), "not a list"),
        (lambda m: m.update(versions=[]), "not a dict"),
        (lambda m: m.pop("graphs"), "'graphs' is missing"),
        (lambda m: m["runs"].append(3), "run 1: expected an object"),
        (lambda m: m["runs"][0].update(graph=9), "there is no number 9"),
        (lambda m: m["runs"][0].pop("inputs"), "'inputs' is missing"),
        (lambda m: m["runs"][0].update(inputs=[]), "0 inputs for a graph of 1"),
        (lambda m: m["runs"][0]["inputs"][0].update(blob=99), "there is no number 99"),
        (lambda m: m["runs"][0]["inputs"][0].update(dtype="int64"), "where the graph has"),
        (lambda m: m["runs"][0]["inputs"][0].update(shape=[3, 2]), "where the graph has"),
        (lambda m: m["runs"][0]["inputs"][0].update(offset=1 << 40), "bytes where"),
        (lambda m: m["runs"][0]["inputs"][0].update(failed="x"), "an earlier graph had failed"),
        (lambda m: m["runs"][0]["inputs"].__setitem__(0, None), "expected an object"),
        (lambda m: m["runs"][0]["outputs"][0].update(probes=[[1]]), "expected an integer"),
        (lambda m: m["runs"][0]["outputs"][0].update(probes=0), "bytes where 8 belong"),
        (lambda m: m["runs"][0]["outputs"][0].update(checksum=1), "not a str"),
        (lambda m: m["runs"][0]["outputs"].append({}), "2 results for a graph of 1"),
        (lambda m: m["graphs"][0].update(text="x"), "not a int"),
        (lambda m: m["graphs"][0].update(lines=0), "lines"),
    ],
)
def test_a_manifest_that_lies_is_refused(small_file, tmp_path, change, what):
    assert what in refusal(tampered(small_file, tmp_path, change))


def test_a_recorded_input_of_absurd_size_is_refused(small_file, tmp_path):
    def change(manifest):
        entry = manifest["runs"][0]["inputs"][0]
        entry.pop("blob")
        entry["statistics"] = dict(manifest["runs"][0]["outputs"][0]["statistics"])
        entry.update(shape=[1 << 45, 3], stride=[3, 1])

    text = "graph(%0 = leaf 0 : float32[35184372088832,3] @lazy:0) {\n  return %0\n}"
    path = with_text(small_file, tmp_path, lambda _: text, change)
    fix_lines(path, 0)
    with pytest.raises((StepError, RecordFileError), match=r"GiB|can be made|are allowed"):
        torpor.replay(path)


@given(data=st.data())
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_damage_to_a_record_is_told_or_harmless(data, small_file):
    whole = bytearray(small_file.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del whole[place:]
    damaged = small_file.with_suffix(".damaged")
    damaged.write_bytes(whole)
    try:
        replay = torpor.replay(damaged)
    except RecordFileError as error:
        assert str(damaged) in str(error)
        return
    assert replay.runs[0].results[0].item() == 30.0


@given(data=st.data())
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_change_of_the_manifest_is_told_or_harmless(data, small_file):
    """As before, by somebody who keeps the sums right: no other error than ours comes out."""
    with Reader(small_file) as reader:
        text = bytearray(json.dumps(reader.manifest).encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place : place + data.draw(st.integers(0, 3))] = data.draw(
        st.sampled_from([b"0", b"-", b'"', b"[", b"]", b"{", b"}", b",", b"null", b"1e9", b"9999"])
    )
    contents = small_file.read_bytes()
    start = struct.unpack("<Q", contents[-56:-48])[0]
    trailer = struct.pack("<QQ32s8s", start, len(text), hashlib.sha256(text).digest(), END)
    changed = small_file.with_suffix(".changed")
    changed.write_bytes(contents[:start] + bytes(text) + trailer)
    try:
        torpor.replay(changed, backend="reference")
    except (RecordFileError, StepError):
        return


@given(data=st.data())
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_change_of_the_graph_is_told_or_harmless(data, small_file, tmp_path):
    words = [
        "[",
        "]",
        "%0",
        "%9",
        "(",
        ")",
        ",",
        "float64",
        "99",
        "-1",
        "@cuda:7",
        "None",
        "=",
        '"',
    ]

    def change(text):
        place = data.draw(st.integers(0, len(text) - 1))
        return text[:place] + data.draw(st.sampled_from(words)) + text[place + 1 :]

    path = with_text(small_file, tmp_path, change)
    try:
        with open_record(path) as record:
            record.arguments(record.runs[0], record.graph(record.runs[0]))
    except RecordFileError as error:
        assert str(path) in str(error)


# -- what surrounds a run ----------------------------------------------------------------------


def test_record_and_replay_in_a_program_that_is_lazy_throughout(tmp_path):
    torpor.enable()
    torch.set_default_device("lazy")
    x = torch.arange(4.0)
    path = recorded(tmp_path / "f", lambda: (x * 3).tolist())
    assert torpor.replay(path).ok
    assert torpor.is_lazy(torch.ones(2))


def test_torch_is_set_as_it_was_and_set_back(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        x = torch.arange(1, 5).to("lazy")
        path = recorded(tmp_path / "f", lambda: (x / 3).tolist())
    finally:
        torch.set_default_dtype(torch.float32)
    replay = torpor.replay(path)
    assert replay.runs[0].kind == SAME
    assert replay.runs[0].results[0].dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "change", [{"default_dtype": "int8"}, {"threads": 0}, {"deterministic": 1}, {"threads": "x"}]
)
def test_settings_that_torch_does_not_have_are_refused(small_file, tmp_path, change):
    path = tampered(small_file, tmp_path, lambda m: m["settings"].update(change))
    assert "settings" in refusal(path)


def test_generators_stay_where_they_are(small_file):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    torpor.replay(small_file, data=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_failed_fails_again(tmp_path):
    table = torch.randn(4, 2).to("lazy")
    with pytest.raises(IndexError), torpor.record(tmp_path / "f"):
        torch.embedding(table, torch.tensor([9]).to("lazy")).tolist()
    replay = torpor.replay(tmp_path / "f")
    assert replay.ok
    assert replay.runs[0].against == "it failed when it was recorded too"
    assert "IndexError" in replay.runs[0].verdicts[0].detail


def test_a_backend_that_fails_is_told(small_file):
    class Fails(ReferenceBackend):
        def execute(self, *_):
            raise RuntimeError("no such luck")

    register("fails", Fails)
    replay = torpor.replay(small_file, backend="fails")
    assert not replay.ok
    assert "RuntimeError: no such luck" in str(replay)


def test_graphs_that_draw_are_run_and_not_compared(tmp_path):
    class Draws(ReferenceBackend):
        draws = True

    register("draws", Draws)
    torpor.use("draws")
    x = torch.zeros(100).to("lazy")
    path = recorded(tmp_path / "f", lambda: torch.rand_like(x).tolist())
    replay = torpor.replay(path)
    assert replay.runs[0].kind == "not compared"
    assert 0 < replay.runs[0].results[0].mean() < 1
