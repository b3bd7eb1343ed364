"""What `import torpor` adds to `import torch`, in fresh interpreters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.clock import Time, medians
from benchmarks.worker import ROOT, environment

BAR = 0.3  # seconds
SHOWN = 12  # modules

_BOTH = """
import json, time
def clocks(): return time.perf_counter(), time.process_time()
start = clocks(); import torch; middle = clocks(); import torpor; end = clocks()
print(json.dumps([[b - a for a, b in zip(start, middle)], [b - a for a, b in zip(middle, end)]]))
"""


@dataclass(frozen=True)
class Imports:
    """Times by process, and what `-X importtime` says is slow."""

    torch: list[Time]
    torpor: list[Time]
    offenders: list[tuple[str, float, float]]  # module, own ms, ms with all that it imports first

    @property
    def added(self) -> Time:
        return medians(self.torpor)

    def as_json(self) -> dict[str, Any]:
        return {"torch": self.torch, "torpor": self.torpor, "offenders": self.offenders}


def measure(processes: int, advance: Callable[[str], None]) -> Imports:
    """One process to write the byte code, then `processes` that count."""
    _run(_BOTH)
    samples = []
    for number in range(processes):
        samples.append(json.loads(_run(_BOTH).stdout))
        advance(f"process {number + 1} of {processes}")
    torch, torpor = ([Time(*pair) for pair in column] for column in zip(*samples))
    slow = medians(torpor).cpu >= BAR
    return Imports(torch, torpor, offenders() if slow else [])


def offenders() -> list[tuple[str, float, float]]:
    """The modules that `import torpor` loads after `import torch`, slowest first."""
    report = _run("import torch\nimport torpor", "-X", "importtime").stderr
    rows = re.findall(r"import time:\s*(\d+) \|\s*(\d+) \|( *)(\S+)", report)
    names = [name for *_, name in rows]
    after = rows[names.index("torch") + 1 :]  # a module is printed after all that it imports
    found = [(name, int(own) / 1e3, int(total) / 1e3) for own, total, _, name in after]
    return sorted(found, key=lambda row: -row[1])[:SHOWN]


def _run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT, env=environment(threads=1), check=True, capture_output=True, text=True,
    )  # fmt: skip
