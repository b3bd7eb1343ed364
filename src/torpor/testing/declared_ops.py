"""For generated packages: whether a backend really runs an op that it claims to lower."""

from __future__ import annotations

import re

from torpor.codegen.coverage import op_db
from torpor.testing.run import run_kit

MAX_ENTRIES = 5
"""The most entries of torch's operator table to run for one op."""


def entries_with(op: str) -> list[str]:
    """Entries that dispatch `op` to a backend, those with the fewest other ops first."""
    found = [(len(ops["forward"]), name) for name, ops in op_db().items() if op in ops["forward"]]
    return [name for _, name in sorted(found)][:MAX_ENTRIES]


def fallbacks_of(backend: str, op: str) -> list[str]:
    """Entries in which `backend` falls back for `op`, or is wrong."""
    names = entries_with(op)
    if not names:
        return []
    pattern = f"^({'|'.join(map(re.escape, names))})$"
    outcome = run_kit(backend, "test_operators", options=["--ops", pattern])
    results = outcome.card.ops
    wrong = [r.op for r in results if r.status == "wrong" or op in r.fallbacks]
    return wrong or ([] if len(results) == len(names) else [outcome.output])
