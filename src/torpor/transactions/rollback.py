"""Rolling back after a failure, to the state in which the failed op was recorded.

Eager would have raised at that op: earlier writes have happened, later ones have not. A trace does
not store when an op was recorded, but it has two orders: storages are listed in the order of their
first write, and leaf slots are numbered in the order of their first use. A write counts as earlier
if its storage is listed before everything that depends on the failed op, and entered the trace
no later than the last leaf of the failed op's cone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torpor import config
from torpor.backend.data import BackendData, Failure
from torpor.compiling.compilation import StandIn
from torpor.distributed.ops import COLLECTIVES
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, SIZE, TABLE, Node, Value
from torpor.ops.spec import spec_of
from torpor.overrides.draws import IN_TURN

if TYPE_CHECKING:
    from torpor.transactions.transaction import StepJob

Old = tuple[BackendData, BackendData | int, tuple[LazyStorage, Value] | None]
"""A handle; the source of the contents that it replaces, as data or as the position of an argument;
and the storage and leaf through which those entered the trace, if they did."""


def first_failed(errors: Iterable[BaseException]) -> tuple[BaseException, Node | None]:
    """The error that eager would have raised first, and its op; None: unknown."""
    each = {id(error): error for error in errors}.values()
    known = [(error, error._torpor_node) for error in each if hasattr(error, "_torpor_node")]
    if len(known) < len(each) or not config.cut_after_optimizer:  # two steps may be in a trace
        return next(iter(each)), None
    return min(known, key=lambda failed: _last_leaf(Graph.of(failed[1].operands)))


def _last_leaf(graph: Graph) -> int:
    return max(map(_slot, graph.inputs), default=-1)


def _slot(value: Value) -> int:
    slot: int = value.node.args[0] if value.node.op is LEAF else -1
    return slot


def failed_for(error: BaseException, arguments: Sequence[Any]) -> list[BackendData]:
    """The arguments whose error is `error`."""
    return [a for a in arguments if isinstance(a, BackendData) and a.error is error]


class _Order:
    """Classifies writes as before or after the failed op; called in the order of first writes."""

    def __init__(
        self,
        nodes: Iterable[Node],
        lost: set[Value],
        failed: Node | None,
        known: Iterable[Value],
    ) -> None:
        self.lost = lost  # values that depend on the failed op
        cone = Graph.of(() if failed is None else failed.operands)
        self.last = _last_leaf(cone)
        self.later = False  # the failed op was recorded before the current storage was written
        self.sure = {*known, *(output for node in cone.nodes for output in node.outputs)}
        self.late = {*lost, *self._made_of_later(nodes)}

    def _made_of_later(self, nodes: Iterable[Node]) -> Iterator[Value]:
        """Values that depend on a leaf which entered the trace after the failed op's last leaf."""
        slots: dict[Value, int] = {}
        for node in nodes if self.last >= 0 else ():
            slot = max([slots.get(value, _slot(value)) for value in node.operands], default=-1)
            slots.update(dict.fromkeys(node.outputs, slot))
            if slot > self.last:
                yield from node.outputs

    def is_before(self, value: Value | None, leaves: Sequence[Value]) -> bool:
        """Whether the next storage, which entered as `leaves`, was written before the failed op."""
        if self.last < 0:
            self.later = self.later or value in self.lost
        else:
            early = all(_slot(leaf) <= self.last for leaf in leaves)
            self.later = self.later or not early or self.is_late(_first_written(value))
        return not self.later

    def last_kept(self, value: Value | None) -> Value | None:
        """The latest contents, from `value` back, that precede the failed op; None: there are none.

        An update may scale the old contents before it adds what depends on the batch, like weight
        decay. That scaling came after the failed op, too.
        """
        if self.is_late(value):
            while value is not None and value not in self.sure:
                if not (self.is_late(value) or _scales(value.node)):
                    break
                value = written_over(value)
        return value

    def is_late(self, value: Value | None) -> bool:
        """Whether it, or what it is a view of, depends on the failed op or was made later."""
        while value is not None and value not in self.late and _is_view(value.node):
            value = _viewed(value)
        return value in self.late


def _first_written(value: Value | None) -> Value | None:
    """The first of the writes that led to `value`."""
    before = None if value is None else written_over(value)
    while before is not None and before.node.op is not LEAF:
        value, before = before, written_over(before)
    return value


def written_over(value: Value) -> Value | None:
    """The contents that `value` replaced, inferred from its ops; None if it is a new tensor."""
    inverses, new = list[Node](), value
    while _is_view(new.node):  # written through views
        inverses.append(new.node)
        new = _viewed(new)
    old = _operand_written(new)
    if old is None or not inverses:
        return old
    base = _base(old, len(inverses)) or _inverted(old, inverses)
    return base if base is not None and base.type is value.type else None


def _base(view: Value, depth: int) -> Value | None:
    """The value that `view` is a view of, `depth` view ops further down."""
    for _ in range(depth):
        if not _is_view(view.node):
            return None
        view = _viewed(view)
    return view


def _inverted(view: Value, inverses: Sequence[Node]) -> Value | None:
    """The base of which `view` shows the contents: the result of `inverses` applied to it."""
    for inverse in reversed(inverses):
        source = spec_of(inverse.op.target).views
        key = (*inverse.key[:source], view, *inverse.key[source + 1 :])
        found = TABLE.find(inverse.op, key)
        if found is None:
            return None
        view = found.outputs[0]
    return view


def _operand_written(value: Value) -> Value | None:
    node = value.node
    if node.op.target is None:
        return None
    if node.op.target._opname.endswith("_scatter"):
        return node.operands[0]  # written through a view
    written = _written_by(node)
    place = value.index - (len(node.outputs) - len(written))
    return written[place] if place >= 0 else None


def _is_view(node: Node) -> bool:
    if node.op.target is None:
        return False
    spec = spec_of(node.op.target)
    return spec.views >= 0 and not spec.mutated


def _viewed(value: Value) -> Value:
    viewed: Value = value.node.args[spec_of(value.node.op.target).views]
    return viewed


def _written_by(node: Node) -> list[Value]:
    """The operands that an op writes to."""
    written: list[Any] = []
    for position in spec_of(node.op.target).mutated:
        argument = node.args[position]
        written += argument if type(argument) is tuple else () if argument is None else (argument,)
    return written


def _scales(node: Node) -> bool:
    """Whether it updates tensors from themselves and numbers alone; setting a constant does not."""
    if node.op.target is None or node.op.target._opname in ("zero_", "fill_", "_foreach_zero_"):
        return False
    written = _written_by(node)
    tensors = {value for value in node.operands if value.node.op not in (SCALAR, SIZE)}
    return bool(written) and tensors <= set(written)


def _add_dependents(lost: set[Value], nodes: Iterable[Node]) -> None:
    for node in nodes:
        if any(value in lost for value in node.operands):
            lost.update(node.outputs)


# -- a graph that ends its trace -------------------------------------------------------------------


def keep_what_was_before(job: StepJob) -> None:
    """Keep results written before the failed op, or roll them back to contents from before it."""
    if job.failed is None:
        return
    places = {id(handle): place for place, handle in enumerate(job.results)}
    replaced: dict[int, list[Old]] = {}
    for old in job.replaced:
        replaced.setdefault(places.get(id(old[0]), -1), []).append(old)
    found = _before(job, replaced)
    stays = {id(job.results[place]) for place, contents in found.items() if contents is None}
    job.replaced = [old for old in job.replaced if id(old[0]) not in stays]
    _replace(job, {place: contents for place, contents in found.items() if contents is not None})


def _before(job: StepJob, replaced: dict[int, list[Old]]) -> dict[int, Value | None]:
    """By position, results written before the failed op: None, or earlier contents to restore."""
    outline, lost = job.outline, _lost_results(job)
    _add_dependents(lost, outline.graph.nodes)
    order = _Order(outline.graph.nodes, lost, job.failed, job.computed)
    found: dict[int, Value | None] = {}
    end = _end_of_gradients(job)
    for value, place in outline.positions.items():
        entered = [old[2] for old in replaced.get(place, ()) if old[2] is not None]
        if _are_updated(job, entered):
            if place >= end:
                break
            continue
        is_before = order.is_before(value, [leaf for _, leaf in entered])
        if not (is_before if entered else place < end):
            continue  # new, made by an optimizer: eager would not have come to that
        contents = order.last_kept(value) if entered or value in lost else value
        if contents is not None and contents.node.op is not LEAF:
            found[place] = None if contents is value else contents
    return found


def _end_of_gradients(job: StepJob) -> int:
    """The position after all gradients, which are listed before anything an optimizer writes."""
    if not job.undo:
        return len(job.results)
    places = [job.outline.positions.get(g, -1) for undo in job.undo for g in undo.gradients if g]
    return max(places, default=-1) + 1


def _are_updated(job: StepJob, entered: Sequence[tuple[LazyStorage, Value]]) -> bool:
    """Whether an optimizer has updated one of these."""
    storages = {storage for storage, _ in entered}
    return any(undo.concerns(storages) for undo in job.undo)


def _lost_results(job: StepJob) -> set[Value]:
    results = job.results
    lost = {value for value, p in job.outline.positions.items() if results[p].error is not None}
    return lost.union(() if job.failed is None else job.failed.outputs)


def _replace(job: StepJob, contents: dict[int, Value]) -> None:
    """Roll results back to contents that have to be computed."""
    for place, data in zip(contents, _computed(job, list(contents.values())), strict=False):
        handle = job.results[place]
        if data.error is None:
            entered = [old[2] for old in job.replaced if old[0] is handle]
            job.replaced = [old for old in job.replaced if old[0] is not handle]
            job.replaced.append((handle, data, entered[0] if entered else None))


def _computed(job: StepJob, values: list[Value]) -> list[BackendData]:
    """Run `values` on the reference backend; [] if that would repeat a draw or a collective."""
    outline, plan = job.outline, job.plan
    graph = Graph.of(values, set(outline.graph.inputs)).with_sizes()
    drawn = any(node.op.target in IN_TURN | COLLECTIVES for node in graph.nodes)
    if not values or drawn or plan is None or plan.runner.scalars_as_data:
        return []
    stand_in = StandIn(graph, plan.record.name, job.backend, job.device)
    arguments = [job.arguments[outline.places[value]] for value in graph.inputs]
    return stand_in.execute(stand_in.computation, arguments, job.device)


# -- a trace that goes on after a failure ----------------------------------------------------------


def mend(job: StepJob, failure: Failure) -> None:
    """Repair the open trace after part of it has failed: dependents are rolled back or fail.

    Contents written before the failed op stay pending. Other storages go back to what they held
    when they entered the trace, or when they were last computed; a storage made in the trace goes
    back along the writes to it.
    """
    lost = _forget_results(job, failure)
    values = [storage.value for storage in TRACE.live() if storage.value is not None]
    _add_dependents(lost, Graph.of(values, {*TRACE.computed, *lost}).nodes)
    order = _Order(Graph.of(values).nodes, lost, job.failed, TRACE.computed)
    entered, changed = dict(TRACE.leaf_storages), False
    for storage in _listed():
        value, leaf = storage.value, entered.get(storage)
        is_before = order.is_before(value, () if leaf is None else (leaf,))
        contents = order.last_kept(value)
        stays = contents is value and (is_before or leaf is None)
        if storage.data is None and (value in lost if leaf is None else not stays):
            changed = True
            _send_back(storage, contents, None if is_before else leaf, job, failure)
        elif value in lost and is_before and contents is not None and contents is not leaf:
            storage.data = None  # the handle of a failed result
            _send_back(storage, contents, None, job, failure)
        elif value in lost:
            storage.value = None  # the restored data will enter as a new leaf
    if changed:
        failure.undo += tuple(TRACE.undo)
        TRACE.undo.clear()


def _listed() -> Iterator[LazyStorage]:
    """Storages that were written in this trace, in the order of their first writes."""
    for reference in list(TRACE.pending):
        storage = reference()
        if storage is not None:
            yield storage


def _forget_results(job: StepJob, failure: Failure) -> set[Value]:
    """The results that failed or were rolled back."""
    lost: set[Value] = set()
    for value, position in job.outline.positions.items():
        handle = job.results[position]
        if handle.error is not None or id(handle) in failure.rolled_back:
            lost.add(value)
            if TRACE.computed.get(value) is handle:
                del TRACE.computed[value]
    return lost


def _send_back(
    storage: LazyStorage, value: Value | None, leaf: Value | None, job: StepJob, failure: Failure
) -> None:
    """Roll `storage` back to `value`; given `leaf`, to the latest contents up to it with data."""
    while value is not None and leaf is not None and not _is_data(value):
        value = written_over(value)
    value = value or leaf
    if value is None:
        failed = job.backend.placeholder(job.device, storage.type.concrete)
        failed.error = failure.error
        storage.hold(failed)
    elif _is_data(value):
        is_leaf = value.node.op is LEAF
        storage.hold(TRACE.leaves[value.node.args[0]] if is_leaf else TRACE.computed[value])
    storage.value = value


def _is_data(value: Value) -> bool:
    return value.node.op is LEAF or value in TRACE.computed
