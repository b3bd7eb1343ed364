"""Settings of torpor: read where they take effect, changed by plain assignment.

Each flag can be preset by an environment variable `TORPOR_<NAME>`.
"""

from __future__ import annotations

import os


def _env_int(name: str, default: int) -> int:
    return int(os.environ.get(f"TORPOR_{name}", default))


def _env_bool(name: str, default: bool) -> bool:
    text = os.environ.get(f"TORPOR_{name}")
    return default if text is None else text.lower() not in ("0", "false", "no", "off", "")


def _env_maybe(name: str) -> bool | None:
    return _env_bool(name, False) if f"TORPOR_{name}" in os.environ else None


def _env_choice(name: str, *choices: str) -> str:
    text = os.environ.get(f"TORPOR_{name}", choices[0])
    if text not in choices:
        raise ValueError(f"TORPOR_{name} is one of {', '.join(choices)}, not {text!r}")
    return text


bound: str = _env_choice("BOUND", "auto", "off")
"""Under `torpor.enable()`: time eager and recorded steps, and record only what is faster that way
("auto"); always record ("off")."""

agreement: str = _env_choice("AGREEMENT", "raise", "warn", "off")
"""Ranks compare their collectives before they run them. If these differ: an error ("raise") or a
warning ("warn"); "off": they are not compared."""

agreement_timeout: float = float(os.environ.get("TORPOR_AGREEMENT_TIMEOUT", 300))
"""Seconds for which a rank waits for the other ranks in a recorded step."""

background_priority: str = _env_choice("BACKGROUND_PRIORITY", "idle", "normal")
"""Processes that build the native library and compile graphs run at low priority, and only on idle
cores if the program can do without them for a while ("idle"); or like the program ("normal")."""

bucket_bytes: int = _env_int("BUCKET_BYTES", 0)
"""Merge consecutive collectives into buckets of at most this many bytes; 0: do not. The value must
be the same on all ranks; it is read when a graph is made. Sums over more than two ranks may be
rounded differently than in eager."""

cut_after_optimizer: bool = _env_bool("CUT_AFTER_OPTIMIZER", True)
"""Cut the trace after every `optimizer.step()`."""

cut_after_module: bool = _env_bool("CUT_AFTER_MODULE", True)
"""Cut the trace after the outermost module call made with gradients off."""

cut_after_reads: bool = _env_bool("CUT_AFTER_READS", True)
"""Cut the trace at a read that recurs at the same place with other values pending than before."""

max_trace_nodes: int = _env_int("MAX_TRACE_NODES", 150_000)
"""A trace is cut automatically if it has this many new nodes or this many pending results."""

max_interned_nodes: int = _env_int("MAX_INTERNED_NODES", 200_000)
"""Nodes kept for reuse; the intern table holds between one and two times this many."""

max_cached_plans: int = _env_int("MAX_CACHED_PLANS", 256)
"""Compiled graphs kept for reuse; the least recently used are dropped."""

max_memoised_types: int = _env_int("MAX_MEMOISED_TYPES", 50_000)
"""Type inferences memoized, by op, operand types and attributes."""

promote_scalars: bool = _env_bool("PROMOTE_SCALARS", True)
"""Turn a Python number that changes from step to step into a run-time input."""

capture: str = _env_choice("CAPTURE", "off", "auto", "on")
"""Capture outermost module calls with TorchDynamo, so that a repeated call is recorded by a single
lookup: calls whose recording has taken as long as a capture would ("auto"), all ("on"), none
("off"). What is passed to `torch.compile` is always captured."""
native: str = _env_choice("NATIVE", "auto", "off", "on")
"""Record cache hits in C++. "auto": if there is a compiler, the library is built in the background
by the first process that records, kept in the cache directory, and loaded at a cut; "on": it is
built immediately, and waited for; "off": never. Read at the first op; `torpor info` shows the
status."""

dynamic: str = _env_choice("DYNAMIC", "auto", "off", "on")
"""Dynamic shapes: sizes become symbols when a graph recurs with other sizes ("auto"), as soon as a
tensor does ("on"), or never ("off")."""

max_graphs_per_structure: int = _env_int("MAX_GRAPHS_PER_STRUCTURE", 16)
"""Graphs compiled that differ only in their sizes; further ones run on the reference backend."""

async_queue: bool = _env_bool("ASYNC_QUEUE", True)
"""Run graphs on the device's queue thread; off: on the thread that calls `sync`."""

queue_bytes: int = _env_int("QUEUE_BYTES", 1 << 29)
"""Bytes that queued steps may keep alive before recording waits for them."""

keep_bytes: int = _env_int("KEEP_BYTES", 1 << 28)
"""Free memory that the C allocator keeps for the next step; 0: its own default. Read once, by
`torpor.enable()` or when the first step runs on a CPU."""

compile_after: int = _env_int("COMPILE_AFTER", -1)
"""Runs of a graph on the reference backend before it is compiled; -1: the backend's default, and
then as soon as compiling pays, judged by the time that the runs have taken."""

compile_async: bool | None = _env_maybe("COMPILE_ASYNC")
"""Compile in the background, in a low-priority process or else on a thread; meanwhile, the
reference backend runs the graph. None: only in that process, if there is a core for it, and only
graphs that are compiled when it pays."""

compile_timeout: float = float(_env_int("COMPILE_TIMEOUT", 1800))
"""Seconds after which a background compile is abandoned."""

progress: bool = _env_bool("PROGRESS", True)
"""Show on a terminal what is being compiled in the background."""

cache: bool = _env_bool("CACHE", True)
"""Keep compiled graphs on disk for later processes, and load those that are there."""

cache_dir: str = os.environ.get("TORPOR_CACHE_DIR", "")
"""Where compiled graphs are kept; empty: `torpor` in the user's cache directory."""

cache_bytes: int = _env_int("CACHE_BYTES", 4 << 30)
"""Bytes of compiled graphs kept on disk; the least recently used are removed."""

failures_dir: str = os.environ.get("TORPOR_FAILURES_DIR", "")
"""Where to write programs that reproduce failures to compile; empty: `torpor-failures` in the
user's cache directory."""

on_recompile: str = _env_choice("ON_RECOMPILE", "ignore", "warn", "raise")
"""What to do when a graph is compiled at a line where one was compiled before."""

explain: bool = _env_bool("EXPLAIN", False)
"""Print the report of `torpor.explain()` to stderr when the process ends."""

view: bool = _env_bool("VIEW", False)
"""Serve a local page about this process from the start; read when torpor is imported."""

view_port: int = _env_int("VIEW_PORT", 0)
"""The port of that page on 127.0.0.1; 0: any free port."""

strict: bool = _env_bool("STRICT", False)
"""Raise an error instead of warning and falling back to the reference backend."""

verify_graphs: bool = _env_bool("VERIFY_GRAPHS", True)
"""Verify the IR of every new graph before it is compiled, and after every pass."""

cpu_devices: int = _env_int("CPU_DEVICES", 8)
"""How many devices `lazy:N` a backend offers on the CPU, each with its own queue."""
