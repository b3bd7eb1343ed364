"""The reference backend: eager's kernels behind the interface, the judge for all others."""

from torpor.backends.reference.compile import ReferenceBackend

__all__ = ["ReferenceBackend"]
