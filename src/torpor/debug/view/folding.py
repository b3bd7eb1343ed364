"""Folds the nodes of a graph into a tree: by module, by repeated part, by line, by number.

No group has more than `MOST_CHILDREN` children, so that any unfolded group can be drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from torpor.debug.facts import Scope
from torpor.debug.view.repeated_parts import LabelledGraph
from torpor.ir.graph import Graph

MOST_CHILDREN: Final = 48
FEW: Final = 6
"""The most nodes that need no folding."""

PHASE: Final = "phase"  # forward, backward, optimizer
MODULE: Final = "module"
REPEAT: Final = "repeat"  # equal parts
PART: Final = "part"  # one of the equal parts
LINE: Final = "line"  # nodes of one line of the user's
RANGE: Final = "range"  # nodes that are merely adjacent
ROOT: Final = "root"


@dataclass
class Fold:
    """A group of nodes and groups, in the order of the graph."""

    kind: str
    label: str
    items: list[int | Fold] = field(default_factory=list)

    def nodes(self) -> Iterator[int]:
        """All nodes inside, in the order of the graph."""
        stack: list[int | Fold] = [self]
        found: list[int] = []
        while stack:
            item = stack.pop()
            if isinstance(item, Fold):
                stack.extend(item.items)
            else:
                found.append(item)
        return iter(sorted(found))


def fold(graph: Graph, scopes: Sequence[Scope | None], lines: Sequence[str]) -> Fold:
    """The tree of a graph, given the module and the line that recorded each node."""
    root = _by_module(scopes)
    structure = LabelledGraph(graph)
    for group in _bottom_up(root):
        _fold_equal_groups(group, structure)
        _fold_own_nodes(group, structure, lines)
        _narrow(group)
    return root


def _bottom_up(root: Fold) -> list[Fold]:
    order, stack = [], [root]
    while stack:
        group = stack.pop()
        order.append(group)
        stack.extend(item for item in group.items if isinstance(item, Fold))
    return order[::-1]


# -- modules -----------------------------------------------------------------------------------


def _by_module(scopes: Sequence[Scope | None]) -> Fold:
    root = Fold(ROOT, "graph")
    known: dict[tuple[str, ...], Fold] = {(): root}
    for node, scope in enumerate(scopes):
        phase, path = scope or ("", "")
        parts = (phase, *path.split(".")) if path else (phase,) if phase else ()
        _group(parts, known).items.append(node)
    return root


def _group(parts: tuple[str, ...], known: dict[tuple[str, ...], Fold]) -> Fold:
    """The group of a module, created along with its ancestors if new."""
    depth = len(parts)
    while parts[:depth] not in known:
        depth -= 1
    group = known[parts[:depth]]
    for i in range(depth, len(parts)):
        inner = Fold(MODULE if i else PHASE, parts[i])
        group.items.append(inner)
        group = known[parts[: i + 1]] = inner
    return group


# -- equal parts -------------------------------------------------------------------------------


def _fold_equal_groups(group: Fold, structure: LabelledGraph) -> None:
    """Merge equal neighbours in a sequence of modules (`blocks.0`, `blocks.1`) into one group."""
    runs: list[list[Fold]] = []
    shape: object = None
    for item in group.items:
        if not isinstance(item, Fold) or item.kind != MODULE or not item.label.isdecimal():
            continue
        found = structure.shape_of(list(item.nodes()))
        if runs and found and found == shape:
            runs[-1].append(item)
        else:
            runs.append([item])
        shape = found
    for run in runs:
        if len(run) > 1:
            label = f"{run[0].label} … {run[-1].label}  ×{len(run)}"
            repeat = Fold(REPEAT, label, list(run))
            _replace(group, run, repeat)
            _narrow(repeat)


def _replace(group: Fold, old: Sequence[int | Fold], new: Fold) -> None:
    """Replace `old` by `new`, at the position of the first."""
    gone = {id(item) for item in old}
    first = next(i for i, item in enumerate(group.items) if id(item) == id(old[0]))
    kept = [item for i, item in enumerate(group.items) if i == first or id(item) not in gone]
    group.items = [new if item is old[0] else item for item in kept]


def _fold_own_nodes(group: Fold, structure: LabelledGraph, lines: Sequence[str]) -> None:
    own = [item for item in group.items if isinstance(item, int)]
    if len(own) <= FEW:
        return
    covered: set[int] = set()
    folded: list[int | Fold] = []
    for repeat in structure.repeats(own):
        if repeat.length < FEW:
            continue
        nodes = own[repeat.start : repeat.start + repeat.length]
        folded.append(_repeated(nodes, repeat.period))
        covered.update(nodes)
    rest = [node for node in own if node not in covered]
    if len(group.items) - len(covered) + len(folded) > MOST_CHILDREN:
        folded += _by_line(rest, lines)
        rest = []
    others = [item for item in group.items if isinstance(item, Fold)]
    group.items = sorted([*others, *folded, *rest], key=_first)


def _repeated(nodes: list[int], period: int) -> Fold:
    count = len(nodes) // period
    if period == 1:
        return Fold(REPEAT, f"×{count}", list(nodes))
    parts = [
        Fold(PART, f"part {i + 1}", list(nodes[i * period : (i + 1) * period]))
        for i in range(count)
    ]
    repeat = Fold(REPEAT, f"{period} nodes ×{count}", list(parts))
    for part in parts:
        _narrow(part)
    _narrow(repeat)
    return repeat


def _by_line(nodes: list[int], lines: Sequence[str]) -> list[int | Fold]:
    """One group per line, if there are several lines."""
    groups: dict[str, Fold] = {}
    for node in nodes:
        line = lines[node]
        groups.setdefault(line, Fold(LINE, line or "no line")).items.append(node)
    if len(groups) == 1:
        return list(nodes)
    for group in groups.values():
        _narrow(group)
    return [group if len(group.items) > 1 else group.items[0] for group in groups.values()]


def _first(item: int | Fold) -> int:
    while isinstance(item, Fold):
        item = item.items[0]
    return item


# -- numbers -----------------------------------------------------------------------------------


def _narrow(group: Fold) -> None:
    """Group neighbours until there are few children."""
    while len(group.items) > MOST_CHILDREN:
        length = len(group.items)
        size = ceil(length / ceil(length / MOST_CHILDREN))
        chunks = [group.items[i : i + size] for i in range(0, length, size)]
        group.items = [Fold(RANGE, f"{_name(c[0])} … {_name(c[-1])}", c) for c in chunks]


def _name(item: int | Fold) -> str:
    return f"node {item}" if isinstance(item, int) else item.label.split(" … ")[0]
