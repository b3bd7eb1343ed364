"""Drawn calls of ops, by their signatures.

A call is drawn as a recipe: what its tensors are made of, and how each argument looks at them. So
it can be made any number of times, each time from an equal starting state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from torpor import _torch
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ops.signature import Make, Signature
from torpor.ops.spec import ArgKind, Argument
from torpor.trace.tensor import InThisTrace, LazyTensor, View
from torpor.trace.values import value_of
from torpor.trace.wrap import wrap_data

LAZY: Final = torch.device("lazy", 0)
CPU: Final = torch.device("cpu")


class Source:
    """Draws everything from one function, which gives a number below the one it is given."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below

    def of(self, items: Sequence[Any]) -> Any:
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent


# -- recipes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Root:
    """A tensor with memory of its own."""

    kind: str  # "leaf": data; "fresh": a result of this trace; "plain": not lazy
    device: torch.device
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    is_inference: bool = False


@dataclass(frozen=True)
class Look:
    """A tensor among the arguments: a root, or what views make of it. Equal ones are the same."""

    root: int
    views: tuple[str, ...] = ()
    stale: bool = False  # its root is written to before the call
    number: int = 0  # of tensors that look alike


@dataclass(frozen=True)
class Looks:
    """A list of tensors."""

    items: tuple[Look | None, ...]


@dataclass(frozen=True)
class Call:
    """A call of an op, to be made again and again."""

    op: Any
    roots: tuple[Root, ...]
    arguments: tuple[Any, ...]  # in schema order
    given: int  # positional arguments; those that follow have their defaults
    mode: str  # "grad", "no_grad" or "inference"
    invented: tuple[int, ...] = ()  # numbers to invent the types of results by
    from_the_top: bool = False  # as the user calls it: autograd comes first

    def __str__(self) -> str:
        made = "\n".join(f"  root {i}: {root}" for i, root in enumerate(self.roots))
        given = "\n".join(f"  {argument!r}" for argument in self.arguments)
        top = "from the top" if self.from_the_top else "below autograd"
        head = f"{self.op}, {self.mode}, {top}, {self.given} positional, {self.invented}"
        return f"{head}\n{made}\n{given}"


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1) if tensor.dim() else tensor.view(1)


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.select(0, 0) if tensor.dim() and tensor.shape[0] else tensor.unsqueeze(0)


def _rest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[1:] if tensor.dim() else tensor.unsqueeze(0)


def _diagonal(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.diagonal() if tensor.dim() > 1 else tensor.unsqueeze(-1)


VIEWS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "detach": lambda tensor: tensor.detach(),
    "turned": _turned,
    "first": _first,
    "rest": _rest,
    "diagonal": _diagonal,
    "whole": lambda tensor: tensor.view_as(tensor),
    "expanded": lambda tensor: tensor.expand(2, *tensor.shape),
    "window": lambda tensor: tensor.as_strided(tensor.shape, tensor.stride()),
    "conj": lambda tensor: tensor.conj(),
}


# -- making a call ---------------------------------------------------------------------------------


@contextmanager
def mode(name: str) -> Iterator[None]:
    """The grad mode, or inference mode, of a call."""
    with torch.inference_mode(name == "inference"), torch.set_grad_enabled(name == "grad"):
        yield


class World:
    """The tensors and arguments of a call, made anew."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.roots = [_root(root) for root in call.roots]
        self.made: dict[Look, torch.Tensor] = {}
        for argument in call.arguments:
            for look in argument.items if isinstance(argument, Looks) else (argument,):
                if isinstance(look, Look) and look not in self.made:
                    self.made[look] = self._look(look)
        self._make_stale()
        self.bound = [self._argument(argument) for argument in call.arguments]

    def _look(self, look: Look) -> torch.Tensor:
        root = self.call.roots[look.root]
        tensor = self.roots[look.root]
        with torch.inference_mode(root.is_inference):
            for view in look.views:
                tensor = VIEWS[view](tensor)
        return tensor

    def _make_stale(self) -> None:
        for number in sorted({look.root for look in self.made if look.stale}):
            root = self.call.roots[number]
            with torch.inference_mode(root.is_inference), torch.no_grad():
                self.roots[number].zero_()
        for look, tensor in self.made.items():
            if not look.stale and look.views and type(tensor) is LazyTensor:
                with TRACE.lock:
                    value_of(tensor)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Look):
            return self.made[argument]
        if isinstance(argument, Looks):
            return [None if item is None else self.made[item] for item in argument.items]
        return list(argument) if type(argument) is tuple else argument

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As the op is called with them."""
        described = zip(_arguments(self.call.op), self.bound, strict=True)
        keywords = {a.name: v for a, v in described if a.kwarg_only and v is not OMITTED}
        return tuple(self.bound[: self.call.given]), keywords

    def tensors(self) -> list[torch.Tensor]:
        return [*self.roots, *self.made.values()]

    def state(self) -> Any:
        """What must not change when a call is refused."""
        lazy = [t for t in self.tensors() if type(t) is LazyTensor]
        storages = [t._lazy_storage for t in lazy]
        values = [s.value if s.data is None else s.data for s in storages]
        sizes = [(t.shape, t.stride(), t.storage_offset()) for t in lazy]
        pending = [storage for reference in TRACE.pending if (storage := reference())]
        return list(map(id, storages)), list(map(id, values)), sizes, list(map(id, pending))


def _root(root: Root) -> torch.Tensor:
    plain = torch.ones(root.shape, dtype=root.dtype)
    with torch.inference_mode(root.is_inference):
        if root.kind == "plain":
            return plain.clone().requires_grad_(root.requires_grad)
        tensor: torch.Tensor = wrap_data(plain, root.device).requires_grad_(root.requires_grad)
        return tensor.clone() if root.kind == "fresh" else tensor


# -- what a call came to ---------------------------------------------------------------------------


class Facts:
    """All there is to know of tensors: values by identity, storages and tensors by number."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # so that no identity is used twice

    def number(self, thing: Any) -> int:
        self.alive.append(thing)
        return self.numbers.setdefault(id(thing), len(self.numbers))

    def of(self, thing: Any) -> Any:
        if isinstance(thing, (list, tuple)):
            return (type(thing).__name__, *map(self.of, thing))
        if type(thing) is LazyTensor:
            return self._lazy(thing)
        if isinstance(thing, torch.Tensor):
            return ("plain", self.number(thing), thing.shape, thing.stride(), thing.dtype)
        return number_text(thing)

    def _lazy(self, tensor: LazyTensor) -> Any:
        storage = tensor._lazy_storage
        return (
            self.number(tensor), self._storage(storage), self._view(tensor._lazy_view),
            tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device,
            tensor.is_inference(), tensor.is_conj(), tensor.is_neg(), tensor.requires_grad,
            _torch.dispatch_keys(tensor), sorted(vars(tensor)),
        )  # fmt: skip

    def _storage(self, storage: LazyStorage) -> Any:
        listed = any(reference() is storage for reference in TRACE.pending)
        data = storage.data is None
        return self.number(storage), storage.type, storage.value, data, storage.listed, listed

    def _view(self, view: View | None) -> Any:
        if view is None:
            return None
        base = view.base
        if type(base) is InThisTrace:
            base = ("in this trace", base.root)
        return view.node, view.index, view.type, view.value, base, self._view(view.parent)


def autograd_facts(tensors: list[Any]) -> Any:
    """What autograd notes of tensors."""
    return [_noted(t) for t in _torch.tree_leaves(tensors) if type(t) is LazyTensor]


def _noted(tensor: torch.Tensor) -> Any:
    facts = (lambda t: type(t.grad_fn).__name__, lambda t: t.is_leaf, lambda t: t._version)
    return [_tried(fact, tensor) for fact in facts]


def _tried(fact: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """A tensor may have no version, or be a view that its base, once resized, no longer has."""
    try:
        return fact(tensor)
    except RuntimeError as error:
        return type(error)


def number_text(thing: Any) -> Any:
    """NaN is no equal of itself, and 1 is one of True: say it by name."""
    return (
        (type(thing).__name__, repr(thing)) if isinstance(thing, (int, float, complex)) else thing
    )


# -- drawing ---------------------------------------------------------------------------------------

OMITTED: Final = "(its default)"
DTYPES: Final = (
    torch.float32, torch.int64, torch.bool, torch.float64, torch.float16, torch.complex64,
    torch.uint8,
)  # fmt: skip
SHAPES: Final[tuple[tuple[int, ...], ...]] = (
    (2, 3), (), (3,), (1,), (0,), (2, 1), (3, 3), (2, 0, 3), (1, 2, 3), (2, 2, 3, 3),
)  # fmt: skip
FLOATS: Final = (
    0.5, 1.0, 0.0, -0.0, 2.0, math.nan, math.inf, -math.inf, -1.5, 1e-300, 1e300, 2.0**60,
)  # fmt: skip
NUMBERS: Final = (
    1, 2, 0, -1, True, False, *FLOATS, 2**53 + 1, -(2**62), 1j, complex(0.0, -0.0),
)  # fmt: skip
INTS: Final = (0, 1, 2, -1, -2, 3)
LENGTHS: Final = (1, 2, 0, 3)
LARGE: Final = (2**31, 2**62)
STRINGS: Final = {
    "rounding_mode": ("floor", "trunc", "other"),
    "approximate": ("none", "tanh"),
    "reduce": ("sum", "mean", "amax"),
    "indexing": ("ij", "xy"),
    "side": ("left", "right"),
    "ord": ("fro", "nuc"),
    "UPLO": ("L", "U"),
    "driver": ("gelsd", "gels"),
    "mode": ("reduced", "complete"),
}
PLAIN_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "int": INTS,
    "bool": (False, True),
    "ScalarType": DTYPES,
    "Layout": (torch.strided, torch.strided, torch.sparse_coo),
    "MemoryFormat": (
        torch.contiguous_format, torch.preserve_format, torch.channels_last,
    ),
}  # fmt: skip


def _arguments(op: Any) -> Any:
    return op._schema.arguments


def _type(argument: Any) -> str:
    return str(argument.real_type)


def can_be_drawn(op: Any) -> bool:
    """There is something to draw for each of its arguments, and a tensor among them."""
    types = [(_type(a), a.has_default_value()) for a in _arguments(op)]
    known = {"Tensor", "number", "float", "str", "Device", *PLAIN_CHOICES}
    for text, has_default in types:
        inner = text.replace("Optional[", "").replace("List[", "").rstrip("]")
        if inner not in known and not text.startswith("Optional[") and not has_default:
            return False
    return any("Tensor" in text for text, _ in types)


class Author:
    """Draws one call of an op."""

    def __init__(self, source: Source, signature: Signature, invents: bool) -> None:
        self.source, self.signature, self.invents = source, signature, invents
        self.roots: list[Root] = []
        self.looks: list[Look] = []
        self.device = source.of((LAZY, CPU))
        self.shape = source.of(SHAPES)
        self.dtype = source.of(DTYPES) if source.chance(50) else torch.float32
        self.from_the_top = not invents and source.chance(60)
        self.length = source.of(LENGTHS)
        self.counted = {r.argument for r in signature.results if r.make is Make.LENGTH}

    def call(self) -> Call:
        spec = self.signature.spec
        described = list(zip(_arguments(spec.target), spec.arguments, strict=True))
        drawn = [self._argument(i, a, known) for i, (a, known) in enumerate(described)]
        if not self._any_lazy():
            self._force_one(drawn)
        given = self._given(spec.arguments, drawn)
        for place, (_, known) in enumerate(described):
            if drawn[place] is OMITTED and not known.keyword_only:
                drawn[place] = known.default
        numbers = tuple(self.source.below(100) for _ in range(6)) if self.invents else ()
        return Call(
            spec.target, tuple(self.roots), tuple(drawn), given,
            self.source.of(("grad", "no_grad", "inference")), numbers, self.from_the_top,
        )  # fmt: skip

    def _given(self, known: Sequence[Argument], drawn: list[Any]) -> int:
        """How many positional arguments are given: those that end the list may be left out."""
        given = sum(not a.keyword_only for a in known)
        while given and drawn[given - 1] is OMITTED:
            given -= 1
        return given

    def _any_lazy(self) -> bool:
        return any(self.roots[look.root].kind != "plain" for look in self.looks)

    def _force_one(self, drawn: list[Any]) -> None:
        """torch hands over an op only if one of its tensors is lazy."""
        place = next(i for i, kind in enumerate(self.signature.kinds) if kind in "tT")
        look = self._new_look("leaf", ())
        drawn[place] = look if self.signature.kinds[place] == "t" else Looks((look,))

    # -- arguments --

    def _argument(self, place: int, argument: Any, known: Argument) -> Any:
        text = _type(argument)
        if known.has_default and self.source.chance(50):
            return OMITTED
        if text.startswith("Optional["):
            if self.source.chance(30):
                return None
            text = text.removeprefix("Optional[").removesuffix("]")
        drawn = self._of_type(place, text, known)
        return OMITTED if _is_default(drawn, text, known) else drawn

    def _of_type(self, place: int, text: str, known: Argument) -> Any:
        source = self.source
        if text == "Tensor":
            return self._tensor(place)
        if text.startswith("List["):
            inner = text.removeprefix("List[").removesuffix("]")
            # lists of unequal lengths crash a few of torch's own kernels
            length = source.of(LENGTHS) if self.invents else self.length
            return self._list(place, inner, length, known)
        if known.kind is ArgKind.OPAQUE:
            return torch.Generator() if text == "Generator" and source.chance(20) else None
        if known.kind is ArgKind.SCALAR:
            return source.of(NUMBERS)
        if known.kind is ArgKind.FLOAT:
            return source.of(FLOATS)
        if text == "Device":
            others = (torch.device("lazy"), LAZY, CPU, torch.device("meta"))
            return self.device if source.chance(60) else source.of(others)
        if text == "str":
            return source.of(STRINGS.get(known.name, ("none", "sum")))
        if text == "int" and self.invents and source.chance(10):
            return source.of(LARGE)
        return source.of(PLAIN_CHOICES[text])

    def _list(self, place: int, inner: str, length: int, known: Argument) -> Any:
        if inner in ("Tensor", "Optional[Tensor]"):
            may_lack = inner != "Tensor"
            items = [
                None if may_lack and self.source.chance(30) else self._one(place)
                for _ in range(length)
            ]
            return Looks(tuple(items))
        return tuple(self._of_type(place, inner, _item(known)) for _ in range(length))

    def _tensor(self, place: int) -> Any:
        """A tensor, or a number in its place."""
        if place in self.counted:  # its third size is a result
            return self._new_look("leaf", (), (1, 2, 3))
        needs_tensor = (*self.signature.kept, *self.signature.extra.requires_grad)
        if place not in needs_tensor and self.source.chance(8):
            return self.source.of(NUMBERS)
        return self._one(place)

    def _one(self, place: int) -> Look:
        if self.looks and self.source.chance(20):
            return self._again()
        is_plain = self.source.chance(3 if place in self.signature.kept else 8)
        kind = "plain" if is_plain else self.source.of(("leaf", "fresh"))
        return self._new_look(kind, self._views())

    def _again(self) -> Look:
        """A tensor that is there already, or another one on the same memory."""
        look = self.source.of(self.looks)
        if self.source.chance(50):
            return look
        other = Look(look.root, self._views(), look.stale, self.source.below(2))
        self.looks.append(other)
        return other

    def _views(self) -> tuple[str, ...]:
        names = [n for n in VIEWS if n != "conj" or (self.from_the_top and self.dtype.is_complex)]
        return tuple(self.source.of(names) for _ in range(self.source.of((0, 0, 0, 1, 1, 2))))

    def _new_look(
        self, kind: str, views: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> Look:
        source = self.source
        if shape is None:
            shape = self.shape if source.chance(70) else source.of(SHAPES)
        dtype = self.dtype if source.chance(85) else source.of(DTYPES)
        differs = source.chance(4)
        device = {LAZY: CPU, CPU: LAZY}[self.device] if differs else self.device
        is_inference = source.chance(15)
        can_have = dtype.is_floating_point or dtype.is_complex
        requires_grad = can_have and not is_inference and source.chance(30)
        self.roots.append(Root(kind, device, shape, dtype, requires_grad, is_inference))
        look = Look(len(self.roots) - 1, views, bool(views) and source.chance(30))
        self.looks.append(look)
        return look


def _is_default(drawn: Any, text: str, known: Argument) -> bool:
    """torch leaves an argument out that is equal to its default: -0.0 where that is 0.0."""
    if not known.has_default or known.default is None:
        return False
    is_named = text in ("ScalarType", "Layout", "MemoryFormat")  # the default is a number
    return is_named or (type(drawn) is type(known.default) and bool(drawn == known.default))


def _item(known: Argument) -> Argument:
    """An argument whose list is `known`."""
    kinds = {
        ArgKind.FLOATS: ArgKind.FLOAT, ArgKind.SCALARS: ArgKind.SCALAR,
        ArgKind.PLAINS: ArgKind.PLAIN,
    }  # fmt: skip
    return Argument(known.name, kinds[known.kind], None, False, False, False, frozenset())
