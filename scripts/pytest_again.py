"""Run pytest, and tests that failed once more, alone: `python -m scripts.pytest_again ARGS`.

A test fails if it fails both times. Tests that passed only the second time are named: they depend
on timing, or on what another test left behind, and are to be mended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MOST = 5
"""With more failures than this, something is broken, and a second run would only take time."""


def _pytest(arguments: Sequence[str], cache: str) -> int:
    command = (sys.executable, "-m", "pytest", *arguments, "-o", f"cache_dir={cache}")
    return subprocess.run(command, check=False).returncode


def _failed(cache: str) -> list[str]:
    found = Path(cache, "v", "cache", "lastfailed")
    return sorted(json.loads(found.read_text())) if found.exists() else []


def main(arguments: Sequence[str]) -> int:
    """Run pytest with these arguments; returns its exit status."""
    with tempfile.TemporaryDirectory() as cache:
        status = _pytest(arguments, cache)
        failed = _failed(cache)
        if status != 1 or not 1 <= len(failed) <= MOST:
            return status
        print(f"\n== again, alone: {len(failed)} that failed ==", flush=True)
        one_process = ("-n", "0") if "-n" in arguments else ()
        status = _pytest((*arguments, "--last-failed", *one_process), cache)
        for name in sorted({*failed} - {*_failed(cache)}):
            print(f"FLAKY, failed once and passed alone: {name}", flush=True)
        return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
