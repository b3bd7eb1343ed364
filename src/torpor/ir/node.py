"""Nodes, values and the intern table: the same op on the same values is the same object.

Every op owns its part of the table, a dictionary from key to node (`OpKind.nodes`). A recorder
looks its key up there directly; that look-up is the whole cost of an op met before. What a key
looks like is the business of the op's recorder; here it only has to be hashable, and equal keys
have to mean equal nodes.

The table has two generations. When the young one is full it becomes the old one, and what is
met again moves back. A node that is dropped while somebody holds it stays valid: meeting its
key again makes a second node, which costs a recompile and never a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torpor import config
from torpor.ir.types import SCALAR_TYPES, ScalarType, TensorType
from torpor.symbols.expressions import forget_entries, valid_while

Key = tuple[Any, ...]
Types = tuple[TensorType | ScalarType | None, ...]  # None: an output that is no tensor


class OpKind:
    """What a node does: a name, and the torch operator behind it (none for leaves)."""

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

    `intern` alone makes them; what belongs to one graph only is a `PrivateNode`.

    `args` are the op's arguments in the order of its schema, with values in the place of
    tensors and tuples in the place of lists. `site` (where the user recorded it: first, or
    last if its kernel may fail) and `scope` (which module of the user's did) are
    not part of the node's identity.
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
        self.conditions = conditions  # on sizes: it is in the table while they hold
        self.transient = (
            transient  # a view of a leaf by sizes of the step, which are others in the next
        )

    def __repr__(self) -> str:
        return f"<{self.op.name} {id(self):x}>"


class Items(NamedTuple):
    """Which items of the lists of an op a node works on."""

    positions: tuple[int, ...]
    length: int  # of the lists
    op: int  # a number for the op: items of one may be joined again


class PrivateNode(Node):
    """A node of one graph, which no table knows; the table may have another one of the same key."""

    __slots__ = ()


class Derived(PrivateNode):
    """A node that a pass made from another: the same op on other values, or on some of its items.

    It has the key of its origin, a node that no pass made.
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
    """Which items of its op's lists a node works on; None: on all of them."""
    return node.items if type(node) is Derived else None


def values_in(args: tuple[Any, ...]) -> Iterator[Value]:
    """The values among `args`, in order; lists are looked into."""
    for arg in args:
        if type(arg) is Value:
            yield arg
        elif type(arg) is tuple:
            for item in arg:
                if type(item) is Value:
                    yield item


class InternTable:
    """All ops' tables together: finds, adds, and keeps the whole bounded."""

    __slots__ = ("generation", "kinds", "young")

    def __init__(self) -> None:
        self.kinds: dict[str, OpKind] = {}
        self.young = 0
        self.generation = 0

    def kind(self, name: str, target: Any = None, parameters: tuple[Any, ...] = ()) -> OpKind:
        """The op of that name, made on first use."""
        found = self.kinds.get(name)
        if found is None:
            found = self.kinds[name] = OpKind(name, target, parameters)
        return found

    def find(self, op: OpKind, key: Key) -> Node | None:
        """The node under `key`, also from the old generation."""
        node = op.nodes.get(key)
        if node is None:
            node = op.old_nodes.pop(key, None)
            if node is not None:
                self._insert(node)
        return node

    def intern(self, kind: OpKind, key: Key, make: Callable[[], tuple[Any, ...]]) -> Node:
        """The node of `kind` under `key`: the one met before, or a new one of what `make` gives.

        That is what `Node` takes after its key: arguments, types, and what else is known.
        """
        return self.find(kind, key) or self._insert(Node(kind, key, *make()))

    def _insert(self, node: Node) -> Node:
        """Let `node` be found under its key, while its conditions hold."""
        if self.young >= config.max_interned_nodes:
            self.rotate()
        node.op.nodes[node.key] = node
        self.young += 1
        if node.conditions:
            valid_while(node.conditions, node.op.nodes, node.key, node)
        return node

    def rotate(self) -> None:
        """Let the young generation grow old; what was old and not met since is dropped."""
        forget_entries()
        for kind in self.kinds.values():
            kind.old_nodes = {k: n for k, n in kind.nodes.items() if not n.conditions}
            kind.nodes.clear()  # recorders hold on to this very dictionary
        self.young = 0
        self.generation += 1

    def clear(self) -> None:
        """Forget every node; for tests and for a change of backend."""
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
    """The op of that name."""
    return TABLE.kinds[name]


def leaf(slot: int, type_: TensorType) -> Value:
    """The value of the `slot`-th buffer that enters a trace."""
    return intern(LEAF, (slot, type_), lambda: ((slot,), (type_,))).outputs[0]


def size(symbol: Any) -> Value:
    """The value of a symbol, which enters a graph as a number."""
    return intern(SIZE, (symbol,), lambda: ((symbol,), (SCALAR_TYPES[int],))).outputs[0]


def scalar(slot: int, kind: type) -> Value:
    """The value of the `slot`-th Python number that enters a trace at run time."""
    return intern(SCALAR, (slot, kind), lambda: ((slot,), (SCALAR_TYPES[kind],))).outputs[0]
