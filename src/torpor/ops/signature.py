"""The signature of an op: all that recording a call of it depends on, as frozen data.

It is derived from the op's schema and `ops.rules`, once. Whoever records reads the same object:
the record path in Python (`trace.recorder.record`) and the native recorder (`native/recorder.cpp`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torpor.ops import rules
from torpor.ops.spec import ArgKind, OpSpec, Return, ReturnKind

ALIASES: Final = frozenset({"aten.alias.default", "aten.detach.default", "aten.lift_fresh.default"})
"""Views that show all there is: their result looks at its storage as their argument does."""

_LETTERS: Final = {
    ArgKind.TENSOR: "t", ArgKind.TENSORS: "T", ArgKind.PLAIN: "p", ArgKind.PLAINS: "P",
    ArgKind.FLOAT: "n", ArgKind.SCALAR: "n", ArgKind.FLOATS: "N", ArgKind.SCALARS: "N",
    ArgKind.OPAQUE: "o",
}  # fmt: skip


class Make(enum.IntEnum):
    """What becomes of an output; the same names, in the same order, as in C++."""

    FRESH = 0  # a tensor with a storage of its own
    VIEW = 1  # a view of an argument
    ALIAS = 2  # another tensor that looks as the argument does
    ARGUMENT = 3  # the argument itself, which is written to
    LENGTH = 4  # no output: a number, the length of an argument


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a call."""

    make: Make
    is_list: bool  # takes all outputs that nothing else takes
    argument: int  # that is viewed, is the result itself, or has a length that is; else 0


@dataclass(frozen=True, slots=True)
class Written:
    """An argument that a call writes to."""

    argument: int
    is_list: bool
    is_out: bool  # `out=`: takes the size of what is written
    may_repeat: bool  # the same tensor may be read as another argument: `x.add_(x)`


@dataclass(frozen=True, slots=True)
class Extra:
    """What is part of the key in addition to the arguments."""

    grad_mode: bool = False
    requires_grad: tuple[int, ...] = ()  # of these arguments
    draw: bool = False  # the number of the draw in its trace

    def __bool__(self) -> bool:
        return self.grad_mode or bool(self.requires_grad) or self.draw


NO_EXTRA: Final = Extra()


@dataclass(frozen=True, slots=True)
class Signature:
    """How calls of one op become nodes."""

    spec: OpSpec
    kinds: str  # a letter for each argument: how it enters the key
    device: int  # the position of the argument `device`, -1 if there is none
    extra: Extra
    kept: tuple[int, ...]  # arguments that live on in the results: they have to be lazy
    results: tuple[Result, ...]
    written: tuple[Written, ...]  # their new values are the node's last outputs
    overlaps: tuple[tuple[int, int], ...]  # pairs, written and other, that must not share memory
    apart: tuple[tuple[int, int], ...]  # pairs of lists, written and read item by item
    assigns: bool  # a copy: between equal types its second argument's value is what is written
    is_window: bool  # a view of the memory, also of an argument that is a part of it
    is_plain: bool  # its one result is a tensor of its own, and nothing is written


def signature_of(spec: OpSpec, extra: Extra = NO_EXTRA, lengths: Sequence[int] = ()) -> Signature:
    """The signature of an op.

    `lengths` are the arguments whose lengths are those of its results that are no tensors.
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
    # what is read where indices say must not be written meanwhile
    indexing = spec.target._opname in rules.INDEXING
    return Written(
        argument=position,
        is_list=argument.kind is ArgKind.TENSORS,
        is_out=argument.keyword_only,
        may_repeat=not indexing and not argument.keyword_only,
    )


Pairs = tuple[tuple[int, int], ...]


def _overlaps(spec: OpSpec, kinds: str, written: Sequence[Written]) -> tuple[Pairs, Pairs]:
    """Which arguments must not share memory, and which lists must not but item by item."""
    singles = [w.argument for w in written if not w.is_list]
    lists = [w.argument for w in written if w.is_list]
    read = [i for i, kind in enumerate(kinds) if kind == "T" and i not in spec.mutated]
    if spec.name.startswith("aten._foreach_"):
        return (), tuple((i, j) for i in lists for j in read)
    if spec.name == "aten.copy_.default":  # it may be in part: `overrides.special` looks
        return (), ()
    others = [i for i, kind in enumerate(kinds) if kind in "tT"]
    twice = {(i, j) for i in singles for j in singles if j < i}
    return tuple((i, j) for i in singles for j in others if i != j and (i, j) not in twice), ()
