"""Selects the backend like `torch._lazy` programs do."""

from __future__ import annotations

from torpor.backend.registry import has_backend
from torpor.backends.torchscript import init_torchscript_backend


def init() -> None:
    """Make sure that a backend is active: TorchScript, unless one was selected before.

    Do not call torch's own `torch._lazy.ts_backend.init` in the same process, as it also claims the
    device `lazy`.
    """
    if not has_backend():
        init_torchscript_backend()
