"""Finds which rule gives the types of each op's results, and which ops are purely elementwise."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable
from typing import Any, Final

import torch

from torpor import _torch
from torpor.codegen.model import Form, LazyArgument, LazyIrSchema
from torpor.codegen.torch_schemas import target_of
from torpor.inference import type_rules
from torpor.ops.spec import ArgKind, spec_of


class Rule(enum.Enum):
    """Where the types of an op's results come from."""

    WRITTEN = "written"  # a rule of `inference.type_rules`
    ELEMENTWISE = "elementwise"  # `inference.elementwise`; else fake tensors
    TRIED = "tried"  # a trial: its kernel, run once on stand-ins
    STRUCTURED = "structured"  # torch's structured kernel, on fake tensors
    META = "meta"  # another meta kernel
    PARTS = "parts"  # its decomposition, on fake tensors
    FAKE = "fake"  # a rule of fake tensors
    NONE = "none"  # none: it runs eagerly, as a fallback


def rule_of(schema: LazyIrSchema) -> Rule:
    """The rule for an op in the installed torch."""
    if schema.name in type_rules.RULES:
        return Rule.WRITTEN
    if schema.name in type_rules.TRIED:
        return Rule.TRIED
    if elementwise_result(schema):
        return Rule.ELEMENTWISE
    if schema.structured:
        return Rule.STRUCTURED
    return Rule(_torch.type_source(target_of(schema)) or "none")


def emit(schemas: Iterable[LazyIrSchema], header: str) -> dict[str, str]:
    """The table of elementwise ops and its stub, by path."""
    return {
        "elementwise.py": _elementwise(schemas, header),
        "elementwise.pyi": f"{header}RESULT_OF: dict[str, str]\nTAKES_NUMBERS: frozenset[str]\n",
    }


# -- elementwise ops -------------------------------------------------------------------------------

_PROBES: Final = (2, 0.5, 0, 0.0, 1, -1, -0.5, 1e30, -(2**40), math.inf, -math.inf, math.nan)
_DTYPES: Final = (torch.float32, torch.float64)
_OPERANDS: Final = (ArgKind.TENSOR, ArgKind.TENSORS, ArgKind.SCALAR, ArgKind.SCALARS, ArgKind.FLOAT)


def _elementwise(schemas: Iterable[LazyIrSchema], header: str) -> str:
    found = [(schema, elementwise_result(schema)) for schema in schemas]
    rows = "".join(f'    "{s.name}": "{result}",\n' for s, result in found if result)
    numbers = "".join(f'    "{s.name}",\n' for s, result in found if result and _takes_number(s))
    return (
        f'{header}"""Elementwise ops, and what they make of floating-point tensors.\n\n'
        "The `same` dtype, `bool`, or the same of all `items` of lists; for "
        "`inference.elementwise`.\n"
        '"""\n\n'
        f"RESULT_OF = {{\n{rows}}}\n\nTAKES_NUMBERS = frozenset({{\n{numbers}}})\n"
    )


@functools.cache
def elementwise_result(schema: LazyIrSchema) -> str:
    """The result dtype of an elementwise op on floating-point tensors, found by running its kernel.

    Empty if it is not elementwise, or if its kernel raises for some numbers.
    """
    if not (schema.is_elementwise or schema.is_foreach) or schema.form is Form.OUT:
        return ""
    if any(a.kind in _OPERANDS and a.type.is_optional for a in schema.arguments):
        return ""
    if schema.is_foreach != any(a.kind is ArgKind.TENSORS for a in schema.arguments):
        return ""
    if any(a.kind not in _OPERANDS and not a.has_default for a in schema.arguments):
        return ""
    found = {_probe(schema, number, dtype) for number in _PROBES for dtype in _DTYPES}
    return found.pop() if len(found) == 1 else ""


def _takes_number(schema: LazyIrSchema) -> bool:
    """Whether its second tensor, and only that, may be a number."""
    places = [i for i, a in enumerate(schema.arguments) if a.kind is ArgKind.TENSOR]
    if len(places) != 2:
        return False
    values = [_stand_in(argument, 2, torch.float32) for argument in schema.arguments]
    values[places[1]] = 2
    spec = spec_of(target_of(schema))
    positional, keywords = spec.call_arguments(values)
    try:
        spec.target(*positional, **keywords)
    except RuntimeError:
        return False
    return True


def _probe(schema: LazyIrSchema, number: float, dtype: torch.dtype) -> str:
    values = [_stand_in(argument, number, dtype) for argument in schema.arguments]
    spec = spec_of(target_of(schema))
    positional, keywords = spec.call_arguments(values)
    try:
        result = spec.target(*positional, **keywords)
    except (RuntimeError, ValueError, NotImplementedError):
        return ""
    if schema.is_foreach:
        items = values[0] if schema.mutated else result
        return "items" if [(t.shape, t.dtype) for t in items] == [((2, 3), dtype)] * 2 else ""
    if result.shape != (2, 3):
        return ""
    return {dtype: "same", torch.bool: "bool"}.get(result.dtype, "")


def _stand_in(argument: LazyArgument, number: float, dtype: torch.dtype) -> Any:
    one = torch.ones(2, 3, dtype=dtype)
    if argument.kind is ArgKind.TENSOR:
        return one
    if argument.kind is ArgKind.TENSORS:
        return [one, one.clone()]
    if argument.kind is ArgKind.SCALARS:
        return [number, number]
    return number if argument.kind in _OPERANDS else argument.default
