"""Inductor's kernels: background compilation and vector instruction sets.

Uses `AsyncCompile` and its pools, and `cpu_vec_isa`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

from torpor._torch.translation_units import UnitKernel, can_share_a_unit, compile_units

_in_background = threading.local()


@contextmanager
def kernels_in_background() -> Iterator[Callable[[], None]]:
    """Let Inductor continue while kernels compile; yields a function that waits for all of them.

    Code that Inductor compiles on this thread meanwhile must not run before that. The function
    raises if a kernel cannot be compiled.
    """
    wait = _patched_compiler()
    waiting: list[tuple[Any, dict[str, Any]]] = []

    def finish() -> None:
        for compiler, names in waiting:
            wait(compiler, names)

    _in_background.kernels = waiting
    try:
        yield finish
    finally:
        _in_background.kernels = None


@functools.cache
def _patched_compiler() -> Callable[[Any, dict[str, Any]], None]:
    """Make Inductor's wait for kernels skippable, and let the kernels of a module share a unit.

    Returns the original wait.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    compiler: Any = AsyncCompile  # there is no setting for this
    one_by_one = compiler.cpp_pybinding

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        in_background = getattr(_in_background, "kernels", None) is not None
        if not in_background or not can_share_a_unit(source_code):
            return one_by_one(self, argtypes, source_code)
        kernel = UnitKernel(argtypes, source_code)
        vars(self).setdefault(_UNIT, []).append(kernel)
        return LambdaFuture(kernel.result)

    wait_for_futures = compiler.wait

    def wait(self: Any, scope: dict[str, Any]) -> None:
        wait_for_futures(self, scope)
        for name, value in scope.items():  # it skips them if it uses one thread
            if isinstance(value, LambdaFuture):
                scope[name] = value.result()

    def wait_now_or_later(self: Any, scope: dict[str, Any]) -> None:
        compile_units(vars(self).pop(_UNIT, ()))
        waiting = getattr(_in_background, "kernels", None)
        if waiting is None:
            wait(self, scope)
        else:
            waiting.append((self, scope))

    compiler.cpp_pybinding, compiler.wait = cpp_pybinding, wait_now_or_later
    return wait


_UNIT: Final = "_torpor_unit"  # attribute of a compiler: kernels that are not being compiled yet


@functools.cache
def start_inductor_workers() -> None:
    """Start the processes that compile GPU kernels, which are slow to start.

    Does not wait for them.
    """
    from torch._inductor.async_compile import AsyncCompile

    workers: Any = AsyncCompile
    workers.use_process_pool()


def forget_inductor_threads() -> None:
    """After a fork, let Inductor recreate the threads that call the C++ compiler.

    It only does so in its own processes; here it would wait for threads lost in the fork.
    """
    module = sys.modules.get("torch._inductor.async_compile")
    if module is not None:
        module.AsyncCompile.pool.cache_clear()


def best_vectors_work() -> bool:
    """Whether the C++ compiler supports this processor's widest vectors, so others are not needed.

    Inductor would probe all vector sets one by one, and then use the widest.
    """
    return try_best_vectors().result()


@functools.cache
def try_best_vectors() -> Future[bool]:
    """Check the widest vectors in the background."""
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401  # are all used

    has = cpu_vec_isa.x86_isa_checker()
    supported = (i for i in cpu_vec_isa.supported_vec_isa_list if set(str(i).split()) <= {*has})
    widest = next(supported, False)
    if "ATEN_CPU_CAPABILITY" in os.environ:  # the user has chosen others
        widest = False
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(bool, widest)
    finally:
        thread.shutdown(wait=False)
