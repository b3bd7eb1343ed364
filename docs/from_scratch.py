"""Lazy tensors from scratch.

For someone who wants to understand the idea behind torpor by reading, and running, a single file:
`python docs/from_scratch.py`. You should know PyTorch as a user. Nothing here is imported from
torpor; comments say where torpor differs, and the end of the file lists what is missing.

The plan. A program such as `loss = (x @ w).square().mean(); loss.backward()` is not executed; its
operations are recorded. When the program reads a number, the recorded graph is compiled and run,
and the compiled graph is cached. A training loop records the same graph in every step. So the
main problem is to recognise, at almost no cost, that a graph has been recorded before.
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
# User code asks a tensor for its sizes, strides and dtype long before it reads its data, and these
# must be correct. Everything that is known about a tensor without its data is its type. (This file
# has only one device. torpor's TensorType includes the device.)


@dataclass(frozen=True)
class Type:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # of the first element in the storage
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Type:
        return Type(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def blank(self) -> torch.Tensor:
        """An uninitialized tensor of this type."""
        pairs = zip(self.shape, self.stride, strict=True)
        room = self.offset + 1 + sum(max(n - 1, 0) * s for n, s in pairs)
        memory = torch.empty(room, dtype=self.dtype, device="cpu")
        return memory.as_strided(self.shape, self.stride, self.offset)


# == 2. Nodes, and the table that makes them unique ================================================
# A Node is one operation on values; a Value is one of a node's outputs. Nodes are interned (hash
# consing): the same op on the same values with the same numbers is always the same object. Almost
# everything else follows from this:
#
#   - comparing two graphs of a million nodes is comparing two pointers;
#   - common subexpressions are eliminated for free;
#   - a warm step is a series of dictionary hits: nothing is inferred or built.


class Value:
    def __init__(self, node: Node, type_: Type) -> None:
        self.node, self.type = node, type_


class Node:
    def __init__(self, op: Any, args: dict[str, Any], template: Any, types: list[Any]) -> None:
        self.op = op  # a torch operator, or LEAF
        self.args = args  # arguments by name, with values in place of tensors
        self.template = template  # what the op returns, with types in place of tensors
        self.outputs = [Value(self, t) for t in types]


TABLE: dict[Any, Node] = {}


def frozen(thing: Any) -> Any:
    """`thing` as part of a dictionary key.

    In Python 1 == 1.0 == True, 0.0 == -0.0, and NaN != NaN. Keys must not compare like that.
    """
    if isinstance(thing, (list, tuple)):
        return tuple(map(frozen, thing))
    if isinstance(thing, dict):
        return tuple((name, frozen(item)) for name, item in thing.items())
    if isinstance(thing, (bool, int, float, complex)):
        return type(thing), repr(thing)
    return thing  # values, types, dtypes, None: equal only to themselves


def node_of(op: Any, args: dict[str, Any]) -> Node:
    """The unique node of `op` on `args`."""
    key = (op, frozen(args))
    node = TABLE.get(key)
    if node is None:
        node = TABLE[key] = Node(op, args, *infer(op, args))
    return node


# == 3. Type inference =============================================================================
# torch can run every operator on fake tensors, which have a type and no data. That is exact, but
# takes a tenth of a millisecond: too slow for every op, so results are memoized by types. Twelve
# equal layers have different values but the same types, and pay once.

FAKES = fakes.FakeTensorMode()
NEEDS_NUMBERS = (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException)
MEMO: dict[Any, tuple[Any, list[Any]]] = {}


def swap(things: Any, change: Callable[[Value], Any]) -> Any:
    """`things` with every value in it replaced, at any depth of lists and dicts."""
    return tree_map(lambda leaf: change(leaf) if type(leaf) is Value else leaf, things)


def infer(op: Any, args: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What `op` returns, as types, and the types of its node's outputs."""
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
# torch's schemas declare it. `Tensor(a!)` is an argument that is written to. A return marked `(a)`
# aliases argument (a): it is the argument itself if that is written to, otherwise a view of it.


class Contract(NamedTuple):
    names: list[str]
    writes: list[str]  # names of the arguments the op writes to
    aliases: bool  # its results share memory with an argument
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
# A tensor and its views share a Storage. It holds a buffer (`data`), a recorded `value`, or both.
#
# How does a tensor that has data enter the trace? Not by its address, which changes from step to
# step, so that no step would match the last one. It enters as a *leaf slot*: "the k-th buffer
# that this trace uses". A training loop uses its parameters and batches in the same order every
# time, so the second step uses leaf 0, leaf 1, ... again, and hits the same nodes as the first.


class Storage:
    def __init__(self, type_: Type, value: Value | None, data: torch.Tensor | None) -> None:
        self.type, self.value, self.data = type_, value, data


LEAF = "leaf"


class Trace:
    """What was recorded since the last cut."""

    def __init__(self) -> None:
        self.leaves: list[Storage] = []
        self.buffers: list[torch.Tensor] = []  # the buffer of each leaf slot
        self.pending: list[weakref.ref[Storage]] = []  # storages that may need to be computed

    def value(self, storage: Storage) -> Value:
        """The value of `storage` in this trace."""
        if storage.value is None:
            key = (LEAF, len(self.leaves), storage.type)
            if key not in TABLE:
                TABLE[key] = Node(LEAF, {"slot": len(self.leaves)}, None, [storage.type])
            storage.value = TABLE[key].outputs[0]
            self.leaves.append(storage)
            self.buffers.append(storage.data)
        return storage.value

    def hold(self, storage: Storage, value: Value) -> None:
        """Make `storage` hold `value` from now on. No buffer is touched."""
        storage.value, storage.data = value, None
        self.pending.append(weakref.ref(storage))

    def live(self) -> list[Storage]:
        """Pending storages that are still referenced: the others can no longer be read."""
        found = [reference() for reference in self.pending]
        return [s for s in dict.fromkeys(found) if s is not None and s.data is None]

    def reset(self) -> None:
        """Forget all values: live storages have data, and enter the next trace as leaves."""
        for storage in self.leaves + [r() for r in self.pending]:
            if storage is not None:
                storage.value = None
        self.leaves, self.buffers, self.pending = [], [], []


TRACE = Trace()

# == 6. The tensor =================================================================================
# The user's tensor is a wrapper with sizes, strides and dtype, but no memory. `__torch_dispatch__`
# runs below autograd, so the backward pass arrives as ordinary ops and needs no code here.


class LazyTensor(torch.Tensor):
    storage_: Storage
    window: Window | None  # None: the tensor covers its whole storage

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
# A view is a window on its storage: sizes, strides, offset. (torpor records the view op itself,
# which compilers handle better, and uses windows where no op fits.) The value of a window depends
# on what its storage holds, and that may change after the view was made:
#
#     row = x[0]; x.add_(1); print(row)
#
# So a window caches its `value` together with the storage value it was derived from (`base`). As
# values are interned, checking whether a view is stale is one `is`. No version counters.


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
    """What represents an argument in a node."""
    if isinstance(thing, LazyTensor):
        root = TRACE.value(thing.storage_)
        return root if thing.window is None else thing.window.look(root)
    if isinstance(thing, torch.Tensor):  # its owner may write to it later: copy it now
        return value_of(lazy(thing))
    return thing


# == 8. Writes are values ==========================================================================
# `x.add_(1)` is a node like any other. Its output is the new contents of x, and the storage of x
# holds that value from now on; nodes that use the old value still refer to it. A write through a
# view gives the whole storage a new value: the old contents with the window replaced.


def write(tensor: LazyTensor, new: Value) -> None:
    storage, window = tensor.storage_, tensor.window
    if window is not None:
        args = {"self": TRACE.value(storage), "src": new, **window.place()}
        new = node_of(torch.ops.aten.as_strided_scatter.default, args).outputs[0]
    TRACE.hold(storage, new)


# == 9. Recording ==================================================================================


def record(op: Any, contract: Contract, bound: dict[str, Any]) -> Any:
    """Turn one call into a node, or run it eagerly if that is impossible."""
    written = [t for name in contract.writes for t in flat(bound.get(name))]
    if contract.random or not all(isinstance(t, LazyTensor) for t in written):
        return run_now(op, contract, bound)
    values = tree_map(value_of, bound)
    try:
        if contract.aliases and not written:  # a view: make a window, record nothing
            source = bound[contract.names[0]].storage_
            return tree_map(lambda t: LazyTensor.make(source, t), infer(op, values)[0])
        node = node_of(op, values)
    except NEEDS_NUMBERS:
        return run_now(op, contract, bound)  # `item`, `nonzero`: the result depends on data
    outputs = iter(node.outputs)
    if contract.aliases:
        result = written[0] if len(written) == 1 else written
    else:
        result = tree_map(lambda t: pending(next(outputs), t), node.template)
    for tensor, output in zip(written, outputs, strict=True):
        write(tensor, output)
    return result


def pending(value: Value, type_: Type | None) -> LazyTensor | None:
    """A tensor with a storage of its own that holds `value`."""
    if type_ is None:
        return None  # an undefined gradient
    TRACE.hold(storage := Storage(type_, None, None), value)
    return LazyTensor.make(storage, type_)


# Some ops cannot be deferred. `item` and `nonzero` depend on data. Random ops could be recorded,
# but the CPU's generator is one stream that plain draws, data loaders and `manual_seed` also use:
# a deferred draw gives other numbers. Drawn immediately, they match eager. (Here `dropout` reads
# the mask that it is about to overwrite, which cuts the trace in mid-step; torpor avoids that.)


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
    """A copy with the same strides: for other strides some kernels differ in the last bits."""
    return replace(Type.of(tensor), offset=0).blank().copy_(tensor)


# == 10. Sync: from values to data =================================================================
# The live values are the roots of the graph. They are interned, so the tuple of their identities
# IS the graph, and serves as the key of the plan cache. A warm step ends with one lookup; the
# graph is not walked, let alone compared.
#
# Here a read computes everything live, so nothing can be computed twice. torpor computes only what
# is read and what that depends on, and keeps the intermediate values that are needed later.

PLANS: dict[tuple[Value, ...], Plan] = {}
COUNTS = {"compiled": 0, "reused": 0}


def sync() -> None:
    """Compute everything live, and start a new trace."""
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
    """The data of a lazy tensor, as a plain tensor that aliases the buffer: do not write to it."""
    if tensor.storage_.data is None:
        sync()
    data = tensor.storage_.data
    return data if tensor.window is None else data.as_strided(**tensor.window.place())


# == 11. A plan, and the interpreter that runs it ==================================================
# This is where a compiler goes: it takes ordered nodes and returns a callable. Ours runs eager's
# kernels one by one. That makes it the reference for all compilers: its results match eager bit
# for bit. To do so, it runs an in-place op with its in-place kernel, on a copy, because other nodes
# may still need the old value.


def ordered(roots: tuple[Value, ...]) -> Iterator[Node]:
    """Operands first. With an explicit stack: Python limits recursion to a depth of 1,000."""
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
    z.mul_(2)  # visible in the views,
    row.add_(100)  # visible in the tensor and the other view,
    assert (column[0].item(), column[1].item(), z[1, 2].item()) == (2.0, 102.0, 106.0)
    row.zero_()  # and still so after a sync
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
# A bound on the tables; any node may be evicted, as recreating it costs a compile but is no error.
# A device of its own, so that `torch.zeros(3, device="lazy")` works. Promotion of numbers that
# change from step to step (a learning rate), which here cause a recompile in every step. A queue,
# so that recording the next step overlaps running this one. Reads that compute only what they need.
# Compilers. Errors that name the user's line. Conjugate views, views of another dtype, resizing.
# Threads. torpor has all of these: docs/layout.md says where.
