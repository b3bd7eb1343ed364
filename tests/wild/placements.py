"""How a program is run, and the list of all programs.

A program is a function that takes a `Placement` and returns what it found out: losses, parameters,
metrics, tokens. It is written as its users would write it: `how.model` is the one line that torpor
asks of them (none under `enable`), `how.device` is where they send their batches.

- ``eager``   plain PyTorch: the judge;
- ``enable``  `torpor.enable()` before the program, which is not changed;
- ``lazy``    `model = torpor.lazy(model)`;
- ``device``  `model.to("lazy")`, and batches that are sent there too.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

LAZY_PLACEMENTS = ("enable", "lazy", "device")
MODULES = (
    "programs_autograd", "programs_data", "programs_generative", "programs_libraries",
    "programs_ranks", "programs_rl", "programs_text", "programs_tools", "programs_training",
    "programs_vision",
)  # fmt: skip

M = TypeVar("M", bound=torch.nn.Module)


@dataclass(frozen=True)
class Placement:
    """One way to run a program; `folder` is its own, for checkpoints and logs."""

    name: str
    folder: Path

    @property
    def device(self) -> torch.device:
        return torch.device("lazy" if self.name == "device" else "cpu")

    def model(self, model: M) -> M:
        """What a user does to a model after it is built."""
        if self.name == "lazy":
            import torpor

            lazy: M = torpor.lazy(model)
            return lazy
        return model.to(self.device)


@dataclass(frozen=True)
class Program:
    """A program, and the ways in which it makes sense."""

    name: str
    run: Callable[[Placement], dict[str, Any]]
    placements: tuple[str, ...]


PROGRAMS: dict[str, Program] = {}


def program(
    *, placements: Iterable[str] = LAZY_PLACEMENTS
) -> Callable[[Callable[[Placement], dict[str, Any]]], Callable[[Placement], dict[str, Any]]]:
    """Put a function on the list of programs, under its own name."""

    def add(run: Callable[[Placement], dict[str, Any]]) -> Callable[[Placement], dict[str, Any]]:
        PROGRAMS[run.__name__] = Program(run.__name__, run, tuple(placements))
        return run

    return add


def named(module: str) -> list[str]:
    """The names of the programs in a module, which is not imported: some take seconds."""
    return [match["name"] for match in _HEADS.finditer(_source(module))]


def placements_of(name: str) -> tuple[str, ...]:
    """The ways in which a program makes sense, as its module says."""
    for module in MODULES:
        for match in _HEADS.finditer(_source(module)):
            if match["name"] == name:
                placements = re.findall(r'"(\w+)"', match["placements"])
                return tuple(placements) or LAZY_PLACEMENTS
    raise ValueError(f"no program is called {name!r}")


def find(name: str) -> Program:
    """The program of that name."""
    for module in MODULES:
        if name in named(module):
            importlib.import_module(f"tests.wild.{module}")
            return PROGRAMS[name]
    raise SystemExit(f"no program is called {name!r}")


_HEADS = re.compile(r"^@program\((?P<placements>.*)\)\ndef (?P<name>\w+)\(", re.MULTILINE)


@functools.cache
def _source(module: str) -> str:
    return (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")
