"""66 drawn programs that once differed from eager, each made small (`found.txt`).

Values, strides, dtypes and types of errors: bit for bit on the reference backend; on Inductor in
`make sweep-drawn`, where every graph is compiled when it is first met.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from tests.property.drawn_run import ERRORS, _error, _kind, _noted, _short

PROGRAMS = dict(
    block.split("\n", 1)
    for block in Path(__file__).with_name("found.txt").read_text().split("##### ")[1:]
)

NEW_MEMORY = "a storage grows, and what is new of it is read before it is written"
READ_AND_WRITTEN = "reads memory that it writes, in an order of its own"
NO_TRUTH = "bytes other than 0 and 1 are written into the memory of booleans"
UNDEFINED = {
    "20430": NEW_MEMORY,
    "20791": NEW_MEMORY,
    "20485": READ_AND_WRITTEN,  # `index_put_` of a part of itself
    "21360": READ_AND_WRITTEN,  # `out=` a view of the input, which is resized
    "21378": READ_AND_WRITTEN,  # the same
}
"""The numbers that eager leaves undefined; everything else about these programs is compared."""

UNDEFINED_COMPILED = {**UNDEFINED, "21162": NO_TRUTH}


GROWS = {"20302"}
"""Memory that an array shares cannot grow; a lazy tensor's array is a copy (docs/limits.md)."""


def _run(source: str, device: str, sync: Any) -> list[tuple[str, Any]]:
    seen: list[tuple[str, Any]] = []

    def out(name: str, value: Any) -> None:
        plain = value.tolist() if hasattr(value, "tolist") else value
        seen.append((name, _noted(value) if isinstance(value, torch.Tensor) else plain))

    names: dict[str, Any] = {
        "torch": torch, "copy": copy, "io": io, "pickle": pickle, "ERR": ERRORS, "STEPS": 3,
        "kind_of": _error,
    }  # fmt: skip
    torch.manual_seed(7)
    exec(source, names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names["run"](device, sync, out)
    return seen


def _compare(seed: str, undefined: bool, exact: bool) -> None:
    expected = _run(PROGRAMS[seed], "cpu", lambda *tensors: None)
    got = _run(PROGRAMS[seed], "lazy", torpor.sync)
    if seed in GROWS:
        expected, got = expected[:1], got[:1]
    assert [name for name, _ in got] == [name for name, _ in expected]
    for (name, one), (_, other) in zip(expected, got, strict=True):
        kind = _kind(one, other, exact)
        known = undefined and kind == "values"
        assert kind is None or known, f"{name}: {kind}: {_short(one)}, lazily {_short(other)}"


@pytest.mark.parametrize("seed", PROGRAMS)
def test_a_program_that_once_differed_gives_eagers_bits(seed: str) -> None:
    _compare(seed, seed in UNDEFINED, exact=True)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", PROGRAMS)
def test_a_program_that_once_differed_gives_eagers_numbers_compiled(seed: str) -> None:
    with torpor.using("inductor"):
        _compare(seed, seed in UNDEFINED_COMPILED, exact=False)
