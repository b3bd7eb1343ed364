"""Find out which ops each entry of torch's operator table brings to a backend, and write it down.

    python -m scripts.op_db_ops          # rewrites src/torpor/codegen/op_db.json: some minutes
    python -m scripts.op_db_ops add mm   # prints what these entries bring

The first sample of each entry is run, forward and backward, on a backend that counts every node as
a fallback. `torpor codegen` uses the file to say how many entries a backend covers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from torpor.backend import register
from torpor.backends.reference.compile import ReferenceBackend
from torpor.backends.reference.lowering import ReferenceLowering
from torpor.ir import Node
from torpor.testing.kit import Kit
from torpor.testing.operators import check_entry, entries

FILE = Path(__file__).resolve().parents[1] / "src" / "torpor" / "codegen" / "op_db.json"
BACKEND = "counting"


class CountingLowering(ReferenceLowering):
    """Counts every node as one that fell back."""

    def lower(self, node: Node) -> None:
        self.fell_back(node)
        super().lower(node)


class CountingBackend(ReferenceBackend):
    """The reference, with every node counted."""

    def lowering_context(self, *args: Any) -> CountingLowering:
        return CountingLowering(*args)


def ops_of(entry: Any) -> dict[str, list[str]]:
    """The ops of an entry's forward, and those that only its backward needs."""
    kit = Kit(BACKEND)
    result = check_entry(kit, entry, [torch.float32], 1)
    kit.close()
    later = sorted(set(result.backward_fallbacks) - set(result.fallbacks))
    return {"forward": result.fallbacks, "backward": later}


def measure(names: list[str]) -> dict[str, dict[str, list[str]]]:
    """The ops of these entries, of all if none is named."""
    register(BACKEND, CountingBackend)
    table = entries()
    chosen = names or sorted(table)
    found = {}
    for position, name in enumerate(chosen):
        found[name] = ops_of(table[name])
        if not names and position % 50 == 0:
            print(f"{position}/{len(chosen)} {name}", file=sys.stderr)
    return found


def as_text(found: dict[str, dict[str, list[str]]]) -> str:
    """JSON, one line for each entry."""
    version = torch.__version__.partition("+")[0]
    lines = [f" {json.dumps(name)}: {json.dumps(ops)}" for name, ops in sorted(found.items())]
    return f'{{"torch": "{version}", "entries": {{\n' + ",\n".join(lines) + "\n}}\n"


def main(names: list[str]) -> int:
    text = as_text(measure(names))
    if names:
        print(text, end="")
    else:
        FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
