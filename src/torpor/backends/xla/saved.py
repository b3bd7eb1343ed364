"""Compiled pieces as bytes, and back: jax's serialised executables, one for each piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import serialize_executable

from torpor.backend.lowering import Computation
from torpor.backend.pack import pack, unpack
from torpor.backends.xla.lowering import XlaPiece
from torpor.backends.xla.runtime import exact, jax_device


def dump(computation: Computation) -> bytes:
    """All compiled pieces of a graph."""
    pieces = enumerate(_pieces(computation))
    return pack({str(i): serialize_executable.serialize(p.compiled)[0] for i, p in pieces})


def load(computation: Computation, saved: bytes) -> Computation:
    """A lowered graph with the compiled pieces of its like."""
    parts = unpack(saved)
    pieces = list(_pieces(computation))
    if parts.keys() != {str(i) for i in range(len(pieces))}:
        raise ValueError(f"{len(parts)} compiled pieces, not {len(pieces)}")
    device = jax_device(computation.device)
    with exact():
        for number, piece in enumerate(pieces):
            piece.compiled = serialize_executable.deserialize_and_load(
                parts[str(number)], *_trees(piece), device.client, [device]
            )
    return computation


def _pieces(computation: Computation) -> Iterator[XlaPiece]:
    return (step for step in computation.program.steps if isinstance(step, XlaPiece))


def _trees(piece: XlaPiece) -> tuple[Any, Any]:
    """The structure of what a piece is called with and of what it returns."""
    results = len(piece.outputs) + bool(piece.checked)
    given: Any = ((0,) * (len(piece.inputs) + bool(piece.offsets)), {})
    return jax.tree.structure(given), jax.tree.structure([0] * results)
