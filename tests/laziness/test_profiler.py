"""What torch's profiler shows of a lazy program: recording, compiling and running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import torpor
from tests.comparison import Put
from torpor.execute.queue import queues
from torpor.observe.events import EVENTS


def events_of(profiler: Any, path: Path) -> list[dict[str, Any]]:
    """The spans of an exported Chrome trace that are torpor's or this test's, in time's order."""
    profiler.export_chrome_trace(str(path))
    content = json.loads(path.read_text())
    found = [e for e in content["traceEvents"] if e.get("ph") == "X"]
    return sorted(found, key=lambda event: event["ts"])


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """`record`, `compile` or `run` for each span of torpor's."""
    return [e["name"].split()[1] for e in events if e["name"].startswith("torpor ")]


def steps(put: Put, number: int) -> None:
    x = put(torch.ones(7))
    for _ in range(number):
        with record_function("user's own"):
            x = x * 2 + 1
            torpor.sync()
    torpor.wait()


def test_a_chrome_trace_shows_every_step(put: Put, tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        steps(put, 3)
    events = events_of(profiler, tmp_path / "trace.json")
    assert kinds(events) == ["record", "compile", "run", "record", "run", "record", "run"]
    record, run = (
        next(e for e in events if e["name"].startswith(f"torpor {kind}"))
        for kind in ("record", "run")
    )
    assert record["ts"] + record["dur"] <= run["ts"]
    inside = [e["name"] for e in events if run["ts"] <= e["ts"] <= run["ts"] + run["dur"]]
    assert "aten::mul" in inside


def test_a_profiler_of_all_threads_shows_the_queue_at_work(put: Put, tmp_path: Path) -> None:
    configuration = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=configuration) as profiler:
        steps(put, 3)
    events = events_of(profiler, tmp_path / "trace.json")
    assert sorted(kinds(events)) == sorted(["record", "run"] * 3 + ["compile"])
    threads = {kind: e["tid"] for e in events for kind in ("record", "run") if kind in e["name"]}
    assert threads["record"] != threads["run"]


def test_nothing_is_left_open_when_a_profiler_stops_in_the_middle(put: Put) -> None:
    x = put(torch.ones(7))
    with profile(activities=[ProfilerActivity.CPU]):
        y = x * 3
    torpor.sync()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        z = y + 1
        torpor.sync()
    assert z.tolist() == [4.0] * 7
    assert "torpor record" in {event.name for event in profiler.events()}


def test_without_a_profiler_jobs_run_on_the_queue(put: Put) -> None:
    x = put(torch.ones(7)) * 5
    torpor.sync(wait=True)
    EVENTS.clear()
    y = x * 6
    torpor.sync(wait=True)
    (run,) = [event for event in EVENTS if event.kind == "run"]
    assert run.thread in {queue.thread.ident for queue in queues() if queue.thread is not None}
    assert run.seconds > 0
    del y
