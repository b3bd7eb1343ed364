"""Donation: a step writes the new contents of a storage over the old ones, if those are unused.

A parameter enters a step as a leaf and leaves it as an output of the same type. If nothing else
references the old buffer when the step runs, the backend may write there. References are counted:
to the handle, its tensor and its memory. If a count is too high, the backend gets a copy instead.
"""

from __future__ import annotations

import sys
from typing import Any

from torpor import metrics
from torpor.backend.interface import Backend
from torpor.backend.native_library import NATIVE
from torpor.execute.storage import TRACE
from torpor.inference.strides import is_dense
from torpor.ir.graph import Graph


def donations(graph: Graph) -> dict[int, int]:
    """Inputs that may be donated, each mapped to the output that replaces it in its storage."""
    inputs = {value: position for position, value in enumerate(graph.inputs)}
    outputs = {value: position for position, value in enumerate(graph.outputs)}
    found: dict[int, int] = {}
    for storage, leaf in TRACE.leaf_storages:
        value = storage.value
        if value is leaf or value is None or value.type is not leaf.type:
            continue
        parameter, result = inputs.get(leaf), outputs.get(value)
        type_ = leaf.type
        if not type_.numel or not is_dense(type_.shape, type_.stride):
            continue
        if parameter is None or result is None:
            continue
        if parameter not in found and result not in found.values():
            found[parameter] = result
    return found


def protect(arguments: list[Any], positions: tuple[int, ...], backend: Backend) -> list[Any]:
    """The arguments, with a copy of each donated one that is referenced elsewhere.

    Called when the step runs: without another reference at that time, none can appear later.
    """
    if not positions:
        return arguments
    if NATIVE.library is None or type(backend).is_shared is not Backend.is_shared:
        refused = shared(arguments, positions, backend)
    else:
        refused = NATIVE.library.shared(arguments, positions)
    given = list(arguments) if refused else arguments
    for position in refused:
        given[position] = backend.copy_data(arguments[position])
    if refused:
        metrics.count("DonationRefused", len(refused))
    if len(positions) > len(refused):
        metrics.count("Donated", len(positions) - len(refused))
    return given


_SOLE_REFERENCES = 3  # the list of arguments, a local here, the argument of `getrefcount`


def shared(arguments: list[Any], positions: tuple[int, ...], backend: Backend) -> list[int]:
    """The positions whose data are referenced elsewhere."""
    found = []
    for position in positions:
        data = arguments[position]
        if data.error is not None:
            continue
        if sys.getrefcount(data) > _SOLE_REFERENCES or backend.is_shared(data):
            found.append(position)
        del data
    return found
