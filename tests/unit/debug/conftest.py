"""Every test starts on the reference backend and leaves nothing running."""

from tests.comparison import on_the_reference_backend

__all__ = ["on_the_reference_backend"]
