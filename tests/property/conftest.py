"""Fixtures shared by the behaviour tests."""

from tests.comparison import concrete, on_the_reference_backend, put, virtual

__all__ = ["concrete", "on_the_reference_backend", "put", "virtual"]
