"""The process that compiles graphs for another one (`remote`): requests on stdin, code on stdout.

It ends when it has had nothing to do for a while, and at once when the other process ends.
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
    """Compile what is asked for."""
    step_back()
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what compilers print is no answer
    while requests.poll(_IDLE_SECONDS):
        answers.send(answer(requests.recv()))


def answer(request: Request) -> CompileReply:
    """The compiled graph, or why there is none."""
    before = _cpu_seconds()
    try:
        saved, why = _compiled(request)
    except Exception as error:  # the other process may meet it too, and tells the user
        saved, why = None, f"{type(error).__name__}: {error}"
    return CompileReply(saved, _cpu_seconds() - before, why)


def _compiled(request: Request) -> tuple[bytes | None, str]:
    torch.set_default_dtype(request.dtype)
    torch.set_num_threads(request.threads)
    config.bucket_bytes = request.bucket_bytes
    if torch.get_float32_matmul_precision() != request.precision:  # to set it sets others too
        torch.set_float32_matmul_precision(request.precision)
    backend = _backend(request.backend, tuple(sorted(request.options.items())))
    if backend.cache_key() != request.backend_key:
        return None, "the settings of the two processes differ"
    graph = parse(request.graph)
    made = compile_graph(graph, request.name, backend, request.device, request.donated)
    return backend.dump(made), "the backend does not keep it"


def _cpu_seconds() -> float:
    """Of this process and of the compilers it has started."""
    return sum(os.times()[:4])


@functools.cache
def _backend(name: str, options: tuple[tuple[str, Any], ...]) -> Backend:
    return make(name, **dict(options))
