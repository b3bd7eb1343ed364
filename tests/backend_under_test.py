"""The backend that the operator and model tests run on: `TORPOR_TEST_BACKEND`, else the reference.

    TORPOR_TEST_BACKEND=torchscript make test-ops ARGS="-k softmax"

A backend that runs eager's own kernels must give eager's bits; one with kernels of its own must
give its numbers, within what the dtype can hold. `TORPOR_TEST_DEVICE=cuda` has models trained on
the GPU, by eager too; there eager itself does not always add in the same order.

`TORPOR_TEST_DEFAULTS=1` has the tests run what people install: the default backend, which compiles
a graph when that has come back often enough, and keeps what it compiled on disk.
"""

from __future__ import annotations

import os

WITH_EAGERS_KERNELS = ("reference", "torchscript")
FALLBACKS = ("aten::", "fallback::", "CompileFailed")
"""How the counters begin that say: this was not computed by the backend."""

DEFAULTS = bool(os.environ.get("TORPOR_TEST_DEFAULTS"))
NAME = os.environ.get("TORPOR_TEST_BACKEND", "inductor" if DEFAULTS else "reference")
COMPILE_AFTER = int(os.environ.get("TORPOR_TEST_COMPILE_AFTER", "4" if DEFAULTS else "0"))
"""Graphs are compiled when they have been met that often: 1 leaves out first steps. By default the
same is so when they have run for a while as well, which nothing does in a test."""
DEVICE = os.environ.get("TORPOR_TEST_DEVICE", "cpu")
BIT_EXACT = NAME in WITH_EAGERS_KERNELS and DEVICE == "cpu"
