"""The XLA backend: whole steps compiled by XLA through `jax.jit`; data are JAX arrays."""

from torpor.backends.xla.compile import XlaBackend

__all__ = ["XlaBackend"]
