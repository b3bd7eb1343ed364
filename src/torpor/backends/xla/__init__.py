"""The XLA backend: whole steps compiled by XLA through `jax.jit`; data are jax arrays."""

from torpor.backends.xla.compile import XlaBackend

__all__ = ["XlaBackend"]
