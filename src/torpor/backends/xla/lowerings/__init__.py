"""Lowerings of torch's ops for XLA: one module for each subject, all in one table.

`table` has the table and what lowerings share. A lowering is a function on JAX arrays; most are one
line. Imported by: `backends/xla/lowering.py` and tests.
"""

from torpor.backends.xla.lowerings import (
    activations,
    attention,
    distances,
    grids,
    indexing,
    linalg,
    normalization,
    pointwise,
    polynomials,
    reductions,
    resampling,
    shapes,
    windows,
)
from torpor.backends.xla.lowerings.table import DTYPES, TABLE, NotLowered

__all__ = [
    "DTYPES",
    "TABLE",
    "NotLowered",
    "activations",
    "attention",
    "distances",
    "grids",
    "indexing",
    "linalg",
    "normalization",
    "pointwise",
    "polynomials",
    "reductions",
    "resampling",
    "shapes",
    "windows",
]
