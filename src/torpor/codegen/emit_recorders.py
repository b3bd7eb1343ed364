"""Modules of recorders: one function for all ops of a shape, and the ops that have it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

from torpor.codegen.model import LazyIrSchema
from torpor.codegen.torch_schemas import target_of
from torpor.ops.recorder_source import source
from torpor.ops.recorders import family

PACKAGE = "recorders"
_NAME = "record"  # of a function before it is named after its first op


def emit(schemas: Iterable[LazyIrSchema], header: str) -> dict[str, str]:
    """The files of the package, by their path in it."""
    families: defaultdict[str, list[LazyIrSchema]] = defaultdict(list)
    for schema in schemas:
        families[family(schema)].append(schema)
    files = {"__init__.py": f'{header}"""Recorders by family: `ops.recorders.family`."""\n'}
    for name, members in sorted(families.items()):
        files[f"{name}.py"] = _module(name, members, header)
        files[f"{name}.pyi"] = _stub(header)
    return {f"{PACKAGE}/{path}": text for path, text in files.items()}


def _module(name: str, schemas: list[LazyIrSchema], header: str) -> str:
    shapes: defaultdict[str, list[LazyIrSchema]] = defaultdict(list)
    for schema in schemas:
        shapes[source(schema)].append(schema)
    functions = [_function(text, members) for text, members in shapes.items()]
    shared = {s.name: members[0].identifier for members in shapes.values() for s in members}
    rows = [_row(schema, shared[schema.name]) for schema in schemas]
    return (
        f"{header}# ruff: noqa: F821  # trace.recorder gives the functions the names they use\n"
        f'"""Recorders of the family {name!r}."""\n\n\n'
        f"{''.join(functions)}RECORDERS = {{\n{''.join(rows)}}}\n"
    )


def _function(text: str, members: list[LazyIrSchema]) -> str:
    """A recorder under the name of the first op that has it."""
    return text.replace(f"def {_NAME}(", f"def {members[0].identifier}(", 1) + "\n\n"


def _row(schema: LazyIrSchema, function: str) -> str:
    entry = f"{json.dumps(str(target_of(schema)._schema))},\n        {function}"
    return f'    "{schema.name}": (\n        {entry},\n    ),\n'


def _stub(header: str) -> str:
    return (
        f"{header}from collections.abc import Callable\nfrom typing import Any\n\n"
        "RECORDERS: dict[str, tuple[str, Callable[..., Any]]]\n"
    )
