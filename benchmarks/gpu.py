"""Every figure that needs a GPU, in one go: ``python -m benchmarks.gpu --help``.

The native library is built and all compilers' caches are filled first, side by side; then each
workload is raced in turn, with nothing beside it; then programs are compiled from nothing. Where
time on a GPU is short, `--only` names some of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.worker import ROOT
from torpor.bench.runners import BY_DEVICE as RUNNERS
from torpor.bench.runners import specs
from torpor.bench.workloads import BY_DEVICE as WORKLOADS

COLD = "cold"
WARM = """
import sys
from torpor.bench.runners import specs
from torpor.bench.worker import Racer, WarmUpLimits
from torpor.bench.workloads import FULL
workload, runner, backend = sys.argv[1:]
(spec,) = specs([runner], [backend], "cuda", {})
Racer(spec, FULL[workload]).warm_up(WarmUpLimits())
"""


def main() -> int:
    """Measure what was asked for; 1 if some of it could not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    choices = [*WORKLOADS["cuda"], COLD]
    parser.add_argument("--only", nargs="+", choices=choices, default=choices)
    parser.add_argument("--runners", nargs="+", choices=RUNNERS["cuda"], default=RUNNERS["cuda"])
    parser.add_argument("--backends", nargs="+", default=["inductor"], help="of torpor's runners")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), help="for the numbers")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORPOR_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        )
        workloads = [name for name in args.only if name != COLD]
        native = _prepared(workloads, args.runners, args.backends)
        races = [_race(name, args, native) for name in workloads]
        cold = _run("bench", "--cold", "--device", "cuda") if COLD in args.only else 0
    return 1 if any(races) or cold or not native else 0


def _prepared(workloads: list[str], runners: list[str], backends: list[str]) -> bool:
    """Fill the caches, and build the native library: whether that could be done."""
    start = time.perf_counter()
    build = subprocess.Popen([sys.executable, "-m", "torpor", "native", "build"])
    filling = {
        f"{name}: {spec.label}": subprocess.Popen(
            [sys.executable, "-c", WARM, name, spec.name, spec.said],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in workloads
        for spec in specs(runners, backends, "cuda", {})
        if spec.name != "eager"
    }
    native = build.wait() == 0
    for what, process in filling.items():
        ended = "" if process.wait() == 0 else f": failed with {process.returncode}"
        print(f"[{time.perf_counter() - start:5.0f} s] {what}{ended}", flush=True)
    return native


def _race(workload: str, args: argparse.Namespace, native: bool) -> int:
    numbers = args.out / f"gpu-{workload}.json"
    usual = ["--device", "cuda", "--warm-jobs", "5", "--keep-caches", "--rounds", str(args.rounds)]
    usual += ["--runners", ",".join(args.runners), "--backends", ",".join(args.backends)]
    environment = {"TORPOR_NATIVE": "on" if native else "off"}
    return _run("bench", workload, *usual, "--json", str(numbers), **environment)


def _run(*arguments: str, **environment: str) -> int:
    command = [sys.executable, "-m", "torpor", *arguments]
    return subprocess.run(command, check=False, env=os.environ | environment).returncode


if __name__ == "__main__":
    sys.exit(main())
