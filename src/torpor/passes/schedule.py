"""Partition the nodes into blocks in a runnable order: compiled, eager, and to commit.

    %1 = aten.sin.default(%0)               compiled 0:
    %2 = aten.nonzero.default(%1)             %1 = aten.sin.default(%0)
    %3 = aten.add_.Tensor(%0, %1)             %4 = aten.cos.default(%1)
    %4 = aten.cos.default(%1)               eager 0:
    return %2, %3 over %0, %4                 %2 = aten.nonzero.default(%1)
                                            commit 0:
                                              %3 = aten.add_.Tensor(%0, %1)
                                              return %2, %3 over %0, %4

A node that cannot be compiled splits the graph. Nodes are ordered to make few blocks: one for
everything that can be computed before the first such node, one for everything between that and the
next, and so on. Collectives are launched as early as possible and waited for as late as possible.

A step that fails must not have overwritten an input. So everything that may fail runs first (index
checks, memory allocation, custom ops), and elementwise updates of donated inputs are committed when
nothing can fail any more. An optimizer's arithmetic qualifies: it reads gradients that are already
in memory of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch

from torpor.distributed.ops import COLLECTIVES, WAIT
from torpor.ir.graph import COMMIT, COMPILED, EAGER, Block, Graph
from torpor.ir.node import Node, Value
from torpor.ops.spec import spec_of
from torpor.passes.pipeline import Pass
from torpor.passes.rewrite import is_view

Predicate = Callable[[Node], bool]

_ELEMENTWISE: Final = frozenset(
    # besides the ops that torch tags as pointwise
    {"_to_copy", "alias", "detach", "lift_fresh_copy", "copy", "copy_", "fill_", "zero_", "clone"}
)  # fmt: skip
MIN_OVERLAP: Final = 16
"""Computing nodes that must overlap with a collective to make splitting a block worth it."""
_REDUCING: Final = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def schedule(runs_eagerly: Predicate, may_refuse: Predicate) -> Pass:
    """The pass, given which nodes cannot be compiled and which may raise when run."""

    def run(graph: Graph) -> Graph:
        late = updates(graph, runs_eagerly, may_refuse)
        early = [node for node in graph.nodes if node not in late]
        blocks = list(_ordered(early, runs_eagerly))
        if late:
            nodes = tuple([node for node in graph.nodes if node in late])
            blocks.append(Block(COMMIT, 0, nodes))
        return graph.in_blocks(blocks)

    return Pass("schedule", "blocks to compile, nodes for eager's kernels, updates last", run)


def split(runs_eagerly: Predicate) -> Pass:
    """A pass that partitions a graph without reordering it, given which nodes cannot be compiled.

    %1 = aten.sin.default(%0)               compiled 0:
    %2 = aten.nonzero.default(%1)             %1 = aten.sin.default(%0)
    %3 = aten.cos.default(%1)               eager 1:
                                              %2 = aten.nonzero.default(%1)
                                            compiled 2:
                                              %3 = aten.cos.default(%1)
    """

    def run(graph: Graph) -> Graph:
        groups = enumerate(itertools.groupby(graph.nodes, runs_eagerly))
        kinds = (COMPILED, EAGER)
        return graph.in_blocks([Block(kinds[e], n, tuple(nodes)) for n, (e, nodes) in groups])

    return Pass("split", "blocks to compile, and nodes for eager's kernels, as recorded", run)


def _ordered(nodes: Sequence[Node], runs_eagerly: Predicate) -> Iterable[Block]:
    """Blocks in a runnable order."""
    levels: dict[int, tuple[list[Node], list[Node]]] = {}
    made_eagerly: dict[Value, int] = {}  # values made by eager nodes -> their level
    made: dict[Value, int] = {}  # the level of a value
    drawn = 0  # the level of the last random op: these keep the program's order
    top = floor = work = 0  # levels: highest compiled so far; lowest allowed for a wait
    for node in nodes:
        read, eager = node.operands, runs_eagerly(node)
        level = max((made.get(value, 0) for value in read), default=0)
        if not eager:
            after = (made_eagerly[value] + 1 for value in read if value in made_eagerly)
            level = max((level, *after))
            top, work = max(top, level), work + (not is_view(node))
        elif node.op.target is WAIT:
            if work >= MIN_OVERLAP:
                floor, work = top, 0  # computed while the collective is in flight
            level = max(level, floor)
        elif spec_of(node.op.target).draws(node.args):
            drawn = level = max(level, drawn)
        levels.setdefault(level, ([], []))[eager].append(node)
        made.update(dict.fromkeys(node.outputs, level))
        if eager:
            made_eagerly.update(dict.fromkeys(node.outputs, level))
    stages = [part for level in sorted(levels) for part in _launched(*levels[level])]
    for stage, groups in enumerate(stages):
        for kind, group in zip((COMPILED, EAGER), groups, strict=True):
            if group:
                yield Block(kind, stage, tuple(group))


def _launched(compiled: list[Node], eager: list[Node]) -> Iterator[tuple[list[Node], list[Node]]]:
    """Split a level at collectives: first what each one needs, then what it can overlap with.

        compiled 0:                             compiled 0:
          %1 = backward of the last layers        %1 = backward of the last layers
          %2 = backward of the first layers     eager 0:
        eager 0:                                  %3 = torpor.all_reduce.default(%1)
          %3 = torpor.all_reduce.default(%1)    compiled 1:
          %4 = torpor.wait.default(%3)            %2 = backward of the first layers
                                                eager 1:
                                                  %4 = torpor.wait.default(%3)

    So ranks compute while they communicate. Not done for fewer than `MIN_OVERLAP` nodes.
    """
    left = dict.fromkeys((*compiled, *eager))
    work = sum(not is_view(node) for node in compiled)
    for launch in [node for node in eager if node.op.target in COLLECTIVES]:
        needed = _needed(launch, left, _draws(eager))
        computed = sum(not is_view(node) for node in compiled if node in needed)
        if computed >= MIN_OVERLAP and work - computed >= MIN_OVERLAP:
            yield [n for n in compiled if n in needed], [n for n in eager if n in needed]
            compiled, eager = ([n for n in ns if n not in needed] for ns in (compiled, eager))
            left, work = dict.fromkeys((*compiled, *eager)), work - computed
    yield compiled, eager


def _needed(last: Node, among: Collection[Node], after: Mapping[Node, Node]) -> set[Node]:
    """`last` and the nodes of `among` that must run before it."""
    found, todo = {last}, [last]
    while todo:
        node = todo.pop()
        before = [*(value.node for value in node.operands), *filter(None, (after.get(node),))]
        new = [one for one in before if one in among and one not in found]
        found.update(new)
        todo += new
    return found


def _draws(nodes: Sequence[Node]) -> dict[Node, Node]:
    """The random op before each one: these keep the program's order."""
    drawing = [node for node in nodes if spec_of(node.op.target).draws(node.args)]
    return dict(zip(drawing[1:], drawing))


def updates(graph: Graph, runs_eagerly: Predicate, may_refuse: Predicate) -> set[Node]:
    """Nodes that only contribute to updates of donated inputs, and cannot fail."""
    if not graph.donated:
        return set()
    late = set(graph.donated.values())
    early = set(graph.outputs) - late  # values that must be computed before anything is overwritten
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if (
            not late.isdisjoint(node.outputs)
            and early.isdisjoint(node.outputs)
            and _is_elementwise(node)
            and not may_refuse(node)
            and not runs_eagerly(node)
        ):
            found.add(node)
            late.update(node.operands)
        else:
            early.update(node.operands)
    return found


def _is_elementwise(node: Node) -> bool:
    """Whether compiled code needs no memory for it besides its results."""
    name = spec_of(node.op.target).target._opname
    if name.startswith("_foreach_"):
        constants = any(
            type(arg) is tuple and not any(type(item) is Value for item in arg) for arg in node.args
        )
        return not (constants or name.startswith(_REDUCING))  # compilers call eager's kernels
    known = torch.Tag.pointwise in node.op.target.tags or name in _ELEMENTWISE
    return known or is_view(node)
