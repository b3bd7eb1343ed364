"""Registers the backends that come with torpor; each is imported when it is first asked for."""

from __future__ import annotations

from typing import Any

from torpor.backend.interface import Backend
from torpor.backend.registry import register


def _reference(**options: Any) -> Backend:
    from torpor.backends.reference import ReferenceBackend

    return ReferenceBackend(**options)


register("reference", _reference)
