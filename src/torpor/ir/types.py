"""Types of values: everything about a tensor except its contents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final
from weakref import WeakValueDictionary

import torch

from torpor import _torch
from torpor.symbols.expressions import (
    FOLLOWING,
    Expr,
    Size,
    Symbol,
    number,
    symbols_in,
)

_waiting_for_complex: list[Callable[[], None]] = []


def on_first_complex(act: Callable[[], None]) -> None:
    """Call `act` when the first complex-valued type is made."""
    _waiting_for_complex.append(act)


def _on_complex() -> None:
    while _waiting_for_complex:
        _waiting_for_complex.pop()()


class TensorType:
    """Shape, strides, offset, dtype and device of a value. Interned: equality is `is`."""

    __slots__ = (
        "__weakref__", "concrete", "conj", "device", "dtype", "injective", "neg", "numel",
        "offset", "shape", "stride", "wrapper",
    )  # fmt: skip

    concrete: TensorType  # itself; for a symbolic type, the type with the current trace's sizes
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conj: bool  # the memory holds the conjugate (`torch.Tensor.is_conj`)
    neg: bool  # the memory holds the negative (`torch.Tensor.is_neg`)
    numel: int
    injective: bool  # `is_injective`, for the native recorder; interned types only
    wrapper: tuple[object, ...]  # positional arguments that construct a wrapper tensor of this type

    def __init__(self) -> None:
        raise TypeError("use TensorType.of(...): types are interned")

    @staticmethod
    def of(
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        offset: int = 0,
        conj: bool = False,
        neg: bool = False,
    ) -> TensorType:
        """The interned type with these properties."""
        key = (shape, stride, offset, dtype, device, conj, neg)
        found = _types.get(key)
        if found is None:
            found = TensorType.uninterned(shape, stride, dtype, device, offset, conj, neg)
            plain = not offset and stride == contiguous_strides(shape)  # None is faster to make
            found.wrapper = (
                shape, None if plain else stride, offset or None, None, dtype, torch.strided,
                device, *_torch.lazy_keys(device.type),
            )  # fmt: skip
            found.injective = found.is_injective
            if dtype.is_complex:
                _on_complex()
            with _lock:
                found = _types.setdefault(key, found)
        return found

    @staticmethod
    def uninterned(
        shape: tuple[Any, ...],
        stride: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
        offset: Any = 0,
        conj: bool = False,
        neg: bool = False,
    ) -> TensorType:
        """A type that is not interned; its sizes may be any objects that behave like ints."""
        made = object.__new__(TensorType)
        made.concrete = made
        made.shape, made.stride, made.offset = shape, stride, offset
        made.dtype, made.device, made.conj, made.neg = dtype, device, conj, neg
        made.numel = 1
        for size in shape:
            made.numel = made.numel * size
        return made

    @staticmethod
    def of_tensor(tensor: torch.Tensor, device: torch.device | None = None) -> TensorType:
        """The type of `tensor`, on `device` if given."""
        return TensorType.of(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device if device is None else device,
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorType:
        """The row-major type of this shape."""
        return TensorType.of(shape, contiguous_strides(shape), dtype, device)

    def on(self, device: torch.device) -> TensorType:
        """The same type on another device."""
        return TensorType.of(
            self.shape, self.stride, self.dtype, device, self.offset, self.conj, self.neg
        )

    def at_offset(self, offset: int) -> TensorType:
        """The same type at another offset in its storage."""
        return TensorType.of(
            self.shape, self.stride, self.dtype, self.device, offset, self.conj, self.neg
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the smallest storage that holds a tensor of this type."""
        return (self.offset + self.span) * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory, inclusive."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def is_dense(self) -> bool:
        """Whether every element of the span is used exactly once: no holes, no overlap."""
        return self.span == self.numel and self.is_injective

    @property
    def is_injective(self) -> bool:
        """Whether sizes and strides prove that no two elements share memory."""
        if len(self.stride) != len(self.shape):
            return False  # malformed; rejected where it is used
        reach = 1
        pairs = zip(self.stride, self.shape, strict=True)
        for stride, size in sorted((st, sz) for st, sz in pairs if sz > 1):
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
        return True

    def __repr__(self) -> str:
        shape = ",".join(map(str, self.shape))
        text = f"{str(self.dtype).removeprefix('torch.')}[{shape}]"
        if self.stride != contiguous_strides(self.shape):
            text += f" stride [{','.join(map(str, self.stride))}]"
        if self.offset:
            text += f" offset {self.offset}"
        text += " conj" * self.conj + " neg" * self.neg
        return f"{text} @{self.device}"

    def __reduce__(self) -> tuple[object, ...]:
        return TensorType.of, (
            self.shape, self.stride, self.dtype, self.device, self.offset, self.conj, self.neg,
        )  # fmt: skip

    def __copy__(self) -> TensorType:
        return self

    def __deepcopy__(self, memo: object) -> TensorType:
        return self


class SymbolicType(TensorType):
    """A type with symbols. Its numeric attributes show the current trace's sizes. Interned."""

    __slots__ = ("at_offset_size", "sizes", "steps", "symbols")

    sizes: tuple[Size, ...]
    steps: tuple[Size, ...]  # strides
    at_offset_size: Size
    symbols: tuple[Symbol, ...]

    @staticmethod
    def with_sizes(
        sizes: tuple[Size, ...], steps: tuple[Size, ...], offset: Size, like: TensorType
    ) -> TensorType:
        """The type with these sizes, strides and offset; the rest is copied from `like`."""
        symbols = tuple(symbols_in((*sizes, *steps, offset)))
        rest = (like.dtype, like.device, like.conj, like.neg)
        if not symbols:
            return TensorType.of(sizes, steps, *rest[:2], offset, *rest[2:])  # type: ignore[arg-type]  # no symbols: ints
        key = (sizes, steps, offset, *rest)
        found: Any = _types.get(key)
        if found is None:
            found = object.__new__(SymbolicType)
            found.sizes, found.steps, found.at_offset_size = sizes, steps, offset
            found.dtype, found.device, found.conj, found.neg = rest
            found.symbols = symbols
            with FOLLOWING:
                found.refresh()
                with _lock:
                    found = _types.setdefault(key, found)
                for symbol in symbols:
                    symbol.followers.add(found)
        return found  # type: ignore[no-any-return]  # interned

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether sizes and strides have no symbols: only the offset may differ between traces."""
        return not any(type(size) is Expr for size in (*self.sizes, *self.steps))

    def refresh(self) -> None:
        """Update the numeric attributes to the current trace's sizes."""
        now = self.concrete = self.at({symbol: symbol.value for symbol in self.symbols})
        self.shape, self.stride, self.offset = now.shape, now.stride, now.offset
        self.numel, self.wrapper, self.injective = now.numel, now.wrapper, now.injective

    def at(self, values: Mapping[Symbol, int]) -> TensorType:
        """The concrete type for these values of the symbols."""
        return TensorType.of(*self._sized(values))

    def uninterned_at(self, values: Mapping[Symbol, Any]) -> TensorType:
        """The type for values that behave like ints, such as a compiler's own symbols."""
        return TensorType.uninterned(*self._sized(values))

    def _sized(self, values: Mapping[Symbol, Any]) -> tuple[Any, ...]:
        return (
            tuple([number(size, values) for size in self.sizes]),
            tuple([number(step, values) for step in self.steps]),
            self.dtype, self.device, number(self.at_offset_size, values), self.conj, self.neg,
        )  # fmt: skip

    def __repr__(self) -> str:
        shape = ",".join(map(str, self.sizes))
        text = f"{str(self.dtype).removeprefix('torch.')}[{shape}]"
        if self.stride != contiguous_strides(self.shape):
            text += f" stride [{','.join(map(str, self.steps))}]"
        if self.at_offset_size != 0:
            text += f" offset {self.at_offset_size}"
        text += " conj" * self.conj + " neg" * self.neg
        return f"{text} @{self.device}"

    def __reduce__(self) -> tuple[object, ...]:
        return self.concrete.__reduce__()


def type_at(type_: Any, values: Mapping[Symbol, int]) -> Any:
    """`type_` with concrete sizes, for these values of its symbols."""
    return type_.at(values) if type(type_) is SymbolicType else type_


class ScalarType:
    """The type of a Python number that is a run-time input of a graph."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind: Final = kind

    def __repr__(self) -> str:
        return f"scalar {self.kind.__name__}"


Types = tuple[TensorType | None, ...]  # of a node's outputs; None: one that is not a tensor

_lock = threading.Lock()
_types: WeakValueDictionary[tuple[object, ...], TensorType] = WeakValueDictionary()

SCALAR_TYPES: Final[dict[type, ScalarType]] = {
    kind: ScalarType(kind) for kind in (bool, int, float, complex)
}


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, as torch computes them (a size of 0 counts as 1)."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)
