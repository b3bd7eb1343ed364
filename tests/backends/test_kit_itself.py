"""The kit's own parts: how it compares, how it classifies operators, where it is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from torpor.backend import Backend, BackendData, BackendDevice, Computation
from torpor.backends.equality import same_bits
from torpor.backends.reference import ReferenceBackend
from torpor.backends.reference.lowering import ReferenceLowering
from torpor.ir import Node
from torpor.testing.comparison import difference, no_further, type_difference
from torpor.testing.run import modules, run_kit
from torpor.testing.scorecard import OpResult, Point, Scorecard

SOURCE = Path(torpor.__file__).resolve().parents[1]


# -- comparison --------------------------------------------------------------------------------

X = torch.tensor([1.0, -2.0, 1e4])


@pytest.mark.parametrize(
    ("got", "exact", "close"),
    [
        (X, True, True),
        (X * (1 + 1e-6), False, True),
        (X * (1 + 1e-6), True, False),
        (X * 1.01, False, False),
        (X.double(), False, False),
        (X[:2], False, False),
        (torch.tensor([1.0, -2.0, float("nan")]), False, False),
        (torch.tensor([1.0, -2.0, float("inf")]), False, False),
        (3.0, False, False),
    ],
)
def test_numbers_are_compared_within_their_dtype(got: Any, exact: bool, close: bool) -> None:
    assert (difference(got, X, exact) is None) is close


def test_nan_is_nan_and_infinity_is_infinity() -> None:
    odd = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert difference(odd.clone(), odd) is None
    assert difference(odd.clone(), odd, exact=True) is None
    assert difference(odd.flip(0), odd) is not None


def test_the_sign_of_zero_counts_among_bits() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) is None


def test_integers_and_numbers_must_be_equal() -> None:
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) is not None
    assert difference(2, 2) is None
    assert difference(2, 2.0) is not None
    assert difference(2.0, 2.0 + 1e-12) is None


@pytest.mark.parametrize(
    ("got", "accepted"), [(0.0, True), (9e-4, True), (2e-3, False), (float("nan"), False)]
)
def test_what_eager_rounds_too_is_judged_in_double_precision(got: float, accepted: bool) -> None:
    eagers, judged = torch.tensor([-5e-4]), torch.zeros(1, dtype=torch.float64)
    assert no_further(torch.tensor([got]), eagers, judged) is accepted


def test_double_precision_that_computes_something_else_is_no_judge() -> None:
    drawn = torch.tensor([0.25], dtype=torch.float64)
    assert not no_further(torch.tensor([0.5]), torch.tensor([0.75]), drawn)
    assert not no_further(torch.tensor([0.5]), torch.tensor([0.75]), drawn.view(1, 1))
    assert not no_further(torch.ones(1, 1), torch.tensor([0.75]), drawn)


def test_strides_and_gradients_are_part_of_a_type() -> None:
    square = torch.ones(2, 3)
    assert type_difference(square, torch.ones(2, 3)) is None
    assert "strides" in str(type_difference(torch.ones(3, 2).t(), square))
    assert "requires_grad" in str(type_difference(torch.ones(2, 3, requires_grad=True), square))


# -- how operators are classified --------------------------------------------------------------


class FallingBack(ReferenceBackend):
    """Says of one op that eager runs it, of another that it is made of others."""

    class Lowering(ReferenceLowering):
        def lower(self, node: Node) -> None:
            if node.op.name == "aten.exp.default":
                self.fell_back(node)
            if node.op.name == "aten.sin.default":
                self.decomposed(node)
            super().lower(node)

    def lowering_context(self, *args: Any) -> ReferenceLowering:
        return self.Lowering(*args)


class Uncompiled(ReferenceBackend):
    """Compiles no `exp`."""

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        if any(n.op.name == "aten.exp.default" for c in computations for n in c.graph.nodes):
            raise NotImplementedError("no exp")
        return super().compile(computations)


class WrongExp(ReferenceBackend):
    """Adds a little to every result."""

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        results = super().execute(computation, arguments, device)
        for result in results:
            if result.tensor is not None and result.tensor.is_floating_point():
                result.tensor = result.tensor + 0.5
        return results


def statuses(backend: type[Backend], ops: str) -> dict[str, str]:
    name = f"tests.backends.test_kit_itself:{backend.__name__}"
    outcome = run_kit(name, "test_operators", options=["--ops", f"^({ops})$", "--samples", "1"])
    return {result.op: result.status for result in outcome.card.ops}


def test_what_a_backend_counts_is_what_the_scorecard_shows() -> None:
    found = statuses(FallingBack, "exp|sin|neg|nonzero")
    expected = {"exp": "fallback", "sin": "decomposed", "neg": "native", "nonzero": "core"}
    assert found == expected


def test_what_falls_back_in_the_backward_alone_is_told() -> None:
    result = OpResult("mm", "native", backward_fallbacks=["aten.t.default"])
    card = Scorecard("acme", "lazy", [], [result, OpResult("add", "native")])
    assert "1 of the native ones fall back in their backward" in card.text()
    assert card.held


def test_what_the_reference_backend_stands_in_for_is_a_fallback() -> None:
    assert statuses(Uncompiled, "exp|neg") == {"exp": "fallback", "neg": "native"}


def test_a_wrong_number_is_wrong() -> None:
    assert statuses(WrongExp, "exp|argmax") == {"exp": "wrong", "argmax": "native"}


# -- the card ----------------------------------------------------------------------------------


def test_a_card_counts_points_and_operators() -> None:
    points = [Point("contract", "a", "held"), Point("contract", "b", "broken", "why")]
    card = Scorecard("acme", "lazy", points, [OpResult("exp", "native"), OpResult("sin", "wrong")])
    assert not card.held
    assert card.text().splitlines() == [
        "contract     1 of 2 points held",
        "operators    2 entries: 1 native, 1 wrong",
    ]
    assert card.to_json()["operators"]["wrong"] == 1
    assert Scorecard("acme", "lazy", points[:1]).held


# -- where it is found -------------------------------------------------------------------------


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )


def test_the_options_are_there_in_a_folder_without_anything(tmp_path: Path) -> None:
    """torpor is installed, so pytest loads `torpor_pytest`, which sees the name of the kit."""
    kit = ("--pyargs", "torpor.testing.test_contract", "--backend", "reference")
    done = pytest_in(tmp_path, *kit, "-k", "devices")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "points held" in done.stdout


def test_a_missing_or_unknown_backend_is_a_usage_error(tmp_path: Path) -> None:
    plugin = ("-p", "torpor.testing.plugin", "--pyargs", "torpor.testing.test_contract")
    for options, text in (
        ((), "needs --backend"),
        (("--backend", "nosuch"), "no backend 'nosuch'"),
    ):
        done = pytest_in(tmp_path, *plugin, *options)
        assert done.returncode == 4
        assert text in done.stdout + done.stderr


def test_other_test_runs_load_nothing_of_the_kit(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--backend')\n"
    )
    (tmp_path / "test_own.py").write_text(
        "import sys\n\n\ndef test_own():\n    assert 'torpor' not in sys.modules\n"
    )
    done = pytest_in(tmp_path, "--backend", "mine")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_sections_are_the_modules() -> None:
    from torpor.cli.conformance import SECTIONS

    assert sorted(f"test_{section}" for section in SECTIONS) == modules()


def test_import_torpor_does_not_load_the_kit_or_pytest() -> None:
    program = (
        "import sys, torpor, torpor.cli; "
        "assert not {'pytest', 'torpor.testing', 'numpy.testing'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
