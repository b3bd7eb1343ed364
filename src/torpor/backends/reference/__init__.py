"""The reference backend: eager's kernels behind the interface, the baseline for all others."""

from torpor.backends.reference.compile import ReferenceBackend

__all__ = ["ReferenceBackend"]
