"""The Inductor backend: whole steps compiled to C++ or Triton."""

from torpor.backends.inductor.compile import InductorBackend

__all__ = ["InductorBackend"]
