"""Check what a backend returns against the types of the graph, on the first run of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torpor.backend.data import BackendData
from torpor.backend.interface import Backend
from torpor.errors import BackendError, annotate
from torpor.execute.plan import Plan
from torpor.ir.types import TensorType
from torpor.text.printer import print_node


def checked(
    results: Any, plan: Plan, backend: Backend, types: Sequence[TensorType]
) -> list[BackendData]:
    """`results`, with each one that does not match its type replaced by an error."""
    wanted = len(plan.outputs)
    if not isinstance(results, (list, tuple)):
        raise BackendError(f"execute returned a {type(results).__name__}, not a list of results")
    if len(results) != wanted:
        raise BackendError(f"execute returned {len(results)} results for a graph of {wanted}")
    kept = [
        _judged(type_, result, position, plan, backend)
        for position, (type_, result) in enumerate(zip(types, results, strict=True))
    ]
    plan.checked = all(result.error is None for result in kept)
    return kept


def _judged(
    type_: TensorType, result: Any, position: int, plan: Plan, backend: Backend
) -> BackendData:
    fault = _fault(type_, result)
    if fault is not None:
        fault += f", not {type_!r}"
    elif result.tensor is None and result.error is None:
        fault = _misfit(result, backend.placeholder(plan.computation.device, type_))
    if fault is None:
        return result  # type: ignore[no-any-return]  # found to be data
    text = f"backend {backend.name!r} returned as result {position} {fault}"
    node = plan.outputs[position].node
    site = None if node.site is None else str(node.site)
    failed = backend.placeholder(plan.computation.device, type_)
    error = BackendError(text)
    error.inputs_written = bool(plan.donated)  # type: ignore[attr-defined]  # the graph has run
    failed.error = annotate(error, node.op.name, site, print_node(node))
    return failed


def _fault(type_: TensorType, result: Any) -> str | None:
    """A description of what is wrong with a result; None if it matches its type."""
    if not isinstance(result, BackendData):
        return f"a {type(result).__name__}"
    if result.error is not None:
        return None
    tensor = result.tensor
    if tensor is None:
        return "data without a value" if not result.has_value else _type_fault(type_, result.type)
    actual = TensorType.of_tensor(tensor, type_.device)
    if actual.offset or actual.conj or actual.neg:
        return f"{actual!r}, which is no memory of its own"
    return _type_fault(type_, actual)


def _misfit(result: BackendData, empty: BackendData) -> str | None:
    """Why a handle that waits for a buffer of the backend's own cannot take it over."""
    empty.assign(result)
    if empty.filled():
        return None
    waits = f"a {type(empty).__name__}, which holds nothing after assign()"
    return f"a {type(result).__name__}, where what placeholder() made is {waits}"


def _type_fault(wanted: TensorType, actual: TensorType) -> str | None:
    if actual.shape != wanted.shape or actual.dtype != wanted.dtype:
        return repr(actual)
    strides = zip(wanted.shape, wanted.stride, actual.stride, strict=True)
    if wanted.numel and any(size > 1 and a != b for size, a, b in strides):
        return repr(actual)
    return None
