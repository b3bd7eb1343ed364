"""Run everything on backends, and write what came out to docs/sweeps/.

    python -m scripts.sweep_backends torchscript inductor --jobs 2

For each backend: the conformance kit (all of op_db), then five training steps of every model. Each
result is noted as it comes under .cache/sweeps/: a sweep that was stopped, or whose machine went
down, goes on from there when it is started again. A crash or a hang costs one test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.backend_under_test import FALLBACKS, WITH_EAGERS_KERNELS
from torpor.testing.journal import read
from torpor.testing.markdown import render, table
from torpor.testing.scorecard import OpResult, Point, Scorecard

ROOT = Path(__file__).resolve().parents[1]
JOURNALS = ROOT / ".cache" / "sweeps"
PAGES = ROOT / "docs" / "sweeps"
TIMEOUT = 1800  # seconds for one operator or model, compilation included
COMPLETE = (0, 1)  # exit statuses of pytest: all tests ran


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    statuses = [_sweep(backend, options) for backend in options.backends]
    return max(statuses)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="+", metavar="BACKEND")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--samples", type=int, default=3, help="samples per operator")
    parser.add_argument("--ops", default="", metavar="REGEX", help="only these operators")
    parser.add_argument("--fresh", action="store_true", help="forget what a stopped sweep noted")
    return parser


def _sweep(backend: str, options: argparse.Namespace) -> int:
    """Run, or go on with, the sweep of one backend; its page is written when it is complete."""
    kit, models = (JOURNALS / f"{backend}.{part}.jsonl" for part in ("kit", "models"))
    if options.fresh:
        for journal in (kit, models):
            journal.unlink(missing_ok=True)
    commands = (_kit_command(backend, kit, options), _models_command(models, options))
    statuses = [_run(backend, command) for command in commands]
    if any(status not in COMPLETE for status in statuses):
        print(f"{backend}: not complete; the next run goes on from {JOURNALS.relative_to(ROOT)}/")
        return 2
    page = PAGES / f"{backend}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(backend, kit, models, options), encoding="utf-8")
    print(f"{backend}: {page.relative_to(ROOT)}")
    for journal in (kit, models):  # the next sweep starts anew
        journal.replace(journal.with_suffix(".last.jsonl"))
    return max(statuses)


def _run(backend: str, command: list[str]) -> int:
    print(f"\n== {backend}: {' '.join(command[3:])} ==", flush=True)
    environment = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORPOR_TEST_BACKEND": backend,
    }
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode


def _pytest(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "default"]
    command += ["--timeout", str(TIMEOUT), "-n", str(options.jobs), "--dist", "worksteal"]
    return [*command, "--max-worker-restart", "1000"]


def _kit_command(backend: str, journal: Path, options: argparse.Namespace) -> list[str]:
    command = [*_pytest(options), "--pyargs", "torpor.testing", "--backend", backend]
    command += ["--samples", str(options.samples), "--ops", options.ops]
    command += ["--journal", str(journal)]
    return command + (["--bit-exact"] if backend in WITH_EAGERS_KERNELS else [])


def _models_command(journal: Path, options: argparse.Namespace) -> list[str]:
    chosen = ["tests/models/test_training.py", "-k", "test_training_equals_eager and lazy"]
    return [*_pytest(options), *chosen, "--models-journal", str(journal)]


# -- the page ----------------------------------------------------------------------------------


def _page(backend: str, kit: Path, models: Path, options: argparse.Namespace) -> str:
    run, *records = read(kit)
    card = Scorecard(backend, run["run"]["device"])
    found = {record["key"]: record for record in records}.values()
    card.points = [Point(**r["result"]) for r in found if r["kind"] == "point"]
    card.ops = [OpResult.from_json(r["result"]) for r in found if r["kind"] == "op"]
    how = "bit for bit" if backend in WITH_EAGERS_KERNELS else "within what the dtype can hold"
    rows = {record["key"]: record["result"] for record in read(models)[1:]}
    parts = [
        render(card).rstrip(),
        f"Operators: the first {options.samples} samples in {run['run']['dtypes']}, or in another "
        f"dtype where the entry does not know it; {how}.",
        *_models(rows, backend in WITH_EAGERS_KERNELS),
        f"Written by `make sweep-backends BACKENDS={backend}`.",
    ]
    return "\n\n".join(parts) + "\n"


def _models(rows: dict[str, dict[str, Any]], exact: bool) -> list[str]:
    """`rows` are what the tests noted, by their names: `test_...[bert-lazy]`."""
    good = sum(row["outcome"] == "passed" for row in rows.values())
    how = (
        "losses, parameters and buffers bit for bit"
        if exact
        else "losses within 1e-4 relative, dropout masks and the generator's state bit for bit"
    )
    cells = sorted(_model_row(key, row) for key, row in rows.items())
    columns = ("model", "family", "agrees", "fallbacks", "a step", "compiled", "from the cache",
               "why not")  # fmt: skip
    most = max((row.get("by eager", 0) for row in rows.values()), default=0)
    reported = (
        f"Five AdamW steps of {len(rows)} models: {good} agree with eager ({how}). Fallbacks are "
        'counted where graphs are lowered; "a step" is how many nodes eager\'s kernels ran in the '
        f"step with most of them, which is {most} at most."
    )
    return ["## Models", reported, table(columns, cells)]


def _model_row(key: str, row: dict[str, Any]) -> tuple[str, ...]:
    name = key.partition("[")[2].removesuffix("-lazy]")
    family = row.get("model", ("", ""))[1]
    counters: dict[str, int] = row.get("counters", {})
    fallbacks = sum(count for key, count in counters.items() if key.startswith(FALLBACKS))
    compiled, hits = counters.get("UncachedCompile", 0), counters.get("CachedCompile", 0)
    reported = row["detail"].splitlines()
    lines = [line[2:].strip() for line in reported if line.startswith("E ")] or reported
    agrees = "yes" if row["outcome"] == "passed" else "no"
    return (
        name,
        family,
        agrees,
        str(fallbacks),
        str(row.get("by eager", 0)),
        str(compiled),
        str(hits),
        "".join(lines[:1])[:200],
    )


if __name__ == "__main__":
    raise SystemExit(main())
