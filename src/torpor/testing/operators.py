"""Checks an entry of torch's operator table: its first samples, forward and backward."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any
from unittest import mock

import torch

import torpor
from torpor import _torch
from torpor.testing.comparison import WIDER, difference, no_further
from torpor.testing.kit import Kit
from torpor.testing.scorecard import OpResult

SEED = 20260714
EAGER_RERUNS = 20

UNINITIALISED = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ "
    "resize_as_".split()
)
"""Entries whose result is uninitialized memory: everything but values is compared."""

OTHER_DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
"""The dtypes for an entry that supports no requested one, such as bitwise ops."""

EITHER_ZERO = frozenset({"max_reduction_no_dim", "min_reduction_no_dim"})
"""Entries whose gradient autograd computes by a mask product for tensor subclasses, but by filling
zeros for plain tensors: 0.0 and -0.0 are considered equal."""


@cache
def entries() -> dict[str, Any]:
    """Every entry of the table by name."""
    return {entry.formatted_name: entry for entry in _torch.op_table()}


def check_entry(kit: Kit, entry: Any, dtypes: list[torch.dtype], samples: int) -> OpResult:
    """Run an entry eagerly and on the backend, and compare."""
    check = _Check(kit, entry)
    with warnings.catch_warnings(), _no_steps_of_others():
        warnings.simplefilter("ignore")
        for dtype in _dtypes_of(entry, dtypes, kit.physical.type):
            check.check_dtype(dtype, samples)
    return check.result()


def _dtypes_of(entry: Any, asked: list[torch.dtype], device: str) -> list[torch.dtype]:
    """The requested dtypes that an entry supports; if none, one that it does."""
    supported = entry.supported_dtypes(device)
    own = [dtype for dtype in (*OTHER_DTYPES, *sorted(supported, key=str)) if dtype in supported]
    return [dtype for dtype in asked if dtype in supported] or own[:1]


def _no_steps_of_others() -> contextlib.AbstractContextManager[Any]:
    """Disable `torch._lazy.mark_step`, which op_db's random entries call on the device `lazy`."""
    return mock.patch("torch._lazy.mark_step", return_value=None)


@dataclass
class _Check:
    """The samples of one entry on one backend."""

    kit: Kit
    entry: Any
    faults: list[str] = field(default_factory=list)
    samples: int = 0
    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {"forward": Counter(), "backward": Counter()}
    )

    def check_dtype(self, dtype: torch.dtype, number: int) -> None:
        device = self.kit.physical.type
        differentiable = self.entry.supports_autograd and (
            dtype in self.entry.supported_backward_dtypes(device)
        )
        _seed()
        found = self.entry.sample_inputs(device, dtype, requires_grad=differentiable)
        for index, sample in enumerate(islice(found, number)):
            where = f"{str(dtype).removeprefix('torch.')} sample {index}"
            for name, run in (("forward", _forward), ("backward", _backward)):
                if name == "forward" or differentiable:
                    self.compare(f"{where} {name}", sample, run, self.counts[name])

    def compare(self, where: str, sample: Any, run: Run, counts: Counter[str]) -> None:
        try:
            expected = self.run(sample, run, self.kit.eager, self.kit.physical)
        except Exception:
            return  # eager raises: there is no baseline
        self.samples += 1
        before = Counter(torpor.metrics.counters())
        try:
            got = self.run(sample, run, self._put, self.kit.device)
            got = [self._read(leaf) for leaf in got]
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            self.faults.append(f"{where}: {type(error).__name__}: {text[0][:300]}")
            self.kit.settle()
            return
        counts.update(Counter(torpor.metrics.counters()) - before)
        self.judge(where, sample, run, got, expected)

    def run(self, sample: Any, run: Run, put: Put, device: torch.device) -> list[Any]:
        carry = _Carrier(put, device)
        args, kwargs = carry((sample.input, *sample.args)), carry(sample.kwargs)
        with self._factories(args, kwargs, device):
            torch.manual_seed(SEED)
            return list(leaves(run(self.entry, sample, args, kwargs, put)))

    def _factories(
        self, args: Any, kwargs: Any, device: torch.device
    ) -> contextlib.AbstractContextManager[Any]:
        """Make a sample without tensors create its results on the default device."""
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves((args, kwargs))):
            return contextlib.nullcontext()
        if self.kit.place == "concrete" and device == self.kit.device:
            return torpor.mode()
        return device

    def _put(self, tensor: torch.Tensor) -> Any:
        return self.kit.put(tensor) if tensor.layout is torch.strided else self.kit.eager(tensor)

    def _read(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        broken = self.kit.broken_promise(leaf)
        if broken is not None:
            raise AssertionError(broken)
        return self.kit.plain(leaf.detach())

    def judge(self, where: str, sample: Any, run: Run, got: list[Any], expected: list[Any]) -> None:
        if len(got) != len(expected):
            self.faults.append(f"{where}: {len(got)} results in the place of {len(expected)}")
            return
        for position, (one, other) in enumerate(zip(got, expected, strict=True)):
            wrong = self._difference(one, other)
            if not wrong or self._eager_differs_too(sample, run, position, one):
                continue
            if self.kit.exact or not self._eager_is_no_nearer(sample, run, position, one, other):
                self.faults.append(f"{where}: result {position}: {wrong}")

    def _difference(self, got: Any, expected: Any) -> str | None:
        if self.entry.name in UNINITIALISED and isinstance(expected, torch.Tensor):
            same = (got.shape, got.dtype) == (expected.shape, expected.dtype)
            return None if same else f"{got.dtype} {got.shape}"
        if self.entry.formatted_name in EITHER_ZERO and isinstance(expected, torch.Tensor):
            got, expected = got + 0.0, expected + 0.0
        return difference(got, expected, self.kit.exact)

    def _eager_differs_too(self, sample: Any, run: Run, position: int, got: Any) -> bool:
        """Rerun eager: some kernels' last bits depend on memory, so another run may agree."""
        for _ in range(EAGER_RERUNS if self.kit.exact else 2):
            again = self.run(sample, run, self.kit.eager, self.kit.physical)
            if self._difference(got, again[position]) is None:
                return True
        return False

    def _eager_is_no_nearer(
        self, sample: Any, run: Run, position: int, got: Any, expected: Any
    ) -> bool:
        """Compare both with eager in double precision, in case the difference is mere rounding."""
        if not isinstance(expected, torch.Tensor) or expected.dtype not in WIDER:
            return False
        try:
            judged = self.run(sample, run, self._widened, self.kit.physical)[position]
        except Exception:
            return False  # the entry has no double precision
        return no_further(got, expected, judged)

    def _widened(self, tensor: torch.Tensor) -> Any:
        own = self.kit.eager(tensor.detach())
        wide = own.to(WIDER.get(own.dtype, own.dtype))
        return wide.requires_grad_(tensor.requires_grad)

    def result(self) -> OpResult:
        """The status describes the forward; fallbacks in backward are listed separately."""
        status, detail = _how_it_ran(self.counts["forward"])
        fallbacks, later = (_fallbacks(self.counts[way]) for way in ("forward", "backward"))
        if self.faults:
            status, detail = "wrong", "\n".join(self.faults[:5])
        elif not self.samples:
            status, detail = "skipped", "no sample that eager accepts"
        return OpResult(self.entry.formatted_name, status, detail, fallbacks, later, self.samples)


def _how_it_ran(counts: Counter[str]) -> tuple[str, str]:
    if counts["CompileFailed"]:
        return "fallback", "could not be compiled: the reference backend stood in"
    if fallbacks := _fallbacks(counts):
        return "fallback", f"eager's kernels for {', '.join(fallbacks)}"
    if not counts["UncachedCompile"] + counts["CachedCompile"]:
        return "core", "the backend was never asked"
    if parts := sorted(_under("decomposed::", counts)):
        return "decomposed", f"as simpler ops: {', '.join(parts)}"
    return "native", ""


def _fallbacks(counts: Counter[str]) -> list[str]:
    stood_in = ["(the reference backend)"] if counts["CompileFailed"] else []
    return sorted(_under("fallback::", counts)) + stood_in


Run = Callable[[Any, Any, Any, Any, Any], Any]
Put = Callable[[torch.Tensor], Any]


def _forward(entry: Any, sample: Any, args: Any, kwargs: Any, put: Put) -> Any:
    with torch.no_grad():
        return entry.op(*args, **kwargs)


def _backward(entry: Any, sample: Any, args: Any, kwargs: Any, put: Put) -> Any:
    process = getattr(sample, "output_process_fn_grad", None) or (lambda output: output)
    output = entry.op(*args, **kwargs)
    ends = [t for t in leaves(process(output)) if isinstance(t, torch.Tensor) and t.requires_grad]
    starts = [t for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not ends or not starts:
        return ()
    generator = torch.Generator().manual_seed(SEED)
    pulls = [put(torch.randn(t.shape, dtype=t.dtype, generator=generator)) for t in ends]
    return torch.autograd.grad(ends, starts, pulls, allow_unused=True)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dictionaries."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def _seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)


def _under(prefix: str, counts: Counter[str]) -> list[str]:
    return [name.removeprefix(prefix) for name in counts if name.startswith(prefix)]


class _Carrier:
    """Copies a sample; a tensor that occurs twice is copied once, to preserve sharing."""

    def __init__(self, put: Put, device: torch.device) -> None:
        self.put, self.device = put, device
        self.seen: dict[int, Any] = {}

    def __call__(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor | torch.Generator):
            if id(tree) not in self.seen:
                self.seen[id(tree)] = self._copy(tree)
            return self.seen[id(tree)]
        if isinstance(tree, dict):
            return {key: self(value) for key, value in tree.items()}
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*map(self, tree))
        if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
            return type(tree)(map(self, tree))
        if isinstance(tree, slice):
            return slice(self(tree.start), self(tree.stop), self(tree.step))
        if isinstance(tree, torch.device) or (isinstance(tree, str) and tree in ("cpu", "cuda")):
            return self.device
        return tree

    def _copy(self, thing: Any) -> Any:
        if isinstance(thing, torch.Generator):
            generator = torch.Generator(thing.device)
            generator.set_state(thing.get_state())
            return generator
        copy = self._strided_copy(thing.detach())
        return copy.requires_grad_(thing.requires_grad)

    def _strided_copy(self, tensor: torch.Tensor) -> Any:
        """Preserve holes and overlaps, which a copy would remove, by a view of copied memory."""
        strided = tensor.layout is torch.strided
        if not strided or torch.empty_like(tensor).stride() == tensor.stride():
            return self.put(tensor)
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone())
        window = (tensor.size(), tensor.stride(), tensor.storage_offset())
        return self.put(memory).as_strided(*window)
