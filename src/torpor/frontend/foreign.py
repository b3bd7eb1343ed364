"""Entry points of torch that bypass the dispatcher get plain tensors, with one warning.

`torch.export`, `torch.jit.trace`, `torch.cond` and the like trace a function or access memory
directly. `ENTRIES` lists them; `Plainly` converts their arguments to plain tensors, and the tensors
they return are made lazy again. Gradients flow in both directions.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from torpor import _torch, metrics
from torpor.execute import sync
from torpor.frontend.mode import LazyMode
from torpor.observe.site import site, warn_once
from torpor.overrides.eager import wrap_result
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import is_traceable, plain_copy


def in_mode() -> bool:
    """Whether `LazyMode` is active on this thread."""
    return any(isinstance(mode, LazyMode) for mode in _torch.modes())


# -- tensors -----------------------------------------------------------------------------------


class _Leave(torch.autograd.Function):
    """Lazy to plain in forward; its gradient plain to lazy."""

    @staticmethod
    def forward(ctx: Any, tensor: LazyTensor) -> Any:
        ctx.device = tensor.device
        return plain_copy(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return as_lazy(grad, ctx.device)


class _LazyAgain(torch.autograd.Function):
    """Plain to lazy in forward; its gradient lazy to plain."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> Any:
        return wrap_result(tensor.detach(), device)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return as_plain(grad), None


_leave: Callable[[torch.Tensor], torch.Tensor] = _Leave.apply
_enter: Callable[[torch.Tensor, torch.device], torch.Tensor] = _LazyAgain.apply


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of a lazy tensor, differentiable."""
    if not isinstance(tensor, LazyTensor):
        return tensor
    with _torch.without_modes():
        if tensor.requires_grad and torch.is_grad_enabled():
            return _leave(tensor)
        return plain_copy(tensor)


def as_lazy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A lazy tensor on `device` from a plain one, differentiable."""
    if isinstance(tensor, LazyTensor) or not is_traceable(tensor):
        return tensor
    with _torch.without_modes():
        if tensor.requires_grad and torch.is_grad_enabled():
            return _enter(tensor, device)
        return wrap_result(tensor.detach(), device)


# -- finding tensors in values -------------------------------------------------------------------


def lazy_tensors(thing: Any, depth: int = 4) -> Iterator[LazyTensor]:
    """The lazy tensors reachable from a value: in containers, modules, closures."""
    for leaf in _torch.tree_leaves(thing):
        if isinstance(leaf, torch.Tensor):
            if isinstance(leaf, LazyTensor):
                yield leaf
        elif depth and leaf is not None:
            for part in _parts(leaf):
                yield from lazy_tensors(part, depth - 1)


def _parts(thing: Any) -> list[Any]:
    """The values inside one that is neither a tensor nor a container."""
    if isinstance(thing, torch.nn.Module):
        return [table[name] for table, name in tensors_of(thing)]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, MethodType):
        return [thing.__self__]
    if isinstance(thing, FunctionType):
        return [*_cells(thing).values(), *_globals(thing).values(), *(thing.__defaults__ or ())]
    return list(vars(thing).values()) if _is_torchs_own(thing) else []


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    """Where a module and its submodules keep tensors: parameters, buffers, attributes.

    Expects nothing of `__init__`, which may still be running. Nothing for TorchScript modules.
    """
    waiting, met = [module], {id(module)}
    while waiting:
        part = vars(waiting.pop())
        for table in (part.get("_parameters", {}), part.get("_buffers", {}), part):
            if isinstance(table, dict):
                names = [name for name, value in table.items() if isinstance(value, torch.Tensor)]
                yield from ((table, name) for name in names)
        inner = part.get("_modules", {})
        new = [m for m in inner.values() if m is not None and id(m) not in met]
        met.update(map(id, new))
        waiting.extend(new)


def _cells(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_set(cell)}


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if empty
    except ValueError:
        return False
    return True


def _globals(function: FunctionType) -> dict[str, LazyTensor]:
    """Lazy tensors that a function refers to by global names."""
    found = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    return {name: value for name, value in found if isinstance(value, LazyTensor)}


def _is_torchs_own(thing: Any) -> bool:
    """Whether it is an object of torch.nn, such as a block mask of flex attention."""
    return type(thing).__module__.startswith("torch.nn.") and hasattr(thing, "__dict__")


class Plainly:
    """Converts arguments to plain ones, and the tensors of modules for the duration of a block.

    Each lazy tensor is read once. With `copies`, parameters stay parameters, as the result will
    hold them. Otherwise the conversion is differentiable.
    """

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies
        self.known: dict[int, tuple[Any, Any]] = {}  # by id; keeps the objects alive
        self.swapped: list[tuple[MutableMapping[str, Any], str, Any]] = []

    def __enter__(self) -> Plainly:
        return self

    def __exit__(self, *_: object) -> None:
        for table, name, tensor in reversed(self.swapped):
            table[name] = tensor

    def __call__(self, thing: Any) -> Any:
        """`thing` with lazy tensors replaced by plain ones."""
        return _torch.tree_map(self._leaf, thing)

    def _leaf(self, leaf: Any) -> Any:
        if next(lazy_tensors(leaf), None) is None:
            return leaf
        if id(leaf) not in self.known:
            self.known[id(leaf)] = (leaf, leaf)  # a function may close over itself
            self.known[id(leaf)] = (leaf, self._convert(leaf))
        return self.known[id(leaf)][1]

    def _convert(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._copy(leaf) if self.copies else as_plain(leaf)
        if isinstance(leaf, torch.nn.Module):
            return self._module(leaf)
        if isinstance(leaf, functools.partial):
            return functools.partial(self(leaf.func), *self(leaf.args), **self(leaf.keywords))
        if isinstance(leaf, MethodType):
            return MethodType(leaf.__func__, self(leaf.__self__))
        return self._function(leaf) if isinstance(leaf, FunctionType) else self._object(leaf)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, LazyTensor), "asked for lazy ones only"
        with _torch.without_modes():
            made = plain_copy(tensor)
            if getattr(tensor, "_is_param", False):
                return torch.nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        for table, name in list(tensors_of(module)):
            if isinstance(tensor := table[name], LazyTensor):
                self.swapped.append((table, name, tensor))
                table[name] = self(tensor)
        return module

    def _function(self, function: FunctionType) -> FunctionType:
        """The same function with a converted closure, globals and defaults."""
        cells = [
            CellType(self(cell.cell_contents)) if _is_set(cell) else cell
            for cell in function.__closure__ or ()
        ]
        found = {name: self(value) for name, value in _globals(function).items()}
        names = {**function.__globals__, **found} if found else function.__globals__
        defaults = self(function.__defaults__)
        made = FunctionType(function.__code__, names, function.__name__, defaults, tuple(cells))
        made.__kwdefaults__ = self(function.__kwdefaults__)
        return made

    def _object(self, thing: Any) -> Any:
        made = copy.copy(thing)
        for name, value in vars(thing).items():
            object.__setattr__(made, name, self(value))
        return made


# -- entry points ------------------------------------------------------------------------------


class ForeignFunction(NamedTuple):
    """A function of torch that gets plain tensors instead of lazy ones."""

    name: str  # where torch defines it
    advice: str | None  # for the warning; None if plain tensors are what the user wants
    makes: bool = False  # whether it makes something that holds copies, such as a traced module


_PLAIN_FIRST = "its result holds plain copies of lazy parameters. To choose when they are made, "
_PLAIN_FIRST += "call it with `torpor.eager(copy.deepcopy(model))`"
_AT_ONCE = "it runs at once, and its results are lazy"
_CONTROL_FLOW = f"{_AT_ONCE}. Python's own `if` and `for` are recorded without it"

ENTRIES = (
    ForeignFunction("torch._higher_order_ops.cond.cond", _CONTROL_FLOW),
    ForeignFunction("torch._higher_order_ops.while_loop.while_loop", _CONTROL_FLOW),
    ForeignFunction("torch._higher_order_ops.scan.scan", _CONTROL_FLOW),
    ForeignFunction("torch._higher_order_ops.associative_scan.associative_scan", _CONTROL_FLOW),
    ForeignFunction("torch._higher_order_ops.map.map", _CONTROL_FLOW),
    ForeignFunction(
        "torch.nn.attention.flex_attention.flex_attention",
        f"{_AT_ONCE}. `scaled_dot_product_attention` is recorded",
    ),
    ForeignFunction("torch.export.export", _PLAIN_FIRST, makes=True),
    ForeignFunction("torch.export.draft_export", _PLAIN_FIRST, makes=True),
    ForeignFunction("torch.jit._trace.trace", _PLAIN_FIRST, makes=True),
    ForeignFunction("torch.jit._trace.trace_module", _PLAIN_FIRST, makes=True),
    ForeignFunction("torch.onnx.export", _PLAIN_FIRST, makes=True),
    ForeignFunction("torch.export.load", None, makes=True),
    ForeignFunction("torch.export.save", None, makes=True),
    ForeignFunction("torch.jit._serialization.load", None, makes=True),
    ForeignFunction("torch.utils.dlpack.to_dlpack", None, makes=True),
)
"""All entry points that get plain tensors."""


def fall_back_to_plain(entry: ForeignFunction, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called with plain tensors where it is given lazy ones."""
    is_compiling = torch.compiler.is_dynamo_compiling  # TorchDynamo treats it as a constant

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return function(*args, **kwargs)
        lazy = next(lazy_tensors((args, kwargs)), None)
        if lazy is None and not in_mode():
            return function(*args, **kwargs)
        if entry.advice is not None:
            tell_fallback(entry.name.rpartition(".")[2], entry.advice)
        device = torch.device("cpu") if lazy is None else lazy.device
        return run_plainly(function, args, kwargs, device, entry.makes)

    return call


def tell_fallback(name: str, advice: str) -> None:
    """Count a sync of the function's arguments, and warn the first time."""
    metrics.count_line(f"Sync::{name}", str(site()))
    warn_once(name, f"{name}: lazy tensors are computed and given to it as plain ones; {advice}")


def run_plainly(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    device: torch.device,
    makes: bool = False,
) -> Any:
    """Call `function` with plain tensors; returned tensors are made lazy, unless it `makes`.

    `device` is that of a lazy tensor among the arguments.
    """
    with Plainly(copies=makes) as plainly, _torch.without_dispatch_modes():
        args, kwargs = plainly((args, kwargs))
        sync.rest()
        result = function(*args, **kwargs)
    return result if makes else lazily(result, device)


def lazily(result: Any, device: torch.device) -> Any:
    """`result` with lazy tensors: on `device` if that is `lazy`, else on their own devices."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return as_lazy(leaf, device if device.type == "lazy" else leaf.device)

    return _torch.tree_map(convert, result)


def _before_ops(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """For higher-order ops that are called directly, for example by backward passes."""

    @functools.wraps(dispatch)
    def call(op: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        modes = _torch.modes()
        if (modes and not isinstance(modes[-1], LazyMode)) or _torch.is_transforming():
            return dispatch(op, key, *args, **kwargs)  # someone is tracing
        lazy = next(lazy_tensors((args, kwargs)), None)
        if lazy is None and not modes:
            return dispatch(op, key, *args, **kwargs)
        tell_fallback(op.name(), _AT_ONCE)
        device = torch.device("cpu") if lazy is None else lazy.device
        return run_plainly(op, args, kwargs, device)

    return call


# -- ops that eager decomposes -------------------------------------------------------------------


def _count_flops(counter: Any) -> None:
    """Register FLOP formulas for backward ops that torpor records undecomposed."""

    def flops(result: tuple[int, ...], inner: int, mask: Sequence[bool]) -> int:
        return 2 * math.prod(result) * inner * sum(mask[:2]) if len(result) > 1 else 0

    @counter.register_flop_formula(torch.ops.aten.linear_backward)  # type: ignore[untyped-decorator]  # torch's
    def linear_backward(input: Any, grad: Any, weight: Any, mask: Any, **_: Any) -> int:
        return flops(grad, input[-1], mask)

    @counter.register_flop_formula(torch.ops.aten.matmul_backward)  # type: ignore[untyped-decorator]  # torch's
    def matmul_backward(grad: Any, one: Any, other: Any, mask: Any, **_: Any) -> int:
        return flops(grad, one[-1], mask) if len(one) > 1 < len(other) else 0


def install() -> None:
    """Wrap the entry points, including those of modules not imported yet."""
    for entry in ENTRIES:
        _torch.replace_function(entry.name, functools.partial(fall_back_to_plain, entry))
    _torch.on_higher_order_op(_before_ops)
    _torch.after_import("torch.utils.flop_counter", _count_flops)
