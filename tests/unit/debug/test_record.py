"""What runs inside `torpor.record` is in the file, and a program does not notice."""

import os
import threading
import warnings

import pytest
import torch
from torch import nn

import torpor
from tests.unit.debug.steps import training_step
from torpor.debug.load import open_record
from torpor.errors import TorporWarning
from torpor.observe.watch import WATCHERS


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.torpor"


@pytest.fixture
def enabled(monkeypatch):
    monkeypatch.setattr(torpor.config, "bound", "auto")
    torpor.enable()
    yield monkeypatch
    torpor.disable()


def test_a_file_holds_graph_lines_numbers_versions_and_results(path):
    x = torch.arange(6.0).reshape(2, 3).to("lazy")
    with torpor.record(path):
        y = (x * 2).sum()
        assert y.item() == 30.0
    with open_record(path) as record:
        (run,) = record.runs
        graph = record.graph(run)
        assert [node.op.name for node in graph.nodes] == ["aten.mul.Tensor", "aten.sum.default"]
        assert "y = (x * 2).sum()" in graph.nodes[0].site
        assert record.arguments(run, graph)[0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        (output,) = record.outputs(run, graph)
        assert output.probes.tolist() == [30.0]
        assert record.versions["torch"] == torch.__version__
        assert (run.backend, run.device, run.interpreted) == ("reference", "cpu:0", False)
        assert int(record.generators["cpu"]["seed"]) == torch.initial_seed()


def test_what_is_pending_at_the_end_is_run_and_recorded(path):
    x = torch.ones(3).to("lazy")
    with torpor.record(path):
        y = x + 1
    assert not torpor.is_pending(y)
    with open_record(path) as record:
        assert len(record.runs) == 1


def test_what_was_pending_before_is_not(path):
    x = torch.ones(3).to("lazy") + 1
    with pytest.warns(TorporWarning, match="holds no runs"), torpor.record(path):
        pass
    assert not torpor.is_pending(x)
    with open_record(path) as record:
        assert record.runs == []


def test_a_recording_without_runs_says_why_at_the_users_line(path):
    with (
        pytest.warns(TorporWarning, match="nothing was computed on lazy tensors") as caught,
        torpor.record(path),
    ):
        torch.ones(3) + 1
    assert caught[0].filename == __file__
    recording = torpor.record(path).start()
    with pytest.warns(TorporWarning, match="holds no runs") as caught:
        recording.stop()
    assert caught[0].filename == __file__


def test_a_model_that_runs_eagerly_under_enable_is_recorded_as_the_warning_says(path, enabled):
    model, batch = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    advice = r'set torpor\.config\.bound = "off"'
    with pytest.warns(TorporWarning, match=advice), torpor.record(path):
        step()
    enabled.setattr(torpor.config, "bound", "off")
    with torpor.record(path) as recording:
        step()
    assert recording.runs


def test_nothing_but_other_tensors_under_enable(path, enabled):
    enabled.setattr(torpor.config, "bound", "off")
    expected = "no model with parameters was called"
    with pytest.warns(TorporWarning, match=expected), torpor.record(path):
        torch.ones(3) + 1


def test_equal_graphs_and_data_are_stored_once(path, tmp_path):
    x = torch.randn(1000).to("lazy")

    def run(times, where):
        with torpor.record(where):
            for _ in range(times):
                (x * 2).sum().item()
        return os.path.getsize(where)

    once, often = run(1, path), run(20, tmp_path / "often")
    assert often < once + 20 * 1200
    with open_record(tmp_path / "often") as record:
        assert len(record.runs) == 20
        assert {run.graph for run in record.runs} == {0}


def test_start_and_stop(path):
    recording = torpor.record(path)
    x = torch.ones(2).to("lazy")
    with pytest.raises(RuntimeError, match="not started"):
        recording.stop()
    recording.start()
    with pytest.raises(RuntimeError, match="before"):
        recording.start()
    (x + 1).tolist()
    recording.stop()
    (x + 2).tolist()
    with open_record(path) as record:
        assert len(record.runs) == 1
    assert WATCHERS == []


def test_an_error_in_the_body_is_told_and_the_file_is_written(path):
    x = torch.ones(2).to("lazy")
    with pytest.raises(ZeroDivisionError), torpor.record(path):
        (x + 1).tolist()
        raise ZeroDivisionError
    with open_record(path) as record:
        assert len(record.runs) == 1
    assert WATCHERS == []


def test_a_graph_that_fails_is_recorded_as_failed(path):
    table = torch.randn(4, 2).to("lazy")
    with pytest.raises(IndexError), torpor.record(path):
        torch.embedding(table, torch.tensor([9]).to("lazy")).tolist()
    with open_record(path) as record:
        (run,) = record.runs
        (output,) = record.outputs(run, record.graph(run))
        assert "index" in output.failed


def test_nothing_is_left_where_the_folder_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError), torpor.record(tmp_path / "none" / "f"):
        pass
    assert WATCHERS == []


def test_an_error_of_the_recording_itself_is_told_at_the_end(path, monkeypatch):
    x = torch.ones(2).to("lazy")
    recording = torpor.record(path)
    recording.start()
    monkeypatch.setattr(recording._writer, "add", lambda contents: 1 // 0)
    assert (x + 1).tolist() == [2.0, 2.0]
    with pytest.raises(ZeroDivisionError):
        recording.stop()
    assert list(path.parent.iterdir()) == []


def test_a_recording_that_grows_too_large_ends_with_a_word(path):
    x = torch.randn(1000).to("lazy")
    recording = torpor.record(path, max_bytes=24_000).start()
    for i in range(5):
        (x * i + torch.randn(1000).to("lazy")).sum().item()
    with pytest.warns(torpor.errors.TorporWarning, match="holds 2 runs; 3 more did not fit"):
        recording.stop()
    with open_record(path) as record:
        assert len(record.runs) == 2


def test_statistics_in_the_place_of_data(path):
    secret = torch.full((100,), 7.0)
    secret[3] = 1234.5
    with torpor.record(path, data=False):
        (secret.to("lazy") * 2).sum().item()
    assert secret.numpy().tobytes() not in path.read_bytes()
    with open_record(path) as record:
        assert not record.has_data
        (run,) = record.runs
        (made_up,) = record.arguments(run, record.graph(run))
        assert made_up.max() <= 1234.5
        assert made_up.min() >= 7.0


def test_numbers_of_a_run_are_kept_to_the_bit(path):
    x = torch.ones(2, dtype=torch.float64).to("lazy")
    for backend in ("reference", "torchscript"):
        torpor.use(backend)
        with torpor.record(path):
            for rate in (0.1, 0.2, 0.3):
                x.mul(rate).tolist()
        with open_record(path) as record:
            last = record.runs[-1]
            assert record.arguments(last, record.graph(last))[-1] == 0.3


def test_options_of_the_backend_are_noted(path):
    torpor.use("inductor", max_nodes=9)
    with torpor.record(path):
        (torch.ones(3).to("lazy") * 5).tolist()
    with open_record(path) as record:
        assert (record.runs[0].backend, record.runs[0].options) == ("inductor", {"max_nodes": "9"})
        assert not record.runs[0].exact


def test_a_graph_on_the_way_to_its_compiler_is_marked(path, monkeypatch):
    monkeypatch.setattr(torpor.config, "compile_after", 1)
    torpor.use("inductor")
    x = torch.ones(3).to("lazy")
    with torpor.record(path):
        for _ in range(2):
            (x * 11).tolist()
    with open_record(path) as record:
        assert [run.interpreted for run in record.runs] == [True, False]


def test_a_step_gives_the_same_numbers_while_it_is_recorded(path):
    plain = training_step(3)
    expected = [plain().item() for _ in range(4)]
    watched = training_step(3)
    got = [watched().item() for _ in range(2)]
    with torpor.record(path, results=True):
        got += [watched().item() for _ in range(2)]
    assert got == expected


def test_donated_buffers_are_recorded_before_they_are_written_over(path):
    torpor.use("inductor")
    weight = nn.Parameter(torch.zeros(64, 64).to("lazy"))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step():
        optimizer.zero_grad()
        (weight * 2).sum().backward()
        optimizer.step()

    step()
    torpor.sync(wait=True)
    with torpor.record(path):
        step()
    with open_record(path) as record:
        run = record.runs[-1]
        arguments = record.arguments(run, record.graph(run))
        assert any(isinstance(a, torch.Tensor) and a.eq(-2).all() for a in arguments)
    assert weight.detach().cpu().eq(-4).all()


def test_threads_record_into_one_file(path):
    def work(device):
        x = torch.ones(3).to(device)
        for i in range(5):
            (x * i).sum().item()

    with torpor.record(path):
        threads = [threading.Thread(target=work, args=(f"lazy:{i}",)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with open_record(path) as record:
        assert len(record.runs) == 15
        assert {run.device for run in record.runs} == {"cpu:0", "cpu:1", "cpu:2"}


def test_nobody_watches_without_a_recording():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (torch.ones(2).to("lazy") + 1).tolist() == [2.0, 2.0]
    assert WATCHERS == []
