"""Compiling graphs in another process, of low priority, that ends with this one.

A thread would not do: compilers are Python and contend with the program for the GIL, and a program
cannot exit while one is running. The process receives a graph as text and returns bytes, which the
backend loads within milliseconds, without importing a compiler.
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

_CODE: Final = (  # when its pipe is closed, it kills itself and the compilers that it has started
    "import select, signal, threading; pipe = select.poll(); pipe.register(0, 0); "
    "end = lambda: (pipe.poll(), os.killpg(0, signal.SIGKILL)); "
    "threading.Thread(target=end, daemon=True).start(); "
    "from torpor.compiling.worker import main; main()"
)
_SETTINGS: Final = {"TORPOR_CACHE": "0", "TORPOR_STRICT": "1", "TORPOR_COMPILE_ASYNC": "0"}


class NotCompiled(CompileError):
    """Another process could not compile a graph; this one may try."""


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that another process needs to compile a graph as this one would."""

    graph: str
    name: str
    backend: str
    options: dict[str, Any]
    device: BackendDevice
    donated: dict[int, int]
    backend_key: str  # `Backend.cache_key`, which must be the same in the other process
    dtype: torch.dtype
    threads: int
    precision: str
    bucket_bytes: int


@dataclass(frozen=True, slots=True)
class CompileReply:
    """The reply to a request."""

    saved: bytes | None  # the compiled graph, from the backend's `dump`
    seconds: float  # CPU time of the compile
    why: str = ""  # the reason if there is no compiled graph


def request(
    graph: Graph, name: str, backend: Backend, device: BackendDevice, donated: Mapping[int, int]
) -> Request | None:
    """The request to compile a graph; None if another process could not do it the same way."""
    if graph.symbols or device.torch_device.type != "cpu":
        return None
    backend_key = backend.cache_key()
    try:
        alike = means_the_same_everywhere(for_backend(graph, backend), backend)
        precision = torch.get_float32_matmul_precision()
    except (RegistrationError, RuntimeError):  # a wrong lowering; a precision per device
        return None
    if backend_key is None or not alike:
        return None
    return Request(
        print_graph(graph), name, backend.name, dict(backend.options), device, dict(donated),
        backend_key, torch.get_default_dtype(), torch.get_num_threads(), precision,
        config.bucket_bytes,
    )  # fmt: skip


class Process:
    """A compile process, and the two pipes to it."""

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
                process_group=0,  # so that Ctrl-C does not reach it
            )  # fmt: skip
        finally:
            os.close(source)
            os.close(drain)

    def stop(self) -> None:
        """Kill it, with all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Close its pipes, so that it ends by itself."""
        self.requests.close()
        self.answers.close()
        self.process.returncode = self.process.returncode or 0  # nobody will wait for it


class CompileWorker:
    """The compile process, started on first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: Process | None = None
        self.idle = False  # the program runs as fast as eager meanwhile, so compiles may take long

    def compile(self, request: Request) -> CompileReply:
        """Compile a graph; raises `NotCompiled` if that fails."""
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
            self.stop()  # it has exited, because it was idle
        if self.process is None:
            self.process = Process(self.idle)
        return self.process

    def stop(self) -> None:
        """End the process, if it runs."""
        process, self.process = self.process, None
        if process is not None:
            process.stop()

    def forget(self) -> None:
        """In the child of a fork: close the pipes, so that the parent's process sees it exit."""
        process, self.process = self.process, None
        self.lock = threading.Lock()
        if process is not None:
            process.close()


WORKER: Final = CompileWorker()
atexit.register(WORKER.stop)
os.register_at_fork(after_in_child=WORKER.forget)
