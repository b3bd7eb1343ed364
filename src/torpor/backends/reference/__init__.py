"""The reference backend."""

from torpor.backends.reference.compile import ReferenceBackend

__all__ = ["ReferenceBackend"]
