"""Options of the Inductor backend: a few of torpor's own, and every setting of Inductor's."""

from __future__ import annotations

import difflib
from typing import Any

from torpor import _torch
from torpor.errors import BackendError

OWN = ("compile_after", "cuda_graphs", "equal_subgraphs", "max_nodes", "rng")


def check_rng(rng: str) -> None:
    """Refuse what random numbers cannot be."""
    if rng in ("exact", "fast"):
        return
    raise BackendError(f"rng is 'exact' or 'fast', not {rng!r}")


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that Inductor does not have, with the nearest one it has."""
    known = [*_torch.inductor_options(), *OWN] if settings else []
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise BackendError(f"Inductor has no option {name!r}{hint}")
