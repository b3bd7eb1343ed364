"""Graphs as functional ATen `torch.fx` modules: shared by the FX backends."""

from torpor.backends.fx.backend import FxBackend

__all__ = ["FxBackend"]
