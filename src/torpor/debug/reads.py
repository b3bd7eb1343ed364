"""Findings on where the program waited for results, and where ops were not recorded, by line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torpor import metrics
from torpor.debug.findings import Finding
from torpor.text import difference as kinds

BRANCH_ON_TENSOR = "branch on a tensor"
SYNC = "sync"
FALLBACK = "fallback"
FALLBACK_IN_BACKEND = "fallback in the backend"

WORDS = {
    "_local_scalar_dense": "a number is asked for (.item())",
    "repr": "a tensor is printed",
    "numpy": "a tensor becomes a NumPy array",
    "tolist": "a tensor becomes a list",
    "_to_copy": "a tensor is copied off the device",
    "pickle": "a tensor is saved",
    "bool": "Python asks a tensor for its truth value",
    "int": "Python asks a tensor for an int",
    "index": "Python asks a tensor for an index",
    "float": "Python asks a tensor for a float",
    "complex": "Python asks a tensor for a complex number",
}
ADVICE = {
    "_local_scalar_dense": "Read every N steps, or keep the tensor (`.detach()`) and read it after "
    "the loop.",
    "repr": "Print every N steps, or let torpor.at_step_end print it when the step is cut.",
    "bool": "Use torch.where or a mask; or read the decision once, one step late.",
}
OTHER_ADVICE = "Read it after the step has been cut, or less often."


def syncs() -> list[Finding]:
    """A finding for each line that waited for a result."""
    fallback_lines = {line for name in _fallback_names() for line in metrics.lines(name)}
    found = [_sync(line, asked) for line, asked in _waits().items()]
    return [one for one in found if one.line not in fallback_lines or _reasons(one.line)]


def _waits() -> dict[str, str]:
    """Every line that waited, with the Python conversion it was for ("" if none)."""
    waits: dict[str, str] = {}
    for name in metrics.line_names():
        if name == "Wait" or name.startswith("Wait::"):
            for line in metrics.lines(name):
                waits[line] = name.partition("::")[2] or waits.get(line, "")
    return waits


def _sync(line: str, asked: str) -> Finding:
    names = ("Wait", f"Wait::{asked}") if asked else ("Wait",)
    count = sum(metrics.lines(name).get(line, 0) for name in names)
    seconds = sum(metrics.line_seconds(name).get(line, 0.0) for name in names)
    reasons = [asked] if asked else _reasons(line)
    words = "; ".join(WORDS.get(why, f"{why} needs the numbers") for why in reasons)
    return Finding(
        BRANCH_ON_TENSOR if asked == "bool" else SYNC,
        line,
        f"{_times(count)} the program waited for numbers: {words or 'a tensor is read'}",
        ADVICE.get(reasons[0] if reasons else "", OTHER_ADVICE),
        count=count,
        seconds=seconds,
    )


def _reasons(line: str) -> list[str]:
    """The syncs counted at a line."""
    return [
        name.removeprefix("Sync::")
        for name in metrics.line_names()
        if name.startswith("Sync::") and line in metrics.lines(name)
    ]


def fallbacks() -> list[Finding]:
    """A finding for each op and line that eager ran because it could not be recorded."""
    found = []
    seconds = metrics.line_seconds("FallbackTime")
    for name in _fallback_names():
        for line, count in metrics.lines(name).items():
            title = f"{_times(count)} {name} could not be recorded: the step was interrupted for it"
            advice = "Write it with other ops; for one of your own, register a fake: torch.library."
            lost = seconds.get(line, 0.0)
            found.append(Finding(FALLBACK, line, title, advice, count=count, seconds=lost))
    return found + _backend_fallbacks()


def _fallback_names() -> Iterable[str]:
    """`aten::op`: fallbacks are counted under the op's own name, by line."""
    other = ("Sync::", "Wait::", "fallback::", "decomposed::")
    return [n for n in metrics.line_names() if "::" in n and not n.startswith(other)]


def _backend_fallbacks() -> list[Finding]:
    found = []
    for name in metrics.line_names():
        if name.startswith("fallback::"):
            for line, count in metrics.lines(name).items():
                op = name.removeprefix("fallback::")
                title = f"the backend cannot lower {op}: eager's kernel runs"
                advice = "Lower it in the backend, or write it with other ops."
                found.append(Finding(FALLBACK_IN_BACKEND, line, title, advice, count=count))
    return found


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def with_branches(reads: list[Finding], compiles: list[Finding]) -> list[Finding]:
    """All findings; recompiles caused by a branch on a tensor are merged into the branch's."""
    by_line = {one.line: one for one in reads if one.cause == BRANCH_ON_TENSOR}
    rest = []
    for one in compiles:
        branch = by_line.get(one.branch)
        if branch is None or one.cause != kinds.BRANCH:
            rest.append(one)
            continue
        details = (*branch.details, f"the other branch is another graph: {one.title}", *one.details)
        seconds = branch.seconds + one.seconds
        by_line[branch.line] = replace(branch, details=details, seconds=seconds)
    return [
        by_line.get(one.line, one) if one.cause == BRANCH_ON_TENSOR else one for one in reads
    ] + rest
