"""Samples of an `op_db` entry, and how a sample enters a subject.

Samples are made once, on the CPU, from a fixed seed. Every run gets its own copy: nothing one run
writes can reach another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import ErrorInput, OpInfo, SampleInput

from tests.ops.subjects import Subject

SEED = 20260714
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)
PRIMARY = (torch.float32, torch.int64, torch.complex64, torch.bfloat16, torch.bool)
FIRST_SAMPLES = 3
"""How many samples count as "the first" in every dtype but the entry's primary one."""


@dataclass(frozen=True)
class Entered:
    """A sample as one run sees it: copies of its tensors, owned by the subject."""

    subject: Subject
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]


def primary_dtype(op: OpInfo) -> torch.dtype:
    """The dtype in which all samples run: float32, or the nearest thing the entry has."""
    supported = op.supported_dtypes("cpu")
    own = sorted(supported, key=str)
    return next(d for d in (*PRIMARY, *own) if d in supported)


def dtypes_of(op: OpInfo) -> list[torch.dtype]:
    primary = primary_dtype(op)
    return [primary, *(d for d in DTYPES if d != primary and op.supports_dtype(d, "cpu"))]


def samples_of(op: OpInfo, dtype: torch.dtype) -> list[SampleInput]:
    """All samples in the primary dtype, the first few in any other."""
    seed_everything()
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    samples: Iterable[SampleInput] = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
    return list(islice(samples, None if dtype == primary_dtype(op) else FIRST_SAMPLES))


def error_samples_of(op: OpInfo) -> list[ErrorInput]:
    if op.error_inputs_func is None:
        return []
    seed_everything()
    return list(op.error_inputs("cpu"))


def seed_everything() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED % 2**32)


def enter(sample: SampleInput, subject: Subject, *, grad: bool) -> Entered:
    """Copy a sample into a subject. Without `grad` no tensor in it requires a gradient."""
    carry = _Carrier(subject, grad)
    args = carry((sample.input, *sample.args))
    process = getattr(sample, "output_process_fn_grad", None) or _same
    return Entered(subject, args, carry(sample.kwargs), process)


def walk(tree: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested lists, tuples and dicts with its place; containers give their type."""
    if isinstance(tree, dict):
        yield where, type(tree)
        for key, value in tree.items():
            yield from walk(value, f"{where}.{key}")
    elif isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        yield where, (type(tree), len(tree))
        for index, value in enumerate(tree):
            yield from walk(value, f"{where}[{index}]")
    else:
        yield where, tree


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in walk(tree, "") if isinstance(leaf, Tensor)]


def _same(value: Any) -> Any:
    return value


class _Carrier:
    """Copies a tree; an object met twice is copied once, so that shared arguments stay shared."""

    def __init__(self, subject: Subject, grad: bool) -> None:
        self.subject, self.grad = subject, grad
        self.seen: dict[int, Any] = {}

    def __call__(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self._once(tree, self._tensor)
        if isinstance(tree, torch.Generator):
            return self._once(tree, _clone_generator)
        if isinstance(tree, dict):
            return {key: self(value) for key, value in tree.items()}
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*map(self, tree))
        if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
            return type(tree)(map(self, tree))
        if isinstance(tree, slice):
            return slice(self(tree.start), self(tree.stop), self(tree.step))
        if isinstance(tree, torch.device) or (isinstance(tree, str) and tree == "cpu"):
            return self.subject.device(tree)
        return tree

    def _once(self, thing: Any, copy: Callable[[Any], Any]) -> Any:
        if id(thing) not in self.seen:
            self.seen[id(thing)] = copy(thing)
        return self.seen[id(thing)]

    def _tensor(self, tensor: Tensor) -> Tensor:
        copy = _copy(tensor.detach(), self.subject)
        return copy.requires_grad_() if self.grad and tensor.requires_grad else copy


def _copy(tensor: Tensor, subject: Subject) -> Tensor:
    """A copy of equal strides, holes and overlaps (which `.to` would straighten) included."""
    if tensor.layout != torch.strided or torch.empty_like(tensor).stride() == tensor.stride():
        return subject.enter(tensor)
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone())
    return subject.enter(storage).as_strided(
        tensor.size(), tensor.stride(), tensor.storage_offset()
    )


def _clone_generator(generator: torch.Generator) -> torch.Generator:
    clone = torch.Generator(generator.device)
    clone.set_state(generator.get_state())
    return clone
