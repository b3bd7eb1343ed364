"""Finds the generated recorder of an op.

The recorders of ATen stand in `ops/_generated/recorders/`, which `make codegen` writes. Each is
kept with the schema it was written for: where the running torch has another one, or the op is not
ATen's, the recorder is written now.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any, Final, Protocol

from torpor.ops import rules
from torpor.ops.spec import ArgKind, OpSpec, Return, ReturnKind

PACKAGE: Final = "torpor.ops._generated.recorders"
FAMILIES: Final = (
    "binary", "factories", "foreach", "many", "out_1", "out_2", "out_3", "out_4", "out_5", "out_6",
    "ternary", "unary", "views", "writes",
)  # fmt: skip
"""The modules of recorders."""
ALIASES: Final = frozenset({"aten.alias.default", "aten.detach.default", "aten.lift_fresh.default"})
"""Views that show all there is: their result looks at its storage as their argument does."""


class Parameter(Protocol):
    """What a recorder has to know of an argument; `spec.Argument` is one."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> ArgKind: ...
    @property
    def has_default(self) -> bool: ...
    @property
    def keyword_only(self) -> bool: ...


class Recordable(Protocol):
    """What a recorder has to know of an op; `spec.OpSpec` is one."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Sequence[Parameter]: ...
    @property
    def returns(self) -> Sequence[Return]: ...
    @property
    def mutated(self) -> tuple[int, ...]: ...
    @property
    def may_fail(self) -> bool: ...


def family(op: Recordable) -> str:
    """The module of `ops/_generated/recorders/` in which the recorder of an op stands.

    Ops that are used together stand together, so that a program loads few of them.
    """
    if op.name.startswith("aten._foreach_"):
        return "foreach"
    tensors = sum(a.kind in (ArgKind.TENSOR, ArgKind.TENSORS) for a in op.arguments)
    if any(op.arguments[i].keyword_only for i in op.mutated):
        return f"out_{min(tensors, 6)}"
    if op.mutated:
        return "writes"
    if any(r.kind is ReturnKind.VIEW for r in op.returns):
        return "views"
    return ("factories", "unary", "binary", "ternary", "many")[min(tensors, 4)]


def kept_arguments(op: Recordable) -> list[int]:
    """Arguments that live on in the results: written ones, and those that are viewed."""
    viewed = {r.argument for r in op.returns if r.kind is ReturnKind.VIEW}
    return sorted({*op.mutated, *viewed})


def may_repeat(op: Recordable, position: int) -> bool:
    """The argument at `position`, which is written to, may be read as another one too.

    `x.add_(x)` is what everybody writes. What is read where indices say must not be written.
    """
    indexing = op.name.split(".")[1] in rules.INDEXING
    return not indexing and not op.arguments[position].keyword_only


def recorder_code(spec: OpSpec, also: str = "") -> CodeType:
    """The code of the recorder of an op, for this op alone; `also` is a further part of its key.

    A copy for each op: Python's interpreter adapts code to the names it is run with.
    """
    code = None if also else _generated_code(spec)
    if code is not None:
        return code.replace(co_name="record", co_qualname=f"record {spec.name}")
    from torpor.ops.recorder_source import compiled  # not needed where torch is the one expected

    return compiled(spec, also)


def _generated_code(spec: OpSpec) -> CodeType | None:
    module = _module(f"{PACKAGE}.{family(spec)}") if spec.target.namespace == "aten" else None
    if module is None:
        return None
    schema, function = module.RECORDERS.get(spec.name, (None, None))
    return function.__code__ if schema == str(spec.target._schema) else None


def _module(name: str) -> Any:
    """A module of recorders; None where it is faster to write the one that is needed.

    Python compiles a module as a whole. It does so once, unless it may not keep what it compiled.
    """
    if name in sys.modules:
        return importlib.import_module(name)  # another thread may still be loading it
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None or not _is_kept(found.cached):  # not there while it is generated
        return None
    return importlib.import_module(name)


def _is_kept(file: str | None) -> bool:
    """The compiled module is in `file`, or will be."""
    if file is None:
        return False
    return os.path.exists(file) or not sys.dont_write_bytecode
