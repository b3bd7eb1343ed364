"""What cannot be compiled leaves a program behind that shows it alone."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from tests.backends import ill_backends
from torpor.backend import registry
from torpor.backend.failures import CompileFailure
from torpor.backends.inductor import InductorBackend
from torpor.debug import failure
from torpor.errors import CompileError, TorporWarning
from torpor.text.torch_parser import parse

Run = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "failures"
    monkeypatch.setattr(torpor.config, "failures_dir", str(folder))
    return folder


def warned(step: Callable[[], Any]) -> str:
    """The one warning of a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    (reported,) = (str(w.message) for w in caught if issubclass(w.category, TorporWarning))
    return reported


def program_in(reported: str) -> Path:
    """The program that a message names."""
    found = re.search(r"^  reproduce:   python (.+)$", reported, re.MULTILINE)
    assert found is not None, reported
    return Path(found[1])


def run(program: Path, well: bool = False) -> tuple[int, str]:
    """The exit status and the output of a program, started elsewhere than here."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"TESTS_WELL": "1"} if well else {}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=env, cwd=program.parent
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The same in this process, which is faster."""

    def run(program: Path, well: bool = False) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr(torpor.config, "strict", False)  # and back again
            patch.setattr(sys, "path", list(sys.path))
            if well:
                patch.setenv("TESTS_WELL", "1")
            status = runpy.run_path(str(program))["main"]()
        return status, capsys.readouterr().out

    return run


def test_a_program_shows_what_was_refused_until_it_is_not(where: Path) -> None:
    torpor.use(
        "tests-ill", reason='no """exponentials""" \\ at\tall\nnever', depth={1: (2.5, None)}
    )
    x, i = torch.randn(4, 6).to("lazy"), torch.tensor([2, 3]).to("lazy")
    reported = warned(lambda: (x.t()[i].conj().exp() * 2).cpu())
    program = program_in(reported)
    assert program.parent == where
    text = program.read_text()
    assert "test_compile_failures.py" in text
    assert "# NotImplementedError: no" in text
    assert f"# torch: {torch.__version__}" in text
    assert "tensor(torch.float32, (4, 6), (6, 1))" in text
    status, shown = run(program)
    assert status == 1
    assert 'NotImplementedError: no """exponentials""" \\ at\tall\nnever' in shown
    assert "FAILS as before" in shown
    assert run(program, well=True) == (0, "it compiles now\n")
    assert list(where.iterdir()) == [program]


def test_the_same_failure_has_the_same_file(where: Path) -> None:
    x = torch.randn(5).to("lazy")

    def fails() -> None:
        x.exp().cpu()

    for reason in ("at <thing 0x7f01>", "at <thing 0x7f02>", "elsewhere"):
        torpor.use("tests-ill", reason=reason)
        program_in(warned(fails))
    assert len(list(where.iterdir())) == 2


def test_only_so_many_are_kept(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "MAX_KEPT", 3)
    where.mkdir(mode=0o700)
    (where / "of_the_user.py").touch()
    written = [failure.write(failed(f"reason {number}")) for number in range(5)]
    for age, path in enumerate(reversed(written)):
        if path.exists():
            os.utime(path, (10**9 - age, 10**9 - age))
    last = failure.write(failed("one more"))
    kept = set(where.iterdir()) - {where / "of_the_user.py"}
    assert kept == {written[3], written[4], last}
    monkeypatch.setattr(failure, "MAX_BYTES", 1)
    assert failure.write(failed("and another")) in where.iterdir()
    assert len(list(where.iterdir())) == 2


def failed(reason: str, inputs: str = "%0 = leaf 0 : float32[4] @cpu") -> CompileFailure:
    """A graph of one exponential that `tests-ill` refused."""
    graph = parse(
        f"graph({inputs}) {{\n  %9 = aten.exp.default(%0) : float32[4] @cpu\n  return %9\n}}"
    )
    backend = registry.make("tests-ill")
    return CompileFailure(graph, backend, NotImplementedError(reason), {}, {})


def test_inputs_have_every_type(run_here: Run) -> None:
    inputs = """
        %0 = leaf 0 : float32[4] @cpu, %1 = scalar 0 : float, %2 = scalar 1 : bool,
        %3 = scalar 2 : complex, %4 = leaf 1 : complex64[2,3] stride [1,4] offset 5 conj @cpu,
        %5 = leaf 2 : bool[0,3] @cpu, %6 = leaf 3 : float8_e4m3fn[2] @cpu, %7 = computed 0 :
        bfloat16[2,2] stride [0,1] @cpu, %8 = leaf 4 : float64[2] neg @cpu
    """
    program = failure.write(failed("no exponentials", inputs))
    assert run_here(program)[0] == 1
    assert run_here(program, well=True) == (0, "it compiles now\n")


def test_a_directory_that_cannot_be_written_to_is_told_of(where: Path) -> None:
    where.write_text("a file in its place")
    torpor.use("tests-ill")
    x = torch.ones(3).to("lazy")
    results: list[torch.Tensor] = []
    reported = warned(lambda: results.append(x.exp().cpu()))
    assert "reproduce:   no program could be written" in reported
    assert str(where) in reported
    assert torch.equal(results[0], torch.ones(3).exp())


def test_a_directory_of_others_is_not_used(where: Path) -> None:
    where.mkdir()
    where.chmod(0o777)
    torpor.use("tests-ill")
    x = torch.ones(3, 1).to("lazy")
    assert "others can write to" in warned(lambda: x.exp().cpu())
    assert list(where.iterdir()) == []


def test_strict_errors_name_a_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "strict", True)
    torpor.use("tests-ill")
    y = torch.ones(2, 3).to("lazy").exp()
    with pytest.raises(CompileError) as raised:
        y.cpu()
    assert program_in(str(raised.value)).exists()


@pytest.mark.parametrize("strict", [False, True])
def test_of_a_graph_cut_in_pieces_the_piece_is_shown(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "strict", strict)
    torpor.use("tests-ill-fx")
    x = torch.rand(7, 2 + strict).to("lazy")
    y = x.sin().exp().sqrt().cos().tanh().neg()
    if strict:
        with pytest.raises(CompileError, match="no cosines") as raised:
            y.cpu()
        reported = str(raised.value)
    else:
        reported = warned(y.cpu)
    program = program_in(reported)
    graph = program.read_text().partition('GRAPH = """')[2]
    assert re.findall(r"aten\.\w+", graph) == ["aten.sqrt", "aten.cos"]
    status, shown = run(program)
    assert status == 1
    assert "RuntimeError: no cosines" in shown
    assert run(program, well=True) == (0, "it compiles now\n")


def test_a_piece_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: InductorBackend, traced: Any, piece: Any) -> Any:
        raise RuntimeError("the compiler is ill")

    monkeypatch.setattr(InductorBackend, "compile_module", fail)
    torpor.use("inductor", max_nodes=50)
    x, w = torch.rand(3, 4).to("lazy"), torch.rand(4, 5).to("lazy")
    reported = warned((x @ w).relu().cpu)
    text = program_in(reported).read_text()
    assert "BACKEND = 'inductor'" in text
    assert "'max_nodes': 50," in text
    assert "aten.relu.default" in text
    assert "RuntimeError: the compiler is ill" in text


def test_sizes_that_change_are_those_it_failed_at(
    run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "dynamic", "on")
    monkeypatch.setattr(ill_backends.IllBackend, "dynamic", True)
    for name, op in (("tests-ill", torch.exp), ("tests-ill-fx", torch.cos)):
        torpor.use(name)
        x = torch.rand(11, 3).to("lazy")
        torpor.mark_dynamic(x, 0)
        program = program_in(warned(op(x.reshape(-1)).cpu))
        text = program.read_text()
        assert "# sizes: they change" in text
        assert "= 11; the graph is for these" in text
        assert "tensor(torch.float32, (11, 3), (3, 1))" in text
        assert run_here(program)[0] == 1
        assert run_here(program, well=True) == (0, "it compiles now\n")


def test_what_may_be_written_over_is_told(run_here: Run) -> None:
    torpor.use("tests-ill-fx")
    x = torch.rand(1000).to("lazy")
    torpor.sync(wait=True)
    reported = warned(lambda: (x.cos_(), torpor.sync(wait=True)))
    program = program_in(reported)
    assert "DONATED = {0: 0}" in program.read_text()
    assert run_here(program, well=True) == (0, "it compiles now\n")


def test_ops_of_others_are_imported() -> None:
    torpor.use("tests-ill")
    x = torch.rand(6).to("lazy")
    program = program_in(warned(lambda: ill_backends.doubled(x).exp().cpu()))
    text = program.read_text()
    assert "# op tests_ill.doubled.default is defined by the module tests.backends.ill_back" in text
    assert run(program)[0] == 1
    assert run(program, well=True) == (0, "it compiles now\n")


def test_a_backend_that_nobody_registered_is_found(run_here: Run) -> None:
    registry.activate(ill_backends.UnregisteredBackend())
    x = torch.rand(8).to("lazy")
    program = program_in(warned(lambda: x.exp().cpu()))
    assert run_here(program)[0] == 1
    assert run_here(program, well=True) == (0, "it compiles now\n")


def test_what_cannot_be_tried_is_neither_right_nor_wrong() -> None:
    registry.activate(ill_backends.hidden())
    x = torch.rand(9).to("lazy")
    status, shown = run(program_in(warned(lambda: x.exp().cpu())))
    assert status == 2
    assert "CANNOT BE TRIED here: BackendError: no backend 'tests-hidden'" in shown


def test_options_that_are_no_python_are_to_be_filled_in(run_here: Run) -> None:
    torpor.use("tests-ill", number=float("inf"), device=torch.device("cpu"), depth=3)
    x = torch.rand(10).to("lazy")
    program = program_in(warned(lambda: x.exp().cpu()))
    text = program.read_text()
    assert "'depth': 3,\n" in text
    assert re.search(r"^    #     'device': device\(type='cpu'\),  to be filled in$", text, re.M)
    assert run_here(program)[0] == 1
