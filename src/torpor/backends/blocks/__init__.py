"""Graphs cut into blocks that are compiled, and run one after the other: what backends share."""

from torpor.backends.blocks.block_backend import BlockBackend

__all__ = ["BlockBackend"]
