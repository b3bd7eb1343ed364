"""Reads the ops of the installed torch from the `native_functions.yaml` in its wheel."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torpor.codegen.model import Composite, LazyIrSchema
from torpor.errors import TorporError

YAML = "packaged/ATen/native/native_functions.yaml"
TAGS = "packaged/ATen/native/tags.yaml"


class TorchgenMissing(TorporError):
    """torchgen or PyYAML is missing, so ATen's list of ops cannot be read."""


def _torchgen(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TorchgenMissing(
            f"cannot read torch's list of ops: {error}. torchgen comes with torch's wheel and "
            "needs PyYAML: pip install PyYAML"
        ) from None


def yaml_file(name: str = YAML) -> Path:
    """A file that comes with torchgen."""
    return Path(_torchgen("torchgen").__file__).parent / name


def fingerprint() -> str:
    """The SHA-256 of the file, which identifies the list of ops."""
    return hashlib.sha256(yaml_file().read_bytes()).hexdigest()


@functools.cache
def schemas() -> Mapping[str, LazyIrSchema]:
    """Every ATen overload that this torch can call, by name in the IR, sorted."""
    parsed = _torchgen("torchgen.gen").parse_native_yaml(str(yaml_file()), str(yaml_file(TAGS)))
    functions = {str(f.func.name): f for f in parsed.native_functions}
    found = [_schema(f, functions) for f in functions.values()]
    return {s.name: s for s in sorted(found, key=lambda s: s.name) if _is_callable(s)}


def _schema(function: Any, functions: Mapping[str, Any]) -> LazyIrSchema:
    """A torchgen function as a schema."""
    plain = LazyIrSchema.parse(f"{function.namespace}::{function.func}")
    delegate = function.structured_delegate
    out = function if function.structured else functions.get(str(delegate)) if delegate else None
    return LazyIrSchema(
        plain.namespace, plain.base, plain.overload, plain.arguments, plain.returns_,
        structured=str(out.func.name) if out is not None else "",
        inherits=(out.structured_inherits or "") if out is not None else "",
        composite=_composite(function),
        tags=tuple(sorted(function.tags)),
    )  # fmt: skip


def _composite(function: Any) -> Composite:
    if function.has_composite_implicit_autograd_kernel:
        return Composite.IMPLICIT
    if function.has_composite_explicit_autograd_kernel:
        return Composite.EXPLICIT
    if function.has_composite_explicit_autograd_non_functional_kernel:
        return Composite.NON_FUNCTIONAL
    return Composite.NO


def _is_callable(schema: LazyIrSchema) -> bool:
    packet = getattr(getattr(torch.ops, schema.namespace), schema.base, None)
    return hasattr(packet, schema.overload or "default")


def target_of(schema: LazyIrSchema) -> Any:
    """The torch op of a schema."""
    packet = getattr(getattr(torch.ops, schema.namespace), schema.base)
    return getattr(packet, schema.overload or "default")
