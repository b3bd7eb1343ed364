"""Formats an explanation as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torpor.debug.findings import Finding

if TYPE_CHECKING:
    from torpor.debug.explain import Balance, Explanation, NewGraph

MAX_GRAPHS_SHOWN = 20
VERDICTS = {
    "compute-bound": "running takes longer than recording, so the device sets the pace",
    "tracing-bound": "recording takes longer than running, so Python sets the pace: make steps "
    "larger, or do less in Python",
    "compile-bound": "compiling takes longer than all the rest: see what is compiled anew, below",
    "idle": "nothing has been recorded",
}


def text(explanation: Explanation) -> str:
    """The whole explanation as text."""
    lines = [*_head(explanation), ""]
    if explanation.findings:
        lines.append("What costs time, most first:")
        for number, finding in enumerate(explanation.findings, 1):
            lines += _finding(number, finding)
    else:
        lines.append("Nothing to change: no recompile, no hidden sync, no fallback.")
    if explanation.places:
        lines += ["", "Under enable():", *(f"  {place}" for place in explanation.places)]
    if explanation.regions:
        lines += ["", "Regions:", *(f"  {region}" for region in explanation.regions)]
    if explanation.collectives:
        groups = "\n".join(map(str, explanation.collectives)).splitlines()
        lines += ["", "Collectives:", *(f"  {line}" for line in groups)]
    if explanation.graphs:
        lines += ["", "New graphs:", *_graphs(explanation)]
    return "\n".join(lines)


def _head(explanation: Explanation) -> Iterator[str]:
    balance, graphs = explanation.balance, explanation.graphs
    compiled = sum(graph.compiled for graph in graphs)
    new = len(graphs) + explanation.forgotten
    compiling = time_(sum(graph.seconds for graph in graphs if graph.compiled))
    loaded = sum(graph.loaded for graph in graphs)
    found = f", {loaded} found on disk" if loaded else ""
    yield f"{balance.traces} traces, {new} new graphs, {compiled} compiled in {compiling}{found}"
    yield f"{balance.verdict}: {VERDICTS[balance.verdict]}"
    yield _times(balance)
    yield _parts(balance)
    if 2 * balance.new_traces > balance.traces:
        new = balance.new_traces
        yield f"{new} of the traces recorded ops never met before: that takes far longer"


def _times(balance: Balance) -> str:
    record, run = map(time_, (balance.record, balance.run))
    return f"a trace is recorded in {record} and run in {run} (medians)"


_PARTS = {
    "recording": "recording",
    "planning": "planning",
    "compiling": "compiling",
    "running": "running",
    "waiting": "waiting for numbers",
    "outside": "outside torpor",
}


def _parts(balance: Balance) -> str:
    """The parts of the wall clock, largest first."""
    spent = {words: getattr(balance, name) for name, words in _PARTS.items()}
    shown = [
        f"{words} {time_(seconds)} ({seconds / balance.wall:.0%})"
        for words, seconds in sorted(spent.items(), key=lambda item: -item[1])
        if seconds >= 0.005 * balance.wall
    ]
    return f"{time_(balance.wall)} in all: {', '.join(shown)}"


def _finding(number: int, finding: Finding) -> Iterator[str]:
    over = ", over by now" if finding.over else ""
    yield f"{number:>3}. {finding.title} ({time_(finding.seconds)}{over})"
    yield f"       {finding.line}"
    for detail in finding.details:
        yield f"         {detail}"
    yield f"     -> {finding.advice}"


def _graphs(explanation: Explanation) -> Iterator[str]:
    shown = explanation.graphs[:MAX_GRAPHS_SHOWN]
    for graph in shown:
        yield _graph(graph)
    left = len(explanation.graphs) - len(shown) + explanation.forgotten
    if left:
        yield f"  ... and {left} more"


def _graph(graph: NewGraph) -> str:
    done = _what_was_done(graph)
    why = graph.why.partition("\n")[0]
    again = "once" if graph.hits == 1 else f"{graph.hits} times"
    head = f"  {graph.name}: {graph.nodes} nodes, {done}, met again {again}; {graph.line}"
    return f"{head}\n    {why}"


def _what_was_done(graph: NewGraph) -> str:
    if graph.loaded:
        return f"found on disk, loaded in {time_(graph.seconds)}"
    return f"compiled in {time_(graph.seconds)}" if graph.compiled else "interpreted"


def time_(seconds: float) -> str:
    """A time with about three digits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
