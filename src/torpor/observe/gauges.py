"""Gauges of the memory and objects that torpor holds, evaluated when metrics are queried."""

from __future__ import annotations

from torpor import metrics
from torpor.execute.queue import queues
from torpor.execute.storage import TRACE
from torpor.execute.sync import PLANS
from torpor.ir.node import TABLE


def pending_bytes() -> int:
    """Bytes that the trace keeps alive because recorded ops may need them."""
    with TRACE.lock:
        held = {id(data): data.type.nbytes for data in (*TRACE.leaves, *TRACE.computed.values())}
    return sum(held.values())


def queued_bytes() -> int:
    """Bytes kept alive by queued steps."""
    return sum(queue.budget.bytes for queue in queues())


def pending_tensors() -> int:
    """Live tensors that are recorded and not yet computed."""
    with TRACE.lock:
        return len(TRACE.live())


metrics.add_gauge("PendingBytes", pending_bytes)
metrics.add_gauge("QueuedBytes", queued_bytes)
metrics.add_gauge("PendingTensors", pending_tensors)
metrics.add_gauge("InternedNodes", lambda: len(TABLE))
metrics.add_gauge("CachedPlans", lambda: len(PLANS.plans))
