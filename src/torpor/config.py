"""Switches of torpor, read where they matter and changed by plain assignment.

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
"""Under `torpor.enable()`: measure what eager takes, and run recorded only what is faster so
("auto"); record always ("off")."""

agreement: str = _env_choice("AGREEMENT", "raise", "warn", "off")
"""Ranks compare their collectives before they run them, and raise where they differ, or warn; or do
not compare ("off")."""

agreement_timeout: float = float(os.environ.get("TORPOR_AGREEMENT_TIMEOUT", 300))
"""Seconds that a rank waits for others in a recorded step."""

background_priority: str = _env_choice("BACKGROUND_PRIORITY", "idle", "normal")
"""Processes that build the native library and compile graphs run at low priority, on cores that
nobody uses where the program can do without them ("idle"); or like the program ("normal")."""

bucket_bytes: int = _env_int("BUCKET_BYTES", 0)
"""Collectives that follow each other become one, of so many bytes at most; 0: each is by itself.
The same on all ranks; read when a graph is made. Sums over more than two ranks may round otherwise
than eager's."""

cut_after_optimizer: bool = _env_bool("CUT_AFTER_OPTIMIZER", True)
"""Cut the trace after every `optimizer.step()`."""

cut_after_module: bool = _env_bool("CUT_AFTER_MODULE", True)
"""Cut the trace after the outermost module call made with gradients off."""

cut_after_reads: bool = _env_bool("CUT_AFTER_READS", True)
"""Cut the trace at a read that comes back to its place and finds more pending than it left."""

max_trace_nodes: int = _env_int("MAX_TRACE_NODES", 150_000)
"""A trace that has met this many new nodes, or holds this many results, is cut by itself."""

max_interned_nodes: int = _env_int("MAX_INTERNED_NODES", 200_000)
"""Nodes kept for reuse: the intern table holds between one and two times this many."""

max_cached_plans: int = _env_int("MAX_CACHED_PLANS", 256)
"""Compiled graphs kept for reuse, least recently used first to go."""

max_memoised_types: int = _env_int("MAX_MEMOISED_TYPES", 50_000)
"""Type inferences remembered, by op, operand types and attributes."""

promote_scalars: bool = _env_bool("PROMOTE_SCALARS", True)
"""Turn a Python number that changes from step to step into a run-time input."""

capture: str = _env_choice("CAPTURE", "off", "auto", "on")
"""Calls of modules that no other one surrounds are captured by TorchDynamo, so that a call like one
before is recorded by one look-up: those whose recording has taken as long as a capture takes
("auto"), all ("on"), none ("off"). What `torch.compile` is asked to compile is in any case."""

native: str = _env_choice("NATIVE", "auto", "off", "on")
"""Record by C++ what was met before. "auto": if there is a compiler, the library is built beside
the first process that records, kept in the cache directory, and taken up at a cut; "on": it is
built now, and waited for; "off": never. Read at the first op; `torpor info` tells the outcome."""

dynamic: str = _env_choice("DYNAMIC", "auto", "off", "on")
"""Sizes that change become symbols: when a graph comes back with others ("auto"), never ("off"), or
as soon as a tensor does ("on")."""

max_graphs_per_structure: int = _env_int("MAX_GRAPHS_PER_STRUCTURE", 16)
"""Graphs compiled that differ in their sizes only; more of them run on the reference backend."""

async_queue: bool = _env_bool("ASYNC_QUEUE", True)
"""Run graphs on the device's queue thread; off runs them where `sync` was called."""

queue_bytes: int = _env_int("QUEUE_BYTES", 1 << 29)
"""Bytes that steps waiting to be run may keep alive before recording waits for them."""

keep_bytes: int = _env_int("KEEP_BYTES", 1 << 28)
"""Free memory that the C library keeps for the next step; 0: as it does by itself. Read once, when
the first step is run on a CPU."""

compile_after: int = _env_int("COMPILE_AFTER", -1)
"""Runs of a graph on the reference backend before it is compiled; -1: as the backend says, and when
compiling pays, by what the runs have taken."""

compile_async: bool | None = _env_maybe("COMPILE_ASYNC")
"""Compile while the program goes on, in a process of low priority, or else on a thread; until then
the reference backend runs the graph. None: in that process, where there is a core for it, for
graphs that are compiled when it pays."""

compile_timeout: float = float(_env_int("COMPILE_TIMEOUT", 1800))
"""Seconds after which a compile in the background is given up."""

progress: bool = _env_bool("PROGRESS", True)
"""Show on a terminal what is being compiled in the background."""

cache: bool = _env_bool("CACHE", True)
"""Keep compiled graphs on disk for later processes, and use those that are there."""

cache_dir: str = os.environ.get("TORPOR_CACHE_DIR", "")
"""Where compiled graphs are kept; empty: `torpor` in the user's cache directory."""

cache_bytes: int = _env_int("CACHE_BYTES", 4 << 30)
"""Bytes of compiled graphs kept on disk; the least recently used go first."""

failures_dir: str = os.environ.get("TORPOR_FAILURES_DIR", "")
"""Where programs are written that show what could not be compiled; empty: `torpor-failures` in the
user's cache directory."""

on_recompile: str = _env_choice("ON_RECOMPILE", "ignore", "warn", "raise")
"""What happens when a graph is compiled at a line that had one compiled before."""

explain: bool = _env_bool("EXPLAIN", False)
"""Print what `torpor.explain()` has to say to stderr when the process ends."""

view: bool = _env_bool("VIEW", False)
"""Serve a local page of this process from the start; read when torpor is imported."""

view_port: int = _env_int("VIEW_PORT", 0)
"""The port of that page on 127.0.0.1; 0: a free one."""

strict: bool = _env_bool("STRICT", False)
"""Raise where torpor would otherwise warn and carry on with the reference backend."""

verify_graphs: bool = _env_bool("VERIFY_GRAPHS", True)
"""Check every new graph against the rules of the IR before it is compiled, and after every pass."""

cpu_devices: int = _env_int("CPU_DEVICES", 8)
"""How many `lazy:N` a backend offers on the CPU, each with a queue of its own."""
