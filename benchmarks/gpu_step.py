"""Where a step's time goes on a GPU: ``python -m benchmarks.gpu_step gpt2 mlp --capture on``.

For each workload of `torpor bench`: CPU time of recording a step, time of steps back to back, how
long the GPU is busy in one, its kernels, and the functions that recording spends its time in. With
``TORPOR_NATIVE=on`` after ``torpor native build`` the native library records.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import torpor
from benchmarks.report import table
from torpor.bench.workloads import BY_DEVICE, FULL

SETTLED = 8  # steps in a row that compile nothing
STEPS = 20


def wait() -> None:
    torpor.wait()
    torch.cuda.synchronize()


def warm_up(program: Any) -> int:
    """Step until nothing is compiled any more; how many steps that took."""
    known, row = -1, 0
    for step in range(200):
        program.step()
        wait()
        compiled = torpor.metrics.counters().get("UncachedCompile", 0)
        row = row + 1 if compiled == known else 0
        known = compiled
        if row >= SETTLED and step > 2 * SETTLED:
            return step
    return 200


def recording(program: Any) -> float:
    """CPU milliseconds of the program's thread in a step, the device idle before it."""
    times = []
    for _ in range(STEPS):
        start = time.thread_time()
        program.step()
        times.append(time.thread_time() - start)
        wait()
    return median(times) * 1e3


def back_to_back(program: Any) -> float:
    """Milliseconds of a step among many."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(STEPS):
            program.step()
        wait()
        times.append(time.perf_counter() - start)
    return median(times) / STEPS * 1e3


def kernels(program: Any, steps: int = 4) -> list[tuple[str, float, float]]:
    """Kernels of a step: name, milliseconds, calls; the dearest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            program.step()
        wait()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.end - event.time_range.start)
    rows = [(name, sum(us) / steps / 1e3, len(us) / steps) for name, us in found.items()]
    return sorted(rows, key=lambda row: -row[1])


def functions(program: Any, most: int) -> None:
    """Print the Python functions that recording spends its CPU time in."""
    profiled = cProfile.Profile(time.thread_time)
    for _ in range(STEPS):
        profiled.enable()
        program.step()
        profiled.disable()
        wait()
    pstats.Stats(profiled).sort_stats("tottime").print_stats(most)


def show(name: str, most: int) -> None:
    program = FULL[name].build(lambda thing: torpor.lazy(thing.cuda()), "cuda")
    steps = warm_up(program)
    own, pace = recording(program), back_to_back(program)
    reserved = torch.cuda.memory_reserved() / 2**20
    of_gpu = kernels(program)
    busy = sum(ms for _, ms, _ in of_gpu)
    print(
        f"\n{name}: warm after {steps} steps; recording {own:.2f} ms CPU, a step {pace:.2f} ms, "
        f"the GPU busy {busy:.2f} ms of it; {reserved:,.0f} MiB reserved"
    )
    rows = [(kernel[:90], f"{ms:.3f}", f"{calls:.1f}") for kernel, ms, calls in of_gpu[:most]]
    print(table(("kernel", "ms a step", "calls"), rows))
    functions(program, most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(BY_DEVICE["cuda"]))
    parser.add_argument("--capture", choices=("auto", "on", "off"), default="on")
    parser.add_argument("--most", type=int, default=20, help="rows of each table")
    arguments = parser.parse_args()
    backend = torpor.use("inductor")
    torpor.config.compile_after = backend.compile_after  # what is measured is compiled
    torpor.config.compile_async = False
    torpor.config.capture, torpor.config.bound = arguments.capture, "off"
    for name in arguments.workloads:
        show(name, arguments.most)


if __name__ == "__main__":
    main()
