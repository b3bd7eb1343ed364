"""Nodes, values and the intern table: the same op on the same values is the same object.

Every op owns its part of the table, a dictionary from key to node (`OpKind.nodes`). A recorder
looks its key up there directly; on a hit, that lookup is the whole cost of recording. How a key is
built is up to the op's recorder; the table only requires that keys are hashable and that equal
keys mean equal nodes.

The table has two generations. When the young one is full it becomes the old one; nodes found in
the old one move back to the young one. A node that was dropped but is still referenced stays
valid: looking its key up again makes a second node, which costs a recompile, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torpor import config
from torpor.ir.types import SCALAR_TYPES, ScalarType, TensorType
from torpor.symbols.expressions import forget_entries, valid_while

Key = tuple[Any, ...]
Types = tuple[TensorType | ScalarType | None, ...]  # None: an output that is not a tensor


class OpKind:
    """The op of a node: its name and its torch operator (None for leaves)."""

    __slots__ = ("name", "nodes", "old_nodes", "parameters", "target")

    def __init__(self, name: str, target: Any = None, parameters: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.target = target
        self.parameters = parameters
        self.nodes: dict[Key, Node] = {}
        self.old_nodes: dict[Key, Node] = {}

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        return op_kind, (self.name,)


class Value:
    """One output of a node."""

    __slots__ = ("index", "node", "type")

    def __init__(self, node: Node, index: int, type_: TensorType | ScalarType | None) -> None:
        self.node = node
        self.index = index
        self.type: Any = type_  # TensorType everywhere but on scalar leaves

    def __repr__(self) -> str:
        return f"{self.node!r}.{self.index}: {self.type!r}"


class Node:
    """One recorded op. Interned: compare with `is`.

    Interned nodes are made only by `intern`; a node that belongs to one graph is a `PrivateNode`.

    `args` are the op's arguments in schema order, with values for tensors and tuples for lists.
    `site` and `scope` are the user's source line and module that recorded the node: the first
    that did, or the latest site if the kernel may fail. Neither is part of the node's identity.
    """

    __slots__ = (
        "__weakref__", "args", "conditions", "key", "op", "operands", "outputs", "scope", "site",
        "transient",
    )  # fmt: skip

    def __init__(
        self,
        op: OpKind,
        key: Key,
        args: tuple[Any, ...],
        types: Types,
        site: Any = None,
        scope: tuple[str, str] | None = None,
        conditions: tuple[Any, ...] = (),
        transient: bool = False,
    ) -> None:
        self.op = op
        self.key = key
        self.args = args
        self.operands: tuple[Value, ...] = tuple(values_in(args))
        self.outputs = tuple(Value(self, i, t) for i, t in enumerate(types))
        self.site = site
        self.scope = scope
        self.conditions = conditions  # guards on sizes: it is in the table only while they hold
        self.transient = transient  # a view of a leaf at sizes that hold for this step only

    def __repr__(self) -> str:
        return f"<{self.op.name} {id(self):x}>"


class Items(NamedTuple):
    """Which items of its op's list arguments a node processes."""

    positions: tuple[int, ...]
    length: int  # of the lists
    op: int  # identifies the original op: nodes with the same number may be merged again


class PrivateNode(Node):
    """A node of a single graph, not interned; the table may hold another node with its key."""

    __slots__ = ()


class Derived(PrivateNode):
    """A node made by a pass from another node: the same op on other values or on some list items.

    `origin` is the node, made by no pass, that it derives from. The key is the origin's if `items`
    is None, else `args`.
    """

    __slots__ = ("items", "origin")

    def __init__(
        self,
        node: Node,
        args: tuple[Any, ...],
        items: Items | None = None,
        types: tuple[Any, ...] | None = None,
    ) -> None:
        origin: Node = node.origin if type(node) is Derived else node
        if types is None:
            types = tuple([value.type for value in node.outputs])
        key = origin.key if items is None else args
        super().__init__(origin.op, key, args, types, origin.site, origin.scope)
        self.origin: Node = origin
        self.items = items


def items_of(node: Node) -> Items | None:
    """Which list items a node processes; None: all."""
    return node.items if type(node) is Derived else None


def values_in(args: tuple[Any, ...]) -> Iterator[Value]:
    """The values among `args`, in order, including those in lists."""
    for arg in args:
        if type(arg) is Value:
            yield arg
        elif type(arg) is tuple:
            for item in arg:
                if type(item) is Value:
                    yield item


class InternTable:
    """The tables of all ops: lookup, insertion, and a bound on their total size."""

    __slots__ = ("generation", "kinds", "young")

    def __init__(self) -> None:
        self.kinds: dict[str, OpKind] = {}
        self.young = 0
        self.generation = 0

    def kind(self, name: str, target: Any = None, parameters: tuple[Any, ...] = ()) -> OpKind:
        """The op named `name`, created on first use."""
        found = self.kinds.get(name)
        if found is None:
            found = self.kinds[name] = OpKind(name, target, parameters)
        return found

    def find(self, op: OpKind, key: Key) -> Node | None:
        """The node for `key`, from either generation; None if there is none."""
        node = op.nodes.get(key)
        if node is None:
            node = op.old_nodes.pop(key, None)
            if node is not None:
                self._insert(node)
        return node

    def intern(self, kind: OpKind, key: Key, make: Callable[[], tuple[Any, ...]]) -> Node:
        """The node of `kind` for `key`; on a miss, a new one.

        `make` returns the constructor's arguments after the key: args, types, and optional ones.
        """
        return self.find(kind, key) or self._insert(Node(kind, key, *make()))

    def _insert(self, node: Node) -> Node:
        """Add `node` under its key; it can be found only while its conditions hold."""
        if self.young >= config.max_interned_nodes:
            self.rotate()
        node.op.nodes[node.key] = node
        self.young += 1
        if node.conditions:
            valid_while(node.conditions, node.op.nodes, node.key, node)
        return node

    def rotate(self) -> None:
        """Start a new generation; old nodes that were not looked up since are dropped."""
        forget_entries()
        for kind in self.kinds.values():
            kind.old_nodes = {k: n for k, n in kind.nodes.items() if not n.conditions}
            kind.nodes.clear()  # cleared in place: recorders hold references to this dictionary
        self.young = 0
        self.generation += 1

    def clear(self) -> None:
        """Drop every node; for tests and for a change of backend."""
        self.rotate()
        self.rotate()

    def __len__(self) -> int:
        return sum(len(k.nodes) + len(k.old_nodes) for k in self.kinds.values())


TABLE = InternTable()
intern = TABLE.intern
LEAF = TABLE.kind("torpor.leaf", parameters=("slot",))
SCALAR = TABLE.kind("torpor.scalar", parameters=("slot",))
SIZE = TABLE.kind("torpor.size", parameters=("symbol",))


def op_kind(name: str) -> OpKind:
    """The op named `name`."""
    return TABLE.kinds[name]


def leaf(slot: int, type_: TensorType) -> Value:
    """The value of the buffer in leaf slot `slot` of a trace."""
    return intern(LEAF, (slot, type_), lambda: ((slot,), (type_,))).outputs[0]


def size(symbol: Any) -> Value:
    """The value of a symbol, which is a graph input with an int."""
    return intern(SIZE, (symbol,), lambda: ((symbol,), (SCALAR_TYPES[int],))).outputs[0]


def scalar(slot: int, kind: type) -> Value:
    """The value of the Python number in run-time scalar slot `slot` of a trace."""
    return intern(SCALAR, (slot, kind), lambda: ((slot,), (SCALAR_TYPES[kind],))).outputs[0]
