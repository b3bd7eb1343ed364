"""One name for one thing, and the names of the field: modules, classes and identifiers."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "torpor"
FILES = sorted(SOURCE.rglob("*.py"))
NATIVE = sorted(path for path in (SOURCE / "native").iterdir() if path.suffix in (".h", ".cpp"))

RHYMES = {
    "compile": "each backend has one",
    "lowering": "each backend has one, and the interface",
    "runtime": "each backend has one",
    "saved": "each backend that keeps compiled graphs has one",
    "report": "each tool has one",
    "worker": "what a child process runs: of the compiler, of the benchmarks",
    "elementwise": "written by hand, and generated",
}
"""Modules of one name that do the same for different owners."""

MIRRORS = {
    "_torch": "named after the part of torch whose private names it holds",
    "backends/xla/lowerings": "named after the kind of torch ops that it lowers",
    "cli": "named after the command",
    "compat/torch_lazy": "named after the module of torch._lazy",
}
"""Packages whose modules are named after something else."""

USER_CODE = ("bench/models.py", "bench/wild/", "cli/char_gpt.py")
"""Models and programs as users write them: they have a GPT, an Attention, a Block each."""

TORCH_API = ("frontend/device_module.py",)
"""Classes named as those of `torch.cuda` are: `torch.lazy.Stream`, `torch.lazy.Event`."""

BANNED = (
    "beside besides picks told fit fits fitted lanes blobs ways passing loose laid front stands"
)
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def test_no_two_modules_bear_the_same_name() -> None:
    found = defaultdict(list)
    for path in FILES:
        name = path.relative_to(SOURCE)
        if path.stem != "__init__" and name.parent.as_posix() not in MIRRORS:
            found[path.stem].append(name.as_posix())
    assert {stem for stem, paths in found.items() if len(paths) > 1} == set(RHYMES), found


def test_no_two_classes_bear_the_same_name() -> None:
    found = defaultdict(list)
    for path in FILES:
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(USER_CODE + TORCH_API):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{name}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def words(name: str) -> set[str]:
    """The words that an identifier is made of."""
    return {part.lower() for part in PART.findall(name)}


def identifiers(path: Path) -> Iterator[tuple[str, int]]:
    if path in NATIVE:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = re.sub(r'"[^"]*"', "", line.partition("//")[0])
            yield from ((name, number) for name in re.findall(r"[A-Za-z_]\w*", code))
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.string, token.start[0]


@pytest.mark.parametrize("name", ["compiles_beside", "NO_FIT", "_Told", "LooseEnd", "FRONT"])
def test_the_words_of_an_identifier_are_seen(name: str) -> None:
    assert words(name) & set(BANNED.split())


def test_private_words_are_no_identifiers() -> None:
    banned = set(BANNED.split())
    assert not [path for path in FILES if words(path.stem) & banned]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in [*FILES, *NATIVE]
        for name, line in identifiers(path)
        if words(name) & banned and not name.startswith("test_")  # sentences, of the kit
    ]
    assert found == []
