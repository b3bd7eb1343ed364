"""Draw programs, run each eagerly and lazily, and print every difference as a small program.

    python -m scripts.drawn_programs --count 2000 --seed 0 --jobs 2 [--backend inductor] [--json]
    python -m scripts.drawn_programs --seed 1234 --count 1        # one program again, with its text

A program is drawn from its seed (tests/property/drawn.py): views, writes through them, `out=`,
`set_`, sizes that become symbols, reads and cuts in between. On `reference` every bit, stride,
dtype and error type is eager's; on other backends numbers may differ within what their dtype holds,
and every graph is compiled when it is first met. `--write` puts the outcome into
docs/sweeps/drawn.md.

Programs run in processes of their own: a crash or a hang is a difference too, and costs one
program.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "sweeps" / "drawn.md"
TIMEOUT: Final = 300  # seconds for one program; making it small may take several
EXACT: Final = ("reference", "torchscript")


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.worker:
        return _serve(options.backend)
    begun = time.monotonic()
    found = _run_all(options)
    seconds = time.monotonic() - begun
    _report(found, options, seconds)
    if options.write:
        _write(found, options, seconds)
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed")
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="differences as JSON, nothing else")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


# -- a worker: seeds come in, lines of JSON go out ---------------------------------------------


def _serve(backend: str) -> int:
    import torch

    import torpor

    torch.set_num_threads(1)
    torpor.config.cache, torpor.config.compile_after = False, 0
    torpor.use(backend)
    for line in sys.stdin:
        seed, *kept = map(int, line.split())
        print(json.dumps(one(seed, backend in EXACT, kept)), flush=True)
    return 0


def one(seed: int, exact: bool, kept: list[int]) -> dict[str, Any]:
    """Draw and run one program; a difference comes with the smallest program that shows it.

    With `kept`, these lines of it alone: how a program that ends the process is made small.
    """
    from tests.property.drawn_run import compare, minimise

    program = drawn(seed, exact, kept)
    found = compare(program, exact)
    if found is None:
        return {"seed": seed, "difference": None, "kind": ""}
    if not kept:
        program, found = minimise(program, found, exact)
    return {
        "seed": seed, "difference": str(found), "kind": found.kind, "place": program.place,
        "program": program.text(),
    }  # fmt: skip


def drawn(seed: int, exact: bool, kept: list[int]) -> Any:
    """The program of a seed, without what eager leaves undefined."""
    from tests.property.drawn import draw
    from tests.property.drawn_run import probe

    program = draw(seed, stable=not exact)
    for place in reversed(range(len(program))):
        if kept and place not in kept:
            program = program.without(place)
    return probe(program)


class Worker:
    """A process that runs programs, begun anew when it dies or hangs."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.process: subprocess.Popen[str] | None = None

    def run(self, seed: int) -> dict[str, Any]:
        """Run one program; if that ends the process, find fewer lines that do."""
        outcome = self.ask(seed, [])
        if outcome["kind"] != "crash":
            return outcome
        exact = self.backend in EXACT
        kept = list(range(len(drawn(seed, exact, []))))
        for place in reversed(range(len(kept))):
            fewer = [each for each in kept if each != place]
            if fewer and self.ask(seed, fewer)["kind"] == "crash":
                kept = fewer
        return {**outcome, "program": drawn(seed, exact, kept).text()}

    def ask(self, seed: int, kept: list[int]) -> dict[str, Any]:
        process = self.process = self.process or self._begin()
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(TIMEOUT, process.kill)
        watch.start()
        try:
            process.stdin.write(" ".join(map(str, [seed, *kept])) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.process = None
        status = process.wait()
        reported = f"the process ended with status {status}" + " (or hung)" * (status == -9)
        return {"seed": seed, "difference": reported, "kind": "crash", "place": "", "program": ""}

    def _begin(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "scripts.drawn_programs", "--worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*command, "--backend", self.backend], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip

    def end(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()


def _run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in range(options.seed, options.seed + options.count):
        seeds.put(seed)
    found: list[dict[str, Any]] = []
    progress = _Progress(options)

    def work() -> None:
        worker = Worker(options.backend)
        while True:
            try:
                seed = seeds.get_nowait()
            except queue.Empty:
                break
            outcome = worker.run(seed)
            if outcome["difference"] is not None:
                found.append(outcome)
            progress.advance(outcome)
        worker.end()

    threads = [threading.Thread(target=work) for _ in range(max(options.jobs, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    progress.end()
    return sorted(found, key=lambda each: each["seed"])


class _Progress:
    """A bar on a terminal; each difference as it is found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.total, self.done, self.different = options.count, 0, 0
        self.quiet = options.json
        self.bar = sys.stderr.isatty()
        self.lock = threading.Lock()

    def advance(self, outcome: dict[str, Any]) -> None:
        with self.lock:
            self.done += 1
            self.different += outcome["difference"] is not None
            if outcome["difference"] is not None and not self.quiet:
                print(_text(outcome), flush=True)
            if self.bar:
                filled = "#" * (30 * self.done // self.total)
                sys.stderr.write(
                    f"\r[{filled:<30}] {self.done}/{self.total}, {self.different} differ "
                )
                sys.stderr.flush()

    def end(self) -> None:
        if self.bar:
            sys.stderr.write("\n")


# -- what came out -----------------------------------------------------------------------------


def _text(outcome: dict[str, Any]) -> str:
    head = f"##### seed {outcome['seed']} {outcome['place']}"
    return "\n".join([head, outcome["program"], f"--- {outcome['difference']}"])


def _report(found: list[dict[str, Any]], options: argparse.Namespace, seconds: float) -> None:
    if options.json:
        print(json.dumps(found, indent=1))
        return
    last = options.seed + options.count - 1
    print(
        f"{options.count} programs (seeds {options.seed} to {last}) on {options.backend}: "
        f"{len(found)} differ; {seconds:.0f} s"
    )


def _write(found: list[dict[str, Any]], options: argparse.Namespace, seconds: float) -> None:
    """One row per backend, and what differs below; what the page says of other backends stays."""
    import torch

    rows, sections = _written()
    last = options.seed + options.count - 1
    rows[options.backend] = (
        f"| {options.backend} | {options.count} | {options.seed}–{last} | {len(found)} | "
        f"{torch.__version__} | {seconds:.0f} s, {options.jobs} processes |"
    )
    sections.pop(options.backend, None)
    if found:
        sections[options.backend] = "\n".join(f"```\n{_text(each)}\n```\n" for each in found)
    table = "\n".join([_HEAD, *(rows[name] for name in sorted(rows))])
    below = "".join(f"\n## {name}\n\n{sections[name]}" for name in sorted(sections))
    PAGE.write_text(f"{table}\n{below}", encoding="utf-8")


def _written() -> tuple[dict[str, str], dict[str, str]]:
    """The rows and the sections of the page, by backend."""
    if not PAGE.exists():
        return {}, {}
    table, *below = PAGE.read_text(encoding="utf-8").split("\n## ")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    sections = (section.partition("\n\n") for section in below)
    return (
        {line.split("|")[1].strip(): line for line in rows},
        {name: text for name, _, text in sections},
    )


_HEAD = """# Drawn programs

For whoever wants to know how far "as eager" has been tried. Programs are drawn from a seed
(`tests/property/drawn.py`) and run eagerly and lazily; values, strides, dtypes and types of errors
are compared: bit for bit on `reference`, within what a dtype holds elsewhere, where every graph is
compiled when it is first met. Left out is what eager leaves undefined: a write to memory that holds
an element twice, or that is read in part by the same op. Plain results are made lazy before they
are used: `set_` of a lazy tensor to a plain one's memory, which torpor refuses, is not drawn.
Written by `python -m scripts.drawn_programs --write` (`make sweep-drawn`).

| backend | programs | seeds | differ | torch | time |
|---|---|---|---|---|---|"""


if __name__ == "__main__":
    sys.exit(main())
