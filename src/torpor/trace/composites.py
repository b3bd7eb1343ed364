"""Composite ops that torch computes differently on the device `lazy` than on the CPU or a GPU.

torch chooses the form of a few composite ops by device type, and for `lazy` it chooses the one
its C++ lazy tensors want. The numbers would differ from eager's on the physical device in the
last bit, so these ops take the physical device's form here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch
from torpor.trace.dispatch import special
from torpor.trace.special import record_to_copy
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import physical
from torpor.trace.wrap import plain_copy

aten = torch.ops.aten
_library = torch.library.Library("aten", "IMPL")


class Retyped(torch.autograd.Function):
    """The same numbers on the physical device, still lazy, or back on the virtual one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, device: torch.device) -> Any:
        return record_to_copy(tensor, device=device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.device = inputs[0].device
        ctx.to = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _retyped(grad, ctx.device), None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: Any) -> Any:
        return _retyped(tangent, ctx.to)


_retyped: Callable[[Any, torch.device], Any] = Retyped.apply


def _retype(things: Any, device: torch.device) -> Any:
    def one(thing: Any) -> Any:
        if isinstance(thing, LazyTensor) and thing.device != device:
            return _retyped(thing, device)
        return thing

    return _torch.tree_map(one, things)


def _physically(op: Any, tensor: torch.Tensor, args: tuple[Any, ...], **kwargs: Any) -> Any:
    """`op` in the form it has on the physical device."""
    there = physical(tensor.device)
    args, kwargs = _retype((args, kwargs), there)
    return _retype(op(*args, **kwargs), tensor.device)


def _override(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function what `op` means on the device `lazy`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(op, function, "AutogradLazy")

        @special(str(op))
        def whole(*args: Any, **kwargs: Any) -> Any:  # inference tensors bring it to us whole
            leaves = _torch.tree_leaves((args, kwargs))
            if any(isinstance(t, torch.Tensor) and t.device.type == "lazy" for t in leaves):
                return function(*args, **kwargs)
            return op.decompose(*args, **kwargs)

        return function

    return register


@_override(aten.dropout.default)
def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout as the CPU computes it: one draw, one scaled mask, one product."""
    if physical(input.device).type != "cpu":
        return aten.native_dropout.default(input, p, train)[0]  # type: ignore[no-any-return]  # ops have no types
    if p < 0 or p > 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    noise = torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
    return input * noise


_FLASH = 1
_choices: dict[tuple[Any, ...], int] = {}


@_override(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the kernel the physical device would choose."""
    simple = attn_mask is None and not enable_gqa and dropout_p == 0.0
    if simple and _choice(query, key, value, is_causal, scale) == _FLASH:
        return aten._scaled_dot_product_flash_attention_for_cpu.default(  # type: ignore[no-any-return]  # ops have no types
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
    return _physically(  # type: ignore[no-any-return]  # ops have no types
        aten.scaled_dot_product_attention.default, query,
        (query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


def _choice(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> int:
    """Which kernel the CPU chooses for tensors like these; -1 on other devices."""
    if physical(query.device).type != "cpu":
        return -1
    tensors = (query, key, value)
    known = (
        *((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors),
        causal, torch.is_grad_enabled(), _torch.attention_switches(),
    )  # fmt: skip
    choice = _choices.get(known)
    if choice is None:
        choice = _torch.attention_choice(
            _on_cpu(query), _on_cpu(key), _on_cpu(value), causal, scale
        )
        if len(_choices) > 1024:
            _choices.clear()
        _choices[known] = choice
    return choice


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor that looks like `tensor`."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu",
        requires_grad=tensor.requires_grad,
    )  # fmt: skip


def _recurrent(op: Any) -> None:
    """A recurrent network in the physical device's form: fused kernels, or its order of steps."""

    @_override(op)
    def run(input: torch.Tensor, *args: Any) -> Any:
        return _physically(op, input, (input, *args))


for _packet in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
    _recurrent(_packet.input)
    _recurrent(_packet.data)


def _tensor_split(
    self: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0
) -> list[torch.Tensor]:
    """The places to split at are numbers; torch reads them from a plain tensor on the CPU."""
    places = tensor_indices_or_sections
    if type(places) is LazyTensor:
        places = plain_copy(places).cpu()
    op = aten.tensor_split.tensor_indices_or_sections
    return op.decompose(self, places, dim)  # type: ignore[no-any-return]  # torch leaves it untyped


for _key in ("AutogradLazy", "AutogradCPU", "AutogradCUDA"):
    _library.impl(aten.tensor_split.tensor_indices_or_sections, _tensor_split, _key)


def _only_numbers(op: Any, compute: Callable[..., Any]) -> None:
    """An op that skips the vectors where no gradient needs them.

    torch takes every tensor subclass for one that might need a gradient, and computes the vectors
    with another algorithm, whose last bits differ.
    """

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        differentiable = tensor.requires_grad and torch.is_grad_enabled()
        if type(tensor) is LazyTensor and not differentiable and not _torch.has_tangent(tensor):
            return compute(tensor, *args, **kwargs)
        return op.decompose(tensor, *args, **kwargs)

    for key in ("AutogradLazy", "AutogradCPU", "AutogradCUDA"):
        _library.impl(op, run, key)


def _svdvals(tensor: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    return aten._linalg_svd.default(tensor, False, False, driver=driver)[1]  # type: ignore[no-any-return]  # ops have no types


def _eigvalsh(tensor: torch.Tensor, UPLO: str = "L") -> torch.Tensor:
    return aten._linalg_eigh.default(tensor, UPLO, False)[0]  # type: ignore[no-any-return]  # ops have no types


_only_numbers(aten.linalg_svdvals.default, _svdvals)
_only_numbers(aten.linalg_eigvalsh.default, _eigvalsh)


def _matmul_out(self: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """torch asks whether two tensors share memory, which wrappers cannot tell it."""
    if not any(type(t) is LazyTensor for t in (self, other, out)):
        return aten.matmul.out.decompose(self, other, out=out)  # type: ignore[no-any-return]
    try:
        return aten.matmul.out.decompose(self, other, out=out)  # type: ignore[no-any-return]
    except RuntimeError as error:
        # it has written to a view of `out`, found no shared memory, and tries to copy
        if "[aten.copy_.default]" not in str(error):
            raise
        return out


for _key in ("AutogradLazy", "AutogradCPU", "AutogradCUDA"):
    _library.impl(aten.matmul.out, _matmul_out, _key)


def _write_out(packet: Any) -> None:
    """An op whose `out=` forms lose their result when a tensor subclass is among the arguments."""
    forms = [getattr(packet, name) for name in packet.overloads()]
    for form in forms:
        names = [a.name for a in form._schema.arguments]
        if names[-1] != "out":
            continue
        plain_form = next(f for f in forms if [a.name for a in f._schema.arguments] == names[:-1])
        _library.impl(form, _computing(form, plain_form), "AutogradLazy")
        _library.impl(form, _computing(form, plain_form), "AutogradCPU")


def _computing(form: Any, plain_form: Any) -> Callable[..., Any]:
    def run(*args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
        if not any(type(t) is LazyTensor for t in (*args, out)):
            return form.decompose(*args, out=out, **kwargs)
        result = plain_form(*args, **kwargs)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run


_write_out(aten.linalg_matrix_rank)
