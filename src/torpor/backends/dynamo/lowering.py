"""Lowering for TorchDynamo's backends: the steps of the FX backends, no op taken apart."""

from __future__ import annotations

from torpor.backends.fx.backend import FxLowering as DynamoLowering

__all__ = ["DynamoLowering"]
