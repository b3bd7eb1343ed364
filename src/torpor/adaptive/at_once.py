"""A read of something small is computed by the thread that reads, without a job for it.

A read waits for its numbers anyway. Where its graph was met before and nothing else is under way,
the thread takes the queue's turn, runs the graph, and keeps the results; no handles are promised
that would have to be filled or taken back. A graph that may fail, draws random numbers or writes
over its arguments is a job as ever, and so is one that has just failed: it is run once more.
"""

from __future__ import annotations

import time
from typing import Any

from torpor import _torch, metrics
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.interrupts import Shield
from torpor.execute.plan import Plan
from torpor.execute.queue import queue_of
from torpor.observe.events import span
from torpor.observe.phases import RUNNING, phase


def may_run_at_once(plan: Plan) -> bool:
    """Running it changes nothing but the time, and its results are known to be what they should."""
    return (
        plan.checked
        and plan.draft is None
        and not (plan.symbols or plan.donated or plan.in_turn or plan.draws or plan.fragile)
        and plan.computation.device.torch_device.type == "cpu"
    )


class Turn:
    """One run of a plan between the jobs of a queue."""

    __slots__ = ("arguments", "device", "plan")

    def __init__(self, plan: Plan, device: BackendDevice, arguments: list[Any]) -> None:
        self.plan = plan
        self.device = device
        self.arguments = arguments

    def take(self, shield: Shield) -> list[BackendData] | None:
        """The results; None if the queue is at work by now, or something went wrong."""
        queue = queue_of(self.device)
        job = queue.borrow()
        if job is None:
            return None
        try:
            shield.open = True
            results = self._run()
        except Exception:  # the job that is run instead tells of it
            return None
        finally:
            shield.open = False
            queue.give_back(job)
        return None if any(result.error is not None for result in results) else results

    def _run(self) -> list[BackendData]:
        plan = self.plan
        start, before = time.perf_counter(), time.thread_time()
        with phase(RUNNING), span("run", plan.record.name), _torch.as_on_another_thread():
            results = plan.runner.execute(plan.computation, self.arguments, self.device)
        seconds = time.perf_counter() - start
        plan.record.ran(seconds, time.thread_time() - before, False)
        metrics.add_time("ExecuteHere", seconds)
        metrics.add_time("Execute", seconds)
        return results
