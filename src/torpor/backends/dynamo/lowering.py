"""Lowering for TorchDynamo's backends: the shared FX lowering, without decompositions."""

from __future__ import annotations

from torpor.backends.blocks.block_backend import BlockLowering as DynamoLowering

__all__ = ["DynamoLowering"]
