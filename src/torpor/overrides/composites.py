"""Composite ops that torch implements differently on the device `lazy` than on the CPU or a GPU.

torch selects the implementation of a few composite ops by device type, and for `lazy` selects the
one its C++ lazy tensors need. Results would differ from eager's on the physical device in the last
bit, so these ops use the physical device's implementation here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch
from torpor.backend.native_library import NATIVE
from torpor.frontend.devices import lazy_device
from torpor.ops.spec import spec_of
from torpor.overrides.eager import count_sync, run_eager
from torpor.overrides.special import record_to_copy
from torpor.trace.dispatch import special
from torpor.trace.recorder import make_recorder
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import physical
from torpor.trace.wrap import plain_copy, wrap_plainly

aten = torch.ops.aten
_library = torch.library.Library("aten", "IMPL")


class _Elsewhere(torch.autograd.Function):
    """The same data on another device, differentiable: the gradient moves back."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.device = inputs[0].device
        ctx.to = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _moved(grad, ctx.device), None


class Physical(_Elsewhere):
    """The same data on the physical device, as a tensor that torch treats as ordinary there.

    It is still lazy, but where torch checks a tensor's backend, it finds the device's.
    """

    @staticmethod
    def forward(tensor: LazyTensor, device: torch.device) -> Any:
        there: Any = tensor if tensor.device == device else record_to_copy(tensor, device=device)
        return wrap_plainly(there)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: Any) -> Any:
        return _physical(tangent, ctx.to)


_physical: Callable[[Any, torch.device], Any] = Physical.apply


class Moved(_Elsewhere):
    """The same data on another device, still lazy: from the physical to the virtual one."""

    @staticmethod
    def forward(tensor: torch.Tensor, device: torch.device) -> Any:
        return record_to_copy(tensor, device=device)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: Any) -> Any:
        return _moved(tangent, ctx.to)


_move: Callable[[Any, torch.device], Any] = Moved.apply


def _moved(tensor: Any, device: torch.device) -> Any:
    return tensor if tensor.device == device else _move(tensor, device)


def _each(change: Callable[[Any, torch.device], Any], things: Any, device: torch.device) -> Any:
    return _torch.tree_map(lambda t: change(t, device) if isinstance(t, LazyTensor) else t, things)


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on the physical device; keeps `requires_grad`, which torch may check."""
    there = _physical(tensor, device)
    if tensor.requires_grad and not torch.is_grad_enabled():
        there.requires_grad_()
    return there  # type: ignore[no-any-return]  # what `Physical` makes


class _Plainly(torch.autograd.Function):
    """The same tensors with only their device's dispatch keys, as one autograd node."""

    @staticmethod
    def forward(ctx: Any, *tensors: LazyTensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(map(wrap_plainly, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


_plainly: Callable[..., Any] = _Plainly.apply


def _stand_ins(things: Any) -> Any:
    """`things` with stand-ins for lazy tensors that are on the physical device already."""
    found = {id(t): t for t in _torch.tree_leaves(things) if isinstance(t, LazyTensor)}
    needing = [t for t in found.values() if t.requires_grad]
    made = {key: wrap_plainly(t) for key, t in found.items() if not t.requires_grad}
    if torch.is_grad_enabled():
        others = _plainly(*needing) if needing else ()
    else:
        others = [wrap_plainly(t).requires_grad_() for t in needing]
    made |= {id(t): other for t, other in zip(needing, others, strict=True)}
    return _torch.tree_map(lambda thing: made.get(id(thing), thing), things)


def physically(op: Any, tensor: torch.Tensor, args: tuple[Any, ...], **kwargs: Any) -> Any:
    """`op` as implemented on the physical device."""
    if tensor.device.type != "lazy" and not _torch.is_differentiating_forward():
        args, kwargs = _stand_ins((args, kwargs))
        return taken_apart(op, *args, **kwargs)
    args, kwargs = _each(_stand_in, (args, kwargs), physical(tensor.device))
    return _each(_moved, taken_apart(op, *args, **kwargs), tensor.device)


EAGER_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, LazyTensor)


def taken_apart(op: Any, *args: Any, **kwargs: Any) -> Any:
    """`op` decomposed as in eager; a compiler's own tensors get the decomposition made for them."""
    tensors = [t for t in _torch.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if all(type(t) in EAGER_TYPES for t in tensors):
        return _torch.take_apart(op, *args, **kwargs)
    return op.decompose(*args, **kwargs)


def override(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function the implementation of `op` on the device `lazy`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(op, function, "AutogradLazy")

        @special(str(op))
        def whole(*args: Any, **kwargs: Any) -> Any:  # inference tensors bypass autograd keys
            return function(*args, **kwargs)

        return function

    return register


@override(aten.dropout.default)
def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """One draw, one scaled mask, one product; off the CPU, one fused kernel."""
    fused = physical(input.device).type != "cpu"
    if fused and train and 0 < p < 1 and input.numel():
        return aten.native_dropout.default(input, p, train)[0]  # type: ignore[no-any-return]  # ops have no types
    if p < 0 or p > 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    noise = torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
    return input * noise


_choices: dict[tuple[Any, ...], int] = {}


@override(aten.scaled_dot_product_attention.default)
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
    """Attention with the kernel that the physical device would choose."""
    if attn_mask is None and not enable_gqa:
        kind = physical(query.device).type
        choice = _choice(kind, (query, key, value), dropout_p, is_causal, scale)
        fused = _FUSED.get((kind, choice))
        if fused is not None:
            given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return _attend(*fused(given[:3], dropout_p, is_causal, scale), given)
    if _torch.CAPTURING.on:
        raise RuntimeError("attention on the device `lazy` with a mask, groups or dropout")
    return physically(  # type: ignore[no-any-return]  # ops have no types
        aten.scaled_dot_product_attention.default, query,
        (query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


def _choice(
    kind: str, tensors: tuple[torch.Tensor, ...], p: float, causal: bool, scale: float | None
) -> int:
    """The kernel that a device chooses for such tensors; -1 leaves it to torch."""
    if kind == "cpu" and p != 0.0:
        return -1
    known = (
        kind, *((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors),
        p, causal, torch.is_grad_enabled(), _torch.attention_switches(),
    )  # fmt: skip
    choice = _choices.get(known)
    if choice is None:
        if len(_choices) > 1024:
            _choices.clear()
        choice = _choices[known] = _choose(kind, tensors, p, causal, scale)
    return choice


def _choose(
    kind: str, tensors: tuple[torch.Tensor, ...], p: float, causal: bool, scale: float | None
) -> int:
    with _torch.without_modes():  # fake tensors would change the choice
        query, key, value = map(_real, tensors)
        choice = _torch.attention_choice(query, key, value, p, causal, scale)
    padded = query.shape[-1] % 8 or value.shape[-1] != query.shape[-1]
    return -1 if padded and kind != "cpu" else choice


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the metadata of `tensor`."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=physical(tensor.device),
        requires_grad=tensor.requires_grad,
    )  # fmt: skip


Tensors = tuple[torch.Tensor, ...]
Call = tuple[Any, tuple[Any, ...]]
"""An op and its arguments; ints are positions among the arguments of attention itself."""


def _attend(op: Any, parts: tuple[Any, ...], given: tuple[Any, ...]) -> torch.Tensor:
    """Call `op` instead of attention; tells the native library to do so from now on."""
    if NATIVE.library is not None:
        NATIVE.library.choose(given, op._schema.name, op._schema.overload_name, parts)
    bound = [given[part] if type(part) is int else part for part in parts]
    positional, keywords = spec_of(op).call_arguments(bound)
    return op(*positional, **keywords)[0]  # type: ignore[no-any-return]  # ops have no types


def _flash_on_cpu(tensors: Tensors, p: float, causal: bool, scale: float | None) -> Call:
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    return op, (0, 1, 2, 0.0, causal, None, scale)


def _flash_on_cuda(tensors: Tensors, p: float, causal: bool, scale: float | None) -> Call:
    scale = 1.0 / math.sqrt(tensors[0].shape[-1]) if scale is None else scale
    return aten._scaled_dot_product_flash_attention.default, (0, 1, 2, p, causal, False, scale)


def _cudnn(tensors: Tensors, p: float, causal: bool, scale: float | None) -> Call:
    backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    op = aten._scaled_dot_product_cudnn_attention.default
    return op, (0, 1, 2, None, backward, p, causal, False, scale)


_FUSED = {("cpu", 1): _flash_on_cpu, ("cuda", 1): _flash_on_cuda, ("cuda", 3): _cudnn}
"""By device and the number of the chosen kernel; other kernels are left to torch."""


@override(aten.group_norm.default)
def group_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Group norm, preserving the input's memory format where the physical device does."""
    op = aten.group_norm.default
    if input.device.type == "lazy" and not input.is_contiguous():
        return physically(op, input, (input, *args), **kwargs)  # type: ignore[no-any-return]
    return taken_apart(op, input, *args, **kwargs)  # type: ignore[no-any-return]


@override(aten.ctc_loss.Tensor)
def ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, lengths: Any, target_lengths: Any, *args: Any
) -> torch.Tensor:
    """Lengths may be on the CPU, as with a GPU, where eager reads them."""
    places = lengths.to(log_probs.device), target_lengths.to(log_probs.device)
    return taken_apart(aten.ctc_loss.Tensor, log_probs, targets, *places, *args)  # type: ignore[no-any-return]


@override(aten.set_.source_Tensor_storage_offset)
def set_(
    self: torch.Tensor, source: torch.Tensor, offset: int, size: Any, stride: Any = ()
) -> torch.Tensor:
    """torch would access the wrapper's memory; use the lazy storage's instead."""
    offset += int(source.storage_offset())
    return self.set_(source.untyped_storage(), offset, size, tuple(stride))


def _casts_inside(op: Any) -> None:
    """Run an op immediately under autocast, because its kernel calls other ops through autocast."""
    spec = spec_of(op)

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _torch.below_autograd():
            if not torch.is_autocast_enabled(tensor.device.type):
                return op(tensor, *args, **kwargs)
            count_sync(spec)
            with _torch.without_modes():
                return run_eager(spec, (tensor, *args), kwargs)

    _library.impl(op, run, "AutogradLazy")


_casts_inside(aten._transformer_encoder_layer_fwd.default)
_casts_inside(aten._native_multi_head_attention.default)


def on_cpu(tensor: LazyTensor) -> torch.Tensor:
    """The data of a tensor that torch reads on the CPU, whatever device the rest is on."""
    with _torch.without_modes():
        return plain_copy(tensor).cpu()


def _tensor_split(
    self: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0
) -> list[torch.Tensor]:
    """Split points are read on the CPU by torch, so they are made plain."""
    places = tensor_indices_or_sections
    if type(places) is LazyTensor:
        places = on_cpu(places)
    op = aten.tensor_split.tensor_indices_or_sections
    return taken_apart(op, self, places, dim)  # type: ignore[no-any-return]  # ops have no types


_library.impl(aten.tensor_split.tensor_indices_or_sections, _tensor_split, "AutogradLazy")


def _only_numbers(op: Any, compute: Callable[..., Any]) -> None:
    """For an op that can skip the vectors if no gradient needs them.

    torch assumes that tensor subclasses need a gradient, and computes the vectors too, using an
    algorithm with different last bits.
    """

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        differentiable = tensor.requires_grad and torch.is_grad_enabled()
        if type(tensor) is LazyTensor and not differentiable and not _torch.has_tangent(tensor):
            return compute(tensor, *args, **kwargs)
        return taken_apart(op, tensor, *args, **kwargs)

    _library.impl(op, run, "AutogradLazy")


def _svdvals(tensor: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    return aten._linalg_svd.default(tensor, False, False, driver=driver)[1]  # type: ignore[no-any-return]  # ops have no types


def _eigvalsh(tensor: torch.Tensor, UPLO: str = "L") -> torch.Tensor:
    return aten._linalg_eigh.default(tensor, UPLO, False)[0]  # type: ignore[no-any-return]  # ops have no types


_only_numbers(aten.linalg_svdvals.default, _svdvals)
_only_numbers(aten.linalg_eigvalsh.default, _eigvalsh)


def expanded_batch(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` expanded to the batch of `other`, as eager passes it to `bmm`.

    For a tensor subclass torch drops a batch dimension of 1 and calls `mm`: different last bits.
    """
    one = tensor.dim() == other.dim() == 3 and tensor.shape[0] == 1 != other.shape[0]
    return tensor.expand(other.shape[0], -1, -1) if one and not tensor.requires_grad else tensor


def _matmul_out(self: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """torch checks whether tensors share memory, which wrappers cannot answer."""
    if not any(type(t) is LazyTensor for t in (self, other, out)):
        return taken_apart(aten.matmul.out, self, other, out=out)  # type: ignore[no-any-return]
    self, other = expanded_batch(self, other), expanded_batch(other, self)
    try:
        return taken_apart(aten.matmul.out, self, other, out=out)  # type: ignore[no-any-return]
    except RuntimeError as error:
        # it has written to a view of `out`, does not see that they alias, and tries to copy
        if "[aten.copy_.default]" not in str(error):
            raise
        return out


_library.impl(aten.matmul.out, _matmul_out, "AutogradLazy")


def _write_out(packet: Any) -> None:
    """For ops whose `out=` variants lose their result if an argument is a tensor subclass."""
    forms = [getattr(packet, name) for name in packet.overloads()]
    for form in forms:
        names = [a.name for a in form._schema.arguments]
        if names[-1] != "out":
            continue
        plain_form = next(f for f in forms if [a.name for a in f._schema.arguments] == names[:-1])
        _library.impl(form, _computing(form, plain_form), "AutogradLazy")


def _computing(form: Any, plain_form: Any) -> Callable[..., Any]:
    def run(*args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
        if not any(type(t) is LazyTensor for t in (*args, out)):
            return taken_apart(form, *args, out=out, **kwargs)
        result = plain_form(*args, **kwargs)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run


_write_out(aten.linalg_matrix_rank)


def _recorded_whole(op: Any) -> None:
    """For an op whose decomposition for tensor subclasses lacks eager's checks.

    It is recorded as one node, which the physical device decomposes itself, checks included.
    """

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is not LazyTensor:
            return taken_apart(op, tensor, *args, **kwargs)
        with _torch.below_autograd():
            return op(tensor, *args, **kwargs)

    _library.impl(op, run, "AutogradLazy")


_recorded_whole(aten.one_hot.default)


def _max_pool1d(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """For tensor subclasses torch calls another kernel, which also accepts integers."""
    op = aten.max_pool1d.default
    if type(self) is LazyTensor and not self.is_floating_point():
        like = torch.zeros(self.shape, dtype=self.dtype, device=physical(self.device))
        with _torch.kernels():
            _torch.take_apart(op, like, *args, **kwargs)  # or raise like eager
    return taken_apart(op, self, *args, **kwargs)


_library.impl(aten.max_pool1d.default, _max_pool1d, "AutogradLazy")


@special("aten.one_hot.default")
def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """One column per class; their number may have to be read from the data."""
    if num_classes > 0:
        return _record_one_hot(tensor, num_classes)
    spec = spec_of(aten.one_hot.default)
    count_sync(spec)
    return run_eager(spec, (tensor, num_classes), {})


_record_one_hot = make_recorder(spec_of(aten.one_hot.default))


@special("aten.to.dtype_layout")
def _to(self: torch.Tensor, *, device: torch.device | None = None, **kwargs: Any) -> Any:
    """torch treats `lazy` and `lazy:0` as different devices, and would copy."""
    if device is not None and device.type == "lazy":
        device = lazy_device(device)
    return taken_apart(aten.to.dtype_layout, self, device=device, **kwargs)


_library.impl(aten.to.dtype_layout, _to, "AutogradLazy")
