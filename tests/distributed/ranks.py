"""Processes that are ranks of one gloo group and run one function after the other, together."""

from __future__ import annotations

import importlib
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 120
"""Seconds after which ranks that have not answered are taken to hang."""


def _work(rank: int, size: int, folder: str, pipe: Any) -> None:
    import torpor

    torch.set_num_threads(1)
    torpor.config.agreement_timeout = float(LIMIT)  # while modules are loaded for the first time
    meeting = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    while True:
        order = pipe.recv()
        if order is None:
            break
        module, name, args = order
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
        except BaseException:  # KeyboardInterrupt too: whoever asked wants to know
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """The processes, from outside."""

    def __init__(self, size: int, folder: str) -> None:
        context = mp.get_context("spawn")
        self.size = size
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = rank, size, folder, theirs
            self.processes.append(context.Process(target=_work, args=arguments, daemon=True))
            self.pipes.append(ours)
        for process in self.processes:
            process.start()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Let every rank call `function`."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, args))

    def answer(self, rank: int) -> Any:
        """What a rank returned."""
        assert self.pipes[rank].poll(LIMIT), f"rank {rank} hangs"
        succeeded, answer = self.pipes[rank].recv()
        assert succeeded, f"rank {rank}:\n{answer}"
        return answer

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What every rank returned."""
        self.start(function, *args)
        return [self.answer(rank) for rank in range(self.size)]


@contextmanager
def ranks(size: int) -> Iterator[Ranks]:
    """`size` processes; they end with the body, whatever they do then."""
    with tempfile.TemporaryDirectory() as folder:
        made = Ranks(size, str(Path(folder)))
        try:
            yield made
        finally:
            for process in made.processes:
                process.kill()
                process.join()
