"""Why new graphs were made: records of the history, grouped by cause, with advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torpor import config
from torpor.debug.findings import Finding
from torpor.observe.history import GraphRecord
from torpor.text import difference as kinds
from torpor.text.difference import Difference

FEW_SIZES = 2

ADVICE = {
    kinds.SAME: "Raise config.max_cached_plans (or max_interned_nodes): the program has more "
    "graphs than are kept.",
    kinds.SHAPE: "Pad to one of a few fixed sizes: each size is compiled once, and reused.",
    kinds.SIZES: "Nothing: other sizes need no further compile.",
    kinds.DTYPE: "Keep one dtype at this line, or cast at the same place in every step.",
    kinds.LAYOUT: "Call .contiguous() on the tensor before the step, or make it in one layout.",
    kinds.MODULE: "Keep to one module, or expect one compile for each: its graph is reused when it "
    "comes back.",
    kinds.CONSTANT: "Pass it as a tensor, so that it is data and no part of the graph; or keep it "
    "fixed.",
    kinds.INDEX: "Take it from a plain tensor before that becomes lazy (data need not be lazy), or "
    "pass the index as a tensor: x.index_select(0, rows).",
    kinds.PROMOTED: "Nothing: other values need no further compile.",
    kinds.LIST: "Keep the number of tensors fixed: write into one tensor of full size, or read old "
    "results (.item()) instead of holding them.",
    kinds.BRANCH: "Use torch.where or multiply by a mask, so that every step records the same ops; "
    "a branch that is taken rarely may stay.",
    kinds.OPEN: "Call torpor.sync() here, at the end of the step: as long as nothing ends the "
    "trace every step is a graph of its own. (optimizer.step() ends it, too.)",
    kinds.READ: "Read at the same place in every step, or after the step has been cut.",
    kinds.RESULTS: "Hold the same tensors at the end of every step; drop what is not needed "
    "(`del`, .item()).",
    kinds.ORDER: "Nothing, if it happens once: a first step also moves parameters to the device. "
    "Otherwise use tensors in the same order in every step.",
    kinds.UNKNOWN: "Ask torpor.explain() earlier: only the latest graphs are kept.",
}
LOOP = (
    "Let Python do the same whatever the size: a loop over a tensor's size records that many ops. "
    "Use one op for all of it, or pad to a fixed size."
)
HAPPENS_ONCE = (kinds.BRANCH, kinds.RESULTS)
ONCE = "Nothing, if it happens once: optimizers make their state in the first step. Otherwise: "
ENDS = "Nothing, if it ends by itself: sizes that change become run-time inputs. Otherwise: "
SMALLER_BATCH = "Drop the last batch (DataLoader(..., drop_last=True)) or pad it to full size."
TITLES = {
    kinds.SAME: "a graph was compiled, dropped, and compiled again",
    kinds.SHAPE: "a tensor has another shape",
    kinds.SIZES: "sizes changed, and were promoted to run-time inputs",
    kinds.DTYPE: "a dtype changed",
    kinds.LAYOUT: "a tensor lies otherwise in memory",
    kinds.MODULE: "another module: tensors that were always the same are others, of other sizes",
    kinds.CONSTANT: "a constant changed",
    kinds.INDEX: "an index changes from step to step",
    kinds.PROMOTED: "a number changed, and was promoted to a run-time input",
    kinds.LIST: "an op takes another number of tensors",
    kinds.BRANCH: "Python took another branch",
    kinds.READ: "a tensor was read in the middle of the step",
    kinds.OPEN: "nothing ends the step",
    kinds.RESULTS: "another tensor is held at the end of the step",
    kinds.ORDER: "the same ops on the same tensors, first used in another order",
    kinds.UNKNOWN: "the graph is new",
}


def recompiles(records: Sequence[GraphRecord]) -> list[Finding]:
    """A finding for each cause of new graphs at cut sites that had one before."""
    groups: dict[tuple[object, ...], list[tuple[GraphRecord, Difference]]] = {}
    for record, found in _differences(records):
        groups.setdefault(_group(record, found), []).append((record, found))
    last = {id(record.cut_site): record for record in records}
    return [
        _finding(group, settled=last[id(group[0][0].cut_site)].hits >= FEW_SIZES)
        for group in groups.values()
    ]


def _differences(records: Sequence[GraphRecord]) -> list[tuple[GraphRecord, Difference]]:
    """The differences of records; a lost one is assumed to equal the next at its cut site."""
    next_: dict[int, Difference] = {}
    result: list[tuple[GraphRecord, Difference]] = []
    for record in reversed(records):
        found = record.difference
        if found is not None:
            if found.kind == kinds.UNKNOWN:
                found = next_.get(id(record.cut_site), found)
            next_[id(record.cut_site)] = found
            result.append((record, found))
    return result[::-1]


def failures(records: Iterable[GraphRecord]) -> list[Finding]:
    """Graphs that the backend could not compile."""
    return [
        Finding(
            "compile failed",
            record.site,
            f"{record.name} could not be compiled: the reference backend runs it",
            "Lower the op, or choose another backend; config.strict makes this an error.",
            (record.failure,),
            count=max(1, record.runs),
            seconds=record.run_seconds,
        )
        for record in records
        if record.failure
    ]


def _group(record: GraphRecord, found: Difference) -> tuple[object, ...]:
    """Differences of one kind at one line, with one cut site, are reported together."""
    then = found.then.line if found.then else ""
    return id(record.cut_site), found.kind, found.line, found.argument, found.dim, then


def _finding(group: list[tuple[GraphRecord, Difference]], settled: bool) -> Finding:
    records, differences = zip(*group, strict=True)
    first: Difference = differences[0]
    compiled = sum(record.compiled for record in records)
    return Finding(
        cause=_cause(first),
        line=_line(first, records[0]),
        title=f"{_what_was_done(records, compiled)}: {_title(first)}",
        advice=_advice(differences, settled),
        details=_details(records, differences),
        count=len(group),
        seconds=sum(map(_lost, records)),
        over=first.kind == kinds.PROMOTED or settled,
        branch=records[0].asked_at,
    )


def _lost(record: GraphRecord) -> float:
    """Seconds that a cache hit would have saved."""
    made = record.record_seconds + record.plan_seconds + record.compile_seconds
    return made + record.interpreted_seconds


def _cause(found: Difference) -> str:
    return "loop" if _is_loop(found) else found.kind


def _is_loop(found: Difference) -> bool:
    """Whether the ops differ because a size does."""
    return found.kind == kinds.SHAPE and found.then is not None


def _line(found: Difference, record: GraphRecord) -> str:
    if _is_loop(found) and found.then is not None and found.then.line:
        return found.then.line
    return found.line or record.site


def _what_was_done(records: Sequence[GraphRecord], compiled: int) -> str:
    new, loaded = len(records), sum(record.loaded for record in records)
    if compiled == new:
        return f"{_number(new, 'more graph')} compiled"
    if loaded:
        return f"{_number(new, 'new graph')}, {compiled} compiled, {loaded} found on disk"
    runs = _number(sum(record.interpreted_runs for record in records), "run")
    if compiled:
        return f"{_number(new, 'new graph')}, {compiled} compiled so far ({runs} interpreted)"
    if new == 1:
        return f"1 new graph, not compiled yet ({runs} interpreted)"
    return (
        f"{new} new graphs, never compiled because none came back often enough ({runs} interpreted)"
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _title(found: Difference) -> str:
    if _is_loop(found):
        return "a tensor has another shape, and Python did something else because of it"
    return TITLES[found.kind]


def _details(records: Sequence[GraphRecord], differences: Sequence[Difference]) -> tuple[str, ...]:
    lines = differences[0].lines
    values = _values(differences)
    if len(values) > FEW_SIZES:
        lines.append(f"so far: {_listed(values)}")
    lines.append(f"cut at {records[0].site}")
    return tuple(lines)


def _values(differences: Sequence[Difference]) -> list[str]:
    values: dict[str, None] = {differences[0].before: None}
    values.update(dict.fromkeys(found.after for found in differences))
    return list(values)


def _listed(values: list[str]) -> str:
    return ", ".join(values if len(values) <= 6 else [*values[:4], "...", values[-1]])


def _advice(differences: Sequence[Difference], settled: bool) -> str:
    first = differences[0]
    if _is_loop(first):
        return LOOP
    if first.kind == kinds.SHAPE:
        fixed = SMALLER_BATCH if _is_last_batch(differences) else ADVICE[kinds.SHAPE]
        return fixed if config.dynamic == "off" else ENDS + fixed
    if settled and len(differences) == 1 and first.kind in HAPPENS_ONCE:
        return ONCE + ADVICE[first.kind]
    return ADVICE[first.kind]


def _is_last_batch(differences: Sequence[Difference]) -> bool:
    """Whether there are two sizes in the first dimension, and the later one is smaller."""
    first = differences[0]
    if first.dim != 0 or len(_values(differences)) > FEW_SIZES:
        return False
    return _first_size(first.after) < _first_size(first.before)


def _first_size(shape: str) -> int:
    return int(shape.strip("[]").split(",")[0] or 0)
