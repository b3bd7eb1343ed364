"""The parent's side of processes that measure."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from torpor import native

PATIENCE = 10.0  # seconds for a process to exit
PACKAGE = Path(__file__).resolve().parents[1]  # torpor


def fresh_folder() -> TemporaryDirectory[str]:
    """A folder for caches; compilers' helper processes may still write to it during removal."""
    return TemporaryDirectory(ignore_cleanup_errors=True)


class WorkerError(RuntimeError):
    """A worker failed; the message is one line."""


def environment(threads: int, device: str, caches: str = "") -> dict[str, str]:
    """The environment of measuring processes.

    If `caches` is given, compilers keep their caches in that folder, and torpor's is disabled,
    except for the native library, which is used if it is installed.
    """
    count = str(threads)
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]))
    found = os.environ | {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
    }
    if caches:
        found |= {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": f"{caches}/triton"}
        found["TORPOR_CACHE"] = "0"
        if native.appeared() is not None:
            found.setdefault("TORPOR_NATIVE", "on")
    if device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""  # so that the device `lazy` is on the CPU too
    return found


def command(module: str, with_torpor: bool) -> list[str]:
    """The command to run a module of this package, with or without torpor loaded."""
    if with_torpor:
        return [sys.executable, "-m", module]
    return [sys.executable, "-P", str(PACKAGE / "bench" / "bare.py"), module]


def run_to_end(
    module: list[str],
    settings: dict[str, Any],
    arguments: list[str],
    variables: dict[str, str],
    folder: Path,
    timeout: float,
    shown: bool = False,
) -> dict[str, Any] | str:
    """Run a process to its end; returns the answer from its file, or why there is none."""
    answer, said, late = folder / "answer.json", folder / "said.txt", ""
    run = [*module, json.dumps({**settings, "answer": str(answer)}), *arguments]
    with said.open("w") as hidden:
        stream: Any = sys.stderr.fileno() if shown else hidden
        try:
            subprocess.run(run, env=variables, stdout=stream, stderr=stream, timeout=timeout)
        except subprocess.TimeoutExpired:
            late = f"not done within {timeout:g} s"
    if answer.exists():
        found: dict[str, Any] = json.loads(answer.read_text())
        return found
    return late or _last_line(said.read_text()) or "it ended without a word"


def _last_line(text: str) -> str:
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return said[-1] if said else ""


class Worker:
    """A process that answers questions, each within `timeout` seconds."""

    def __init__(self, command: list[str], environment: dict[str, str], timeout: float) -> None:
        self.timeout = timeout
        self.late = False
        self.errors = TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        self.process = subprocess.Popen(
            command, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip

    def ask(self, do: str, **question: Any) -> Any:
        """The answer to one question; raises if there is none."""
        timer = threading.Timer(self.timeout, self._too_late)
        timer.start()
        try:
            line = self._exchange(json.dumps({"do": do, **question}))
        finally:
            timer.cancel()
        if not line:
            raise WorkerError(self._why_it_ended())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["answer"]

    def _exchange(self, question: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(question, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return ""
        return self.process.stdout.readline()

    def _too_late(self) -> None:
        self.late = True
        self.process.kill()

    def _why_it_ended(self) -> str:
        status = self.process.wait()
        if self.late:
            return f"no answer within {self.timeout:g} s"
        return f"{_ending(status)}: {self.last_words()}"

    def last_words(self) -> str:
        """The last line that the process wrote to standard error."""
        self.errors.seek(0)
        return _last_line(self.errors.read()) or "no word"

    def close(self) -> None:
        """End the process, whether busy or not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # an idle worker exits by itself
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"killed by {signal.Signals(-status).name}"
