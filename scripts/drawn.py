"""Run small drawn programs on a lazy device and in eager, and say where they differ.

    python -m scripts.drawn programs.txt [--backend inductor] [--alone] [--seed 20005] [--messages]

A file of programs has, for each, a line `##### seed N ...`, the text of `def run(DEV, S, out)`, and
from a line `---` on what was seen when it was drawn, which is not read. `run` is called with a
device, `torpor.sync`, and a function that notes a named result. Names of tensors that a program
reads and never makes (they were dropped when it was made small) are its first tensor.
"""

from __future__ import annotations

import argparse
import ast
import copy
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

import torpor

STEPS = 3
ERR = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError)

_WHILE_WRITING = (
    "the op reads memory that it is writing: what it reads depends on the kernel's order"
)
_DEVICE = "the program asks for the device, and does another thing on `lazy`"
UNDEFINED = {
    20302: f"{_DEVICE}: `numpy()` of a CPU tensor keeps its memory from growing",
    20430: "`set_` beyond the end of a storage: what is in the new memory is not defined",
    20485: f"`x.index_put_(i, x[:1], accumulate=True)`: {_WHILE_WRITING}",
    20791: "`resize_` to a larger size: what is in the new memory is not defined",
    20859: f"`x.masked_scatter_(mask, x)`: {_WHILE_WRITING}",
    21162: "booleans whose bytes are not 0 or 1, written through a view of another dtype",
    21360: f"`sub(x, y, out=x[...])` that grows `x`: {_WHILE_WRITING}",
    21378: f"`sub(x, y, out=x[...])` that grows `x`: {_WHILE_WRITING}",
}
"""Programs whose results eager leaves undefined, each with the reason."""


@dataclass(frozen=True)
class Program:
    """One drawn program."""

    seed: int
    text: str


def read(path: Path) -> list[Program]:
    """The programs of a file."""
    parts = re.split(r"^##### seed (\d+).*\n", path.read_text(), flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [Program(int(seed), text.split("\n---")[0] + "\n") for seed, text in pairs]


def compiled(program: Program) -> Callable[..., None]:
    """The function of a program."""
    tree = ast.parse(program.text)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef), "a program is one function"
    loop = next(i for i, node in enumerate(function.body) if isinstance(node, ast.For))
    function.body[loop:loop] = _missing(function)
    names: dict[str, Any] = {
        "torch": torch, "pickle": pickle, "copy": copy, "numpy": numpy, "np": numpy,
        "STEPS": STEPS, "ERR": ERR, "kind_of": kind_of,
    }  # fmt: skip
    exec(compile(ast.fix_missing_locations(tree), f"<{program.seed}>", "exec"), names)
    run: Callable[..., None] = names["run"]
    return run


def _missing(function: ast.FunctionDef) -> list[ast.stmt]:
    """Assignments of the first tensor to names that are read and never made."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    made = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    wanted = {name.id for name in names} - made
    first = min(name for name in made if re.fullmatch(r"s\d+", name))
    missing = sorted(name for name in wanted if re.fullmatch(r"[stw]\d+", name))
    return [stmt for name in missing for stmt in ast.parse(f"{name} = {first}").body]


def kind_of(error: Exception) -> str:
    """Type and first words of an error, without what torpor puts before and after them."""
    words = re.sub(r"^\[[\w.]+\] ", "", str(error).split("\n")[0])
    return f"{type(error).__name__}: {words[:120]}"


Noted = tuple[str, Any]


def run_on(program: Program, device: str) -> list[Noted]:
    """What a program notes on `device`."""
    noted: list[Noted] = []
    torch.manual_seed(program.seed)
    compiled(program)(device, torpor.sync if device != "cpu" else _no_sync, _noting(noted))
    return noted


def _no_sync(*args: Any, **kwargs: Any) -> None:
    """Eager has nothing to cut."""


def _noting(noted: list[Noted]) -> Callable[[str, Any], None]:
    def out(name: str, value: Any) -> None:
        noted.append((name, _fact(value)))

    return out


def _fact(value: Any) -> Any:
    """What is compared of a result: of a tensor its type, strides and bits."""
    if isinstance(value, torch.Tensor):
        stride = value.stride() if value.numel() else None
        about = (tuple(value.shape), stride, value.dtype, value.requires_grad)
        return about, _bits(value.detach().cpu())
    return copy.deepcopy(value)


def _bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.resolve_conj()
        .resolve_neg()
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def difference(eager: list[Noted], lazy: list[Noted], messages: bool) -> str | None:
    """The first difference, in words."""
    for place, (one, other) in enumerate(zip(eager, lazy)):
        if not _same(one, other, messages):
            return f"result {place}: eager {_words(one)}, lazy {_words(other)}"
    if len(eager) != len(lazy):
        more = eager[len(lazy) :] or lazy[len(eager) :]
        return f"{len(eager)} results in eager, {len(lazy)} lazily: {_words(more[0])}"
    return None


def _same(one: Noted, other: Noted, messages: bool) -> bool:
    if one[0] == other[0] == "E" and not messages:
        return bool(one[1].split(":")[0] == other[1].split(":")[0])
    return repr(one) == repr(other)


def _words(noted: Noted) -> str:
    name, value = noted
    return f"{name} {str(value)[:160]}"


def judge(program: Program, messages: bool = False) -> str:
    """Whether a program does lazily what it does in eager: `equal`, or what differs."""
    if program.seed in UNDEFINED:
        run_on(program, "lazy")
        return f"undefined: {UNDEFINED[program.seed]}"
    try:
        found = difference(run_on(program, "cpu"), run_on(program, "lazy"), messages)
    except Exception:
        return "DIFFERS: " + traceback.format_exc(limit=-3)
    return "equal" if found is None else f"DIFFERS: {found}"


def _alone(program: Program, arguments: list[str]) -> str:
    """The judgement of a process that runs nothing else."""
    call = [sys.executable, "-m", "scripts.drawn", *arguments, "--seed", str(program.seed)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600, check=False)
    lines = done.stdout.splitlines()
    return lines[0].split(maxsplit=1)[1] if lines else f"DIFFERS: {done.stderr[-300:]}"


def main() -> int:
    """Print one line for each program; 1 if one of them differs."""
    parser = argparse.ArgumentParser(prog="python -m scripts.drawn", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--alone", action="store_true", help="each in a process of its own")
    parser.add_argument("--seed", type=int, action="append", help="only these programs")
    parser.add_argument("--messages", action="store_true", help="compare words of errors too")
    options = parser.parse_args()
    torpor.use(options.backend)
    torpor.config.compile_after = 0
    chosen = [p for p in read(options.file) if not options.seed or p.seed in options.seed]
    differing = 0
    for program in chosen:
        if options.alone:
            answer = _alone(program, [str(options.file), "--backend", options.backend])
        else:
            answer = judge(program, options.messages)
        differing += answer.startswith("DIFFERS")
        print(f"{program.seed}  {answer}", flush=True)
    print(f"{len(chosen)} programs on {options.backend}, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
