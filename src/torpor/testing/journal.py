"""A file to which a run appends each result, so that a later run can resume from it.

One JSON object per line. The first identifies the run; resuming with other settings is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Journal:
    """The results of a run by key; `add` writes through to the file."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        head, *records = read(path) or [{"run": run}]
        if head != {"run": run}:
            raise ValueError(f"{path} is of another run: {head.get('run')}, not {run}")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(line) + "\n" for line in (head, *records)]
        path.write_text("".join(lines), encoding="utf-8")
        self.records.update((record["key"], record) for record in records)

    def add(self, key: str, kind: str, result: dict[str, Any]) -> None:
        """Append a result, replacing an earlier one with the same key."""
        record = {"key": key, "kind": kind, "result": result}
        self.records[key] = record
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Every result of a kind, in order."""
        return [record["result"] for record in self.records.values() if record["kind"] == kind]


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a journal, without a last line that was cut short when the run was killed."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
