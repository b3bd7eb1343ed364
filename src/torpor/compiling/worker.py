"""The compile process, the counterpart of `remote`: requests on stdin, compiled graphs on stdout.

It exits when it has been idle for a while, and immediately when the other process ends.
"""

from __future__ import annotations

import functools
import os
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from torpor import config
from torpor.backend.interface import Backend
from torpor.backend.registry import make
from torpor.compiling.compilation import compile_graph
from torpor.compiling.processes import step_back
from torpor.compiling.remote import CompileReply, Request
from torpor.text.torch_parser import parse

_IDLE_SECONDS: Final = 60.0


def main() -> None:
    """Serve requests until idle."""
    step_back()
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # keep what compilers print out of the pipe
    while requests.poll(_IDLE_SECONDS):
        answers.send(answer(requests.recv()))


def answer(request: Request) -> CompileReply:
    """The compiled graph, or the reason why there is none."""
    before = _cpu_seconds()
    try:
        saved, why = _compiled(request)
    except Exception as error:  # the other process may try, and report it to the user
        saved, why = None, f"{type(error).__name__}: {error}"
    return CompileReply(saved, _cpu_seconds() - before, why)


def _compiled(request: Request) -> tuple[bytes | None, str]:
    torch.set_default_dtype(request.dtype)
    torch.set_num_threads(request.threads)
    config.bucket_bytes = request.bucket_bytes
    if torch.get_float32_matmul_precision() != request.precision:  # setting it affects others, too
        torch.set_float32_matmul_precision(request.precision)
    backend = _backend(request.backend, tuple(sorted(request.options.items())))
    if backend.cache_key() != request.backend_key:
        return None, "the settings of the two processes differ"
    graph = parse(request.graph)
    made = compile_graph(graph, request.name, backend, request.device, request.donated)
    return backend.dump(made), "the backend does not keep it"


def _cpu_seconds() -> float:
    """CPU time of this process and of the compilers that it has started."""
    return sum(os.times()[:4])


@functools.cache
def _backend(name: str, options: tuple[tuple[str, Any], ...]) -> Backend:
    return make(name, **dict(options))
