"""Compute a small read on the reading thread, without a job on the queue.

A read waits for its result anyway. If its graph is in the plan cache and the queue is idle, the
reading thread reserves the queue, runs the graph, and keeps the results; there are no handles to
fill or roll back. A graph that may fail, is random or donates arguments takes the usual path, and
so does one that has just failed here: it is run again as a job.
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
    """Whether a run has no side effects, and an earlier one returned the promised types."""
    return (
        plan.checked
        and plan.draft is None
        and not (plan.symbols or plan.donated or plan.in_turn or plan.draws or plan.fragile)
        and plan.computation.device.torch_device.type == "cpu"
    )


class Turn:
    """One run of a plan on an idle queue, without a job."""

    __slots__ = ("arguments", "device", "plan")

    def __init__(self, plan: Plan, device: BackendDevice, arguments: list[Any]) -> None:
        self.plan = plan
        self.device = device
        self.arguments = arguments

    def take(self, shield: Shield) -> list[BackendData] | None:
        """The results; None if the queue is busy by now, or the run failed."""
        queue = queue_of(self.device)
        job = queue.borrow()
        if job is None:
            return None
        try:
            shield.open = True
            results = self._run()
        except Exception:  # it is run again as a job, which reports the error
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
