"""Compiled pieces as bytes, and back: jax's serialised executables."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import serialize_executable

from torpor.backend.device import BackendDevice
from torpor.backends.blocks.program import Piece
from torpor.backends.xla.runtime import exact, jax_device


def dump_code(compiled: Any) -> bytes:
    """A compiled piece."""
    saved: bytes = serialize_executable.serialize(compiled)[0]
    return saved


def load_code(saved: bytes, piece: Piece, device: BackendDevice) -> Any:
    """A compiled piece like the one that was dumped."""
    given: Any = ((0,) * len(piece.inputs), {})
    results = [0] * (len(piece.outputs) + piece.checked)
    trees = jax.tree.structure(given), jax.tree.structure(results)
    place = jax_device(device)
    with exact():
        return serialize_executable.deserialize_and_load(saved, *trees, place.client, [place])
