"""The signature of an op: everything that recording a call depends on, as frozen data.

It is derived once, from the op's schema and `ops.rules`. Both recorders are driven by it: the
Python one (`trace.recorder.record`) and the native one (`native/recorder.cpp`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torpor.ops import rules
from torpor.ops.spec import ArgKind, OpSpec, Return, ReturnKind

ALIASES: Final = frozenset({"aten.alias.default", "aten.detach.default", "aten.lift_fresh.default"})
"""Views of the whole argument: the result has the same view of the storage as the argument."""

_LETTERS: Final = {
    ArgKind.TENSOR: "t", ArgKind.TENSORS: "T", ArgKind.PLAIN: "p", ArgKind.PLAINS: "P",
    ArgKind.FLOAT: "n", ArgKind.SCALAR: "n", ArgKind.FLOATS: "N", ArgKind.SCALARS: "N",
    ArgKind.OPAQUE: "o",
}  # fmt: skip


class Make(enum.IntEnum):
    """How a result of the call is made; same names and order as in C++."""

    FRESH = 0  # a tensor with a storage of its own
    VIEW = 1  # a view of an argument
    ALIAS = 2  # a new tensor with the same view of the storage as an argument
    ARGUMENT = 3  # the argument itself, which is written to
    LENGTH = 4  # an int, the length of an argument; not an output of the node


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a call."""

    make: Make
    is_list: bool  # takes all outputs that no other result takes
    argument: int  # the argument that is viewed, returned, or measured (LENGTH); else 0


@dataclass(frozen=True, slots=True)
class Written:
    """An argument that a call writes to."""

    argument: int
    is_list: bool
    is_out: bool  # `out=`: resized to the size of the result
    may_repeat: bool  # may be passed as another argument too: `x.add_(x)`


@dataclass(frozen=True, slots=True)
class Extra:
    """What the key contains in addition to the arguments."""

    grad_mode: bool = False
    requires_grad: tuple[int, ...] = ()  # the flag `requires_grad` of these arguments
    draw: bool = False  # the index of this random draw in its trace

    def __bool__(self) -> bool:
        return self.grad_mode or bool(self.requires_grad) or self.draw


NO_EXTRA: Final = Extra()


@dataclass(frozen=True, slots=True)
class Signature:
    """How a call of one op becomes a node and its results."""

    spec: OpSpec
    kinds: str  # one letter per argument: how it enters the key
    device: int  # the position of the argument `device`, -1 if there is none
    extra: Extra
    kept: tuple[int, ...]  # arguments that are written to or viewed: they must be lazy
    results: tuple[Result, ...]
    written: tuple[Written, ...]  # their new contents are the node's last outputs
    overlaps: tuple[tuple[int, int], ...]  # pairs (written, other) that must not share memory
    apart: tuple[tuple[int, int], ...]  # pairs of lists (written, read) processed item by item
    assigns: bool  # a copy: between equal types the target takes the source's value
    is_window: bool  # a view of the storage, not of the argument
    is_plain: bool  # a single fresh tensor is returned, and nothing is written
    bumps: bool  # the kernel raises the versions of what it writes, not torch's layers above it


def signature_of(spec: OpSpec, extra: Extra = NO_EXTRA, lengths: Sequence[int] = ()) -> Signature:
    """The signature of an op.

    `lengths`: for each result that is not a tensor, the argument whose length it is.
    """
    kinds = "".join(_LETTERS[a.kind] for a in spec.arguments)
    names = [a.name for a in spec.arguments]
    numbers = iter(lengths)
    viewed = {r.argument for r in spec.returns if r.kind is ReturnKind.VIEW}
    written = tuple(_written(spec, position) for position in spec.mutated)
    overlaps, apart = _overlaps(spec, kinds, written)
    results = tuple(_result(spec, returned, numbers) for returned in spec.returns)
    return Signature(
        spec=spec,
        kinds=kinds,
        device=names.index("device") if "device" in names else -1,
        extra=extra,
        kept=tuple(sorted({*spec.mutated, *viewed})),
        results=results,
        written=written,
        overlaps=overlaps,
        apart=apart,
        assigns=spec.name == "aten.copy_.default",
        is_window=spec.name == "aten.as_strided.default",
        is_plain=results == (Result(Make.FRESH, False, 0),) and not written,
        bumps=spec.name.startswith("aten._foreach_") and bool(written),
    )


def _result(spec: OpSpec, returned: Return, lengths: Iterator[int]) -> Result:
    if returned.kind is ReturnKind.OTHER:
        return Result(Make.LENGTH, returned.is_list, next(lengths, -1))
    make = {
        ReturnKind.FRESH: Make.FRESH,
        ReturnKind.VIEW: Make.ALIAS if spec.name in ALIASES else Make.VIEW,
        ReturnKind.ARGUMENT: Make.ARGUMENT,
    }[returned.kind]
    return Result(make, returned.is_list, max(returned.argument, 0))


def _written(spec: OpSpec, position: int) -> Written:
    argument = spec.arguments[position]
    # a kernel that reads at indices must not see its own writes
    indexing = spec.target._opname in rules.INDEXING
    return Written(
        argument=position,
        is_list=argument.kind is ArgKind.TENSORS,
        is_out=argument.keyword_only,
        may_repeat=not indexing and not argument.keyword_only,
    )


Pairs = tuple[tuple[int, int], ...]


def _overlaps(spec: OpSpec, kinds: str, written: Sequence[Written]) -> tuple[Pairs, Pairs]:
    """`Signature.overlaps` and `Signature.apart` of an op."""
    singles = [w.argument for w in written if not w.is_list]
    lists = [w.argument for w in written if w.is_list]
    read = [i for i, kind in enumerate(kinds) if kind == "T" and i not in spec.mutated]
    if spec.name.startswith("aten._foreach_"):
        return (), tuple((i, j) for i in lists for j in read)
    if spec.name == "aten.copy_.default":  # partial overlap is legal: see `overrides.special`
        return (), ()
    others = [i for i, kind in enumerate(kinds) if kind in "tT"]
    twice = {(i, j) for i in singles for j in singles if j < i}
    return tuple((i, j) for i in singles for j in others if i != j and (i, j) not in twice), ()
