"""The lock of the generators: eager's draws, and what must not meet one."""

from __future__ import annotations

import threading
from typing import Final

DRAWING: Final = threading.RLock()
"""Held while an op runs at once, which may draw, and while somebody swaps a generator's state."""
