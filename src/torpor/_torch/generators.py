"""Random generators: intercepts setting their states.

Wraps `set_rng_state` of torch and of CUDA, which compilers call too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torpor._torch.dispatch import without_modes


class _Generators(threading.local):
    """How to handle states that compilers set on this thread."""

    by_copies = False
    ignored = False


_generators = _Generators()


@contextmanager
def set_cuda_states_by_copies() -> Iterator[None]:
    """On this thread, `torch.cuda.set_rng_state` installs a new state object in the generator.

    Writing into the old one, as Inductor does after each compile, would reset the dropout of
    cuDNN's RNNs.
    """
    _watch_states()
    before, _generators.by_copies = _generators.by_copies, True
    try:
        yield
    finally:
        _generators.by_copies = before


@contextmanager
def leave_states_alone() -> Iterator[None]:
    """Ignore generator states set on this thread: other threads draw meanwhile, and would repeat.

    Inductor restores the state it found after each compile.
    """
    _watch_states()
    before, _generators.ignored = _generators.ignored, True
    try:
        yield
    finally:
        _generators.ignored = before


@functools.cache
def _watch_states() -> None:
    original, original_of_cuda = torch.random.set_rng_state, torch.cuda.set_rng_state

    @functools.wraps(original)
    def set_rng_state(new_state: torch.Tensor) -> None:
        if not _generators.ignored:
            original(new_state)

    @functools.wraps(original_of_cuda)
    def set_rng_state_of_cuda(new_state: torch.Tensor, device: Any = "cuda") -> None:
        if _generators.ignored:
            return
        if not _generators.by_copies:
            original_of_cuda(new_state, device)
            return
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        index = torch.cuda.current_device() if where.index is None else where.index
        generator = torch.cuda.default_generators[index]
        state = generator.clone_state()
        state.set_state(new_state)
        generator.graphsafe_set_state(state)

    torch.random.set_rng_state = set_rng_state
    torch.cuda.set_rng_state = set_rng_state_of_cuda


def accept_lazy_states(plain: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let generator states be lazy tensors, converted by `plain`, as torch reads their memory."""
    places: list[Any] = [torch.random, torch, torch.cuda.random, torch.cuda]
    for place in places:
        place.set_rng_state = _with_plain_state(place.set_rng_state, plain)


def _with_plain_state(original: Any, plain: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    @functools.wraps(original)
    def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with without_modes():
            original(plain(new_state), *args, **kwargs)

    return set_rng_state
