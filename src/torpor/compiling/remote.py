"""Graphs compiled in another process, of low priority, that ends with this one.

A thread would not do: compilers are Python, and take turns with the program at Python's lock; and
a program cannot end while one is at work. The process gets a graph as text and gives back bytes, of
which the backend makes a computation in milliseconds, without the imports of a compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from torpor import config
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.cache.graphs import means_the_same_everywhere
from torpor.compiling import processes
from torpor.compiling.compilation import for_backend
from torpor.errors import CompileError, RegistrationError
from torpor.ir.graph import Graph
from torpor.text.printer import print_graph

_CODE: Final = (  # with nobody at the other end of the pipe it ends, and compilers it has started
    "import select, signal, threading; pipe = select.poll(); pipe.register(0, 0); "
    "end = lambda: (pipe.poll(), os.killpg(0, signal.SIGKILL)); "
    "threading.Thread(target=end, daemon=True).start(); "
    "from torpor.compiling.worker import main; main()"
)
_SETTINGS: Final = {"TORPOR_CACHE": "0", "TORPOR_STRICT": "1", "TORPOR_COMPILE_ASYNC": "0"}


class NotCompiled(CompileError):
    """Another process could not compile a graph: this one may try."""


@dataclass(frozen=True, slots=True)
class Request:
    """All that another process needs to compile a graph as this one would."""

    graph: str
    name: str
    backend: str
    options: dict[str, Any]
    device: BackendDevice
    donated: dict[int, int]
    backend_key: str  # what the code depends on (`Backend.cache_key`): it has to be the same there
    dtype: torch.dtype
    threads: int
    precision: str
    bucket_bytes: int


@dataclass(frozen=True, slots=True)
class CompileReply:
    """What came of a request."""

    saved: bytes | None  # what the backend's `dump` makes of the compiled graph
    seconds: float  # of CPU time that it took
    why: str = ""  # there is no compiled graph


def request(
    graph: Graph, name: str, backend: Backend, device: BackendDevice, donated: Mapping[int, int]
) -> Request | None:
    """What to send of a graph; None if another process would not understand it."""
    if graph.symbols or device.torch_device.type != "cpu":
        return None
    backend_key = backend.cache_key()
    try:
        alike = means_the_same_everywhere(for_backend(graph, backend), backend)
        precision = torch.get_float32_matmul_precision()
    except (RegistrationError, RuntimeError):  # a wrong lowering; set for some devices alone
        return None
    if backend_key is None or not alike:
        return None
    return Request(
        print_graph(graph), name, backend.name, dict(backend.options), device, dict(donated),
        backend_key, torch.get_default_dtype(), torch.get_num_threads(), precision,
        config.bucket_bytes,
    )  # fmt: skip


class Process:
    """A process that compiles, and the two pipes to it."""

    def __init__(self, idle: bool) -> None:
        python = processes.interpreter()
        if python is None:
            raise NotCompiled("there is no interpreter to start")
        source, requests = os.pipe()
        answers, drain = os.pipe()
        self.requests = Connection(requests, readable=False)
        self.answers = Connection(answers, writable=False)
        try:
            self.process = subprocess.Popen(
                processes.command(python, _CODE, idle=idle), env=processes.environment(_SETTINGS),
                stdin=source, stdout=drain, stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is not meant for it
            )  # fmt: skip
        finally:
            os.close(source)
            os.close(drain)

    def stop(self) -> None:
        """End it, whatever it is at, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Leave it to itself: without a pipe to it, it ends."""
        self.requests.close()
        self.answers.close()
        self.process.returncode = self.process.returncode or 0  # it is not waited for


class CompileWorker:
    """The process that compiles, started when it is needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: Process | None = None
        self.idle = False  # meanwhile the program runs as eager does, and has time

    def compile(self, request: Request) -> CompileReply:
        """The compiled graph; `NotCompiled` if there is none."""
        with self.lock:
            try:
                process = self._running()
                process.requests.send(request)
                answer: CompileReply = process.answers.recv()
            except (OSError, EOFError, pickle.PickleError, AttributeError, TypeError) as error:
                self.stop()
                raise NotCompiled(f"the process that compiles has ended: {error!r}") from None
        if answer.saved is None:
            raise NotCompiled(answer.why)
        return answer

    def _running(self) -> Process:
        if self.process is not None and self.process.process.poll() is not None:
            self.stop()  # it had nothing to do
        if self.process is None:
            self.process = Process(self.idle)
        return self.process

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self.process = self.process, None
        if process is not None:
            process.stop()

    def forget(self) -> None:
        """In a child of a fork: the process is the parent's, and must be able to see its end."""
        process, self.process = self.process, None
        self.lock = threading.Lock()
        if process is not None:
            process.close()


WORKER: Final = CompileWorker()
atexit.register(WORKER.stop)
os.register_at_fork(after_in_child=WORKER.forget)
