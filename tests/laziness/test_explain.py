"""What `torpor.explain()` answers, and the switches that forbid recompiles and hidden syncs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import torpor
from tests.comparison import Put, line_below
from torpor.backend import Computation, register
from torpor.backends.reference import ReferenceBackend
from torpor.errors import HiddenSync, RecompileError, TorporWarning
from torpor.execute.sync import PLANS
from torpor.ir.node import TABLE
from torpor.observe import history
from torpor.observe.history import HISTORY


class Patient(ReferenceBackend):
    """Compiles what it has met twice before."""

    compile_after = 2


class Unable(ReferenceBackend):
    """Compiles nothing."""

    name = "unable"

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        raise NotImplementedError("nothing at all")


register("patient", Patient)
register("unable", Unable)


@pytest.fixture(autouse=True)
def fresh(on_the_reference_backend: None) -> Iterator[None]:
    """A node keeps the line that met it first, so none may be known before."""
    torpor.sync(wait=True)
    TABLE.clear()
    HISTORY.clear()
    torpor.metrics.reset()
    yield
    torpor.config.on_recompile = "ignore"
    torpor.sync(wait=True)
    TABLE.clear()


def step(put: Put, size: int) -> None:
    y = put(torch.ones(size)).exp()
    torpor.sync()
    del y


# -- the answer --------------------------------------------------------------------------------


def test_nothing_done_nothing_to_tell() -> None:
    answer = torpor.explain()
    assert answer.balance.verdict == "idle"
    assert (answer.findings, answer.graphs) == ((), ())
    assert "Nothing to change" in str(answer)


def test_a_first_compile_is_told_and_is_no_finding(put: Put) -> None:
    for _ in range(3):
        step(put, 3)
    answer = torpor.explain()
    assert answer.findings == ()
    (graph,) = answer.graphs
    assert (graph.cause, graph.compiled, graph.hits, graph.nodes) == ("first time", True, 2, 1)
    assert "torpor.sync()" in graph.line


def test_the_answer_is_json_too(put: Put) -> None:
    for size in (3, 4):
        step(put, size)
    content = json.loads(torpor.explain().to_json())
    assert content["findings"][0]["cause"] == "shape"
    assert content["graphs"][1]["compiled"] is True
    assert content["balance"]["traces"] == 2
    assert content["verdict"] in ("tracing-bound", "compute-bound", "compile-bound")


def test_what_was_before_a_reset_is_left_out_and_still_compared_with(put: Put) -> None:
    step(put, 3)
    torpor.metrics.reset()
    assert torpor.explain().graphs == ()
    step(put, 4)
    (graph,) = torpor.explain().graphs
    assert graph.cause == "shape"


def test_dearest_first_and_what_is_over_last(put: Put) -> None:
    rate = 0.5
    x = put(torch.ones(3))
    for _ in range(4):
        rate /= 2
        y = x * rate
        y.sum().item()
        torpor.sync()
        del y
    found = torpor.explain().findings
    assert [one.over for one in found] == sorted(one.over for one in found)
    going_on = [one.seconds for one in found if not one.over]
    assert going_on == sorted(going_on, reverse=True)
    assert {"promoted", "sync"} <= {one.cause for one in found}


@pytest.mark.usefixtures("fixed_sizes")
def test_a_new_graph_every_step_is_never_compiled(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", -1)
    with torpor.using("patient"):
        for size in range(1, 7):
            step(put, size)
        torpor.wait()
        answer = torpor.explain()
    assert not any(graph.compiled for graph in answer.graphs)
    found = answer.findings[0]
    assert (found.cause, found.count) == ("shape", 5)
    assert "5 new graphs, never compiled because none came back often enough" in found.title
    assert found.seconds > 0


def test_a_graph_that_is_compiled_late_is_told_once(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", -1)
    with torpor.using("patient"):
        for _ in range(4):
            step(put, 3)
        torpor.wait()
        (graph,) = torpor.explain().graphs
    assert graph.compiled
    assert graph.hits == 3


@pytest.mark.filterwarnings("ignore::torpor.errors.TorporWarning")
def test_a_graph_that_cannot_be_compiled_is_a_finding(put: Put) -> None:
    with torpor.using("unable"):
        step(put, 3)
        torpor.wait()
        found = torpor.explain().findings
    assert found[0].cause == "compile failed"
    assert "nothing at all" in str(found[0].details)


def test_a_graph_that_was_dropped_is_the_same_one(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        step(put, 3)
        PLANS.clear()
    found = torpor.explain().findings[0]
    assert found.cause == "same"
    assert "max_cached_plans" in found.advice


def test_a_tensor_that_is_held_once_is_named(put: Put) -> None:
    x, held = put(torch.ones(3)), []
    for number in range(4):
        expected = line_below()
        y = x.exp()
        z = y.sum()
        if number == 2:
            held.append(y)
        del y
        torpor.sync()
        del z
    found = next(one for one in torpor.explain().findings if one.cause == "results")
    assert found.line.startswith(expected)
    assert "1 results -> 2" in found.details[0]


def test_a_read_in_some_steps_makes_another_graph(put: Put) -> None:
    x = put(torch.ones(3))
    for number in range(4):
        y = x.exp()
        if number == 2:
            y.tolist()
        z = y.sum()
        torpor.sync()
        del y, z
    causes = {one.cause for one in torpor.explain().findings}
    assert causes == {"read", "sync"}


def test_a_constant_that_is_never_promoted_is_named(put: Put) -> None:
    x = put(torch.ones(3))
    for exponent in (2, 3, 4):
        expected = line_below()
        y = x**exponent
        torpor.sync()
        del y
    found = torpor.explain().findings[0]
    assert found.cause == "constant"
    assert found.line.startswith(expected)
    assert found.details[:2] == (
        "a constant changed: `exponent` of aten.pow.Tensor_Scalar, 2 -> 3",
        "so far: 2, 3, 4",
    )


# -- bounded -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("fixed_sizes")
def test_the_latest_graphs_are_kept_in_a_process_of_many_lines(
    virtual: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_GRAPHS", 8)
    for number in range(8):  # each line begins with graphs that are kept longest
        exec(compile("(x * 2).tolist()", f"line{number}.py", "exec"), {"x": virtual(torch.ones(2))})
    for size in range(1, 9):
        step(virtual, size)
    assert HISTORY.records[-1].graph is not None
    assert HISTORY.records[-2].graph is not None


@pytest.mark.usefixtures("fixed_sizes")
def test_an_endless_stream_of_graphs_keeps_few_of_them(
    virtual: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_GRAPHS", 8)
    for size in range(1, 41):
        step(virtual, size)
    assert sum(record.graph is not None for record in HISTORY.records) == 8
    assert HISTORY.nodes == 8
    answer = torpor.explain()
    assert answer.findings[0].cause == "shape"
    assert len(answer.graphs) == 40


@pytest.mark.usefixtures("fixed_sizes")
def test_old_records_are_counted_and_forgotten(
    virtual: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_RECORDS", 8)
    HISTORY.clear()
    for size in range(1, 21):
        step(virtual, size)
    answer = torpor.explain()
    assert (len(answer.graphs), answer.forgotten) == (8, 12)
    assert "20 new graphs" in str(answer)
    monkeypatch.undo()
    HISTORY.clear()


# -- switches ----------------------------------------------------------------------------------


def cut() -> None:
    torpor.sync()  # one line for all cuts of a test


def test_a_recompile_can_be_an_error_with_its_reason(put: Put) -> None:
    torpor.config.on_recompile = "raise"
    for _ in range(2):
        y = put(torch.ones(3)).exp()
        cut()
    y = put(torch.ones(4)).exp()
    with pytest.raises(RecompileError, match=r"dim 0 of \[3\] -> \[4\]") as caught:
        cut()
    assert "torpor.sync()" in str(caught.value)
    torpor.config.on_recompile = "ignore"
    assert y.tolist() == torch.ones(4).exp().tolist()


def test_a_refused_recompile_is_refused_again(put: Put) -> None:
    torpor.config.on_recompile = "raise"
    y = put(torch.ones(3)).exp()
    cut()
    y = put(torch.ones(4)).exp()
    for _ in range(2):
        with pytest.raises(RecompileError):
            cut()
    torpor.config.on_recompile = "ignore"
    cut()
    assert len(torpor.explain().graphs) == 2
    del y


def test_a_recompile_can_be_a_warning_at_the_users_line(put: Put) -> None:
    torpor.config.on_recompile = "warn"
    y = put(torch.ones(3)).exp()
    cut()
    y = put(torch.ones(4)).exp()
    with pytest.warns(TorporWarning, match="compiled again") as caught:
        cut()
    assert caught[0].filename == __file__
    del y


def test_a_wish_that_is_none_is_refused(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    y = put(torch.ones(3)).exp()
    cut()
    monkeypatch.setattr(torpor.config, "on_recompile", "sometimes")
    y = put(torch.ones(4)).exp()
    with pytest.raises(ValueError, match="'warn'"):
        cut()
    monkeypatch.undo()
    assert y.tolist() == torch.ones(4).exp().tolist()


def test_a_first_compile_at_another_line_is_no_recompile(put: Put) -> None:
    torpor.config.on_recompile = "raise"
    y = put(torch.ones(3)).exp()
    torpor.sync()
    y = put(torch.ones(4)).exp()
    torpor.sync()
    del y


def test_a_change_of_backend_is_no_recompile(put: Put) -> None:
    torpor.config.on_recompile = "raise"
    for _ in range(2):
        y = put(torch.ones(3)).exp()
        cut()
        with torpor.using("patient"):
            y = put(torch.ones(3)).exp()
            cut()
    del y


def test_graphs_that_are_interpreted_are_no_recompiles(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", 5)
    torpor.config.on_recompile = "raise"
    for size in range(1, 5):
        step(put, size)


@pytest.mark.parametrize("read", [
    lambda x: x.item(), bool, float, repr, lambda x: x.tolist(), lambda x: x.numpy(),
    lambda x: torch.nonzero(x), lambda x: torch.unique(x),
])  # fmt: skip
def test_a_hidden_sync_can_be_an_error(put: Put, read) -> None:
    x = put(torch.ones(1))
    with torpor.no_sync():
        y = x + 1
        with pytest.raises(HiddenSync) as caught:
            read(y)
    assert "test_explain.py:" in str(caught.value)
    assert read(y) is not None  # and nothing is broken


def test_a_hidden_sync_is_told_with_its_line(put: Put) -> None:
    y = put(torch.ones(1)) + 1
    with torpor.no_sync(), pytest.raises(HiddenSync) as caught:
        expected = line_below()
        y.item()
    assert f"read at: {expected}   y.item()" in str(caught.value)


def test_what_asks_in_words_is_no_hidden_sync(put: Put) -> None:
    with torpor.no_sync():
        y = put(torch.ones(1)) + 1
        torpor.sync(y, wait=True)
        assert y.item() == 2  # known by now: nobody waits
        z = y * 2
        torpor.sync()
        torpor.wait()
    assert z.item() == 4


def test_a_step_without_reads_passes(put: Put) -> None:
    module = put(torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(module.parameters())
    with torpor.no_sync():
        for _ in range(3):
            module(put(torch.ones(2, 3))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_reads_are_forbidden_on_one_thread_and_until_the_end_of_the_body(put: Put) -> None:
    y = put(torch.ones(1)) + 1
    with pytest.raises(KeyError), torpor.no_sync(), torpor.no_sync():
        raise KeyError
    assert y.item() == 2


# -- at exit -----------------------------------------------------------------------------------

PROGRAM = """
import torch, torpor
for size in (3, 4):
    y = torch.ones(size, device="lazy").exp()
    torpor.sync()
"""


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_answer_is_printed_at_exit_if_asked_for(switch: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORPOR_EXPLAIN": switch,
        "TORPOR_BACKEND": "reference",
        "TORPOR_COMPILE_AFTER": "0",
    }
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == ""
    assert ("program.py:4   y = torch.ones" in done.stderr) is (switch == "1")
