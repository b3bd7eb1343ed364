"""Registers the backends that come with torpor; each is imported on first use."""

from __future__ import annotations

import importlib.util
from typing import Any

from torpor.backend.interface import Backend
from torpor.backend.registry import register


def _reference(**options: Any) -> Backend:
    from torpor.backends.reference import ReferenceBackend

    return ReferenceBackend(**options)


def _torchscript(**options: Any) -> Backend:
    from torpor.backends.torchscript import TSBackend

    return TSBackend(**options)


def _inductor(**options: Any) -> Backend:
    from torpor.backends.inductor import InductorBackend

    return InductorBackend(**options)


def _inductor_available() -> str | None:
    from torpor.backends.inductor.runtime import unavailable

    return unavailable()


def _dynamo(name: str, **options: Any) -> Backend:
    from torpor.backends.dynamo import DynamoBackend

    return DynamoBackend(name, **options)


def _xla(**options: Any) -> Backend:
    from torpor.backends.xla import XlaBackend

    return XlaBackend(**options)


def _xla_available() -> str | None:
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed (pip install 'torpor[xla]')"
    return None


register("reference", _reference)
register("inductor", _inductor, _inductor_available)
register("dynamo:NAME", _dynamo)
register("torchscript", _torchscript)
register("xla", _xla, _xla_available)
