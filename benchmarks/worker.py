"""One system in a process of its own, which runs one training step whenever it is told to.

The parent holds several workers and lets them take turns, so that a slow minute of the machine
meets them all. A worker that is not at work waits on its standard input and uses no CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.clock import Time

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """One training step: until it is all recorded (for eager: computed), and the cut after it."""

    trace: Time
    cut: Time


def environment(threads: int) -> dict[str, str]:
    """Of every process that measures: `threads` of torch's, and the same hashes in each."""
    count = str(threads)
    return os.environ | {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "PYTHONHASHSEED": "0",
        "TORPOR_BACKEND": "reference",  # what is measured is recording
    }


class Worker:
    """The parent's end."""

    def __init__(self, system: str, optimizer: str, threads: int = 1, **size: Any) -> None:
        command = [sys.executable, "-m", "benchmarks.worker", system, optimizer, json.dumps(size)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(threads), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip
        self._answer()  # the model is built

    def step(self) -> Step:
        """Let the worker run one step."""
        return self._step("step")

    def second_step(self) -> Step:
        """Let the worker run two steps; the second counts.

        Collecting garbage and the other workers' turns leave the caches cold, which a training
        loop's are not.
        """
        return self._step("second")

    def _step(self, question: str) -> Step:
        answer = self._ask(question)
        return Step(Time(*answer["trace"]), Time(*answer["cut"]))

    def counters(self) -> dict[str, int]:
        """What the system counted during the last step."""
        counted: dict[str, int] = self._ask("counters")
        return counted

    def _ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        print(question, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines() or ["no word"]
            raise RuntimeError(f"a worker ended with status {status}: {said[-1]}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def main() -> None:
    """The worker's end: answer each line of standard input with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("optimizer")
    parser.add_argument("size", type=json.loads, help="JSON object: fields of benchmarks.gpt.Size")
    arguments = parser.parse_args()

    # here, not above: the parent never loads torch
    from benchmarks.clock import no_gc, timed
    from benchmarks.gpt import Size, Training
    from benchmarks.systems import SYSTEMS

    system = SYSTEMS[arguments.system]()
    training = Training(Size(**arguments.size), arguments.optimizer, system.place)
    system.cut()
    system.wait()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        answer: Any = None
        if line.strip() == "counters":
            answer = system.counters()
        else:
            with no_gc():
                for _ in range(1 + (line.strip() == "second")):
                    system.reset_counters()
                    answer = asdict(Step(timed(training.step), timed(system.cut)))
                    system.wait()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
