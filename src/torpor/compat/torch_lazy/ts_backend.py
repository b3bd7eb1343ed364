"""Choosing the backend the way `torch._lazy` programs do."""

from __future__ import annotations

from torpor.backend.registry import backends, get_backend, has_backend, use


def init() -> None:
    """Make sure that a backend is active: TorchScript, unless one was chosen before.

    Where torpor has no TorchScript backend, its default one is used. Do not call torch's own
    `torch._lazy.ts_backend.init` in the same process: it takes the device `lazy` for itself.
    """
    if has_backend():
        return
    if backends().get("torchscript") == "available":
        use("torchscript")
    else:
        get_backend()
