"""The backend that the operator and model tests run on: `TORPOR_TEST_BACKEND`, else the reference.

    TORPOR_TEST_BACKEND=torchscript make test-ops ARGS="-k softmax"

A backend that runs eager's own kernels must give eager's bits; one with kernels of its own must
give its numbers, within what the dtype can hold.
"""

from __future__ import annotations

import os

WITH_EAGERS_KERNELS = ("reference", "torchscript")
FALLBACKS = ("aten::", "fallback::", "CompileFailed")
"""How the counters begin that say: this was not computed by the backend."""

NAME = os.environ.get("TORPOR_TEST_BACKEND", "reference")
BIT_EXACT = NAME in WITH_EAGERS_KERNELS
