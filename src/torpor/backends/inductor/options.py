"""Options of the Inductor backend: torpor's own, and all of Inductor's settings."""

from __future__ import annotations

from typing import Any

from torpor import _torch
from torpor.errors import BackendError, did_you_mean

OWN = ("compile_after", "cuda_graphs", "equal_subgraphs", "max_nodes", "rng")


def check_rng(rng: str) -> None:
    """Raise on an unknown value of `rng`."""
    if rng in ("exact", "fast"):
        return
    raise BackendError(f"rng is 'exact' or 'fast', not {rng!r}")


def check_settings(settings: dict[str, Any]) -> None:
    """Raise on settings that Inductor lacks, suggesting the closest one."""
    known = [*_torch.inductor_options(), *OWN] if settings else []
    for name in settings:
        if name not in known:
            raise BackendError(f"Inductor has no option {name!r}{did_you_mean(name, known)}")
