"""Graphs of nodes as functional ATen `torch.fx` modules: what the FX backends share."""

from torpor.backends.fx.backend import FxBackend

__all__ = ["FxBackend"]
