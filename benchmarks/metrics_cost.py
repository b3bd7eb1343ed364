"""``python -m benchmarks.metrics_cost``: what counting costs while nobody looks.

The hot path counts calls, one addition for each op. Ops are recorded by their recorders and by the
same ones without that line, in turns; the rest of the metrics is written per step, not per op.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import torpor
from torpor import _torch
from torpor.cli import terminal
from torpor.ops.spec import spec_of
from torpor.trace import recorder

CALLS = 1000
BAR = 0.02
aten = torch.ops.aten


def cases() -> dict[Any, tuple[Any, ...]]:
    x, y = torch.randn(8, 8).to("lazy"), torch.randn(8, 8).to("lazy")
    torpor.sync()
    return {
        aten.add.Tensor: (x, y),
        aten.mul.Tensor: (x, 0.5),
        aten.mm.default: (x, y),
        aten.view.default: (x, [64]),
        aten.t.default: (x,),
        aten._softmax.default: (x, -1, False),
        aten.native_layer_norm.default: (x, [8], None, None, 1e-5),
    }


def uncounted(op: Any) -> Callable[..., Any]:
    """The recorder of `op` without the line that counts."""
    text = inspect.getsource(recorder.record)
    counting = "    recording.calls[0] += 1\n"
    assert counting in text, text
    names = dict(vars(recorder))
    exec(compile(text.replace(counting, ""), "uncounted", "exec"), names)
    record, recording = names["record"], recorder.recording_of(spec_of(op))
    return lambda *args, **kwargs: record(recording, args, kwargs)


def seconds(op: Any, record: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """What it takes to record `op`, torch's own way to the recorder included."""
    _torch.set_op_attribute(op, "_torpor_record", record)
    start = time.perf_counter()
    for _ in range(CALLS):
        op(*args)
    return time.perf_counter() - start


def measured(op: Any, args: tuple[Any, ...], rounds: int) -> tuple[float, float]:
    """Microseconds of a call, and the part of it that counting takes."""
    with_, without = recorder.make_recorder(spec_of(op)), uncounted(op)
    ratios, times = [], []
    for turn in range(rounds):
        order = (with_, without) if turn % 2 else (without, with_)
        taken = {record: seconds(op, record, args) for record in order}
        ratios.append(taken[with_] / taken[without] - 1)
        times.append(taken[with_] / CALLS * 1e6)
    return statistics.median(times), statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="benchmarks.metrics_cost")
    parser.add_argument("--rounds", type=int, default=201)
    arguments = parser.parse_args()
    torpor.use("reference")
    found = []
    subjects = cases()
    with terminal.progress("counting", len(subjects)) as advance:
        for op, args in subjects.items():
            found.append((str(op), *measured(op, args, arguments.rounds)))
            advance(str(op))
    rows = [(name, f"{us:.2f}", f"{share:+.1%}") for name, us, share in found]
    terminal.table(("op", "us to record", "counting"), rows)
    mean = statistics.mean(share for _, _, share in found)
    terminal.heading(f"counting takes {mean:.1%} of recording; the bar is {BAR:.0%}")
    return 0 if mean < BAR else 1


if __name__ == "__main__":
    sys.exit(main())
