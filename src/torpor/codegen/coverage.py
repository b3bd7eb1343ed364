"""Computes what is covered: by a backend's declaration, and by torpor itself."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from torpor import _torch
from torpor.codegen import own_ops
from torpor.codegen.emit_types import Rule, rule_of
from torpor.codegen.model import Form, LazyIrSchema
from torpor.codegen.torch_schemas import schemas, target_of
from torpor.codegen.yaml_file import BackendFile
from torpor.ops.spec import Mode, spec_of

# -- a backend ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """How many of a set of things are covered."""

    what: str
    covered: int
    total: int

    @property
    def percent(self) -> str:
        return f"{100 * self.covered / self.total:.1f} %" if self.total else "-"

    def row(self) -> tuple[str, str, str, str]:
        return self.what, str(self.covered), str(self.total), self.percent


@dataclass(frozen=True)
class Coverage:
    """What a backend declares, in numbers."""

    backend: str
    shares: tuple[Share, ...]
    uncovered_core: tuple[str, ...]  # core ATen ops that it does not cover

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "covered": {s.what: {"covered": s.covered, "of": s.total} for s in self.shares},
            "core_aten_missing": list(self.uncovered_core),
        }


def twins(ops: Iterable[LazyIrSchema]) -> dict[str, LazyIrSchema]:
    """In-place ops, each with the functional one among `ops` that computes the same."""
    known = schemas()
    found = {}
    for op in ops:
        name = f"{op.namespace}.{op.base}_.{op.overload or 'default'}"
        inplace = known.get(name)
        if inplace is not None and _is_twin(inplace, op):
            found[name] = op
    return found


def _is_twin(inplace: LazyIrSchema, op: LazyIrSchema) -> bool:
    arguments = [(a.name, a.type) for a in inplace.arguments]
    same = arguments == [(a.name, a.type) for a in op.arguments]
    one = len(inplace.mutated) == len(inplace.returns) == len(op.returns) == 1
    plain = op.form is Form.FUNCTIONAL and inplace.form is Form.INPLACE and not op.is_view
    return same and one and plain and not op.mutated and not inplace.is_foreach


def of_backend(file: BackendFile) -> Coverage:
    """How much a backend's file covers of ATen, of core ATen and of torch's operator table."""
    declared = {op.name for op in file.lowered}
    reached = declared | set(twins(op.schema for op in file.lowered))
    nodes = {schema.name for schema in own_ops.recorded()}
    core = {schema.name for schema in schemas().values() if schema.is_core}
    return Coverage(
        file.name,
        (
            Share("ATen overloads", len(declared), len(schemas())),
            Share("of those that reach a backend", len(reached & nodes), len(nodes)),
            Share("core ATen", len(reached & core), len(core)),
            *_of_op_db(reached),
        ),
        tuple(sorted(core - reached)),
    )


def _of_op_db(covered: set[str]) -> list[Share]:
    """Entries of the table whose ops are all covered, ignoring entries without ops."""
    bring = [ops for ops in op_db().values() if ops["forward"]]
    forward = [ops for ops in bring if covered.issuperset(ops["forward"])]
    both = [ops for ops in forward if covered.issuperset(ops["backward"])]
    return [
        Share("op_db entries, forward", len(forward), len(bring)),
        Share("op_db entries, forward and backward", len(both), len(bring)),
    ]


@functools.cache
def _op_db_file() -> Any:
    text = (resources.files("torpor.codegen") / "op_db.json").read_text(encoding="utf-8")
    return json.loads(text)


def op_db() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """The ops that each entry of torch's operator table dispatches to a backend (first sample)."""
    entries: Mapping[str, Mapping[str, Sequence[str]]] = _op_db_file()["entries"]
    return entries


def op_db_version() -> str:
    """The torch version with which `op_db` was measured."""
    version: str = _op_db_file()["torch"]
    return version


# -- torpor itself -----------------------------------------------------------------------------

HOW = ("node", "view", "composite", "random", "eager", "metadata")
"""How an op is recorded: as a node, as a view node, decomposed into other ops; random, run
immediately, or by changing a tensor's size."""

FAMILIES = {
    "factories": "no tensor in",
    "unary": "one tensor in",
    "binary": "two tensors in",
    "ternary": "three tensors in",
    "many": "more tensors in",
    "views": "views",
    "writes": "in-place",
    "out": "out=",
    "foreach": "_foreach_",
}


def family(schema: LazyIrSchema) -> str:
    """The row of the table in which an op is counted."""
    if schema.is_foreach:
        return "foreach"
    if any(schema.arguments[i].keyword_only for i in schema.mutated):
        return "out"
    if schema.mutated:
        return "writes"
    if schema.is_view:
        return "views"
    return ("factories", "unary", "binary", "ternary", "many")[min(len(schema.tensors), 4)]


@dataclass(frozen=True)
class OwnCoverage:
    """What torpor does with every overload of ATen."""

    torch: str
    overloads: int
    constructors: int
    families: Mapping[str, Mapping[str, int]]  # counts by family: overloads, constructors, `HOW`
    rules: Mapping[str, int]  # counts by kind of type rule

    @property
    def typed(self) -> int:
        """Overloads with a constructor and a type rule."""
        return self.constructors - self.rules[Rule.NONE.value]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "typed": self.typed}


def how_recorded(schema: LazyIrSchema) -> str:
    """How calls of an op are recorded: one of `HOW`."""
    target = target_of(schema)
    if schema.name not in _recorded() and _torch.is_composite(target):
        return "composite"
    mode = spec_of(target).mode
    return "node" if mode is Mode.RECORD else mode.value


@functools.cache
def _recorded() -> frozenset[str]:
    return frozenset(schema.name for schema in own_ops.recorded())


def of_torpor() -> OwnCoverage:
    """torpor's own coverage of the installed torch."""
    constructors = {schema.name for schema in own_ops.nodes()}
    families: dict[str, Counter[str]] = {name: Counter() for name in FAMILIES}
    for schema in schemas().values():
        counts = families[family(schema)]
        counts["overloads"] += 1
        counts["constructor"] += schema.name in constructors
        counts[how_recorded(schema)] += 1
    kinds = Counter(rule_of(schema).value for schema in own_ops.nodes())
    columns = ("overloads", "constructor", *HOW)
    return OwnCoverage(
        torch.__version__.partition("+")[0],
        len(schemas()),
        len(constructors),
        {name: {c: counts[c] for c in columns} for name, counts in families.items()},
        {rule.value: kinds[rule.value] for rule in Rule},
    )


RULES = {
    Rule.WRITTEN: "a rule written by hand",
    Rule.ELEMENTWISE: "torch's rule for elementwise ops, in Python",
    Rule.TRIED: "the kernel, run once on stand-ins",
    Rule.STRUCTURED: "torch's structured kernel, on fake tensors",
    Rule.META: "another kernel for meta tensors",
    Rule.PARTS: "the ops it is made of, on fake tensors",
    Rule.FAKE: "a rule that fake tensors have",
    Rule.NONE: "none: it runs eagerly, as a fallback",
}


def family_table(coverage: OwnCoverage) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: how the ops of each family are recorded, with totals."""
    columns = ("overloads", "constructor", *HOW)
    rows: list[tuple[str, ...]] = [
        (FAMILIES[name], *(str(counts[c]) for c in columns))
        for name, counts in coverage.families.items()
    ]
    total = (str(sum(f[c] for f in coverage.families.values())) for c in columns)
    return ("family", *columns), [*rows, ("all", *total)]


def rule_table(coverage: OwnCoverage) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: where the types of results come from."""
    rows: list[tuple[str, ...]] = [
        (text, str(coverage.rules[rule.value])) for rule, text in RULES.items()
    ]
    return ("type rule", "overloads"), rows


def page(coverage: OwnCoverage) -> str:
    """The page `docs/coverage.md`."""
    return (
        "# What torpor covers of ATen\n\n"
        "For someone who wants to know how an op is handled. Generated by\n"
        f"`torpor codegen --coverage --markdown` for torch {coverage.torch}: of "
        f"{coverage.overloads:,} overloads {coverage.constructors:,}\nhave a node constructor "
        f"(`torpor.ops.nodes`), and {coverage.typed:,} of these a type rule. Which results\n"
        "match eager is in [op_db.md](op_db.md).\n\n"
        f"{markdown(*family_table(coverage))}\n\n"
        "| how an op is recorded | |\n|---|---|\n"
        "| node | one node |\n"
        "| view | one node, whose result shares its argument's memory |\n"
        "| composite | torch decomposes it first; the parts are recorded |\n"
        "| random | drawn immediately, with eager's generator "
        "([why](design/0001-random-numbers-are-drawn-when-recorded.md)) |\n"
        "| eager | runs immediately: its result is not a tensor, or depends on data |\n"
        "| metadata | changes the size of a tensor in place; hand-written recorder |\n\n"
        f"{markdown(*rule_table(coverage))}\n"
    )


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    """A Markdown table; all columns but the first are numeric."""
    ruler = ["---", *["---:" if numbers else "---"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ruler, *rows))
