"""Hand-written recorders: copies between devices, and ops that change a tensor's own sizes."""

from __future__ import annotations

from typing import Any

import torch

from torpor import _torch, metrics
from torpor.backend.registry import get_backend
from torpor.errors import UnsupportedError
from torpor.execute import sync
from torpor.execute.storage import LazyStorage
from torpor.frontend.storages import on_storage
from torpor.inference.strides import overlaps_in_part
from torpor.ir.types import TensorType, contiguous_strides
from torpor.observe.site import site
from torpor.ops.spec import spec_of
from torpor.overrides.eager import count_sync, writable, write_data
from torpor.overrides.grad_mode import mkldnn_rnn_layer_without_grad
from torpor.overrides.resize import memory_of, resize
from torpor.trace.dispatch import special
from torpor.trace.overlap import check_overlap
from torpor.trace.recorder import make_recorder
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import physical
from torpor.trace.wrap import become, plain, wrap_data, wrap_window

aten = torch.ops.aten

FOR_TRANSFER = "_torpor_for_transfer"
"""Marks a tensor that torch has just made as the destination of `plain.to("lazy")`."""

_record_copy = make_recorder(spec_of(aten.copy_.default))
record_to_copy = make_recorder(spec_of(aten._to_copy.default), may_leave=True)
_record_as_strided = make_recorder(spec_of(aten.as_strided.default))


# -- reads -------------------------------------------------------------------------------------


@special("aten._local_scalar_dense.default", "aten.item.default")
def item(tensor: LazyTensor) -> Any:
    """`x.item()`: waits for the number."""
    count_sync(spec_of(aten._local_scalar_dense.default))
    number = plain(tensor).item()
    sync.rest()
    return number


@special("aten._has_compatible_shallow_copy_type.default")
def has_compatible_shallow_copy_type(tensor: Any, other: Any) -> bool:
    """Whether `tensor.data = other` works in place: only between lazy tensors."""
    return isinstance(tensor, LazyTensor) and isinstance(other, LazyTensor)


@special("aten.is_pinned.default")
def is_pinned(tensor: LazyTensor, device: Any = None) -> bool:
    """False: a lazy tensor has no host memory to pin."""
    return False


@special("aten.mkldnn_rnn_layer.default")
def mkldnn_rnn_layer(*args: Any) -> Any:
    """Its kernel depends on the grad mode, which is not the same when the graph runs."""
    return (_record_rnn if torch.is_grad_enabled() else _record_rnn_without_grad)(*args)


_record_rnn = make_recorder(spec_of(aten.mkldnn_rnn_layer.default))
_record_rnn_without_grad = make_recorder(spec_of(mkldnn_rnn_layer_without_grad))


# -- copies ------------------------------------------------------------------------------------


@special("aten.copy_.default", usual=_record_copy)
def copy_(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """`target.copy_(source)`, where either may be lazy."""
    if not isinstance(target, LazyTensor):
        return target.copy_(plain(source))
    if not isinstance(source, LazyTensor):
        return _copy_in(target, source)
    if source.device != target.device:
        source = record_to_copy(source, device=target.device)
    elif source._lazy_storage is target._lazy_storage and source is not target:
        if TensorType.of_tensor(source) is TensorType.of_tensor(target):
            return target  # identical memory: eager does nothing
        _check_copy(target, source)
    return _record_copy(target, source, non_blocking)


def _check_copy(target: LazyTensor, source: LazyTensor) -> None:
    """Raise, like eager, for a copy between partially overlapping tensors."""
    one, other = TensorType.of_tensor(target), TensorType.of_tensor(source)
    if overlaps_in_part(one, other):
        check_overlap(spec_of(aten.copy_.default), (target, source, False))


def _copy_in(target: LazyTensor, source: torch.Tensor) -> LazyTensor:
    """Copy a plain tensor in: its data are copied now, as it may change later."""
    metrics.count("CreateLtcTensor")
    if target.__dict__.pop(FOR_TRANSFER, False):
        _take_strides(target, source)
    device = physical(target.device)
    if 0 in target.stride() and target.numel() > 1:
        return _record_copy(target, source)  # type: ignore[no-any-return]  # raises like eager
    real = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=device)
    with _torch.without_torch_function():
        real.copy_(source)
    write_data(target, real)
    return target


def _take_strides(target: LazyTensor, source: torch.Tensor) -> None:
    """Preserve dense strides in `x.to("lazy")`, like eager between devices."""
    type_ = TensorType.of_tensor(source, target.device).at_offset(0)
    if type_.is_dense and type_.shape == tuple(target.shape) and type_.stride != target.stride():
        real = torch.empty_strided(
            type_.shape, type_.stride, dtype=target.dtype, device=physical(target.device)
        )
        become(target, wrap_data(real, target.device))


@special("aten._to_copy.default", usual=record_to_copy)
def to_copy(
    tensor: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """`x.to(...)`: stays lazy between lazy devices, else becomes a plain tensor."""
    if device is not None and device.type == "lazy":
        device = torch.device("lazy", get_backend().backend_device(device).ordinal)
    if device is not None and device.type == "meta":
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device
        )
    if device is not None and tensor.device.type == "lazy" and device.type != "lazy":
        metrics.count_line("Sync::_to_copy", str(site()))
        real = plain(tensor)
        sync.rest()
        if real.device == device and memory_format in (None, torch.preserve_format):
            real = writable(real)  # not `real` itself, which belongs to the lazy tensor
            return real if dtype in (None, real.dtype) else real.to(dtype)
        with _torch.without_torch_function():
            return aten._to_copy.default(
                real, dtype=dtype, layout=layout, device=device, memory_format=memory_format
            )
    keywords = {"dtype": dtype, "layout": layout, "device": device, "memory_format": memory_format}
    return record_to_copy(tensor, **{k: v for k, v in keywords.items() if v is not None})


@special("aten._copy_from.default")
def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    """torch's internal op for copies across devices."""
    return copy_(target, source, non_blocking)


# -- a tensor's own sizes ------------------------------------------------------------------------


def _in_place_view(name: str, view: Any) -> None:
    @special(name)
    def record(tensor: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
        return become(tensor, make_view(tensor, *args, **kwargs))

    def make_view(*args: Any, **kwargs: Any) -> LazyTensor:
        return make_recorder(spec_of(view))(*args, **kwargs)  # type: ignore[no-any-return]  # a recorder


for _name, _view in {
    "aten.t_.default": aten.t.default,
    "aten.transpose_.default": aten.transpose.int,
    "aten.squeeze_.default": aten.squeeze.default,
    "aten.squeeze_.dim": aten.squeeze.dim,
    "aten.squeeze_.dims": aten.squeeze.dims,
    "aten.unsqueeze_.default": aten.unsqueeze.default,
}.items():
    _in_place_view(_name, _view)


@special("aten.detach_.default")
def detach_(tensor: LazyTensor) -> LazyTensor:
    """No-op: autograd does all of it."""
    return tensor


@special("aten.swapdims_.default", "aten.swapaxes_.default")
def swapdims_(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    """Alias of `transpose_`."""
    return become(tensor, make_recorder(spec_of(aten.transpose.int))(tensor, dim0, dim1))


@special("aten.as_strided.default", usual=_record_as_strided)
def as_strided(
    tensor: LazyTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> LazyTensor:
    """A view of the whole storage, whichever part `tensor` covers."""
    if not isinstance(tensor, LazyTensor):
        return _record_as_strided(tensor, size, stride, storage_offset)
    offset = int(tensor.storage_offset()) if storage_offset is None else storage_offset
    storage = memory_of(tensor)
    type_ = TensorType.of(
        tuple(size), tuple(stride), tensor.dtype, tensor.device, offset,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip
    too_large = type_.numel and type_.nbytes > storage.type.nbytes
    if too_large or offset < 0 or len(size) != len(stride):
        return _refuse_as_strided(storage, type_)
    is_all = tensor._lazy_view is None and storage is tensor._lazy_storage  # it has not grown
    if is_all and storage_offset is not None and type_ is not storage.type.concrete:
        return _record_as_strided(tensor, size, stride, offset)  # type: ignore[no-any-return]  # a recorder
    return wrap_window(storage, type_)


def _refuse_as_strided(storage: LazyStorage, type_: TensorType) -> LazyTensor:
    """Raise eager's error, by calling it on a tensor of the same storage size."""
    real = torch.empty(
        (storage.type.nbytes // type_.dtype.itemsize,), dtype=type_.dtype, device="cpu"
    )
    aten.as_strided.default(real, type_.shape, type_.stride, type_.offset)
    raise UnsupportedError(f"as_strided of {type_!r} on a storage of {storage.type!r}")


@special("aten.as_strided_.default")
def as_strided_(
    tensor: LazyTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> LazyTensor:
    """`as_strided` in place."""
    return become(tensor, as_strided(tensor, size, stride, storage_offset))


@special("aten.resize_.default")
def resize_(tensor: LazyTensor, size: Any, *, memory_format: Any = None) -> LazyTensor:
    """Resize on the same storage, which grows if needed; new memory is uninitialized."""
    shape = tuple(size)
    stride = contiguous_strides(shape)
    if memory_format is not None and memory_format is not torch.contiguous_format:
        with _torch.without_torch_function():
            stride = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    if shape == tuple(tensor.shape):
        return tensor
    offset, bits = int(tensor.storage_offset()), (tensor.is_conj(), tensor.is_neg())
    return resize(tensor, TensorType.of(shape, stride, tensor.dtype, tensor.device, offset, *bits))


@special("aten.resize_as_.default")
def resize_as_(tensor: LazyTensor, like: torch.Tensor, *, memory_format: Any = None) -> LazyTensor:
    """`resize_` to the size of another tensor."""
    return resize_(tensor, tuple(like.shape), memory_format=memory_format)


@special("aten.set_.source_Tensor")
def set_tensor(tensor: Any, source: Any) -> Any:
    """Make `tensor` an alias of `source`."""
    if tensor.dtype != source.dtype:
        names = [str(t.dtype).removeprefix("torch.") for t in (source, tensor)]
        raise RuntimeError("Could not set tensor of type {} to a tensor of type {}".format(*names))
    if type(tensor) is type(source) is LazyTensor and tensor.device == source.device:
        return become(tensor, source)
    return set_window(tensor, source, 0, tuple(source.shape), source.stride())


@special("aten.shallow_copy_data_.default")
def shallow_copy_data_(tensor: Any, source: Any) -> Any:
    """`tensor.data = source`, in compiled code (torch 2.15)."""
    tensor.data = source
    return tensor


@special("aten.set_.source_Tensor_storage_offset")
def set_window(tensor: Any, source: Any, offset: int, size: Any, stride: Any = ()) -> Any:
    """Make `tensor` a view of the memory of `source`, with an offset relative to it."""
    offset += int(source.storage_offset())
    return set_storage(tensor, source.untyped_storage(), offset, size, stride)


@special("aten.set_.default")
def set_empty(tensor: LazyTensor) -> LazyTensor:
    """Make `tensor` an empty one-dimensional tensor."""
    empty = torch.empty((0,), dtype=tensor.dtype, device=physical(tensor.device))
    return become(tensor, wrap_data(empty, tensor.device))


@special("aten.set_.source_Storage", "aten.set_.source_Storage_storage_offset")
def set_storage(
    tensor: Any, source: Any, offset: int = 0, size: Any = None, stride: Any = ()
) -> Any:
    """Make `tensor` a view of the memory of a storage object."""
    memory = source.untyped() if hasattr(source, "untyped") else source
    if not isinstance(tensor, LazyTensor):
        raise UnsupportedError(
            "set_ of a plain tensor to the memory of a lazy one: it could not see what is written "
            "there; use `torpor.lazy(tensor).set_(...)`, or copy with `tensor.copy_(lazy)`"
        )
    return become(tensor, on_storage(tensor, memory, offset, size, stride))


@special("aten.histc.default")
def histc(tensor: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Other devices count integers, as does `lazy`; the CPU's kernel only takes floats."""
    virtual = isinstance(tensor, LazyTensor) and tensor.device.type == "lazy"
    others = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
    if virtual and not others and physical(tensor.device).type == "cpu":
        counts = _record_histc(record_to_copy(tensor, dtype=torch.float64), bins, min, max)
        return record_to_copy(counts, dtype=tensor.dtype)
    return _record_histc(tensor, bins, min, max)


_record_histc = make_recorder(spec_of(aten.histc.default))


@special("aten.linalg_lu_solve.default")
def linalg_lu_solve(
    LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False
) -> Any:
    """With `left=False`, eager's complex result has its conjugate bit set."""
    result = _record_lu_solve(LU, pivots, B, left=left, adjoint=adjoint)
    if left or not result.is_complex():
        return result
    return _record_conj(_record_conj_physical(result))


@special("aten.linalg_lu_solve.out")
def linalg_lu_solve_out(
    LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False, out: Any
) -> Any:
    """The same with `out`, unless its strides differ from those the kernel uses."""
    expected = _record_lu_solve(LU, pivots, B, left=left, adjoint=adjoint)
    _record_lu_solve_out(LU, pivots, B, left=left, adjoint=adjoint, out=out)
    if left or not expected.is_complex() or out.stride() != expected.stride():
        return out
    if not out.is_conj():  # not resized, so it kept its bits
        become(out, _record_conj(out))
    return copy_(out, expected)


_record_lu_solve = make_recorder(spec_of(aten.linalg_lu_solve.default))
_record_lu_solve_out = make_recorder(spec_of(aten.linalg_lu_solve.out))
_record_conj = make_recorder(spec_of(aten._conj.default))
_record_conj_physical = make_recorder(spec_of(aten._conj_physical.default))
