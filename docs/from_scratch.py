"""Lazy tensors from scratch.

For someone who wants to understand the idea behind torpor by reading one file from top to bottom,
and to run it: `python docs/from_scratch.py`. You should know PyTorch as a user. Nothing here is
imported from torpor; remarks say where the real thing differs, and the end what is missing.

The plan. A program such as `loss = (x @ w).square().mean(); loss.backward()` is not executed; every
operation is written down. When somebody looks at a number, what was written down is executed, and
how to execute it is remembered. A training loop writes down the same thing in every step. So the
whole art is to notice, in almost no time, that what was written down has been seen before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch._subclasses import fake_tensor as fakes
from torch.utils._pytree import tree_leaves, tree_map

# == 1. Types ======================================================================================
# User code asks a tensor for its sizes, strides and dtype long before it asks for numbers, and it
# must get the truth. All that can be said about a tensor without its numbers is its type. (There is
# only one device in this file. torpor's TensorType has the device too.)


@dataclass(frozen=True)
class Type:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # where in its memory the first element is
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Type:
        return Type(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def blank(self) -> torch.Tensor:
        """A tensor of this type, numbers unset."""
        pairs = zip(self.shape, self.stride, strict=True)
        room = self.offset + 1 + sum(max(n - 1, 0) * s for n, s in pairs)
        memory = torch.empty(room, dtype=self.dtype, device="cpu")
        return memory.as_strided(self.shape, self.stride, self.offset)


# == 2. Nodes, and the table that makes them unique ================================================
# A Node is one operation on values; a Value is one of a node's outputs. Nodes are interned: whoever
# asks for "this op on these values with these numbers" twice gets the same object. From that
# follows nearly everything:
#
#   - comparing two graphs of a million nodes is comparing two pointers;
#   - a repeated sub-expression is found for free;
#   - a step that was recorded before is a series of dictionary hits: nothing is inferred or built.


class Value:
    def __init__(self, node: Node, type_: Type) -> None:
        self.node, self.type = node, type_


class Node:
    def __init__(self, op: Any, args: dict[str, Any], template: Any, types: list[Any]) -> None:
        self.op = op  # a torch operator, or LEAF
        self.args = args  # arguments by name, values in the place of tensors
        self.template = template  # what the op returns, types in the place of tensors
        self.outputs = [Value(self, t) for t in types]


TABLE: dict[Any, Node] = {}


def frozen(thing: Any) -> Any:
    """`thing` as part of a dictionary key.

    Python says 1 == 1.0 == True and 0.0 == -0.0, and that NaN is not itself. A key must not.
    """
    if isinstance(thing, (list, tuple)):
        return tuple(map(frozen, thing))
    if isinstance(thing, dict):
        return tuple((name, frozen(item)) for name, item in thing.items())
    if isinstance(thing, (bool, int, float, complex)):
        return type(thing), repr(thing)
    return thing  # values, types, dtypes, None: equal only to themselves


def node_of(op: Any, args: dict[str, Any]) -> Node:
    """The one node of `op` on `args`."""
    key = (op, frozen(args))
    node = TABLE.get(key)
    if node is None:
        node = TABLE[key] = Node(op, args, *infer(op, args))
    return node


# == 3. Inference: what would come out? ============================================================
# torch can run every operator on fake tensors, which have a type and no numbers. That is exact, and
# takes a tenth of a millisecond: too slow for every op, so answers are remembered by types. Twelve
# equal layers have other values and the same types, and pay once.

FAKES = fakes.FakeTensorMode()
NEEDS_NUMBERS = (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException)
MEMO: dict[Any, tuple[Any, list[Any]]] = {}


def swap(things: Any, change: Callable[[Value], Any]) -> Any:
    """`things` with every value in it changed, however deep in lists and dicts."""
    return tree_map(lambda leaf: change(leaf) if type(leaf) is Value else leaf, things)


def infer(op: Any, args: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What `op` returns, in types, and the types of its node's outputs."""
    key = (op, frozen(swap(args, lambda value: value.type)))
    if key not in MEMO:
        with FAKES:
            blanks = swap(args, lambda value: value.type.blank())
            template = tree_map(lambda t: Type.of(t) if torch.is_tensor(t) else t, op(**blanks))
        contract = contract_of(op)
        types = [] if contract.aliases and contract.writes else flat(template)
        types += [Type.of(t) for name in contract.writes for t in flat(blanks.get(name))]
        MEMO[key] = template, types
    return MEMO[key]


def flat(thing: Any) -> list[Any]:
    """A tensor, a list of them, or nothing, as a list."""
    if isinstance(thing, (list, tuple)):
        return list(thing)
    return [] if thing is None else [thing]


# == 4. Contracts: what an op does to memory =======================================================
# torch's schemas say it. `Tensor(a!)` is an argument that is written to. A return marked `(a)` is
# the memory of argument (a): the argument itself if it was written to, otherwise a view of it.


class Contract(NamedTuple):
    names: list[str]
    writes: list[str]  # names of the arguments the op writes to
    aliases: bool  # what it returns is not fresh memory
    random: bool


@functools.cache
def contract_of(op: Any) -> Contract:
    arguments = op._schema.arguments
    return Contract(
        names=[a.name for a in arguments],
        writes=[a.name for a in arguments if a.alias_info and a.alias_info.is_write],
        aliases="Tensor(" in str(op._schema).split("->")[1],
        random=torch.Tag.nondeterministic_seeded in op.tags,
    )


# == 5. Storages and leaf slots ====================================================================
# A tensor and its views share a Storage. It holds a buffer (`data`), or a recorded `value`, or
# both.
#
# How does a tensor that has data enter the record? Not by its address, which changes from step to
# step: then no step would ever look like the last one. It enters as a *leaf slot*: "the k-th buffer
# that this trace uses". A training loop uses its parameters and batches in the same order every
# time, so the second step meets leaf 0, leaf 1, ... and with them the very nodes of the first.


class Storage:
    def __init__(self, type_: Type, value: Value | None, data: torch.Tensor | None) -> None:
        self.type, self.value, self.data = type_, value, data


LEAF = "leaf"


class Trace:
    """What was recorded since the last cut."""

    def __init__(self) -> None:
        self.leaves: list[Storage] = []
        self.buffers: list[torch.Tensor] = []  # the buffer of each leaf slot
        self.pending: list[weakref.ref[Storage]] = []  # storages that may have to be computed

    def value(self, storage: Storage) -> Value:
        """What `storage` holds in this trace."""
        if storage.value is None:
            key = (LEAF, len(self.leaves), storage.type)
            if key not in TABLE:
                TABLE[key] = Node(LEAF, {"slot": len(self.leaves)}, None, [storage.type])
            storage.value = TABLE[key].outputs[0]
            self.leaves.append(storage)
            self.buffers.append(storage.data)
        return storage.value

    def hold(self, storage: Storage, value: Value) -> None:
        """From now on `storage` holds `value`. No buffer is touched."""
        storage.value, storage.data = value, None
        self.pending.append(weakref.ref(storage))

    def live(self) -> list[Storage]:
        """Pending storages that somebody still holds: nobody can ask for the others."""
        found = [reference() for reference in self.pending]
        return [s for s in dict.fromkeys(found) if s is not None and s.data is None]

    def reset(self) -> None:
        """Forget all values: everything alive is data, and enters the next trace as a leaf."""
        for storage in self.leaves + [r() for r in self.pending]:
            if storage is not None:
                storage.value = None
        self.leaves, self.buffers, self.pending = [], [], []


TRACE = Trace()

# == 6. The tensor =================================================================================
# What the user holds is a wrapper: sizes, strides, dtype, and no memory. `__torch_dispatch__` sits
# below autograd: backward arrives here as ordinary ops, and needs not a single line of ours.


class LazyTensor(torch.Tensor):
    storage_: Storage
    window: Window | None  # None: the tensor is all of its storage

    @staticmethod
    def make(storage: Storage, type_: Type) -> LazyTensor:
        facts = (type_.shape, type_.stride, type_.offset, None, type_.dtype)
        tensor = torch.Tensor._make_wrapper_subclass(LazyTensor, *facts)
        tensor.storage_ = storage
        tensor.window = None if type_ == storage.type else Window(type_)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        contract = contract_of(op)
        bound = dict(zip(contract.names, args, strict=False)) | (kwargs or {})
        return record(op, contract, bound)

    def __repr__(self) -> str:
        return f"lazy {read(self)!r}"


def lazy(tensor: torch.Tensor) -> LazyTensor:
    """A lazy copy of a plain tensor."""
    data = tensor.detach().clone()
    return LazyTensor.make(Storage(Type.of(data), None, data), Type.of(data))


# == 7. Views ======================================================================================
# A view is a window on its storage: sizes, strides, offset. (torpor keeps the view op itself, which
# compilers like better, and uses windows where no op fits.) What the window shows depends on what
# the storage holds, and that may change behind the view's back:
#
#     row = x[0]; x.add_(1); print(row)
#
# So a window remembers what it showed (`value`) for which contents (`base`). Contents are values
# and values are interned; "is the view up to date?" is one identity check. No version counters.


class Window:
    def __init__(self, type_: Type) -> None:
        self.type, self.base, self.value = type_, None, None

    def look(self, root: Value) -> Value:
        if self.base is not root:
            node = node_of(torch.ops.aten.as_strided.default, {"self": root, **self.place()})
            self.base, self.value = root, node.outputs[0]
        return self.value

    def place(self) -> dict[str, Any]:
        type_ = self.type
        return {"size": type_.shape, "stride": type_.stride, "storage_offset": type_.offset}


def value_of(thing: Any) -> Any:
    """What stands for an argument in a node."""
    if isinstance(thing, LazyTensor):
        root = TRACE.value(thing.storage_)
        return root if thing.window is None else thing.window.look(root)
    if isinstance(thing, torch.Tensor):  # its owner may write to it later: take a copy now
        return value_of(lazy(thing))
    return thing


# == 8. Writes are values ==========================================================================
# `x.add_(1)` is a node like any other. Its output is the new contents of x, and the storage of x
# holds that value from now on; the old value is still there for whoever recorded it. A write
# through a view gives the whole storage new contents: the old ones with the window replaced.


def write(tensor: LazyTensor, new: Value) -> None:
    storage, window = tensor.storage_, tensor.window
    if window is not None:
        args = {"self": TRACE.value(storage), "src": new, **window.place()}
        new = node_of(torch.ops.aten.as_strided_scatter.default, args).outputs[0]
    TRACE.hold(storage, new)


# == 9. Recording ==================================================================================


def record(op: Any, contract: Contract, bound: dict[str, Any]) -> Any:
    """Turn one call into a node, or run it where that is impossible."""
    written = [t for name in contract.writes for t in flat(bound.get(name))]
    if contract.random or not all(isinstance(t, LazyTensor) for t in written):
        return run_now(op, contract, bound)
    values = tree_map(value_of, bound)
    try:
        if contract.aliases and not written:  # a view: nothing to record, a window to make
            source = bound[contract.names[0]].storage_
            return tree_map(lambda t: LazyTensor.make(source, t), infer(op, values)[0])
        node = node_of(op, values)
    except NEEDS_NUMBERS:
        return run_now(op, contract, bound)  # `item`, `nonzero`: the answer needs numbers
    outputs = iter(node.outputs)
    if contract.aliases:
        result = written[0] if len(written) == 1 else written
    else:
        result = tree_map(lambda t: pending(next(outputs), t), node.template)
    for tensor, output in zip(written, outputs, strict=True):
        write(tensor, output)
    return result


def pending(value: Value, type_: Type | None) -> LazyTensor | None:
    """A tensor with memory of its own that will hold `value`."""
    if type_ is None:
        return None  # an undefined gradient
    TRACE.hold(storage := Storage(type_, None, None), value)
    return LazyTensor.make(storage, type_)


# Some ops cannot wait. `item` and `nonzero` need numbers by nature. Random ops could be recorded,
# but the CPU's generator is one stream that plain draws, data loaders and `manual_seed` use as
# well: a draw made later is another draw. Drawn at once, the numbers are eager's. (Our `dropout`
# reads a mask only to overwrite it, which ends a trace in mid-step; torpor knows better.)


def run_now(op: Any, contract: Contract, bound: dict[str, Any]) -> Any:
    real = tree_map(lambda t: read(t) if isinstance(t, LazyTensor) else t, bound)
    written = [name for name in contract.writes if isinstance(bound[name], LazyTensor)]
    real.update({name: copy_of(real[name]) for name in written})
    result = op(**real)
    for name in written:
        write(bound[name], value_of(real[name]))
    if contract.aliases:
        return bound[contract.writes[0]]
    return tree_map(lambda t: lazy(t) if torch.is_tensor(t) else t, result)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: some kernels compute other last bits on other strides."""
    return replace(Type.of(tensor), offset=0).blank().copy_(tensor)


# == 10. Sync: from values to numbers ==============================================================
# The values that are alive are the roots of the graph. They are interned, so the tuple of their
# identities IS the graph: it is the key of the plan cache. A warm step ends with one look-up, and
# the graph is not walked, let alone compared.
#
# Here a read computes everything alive, so nothing can be computed twice. torpor computes only what
# the reader needs, and keeps what the rest will need again.

PLANS: dict[tuple[Value, ...], Plan] = {}
COUNTS = {"compiled": 0, "reused": 0}


def sync() -> None:
    """Compute everything that is alive, and start a new trace."""
    live = TRACE.live()
    roots = tuple(dict.fromkeys(s.value for s in live))
    plan = PLANS.get(roots)
    COUNTS["compiled" if plan is None else "reused"] += 1
    if plan is None:
        plan = PLANS[roots] = Plan(roots)
    results = dict(zip(roots, plan.run(TRACE.buffers), strict=True))
    for storage in live:
        storage.data = results[storage.value]
    TRACE.reset()


def read(tensor: LazyTensor) -> torch.Tensor:
    """The numbers of a lazy tensor, as a plain tensor on the buffer itself: never write to it."""
    if tensor.storage_.data is None:
        sync()
    data = tensor.storage_.data
    return data if tensor.window is None else data.as_strided(**tensor.window.place())


# == 11. A plan, and the interpreter that runs it ==================================================
# This is where a compiler goes: it gets ordered nodes, and gives back something to call. Ours calls
# eager's kernels one by one. That makes it the judge for all compilers: its numbers are eager's,
# bit for bit. For that an in-place op must run its in-place kernel, on a copy, because the values
# it overwrites may be needed by others.


def ordered(roots: tuple[Value, ...]) -> Iterator[Node]:
    """Operands first. With a stack of our own: Python's ends at a depth of a thousand."""
    done: set[Node] = set()
    stack = [(root.node, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            yield node
        else:
            stack.append((node, True))
            operands = [leaf for leaf in tree_leaves(node.args) if type(leaf) is Value]
            stack.extend((operand.node, False) for operand in reversed(operands))


class Plan:
    def __init__(self, roots: tuple[Value, ...]) -> None:
        self.roots, self.nodes = roots, list(ordered(roots))

    def run(self, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        numbers: dict[Value, torch.Tensor] = {}
        for node in self.nodes:
            if node.op is LEAF:
                numbers[node.outputs[0]] = buffers[node.args["slot"]]
                continue
            args = swap(node.args, numbers.__getitem__)
            contract = contract_of(node.op)
            for name in contract.writes:
                args[name] = tree_map(copy_of, args[name])
            result = node.op(**args)
            fresh = [] if contract.aliases and contract.writes else flat(result)
            fresh += [t for name in contract.writes for t in flat(args[name])]
            numbers.update(zip(node.outputs, fresh, strict=True))
        return [numbers[root] for root in self.roots]


# == 12. Does it work? =============================================================================


def training(enter: Callable[[torch.Tensor], torch.Tensor], cut: Callable[[], None]) -> list[Any]:
    """Ten steps of a small network with dropout, momentum and a write through a view."""
    torch.manual_seed(0)
    weights = [enter(torch.randn(8, 16) / 4), enter(torch.randn(16, 1) / 4)]
    weights = [weight.requires_grad_(True) for weight in weights]
    momenta = [enter(torch.zeros(8, 16)), enter(torch.zeros(16, 1))]
    losses = []
    for _ in range(10):
        batch = enter(torch.randn(32, 8))
        batch[:, 0].zero_()
        hidden = torch.nn.functional.dropout(torch.tanh(batch @ weights[0]), 0.25)
        loss = (hidden @ weights[1] - batch.sum(1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
                momentum.mul_(0.9).add_(gradient)
                weight.sub_(momentum, alpha=0.05)
        losses.append(loss.detach())
        cut()
    return [loss.item() for loss in losses]


def main() -> None:
    x, y = lazy(torch.ones(2, 3)), lazy(torch.arange(3.0))
    z = x + y
    assert z.shape == (2, 3)
    assert z.storage_.data is None, "nothing has run"
    assert (x + y).storage_.value is z.storage_.value, "the same op on the same values is one node"
    row, column = z[1], z[:, 0]
    z.mul_(2)  # the views see it,
    row.add_(100)  # the tensor and the other view see this,
    assert (column[0].item(), column[1].item(), z[1, 2].item()) == (2.0, 102.0, 106.0)
    row.zero_()  # and it goes on after a sync
    assert z.sum().item() == 12.0

    chain = lazy(torch.zeros(1))
    for _ in range(2000):
        chain = chain + 1
    assert chain.item() == 2000.0, "deep graphs need no deep stack"

    sync()
    COUNTS.update(compiled=0, reused=0)
    eager_losses = training(torch.clone, lambda: None)
    assert training(lazy, sync) == eager_losses, "bit for bit"
    print("losses:", [round(loss, 4) for loss in eager_losses])
    print("graphs:", COUNTS)
    assert COUNTS["reused"] > 5 * COUNTS["compiled"], "a step is compiled once, then reused"
    print("everything equals eager")


if __name__ == "__main__":
    main()

# == What is missing ===============================================================================
# A bound on the tables, whose nodes may be forgotten at any time: meeting one again costs a compile
# and no error. A device of its own, so that `torch.zeros(3, device="lazy")` works. Numbers that
# change from step to step (a learning rate), which here would compile every step anew. A queue, so
# that recording the next step overlaps running this one. Reads that compute only what they need.
# Compilers. Errors that name your line. Conjugate views, views of another dtype, memory that is
# resized. Threads. Each of them has its place in torpor: docs/layout.md says where.
