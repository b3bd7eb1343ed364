"""The end of a sweep: the table (passed, fell back, excluded) and the failures, grouped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tests.ops.results import Failure, Result

RECORDED_SHARE = 0.95
"""At least this share of the entries that ran must record without falling back."""

COLUMNS = ("passed", "fell back", "failed", "excluded")


def recorded_share(results: Iterable[Result]) -> float:
    """Entries without a fallback among those that ran. A sync by nature is no fallback."""
    ran = [r for r in results if not r.excluded]
    return sum(not r.fallbacks for r in ran) / len(ran) if ran else 1.0


def table(results: Iterable[Result]) -> str:
    """One line per mode, then who fell back, where eager is its own bound, and what is excluded."""
    results = list(results)
    lines = [f"{'mode':<10}{'entries':>9}" + "".join(f"{c:>11}" for c in COLUMNS)]
    lines[0] += f"{'samples':>10}{'runs':>10}{'recorded without fallback':>28}"
    for mode in sorted({r.mode for r in results}):
        own = [r for r in results if r.mode == mode]
        status = Counter(r.status for r in own)
        line = f"{mode:<10}{len(own):>9}" + "".join(f"{status[c]:>11}" for c in COLUMNS)
        line += f"{sum(r.samples for r in own):>10}{sum(r.runs for r in own):>10}"
        lines.append(f"{line}{recorded_share(own):>28.1%}")
    lines += _named("fell back", {r.op: ", ".join(r.fallbacks) for r in results if r.fallbacks})
    lines += _named("synced by nature", {r.op: ", ".join(r.syncs) for r in results if r.syncs})
    lines += _named(
        "eager differs from itself",
        {r.op: ", ".join(sorted(set(r.noisy))) for r in results if r.noisy},
    )
    lines += _named(
        "raised as eager does, but only when read",
        {r.op: f"{len(r.late)} times" for r in results if r.late},
    )
    lines += _named(
        "eager does not write a strided out= in place: not compared",
        {r.op: f"{r.eager_faults} times" for r in results if r.eager_faults},
    )
    lines += _named("excluded", {r.op: r.excluded for r in results if r.excluded})
    return "\n".join(lines)


def _named(title: str, reasons: dict[str, str]) -> list[str]:
    if not reasons:
        return []
    return [
        "",
        f"{title} ({len(reasons)}):",
        *(f"  {op}: {why}" for op, why in sorted(reasons.items())),
    ]


def summarise(results: Iterable[Result]) -> str:
    """The failures of a run, grouped by what differs."""
    groups: dict[tuple[str, ...], list[Failure]] = {}
    for failure in (f for result in results for f in result.failures):
        groups.setdefault(_signature(failure), []).append(failure)
    lines = []
    for signature, failures in sorted(groups.items(), key=lambda g: -len({f.op for f in g[1]})):
        ops = sorted({f.op for f in failures})
        names = ", ".join(ops[:8]) + (f" and {len(ops) - 8} more" if len(ops) > 8 else "")
        lines += [f"{len(ops):4} ops {len(failures):6} times: {' | '.join(signature)}"]
        lines += [f"       {names}", f"       e.g. {failures[0]}"]
    return "\n".join(lines)


def _signature(failure: Failure) -> tuple[str, ...]:
    if failure.kind in ("raises", "does not raise", "exception type"):
        text = re.sub(r"0x[0-9a-f]+|-?\d+(\.\d+)?(e-?\d+)?", "#", failure.detail)
        return failure.kind, re.sub(r"\[[^]]*\]|'[^']*'", "…", text)
    return failure.kind, failure.variant, re.sub(r"\[?\d+\]?", "#", failure.where)
