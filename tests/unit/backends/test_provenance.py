"""What compiled code depends on: told in full, the same until something changes."""

import subprocess
import sys

import pytest
import torch

from torpor.backends import provenance

ALL = ("software", "settings_of_torch", "processor", "graphics", "compiler")


@pytest.mark.parametrize("name", ALL)
def test_it_is_the_same_in_every_process(name: str) -> None:
    program = f"from torpor.backends import provenance; print(provenance.{name}(), end='')"
    command = [sys.executable, "-c", program]
    reported = [subprocess.run(command, capture_output=True, text=True) for _ in range(2)]
    assert all(done.returncode == 0 for done in reported), reported
    if name != "software":  # sources may be edited meanwhile
        assert reported[0].stdout == reported[1].stdout
    assert reported[0].stdout.strip()


def test_versions_are_told() -> None:
    reported = provenance.software()
    assert torch.__version__ in reported
    assert sys.version in reported


def test_sources_are_told_by_their_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    before = provenance._sources.__wrapped__()
    monkeypatch.setattr(provenance, "_SOURCES", ("ir",))
    assert provenance._sources.__wrapped__() != before


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_precision_of_products_is_told(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    reported = provenance.settings_of_torch()
    torch.set_float32_matmul_precision(precision)
    try:
        assert provenance.settings_of_torch() != reported
    finally:
        torch.set_float32_matmul_precision(before)


PRECISION_BY_DEVICE = """
import torch
from torpor.backends import provenance
before = provenance.settings_of_torch()
torch.backends.fp32_precision = "tf32"
torch.backends.cuda.matmul.fp32_precision = "ieee"
assert provenance.settings_of_torch() != before
"""


def test_precision_may_be_set_by_device() -> None:
    done = subprocess.run([sys.executable, "-c", PRECISION_BY_DEVICE], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_the_number_of_threads_is_told() -> None:
    before, reported = torch.get_num_threads(), provenance.settings_of_torch()
    torch.set_num_threads(before + 1)
    try:
        assert provenance.settings_of_torch() != reported
    finally:
        torch.set_num_threads(before)


def test_features_of_the_processor_are_told() -> None:
    assert torch.backends.cpu.get_cpu_capability() in provenance.processor()
    with open("/proc/cpuinfo") as file:
        reported = file.read()
    assert provenance._features().split("; ")[0] in reported
