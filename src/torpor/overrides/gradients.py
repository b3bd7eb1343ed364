"""Gradients that torch computes differently for tensor subclasses than for plain tensors.

A few of autograd's formulas depend on the data (are there zeros? what is masked?) or write in
place; for tensor subclasses they use another formula, with different last bits or strides. Here
they are computed immediately in backward, on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torpor import _torch
from torpor.execute import sync
from torpor.ops.spec import spec_of
from torpor.overrides.eager import count_sync, wrap_result
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import clone_plain, plain, wrap_data

aten = torch.ops.aten
_libraries = {name: torch.library.Library(name, "IMPL") for name in ("aten", "torch_nn")}


def _is_ordinary(*tensors: torch.Tensor) -> bool:
    """Reverse-mode differentiation of lazy tensors, with no other transform active."""
    return (
        any(type(t) is LazyTensor for t in tensors)
        and torch.is_grad_enabled()
        and not _torch.is_transforming()
        and not any(map(_torch.has_tangent, tensors))
    )


# -- formulas that need all tensors and the result -------------------------------------------------


class EagerGradient(torch.autograd.Function):
    """An op whose gradients are computed by eager's own formula, on plain tensors.

    For higher-order derivatives, torch's formula for tensor subclasses is used.
    """

    @staticmethod
    def forward(ctx: Any, op: Any, formula: Any, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.op, ctx.formula, ctx.kwargs = op, formula, kwargs
        ctx.rest = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        output = op(*args, **kwargs)
        ctx.save_for_backward(*(args[place] for place in ctx.places), output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        tensors = ctx.saved_tensors[:-1]
        wanted = [place for place in ctx.places if ctx.needs_input_grad[place + 3]]
        if torch.is_grad_enabled():
            found = _gradients(ctx, ctx.formula, tensors, wanted, grad)
        else:
            found = _on_numbers(ctx, tensors, wanted, grad)
        results: list[Any] = [None] * len(ctx.needs_input_grad)
        for place, gradient in zip(wanted, found, strict=True):
            results[place + 3] = gradient
        return tuple(results)


def _gradients(
    ctx: Any, run: Any, tensors: Sequence[torch.Tensor], wanted: list[int], grad: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Autograd's gradients of `run`; differentiable if autograd is on."""
    again = torch.is_grad_enabled()
    args = list(ctx.rest)
    for place, tensor in zip(ctx.places, tensors, strict=True):
        args[place] = tensor
    with torch.enable_grad():
        output = run(*args, **ctx.kwargs)
        inputs = [args[place] for place in wanted]
        return torch.autograd.grad(output, inputs, grad, create_graph=again, allow_unused=True)


def _on_numbers(
    ctx: Any, tensors: Sequence[torch.Tensor], wanted: list[int], grad: torch.Tensor
) -> list[torch.Tensor | None]:
    """Eager's gradients, computed on plain tensors."""
    count_sync(spec_of(ctx.op))
    with _torch.without_modes():
        reals = [_real(t).requires_grad_(t.requires_grad) for t in tensors]
        found = _gradients(ctx, ctx.op, reals, wanted, _real(grad))
        sync.rest()
        return [None if g is None else wrap_result(g, grad.device) for g in found]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor).detach() if isinstance(tensor, LazyTensor) else tensor.detach()


def _from_numbers(op: Any, key: str) -> Any:
    original = _torch.kernel(op, key)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        def formula(*args: Any, **kwargs: Any) -> Any:
            return original(keys, *args, **kwargs)

        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if any(t.requires_grad for t in tensors) and _is_ordinary(*tensors):
            return _differentiable(op, formula, kwargs, *args)
        return formula(*args, **kwargs)

    return run


_differentiable: Callable[..., Any] = EagerGradient.apply


# -- masked_fill: the gradient of the value depends on the mask's data -----------------------------


class MaskedFill(torch.autograd.Function):
    """`masked_fill` with a value that needs a gradient, summed in eager's order."""

    @staticmethod
    def forward(ctx: Any, self: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
        ctx.save_for_backward(mask)
        return self.masked_fill(mask, value)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (mask,) = ctx.saved_tensors
        rest = grad.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        return rest, None, grad.masked_select(mask).sum()


_differentiable_masked_fill: Callable[..., Any] = MaskedFill.apply


def _masked_fill(op: Any, key: str) -> Any:
    original = _torch.kernel(op, key)

    def run(keys: Any, self: Any, mask: torch.Tensor, value: torch.Tensor) -> Any:
        if value.requires_grad and _is_ordinary(self, mask, value):
            return _differentiable_masked_fill(self, mask, value)
        return original(keys, self, mask, value)

    return run


def _masked_fill_(op: Any, key: str) -> Any:
    original = _torch.kernel(op, key)

    def run(keys: Any, self: Any, mask: torch.Tensor, value: torch.Tensor) -> Any:
        if value.requires_grad and _is_ordinary(self, mask, value):
            filled = self.masked_fill(mask, value)
            if filled.shape == self.shape:
                return self.copy_(filled)
        return original(keys, self, mask, value)

    return run


# -- gradients that come back as plain tensors -----------------------------------------------------


class LazyGradient(torch.autograd.Function):
    """The identity; its gradient is converted to a lazy tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        ctx.device = tensor.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if isinstance(grad, LazyTensor) or grad.layout is not torch.strided:
            return grad
        with _torch.without_modes():
            return wrap_data(clone_plain(grad), ctx.device)


_lazy_gradient: Callable[[torch.Tensor], torch.Tensor] = LazyGradient.apply


def _leaves(op: Any, key: str) -> Any:
    original = _torch.kernel(op, key)

    def enter(arg: Any) -> Any:
        is_lazy = type(arg) is LazyTensor and arg.requires_grad
        return _lazy_gradient(arg) if is_lazy and _is_ordinary(arg) else arg

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return original(keys, *map(enter, args), **kwargs)

    return run


def _replace(op: Any, make: Callable[[Any, str], Any]) -> None:
    """Register the result of `make` as the autograd kernel of `op` for lazy tensors."""
    key = "AutogradLazy"
    _libraries[op.namespace].impl(op, make(op, key), key, with_keyset=True)


def keep_lazy(op: Any) -> None:
    """Keep gradients lazy for an op whose result or backward uses plain tensors."""
    _replace(op, _leaves)


_replace(aten.prod.default, _from_numbers)  # depends on zeros
_replace(aten.prod.dim_int, _from_numbers)
_replace(aten.ormqr.default, _from_numbers)  # writes in place
_replace(aten.masked_fill.Tensor, _masked_fill)
_replace(aten.masked_fill_.Tensor, _masked_fill_)
for _packet in (
    aten._to_sparse, aten._to_sparse_csr, aten._to_sparse_csc, aten._to_sparse_bsr,
    aten._to_sparse_bsc,
):  # fmt: skip
    keep_lazy(_packet.default)
keep_lazy(aten._to_sparse.sparse_dim)
