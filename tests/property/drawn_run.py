"""Runs drawn programs eagerly and lazily and says where they differ."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torpor
from tests.property.drawn import Drawn, Program
from torpor.backends.equality import TOLERANCES, same_bits
from torpor.symbols.leaves import SIZES

ERRORS = (
    RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, AttributeError,
    NameError, ZeroDivisionError, torpor.errors.TorporError,
)  # fmt: skip
LARGEST = 2000  # elements of a tensor; a larger one ends its line in an error
ROUNDING = 10.0  # how many times what a change in the last digits of the leaves causes is rounding


class TooLarge(RuntimeError):
    """A line gave more than there is to compare."""


@dataclass
class Seen:
    """What is noted: where (step and line) and what."""

    step: int
    line: int
    text: str
    value: Any


@dataclass
class Difference:
    """The first thing that differs; `kind` is what it stays while a program is made smaller."""

    kind: str
    where: str
    reported: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.reported}"


# -- one run -----------------------------------------------------------------------------------


class World:
    """The tensors of a program, all eager or all lazy."""

    def __init__(
        self, program: Program, put: Callable[[Tensor], Tensor], shift: float = 0.0
    ) -> None:
        self.program, self.put, self.shift = program, put, shift
        self.seen: list[Seen] = []
        self.place = (0, 0, "")
        self.draw = torch.Generator().manual_seed(program.seed)
        self.names: dict[str, Any] = {
            "torch": torch, "F": F, "copy": copy, "pickle": pickle, "io": io, "L": put,
            "leaf": self._leaf, "S": self._cut, "out": self._out, "numbers": _numbers,
            "gradient": gradient, "holds": _holds,
        }  # fmt: skip

    @property
    def lazy(self) -> bool:
        return self.put is not _plain_tensor

    def _leaf(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Quarters, so that sums are exact; the same in every world."""
        kind = torch.complex128 if dtype.is_complex else torch.float64
        made = (torch.randn(shape, dtype=kind, generator=self.draw) * 12).real.round() / 4
        made = made.to(kind)
        if self.shift and (dtype.is_floating_point or dtype.is_complex):
            eps = max(torch.finfo(dtype).eps, 1e-7) * self.shift
            made = made * (1 + eps) + eps
        if dtype is torch.uint8:
            made = made.abs()
        return made.to(dtype)

    def _cut(self, *tensors: Any, wait: bool = False) -> None:
        if self.lazy:
            torpor.sync(*tensors, wait=wait)

    def _out(self, value: Any) -> None:
        self.seen.append(Seen(*self.place, _noted(value)))

    def run(self) -> list[Seen]:
        torch.manual_seed(7)
        for line in self.program.before:
            self._do(-1, -1, line)
        for step, (n, m) in enumerate(self.program.sizes()):
            self.names.update(n=n, m=m, step=step)
            for place, line in enumerate(self.program.lines):
                self._do(step, place, line)
            if not self.program.reads_late:
                self._note_all(step)
        self._note_all(len(self.program.sizes()))
        self.place = (99, 0, "the generator's state")
        self._out(torch.get_rng_state())
        return self.seen

    def _do(self, step: int, place: int, line: Drawn) -> None:
        self.place = (step, place, line.source())
        try:
            if line.gives:
                self.names[line.gives] = self._put(_small(eval(line.text, self.names)))
            else:
                exec(line.text, self.names)
        except ERRORS as error:
            self.seen.append(Seen(*self.place, _error(error)))

    def _put(self, value: Any) -> Any:
        """A result; factories on a concrete device make plain tensors, which `set_` refuses."""
        plain = self.lazy and isinstance(value, Tensor) and not torpor.is_lazy(value)
        return self.put(value) if plain else value

    def _note_all(self, step: int) -> None:
        for name in self.program.names():
            self.place = (step, 1000, name)
            if name in self.names:
                try:
                    self._out(self.names[name])
                except ERRORS as error:
                    self.seen.append(Seen(*self.place, _error(error)))


def _plain_tensor(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _small(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() > LARGEST:
        raise TooLarge
    return value


def gradient(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Any:
    """The gradient of a function at a tensor; the output is weighted so that no part is alike."""
    x = tensor.detach().clone().requires_grad_()
    y = function(x)
    weight = torch.arange(1.0, y.numel() + 1).view(y.shape).to(y.device, y.dtype)
    (y * weight).sum().backward()
    return x.grad


def _holds(tensor: Tensor, count: int, other: Tensor) -> bool:
    """The memory of a tensor has room for `count` elements of another: none is uninitialised."""
    bytes_held = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and bytes_held >= count * other.element_size()


def _numbers(tensor: Tensor) -> Any:
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return tensor.detach().resolve_conj().resolve_neg().numpy().copy().tolist()


_FAMILIES = (IndexError, NotImplementedError, TypeError, ValueError, AttributeError, NameError)


def _error(error: BaseException) -> str:
    """The built-in type that `except` would name."""
    for kind in (*_FAMILIES, RuntimeError):
        if isinstance(error, kind):
            return f"raises {kind.__name__}"
    return f"raises {type(error).__name__}"


def _noted(value: Any) -> Any:
    """A copy that later writes do not reach, with what can be seen from outside."""
    if not isinstance(value, Tensor):
        return value
    looks = (tuple(value.shape), value.stride() if value.numel() else (), value.dtype)
    plain = value.detach()
    if torpor.is_lazy(plain):
        plain = plain.cpu() if plain.device.type == "lazy" else torpor.eager(plain)
    return looks, plain.resolve_conj().resolve_neg().clone()


# -- what eager leaves undefined ------------------------------------------------------------------


def probe(program: Program) -> Program:
    """The program without lines whose result eager leaves undefined.

    Those write to memory that holds an element twice, or that they read in part, and eager raises
    no error; or eager raises one when it has resized the output.
    """
    while True:
        world = _Probe(program, _plain_tensor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world.run()
        if world.undefined is None:
            return program
        program = program.without(len(program.before) + world.undefined)


class _Probe(World):
    undefined: int | None = None

    def _do(self, step: int, place: int, line: Drawn) -> None:
        risky = self.undefined is None and self._risky(line)
        before, shapes = len(self.seen), self._shapes(line)
        super()._do(step, place, line)
        failed = len(self.seen) > before
        if self.undefined is None and (self._shapes(line) != shapes if failed else risky):
            self.undefined = place

    def _shapes(self, line: Drawn) -> list[Any]:
        return [getattr(self.names.get(name), "shape", None) for name in line.writes]

    def _risky(self, line: Drawn) -> bool:
        written = [self.names.get(name) for name in line.writes]
        read = [self.names.get(name) for name in line.reads]
        tensors = [t for t in written if isinstance(t, Tensor)]
        others = [t for t in read if isinstance(t, Tensor)]
        return any(_twice(t) for t in tensors) or any(
            _shared(t, o, line.by_element) for t in tensors for o in others
        )


def _places(tensor: Tensor) -> Tensor:
    """The bytes of memory that a tensor's elements begin at, and those they go on with."""
    places = torch.tensor([tensor.data_ptr()])
    size = tensor.element_size()
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(count) * stride * size).flatten()
    return (places[:, None] + torch.arange(size)).flatten()


def _twice(tensor: Tensor) -> bool:
    places = _places(tensor)
    return len(places.unique()) != len(places)


def _shared(tensor: Tensor, other: Tensor, by_element: bool) -> bool:
    """Memory that is written is read too, and not just by the element that is written to it."""
    if by_element and tensor.dtype == other.dtype and tensor.is_set_to(other):
        return False
    return bool(torch.isin(_places(tensor), _places(other)).any())


# -- two runs ------------------------------------------------------------------------------------


def compare(program: Program, exact: bool) -> Difference | None:
    """The first difference between an eager and a lazy run of a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = World(program, _plain_tensor).run()
        got = _lazy(program)
        if isinstance(got, Difference):
            return got
        shifted = None if exact else World(program, _plain_tensor, shift=4.0).run()
    return _first(expected, got, shifted)


def _lazy(program: Program) -> list[Seen] | Difference:
    SIZES.clear()
    put = (lambda t: t.to("lazy")) if program.place == "lazy" else torpor.lazy
    world = World(program, put)
    try:
        seen = world.run()
        torpor.sync(wait=True)
    except Exception as error:
        return Difference("raise", f"line {world.place[2]}", f"{type(error).__name__}: {error}")
    return seen


def _first(expected: list[Seen], got: list[Seen], shifted: list[Seen] | None) -> Difference | None:
    """Where two runs part. With `shifted`, a difference that rounding explains is none."""
    for index, one in enumerate(expected):
        other = got[index] if index < len(got) else Seen(99, 0, "the end", None)
        where = f"step {one.step}, {one.text}"
        if (one.step, one.line, one.text) != (other.step, other.line, other.text):
            where = f"step {one.step}, {one.text} or step {other.step}, {other.text}"
            return Difference(
                "events", where, f"eager {_short(one.value)}, lazy {_short(other.value)}"
            )
        kind = _kind(one.value, other.value, shifted is None)
        if kind is None:
            continue
        if shifted is not None and kind == "values":
            third = shifted[index] if index < len(shifted) else None
            if third is None or third.text != one.text or _rounding(one, other, third):
                return None  # what follows depends on it
        return Difference(kind, where, f"eager {_short(one.value)}, lazy {_short(other.value)}")
    if len(got) > len(expected):
        extra = got[len(expected)]
        return Difference("events", f"step {extra.step}, {extra.text}", f"lazy {extra.value}")
    return None


def _kind(one: Any, other: Any, exact: bool) -> str | None:
    """What differs, as a word; None: nothing."""
    if isinstance(one, str) or isinstance(other, str):
        return None if one == other else "errors"
    if _is_tensor(one) and _is_tensor(other):
        for word, mine, its in zip(("shape", "strides", "dtype"), one[0], other[0], strict=True):
            if mine != its:
                return word
        return None if _same(one[1], other[1], exact) else "values"
    if type(one) is not type(other):
        return "types"
    return None if _same_numbers(one, other, exact) else "values"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Tensor)


def _same(one: Tensor, other: Tensor, exact: bool) -> bool:
    if exact or one.dtype not in TOLERANCES:
        return same_bits(one, other)
    relative, absolute = TOLERANCES[one.dtype]
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    largest = one.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if one.numel() else 0.0
    return torch.allclose(other, one, relative, absolute * max(1.0, largest), equal_nan=True)


def _same_numbers(one: Any, other: Any, exact: bool) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            _same_numbers(a, b, exact) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return one == other or (not exact and math.isclose(one, other, rel_tol=1e-2, abs_tol=1e-3))
    if isinstance(one, complex):
        return _same_numbers([one.real, one.imag], [other.real, other.imag], exact)
    return bool(one == other)


def _rounding(one: Seen, other: Seen, shifted: Seen) -> bool:
    """Eager itself moves about as far when its leaves change in their last digits."""
    if not all(map(_is_tensor, (one.value, other.value, shifted.value))):
        return not _same_numbers(one.value, shifted.value, True)
    a, b, c = (seen.value[1] for seen in (one, other, shifted))
    if not a.shape == b.shape == c.shape:
        return True
    wide = torch.complex128 if a.is_complex() else torch.float64
    gap = (a.to(wide) - b.to(wide)).abs().nan_to_num(1e30).max().item()
    own = (a.to(wide) - c.to(wide)).abs().nan_to_num(1e30).max().item()
    return gap <= ROUNDING * own


def _short(value: Any) -> str:
    if _is_tensor(value):
        numbers = value[1].flatten()[:6].tolist()
        return f"{value[0][0]} {value[0][1]} {str(value[0][2])[6:]} {numbers}"
    return str(value)[:120]


# -- made small --------------------------------------------------------------------------------


def minimise(program: Program, found: Difference, exact: bool) -> tuple[Program, Difference]:
    """The program with as few lines as still show a difference of the same kind."""
    smaller = True
    while smaller:
        smaller = False
        for place in reversed(range(len(program))):
            less = program.without(place)
            got = compare(less, exact) if probe(less) is less else None
            if got is not None and got.kind == found.kind:
                program, found, smaller = less, got, True
    return program, found
