"""Methods of lazy tensors that are not ops: to numbers, copying, saving, printing."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch, metrics
from torpor.errors import UnsupportedError
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.frontend.sharing import LOCATION
from torpor.frontend.storages import own_buffer, refuse_shared, storage_object
from torpor.observe.events import asked_for
from torpor.observe.site import site
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import make_wrapper, plain, plain_copy, wrap_data


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` a method of LazyTensor; plain tensors stay plain in its body."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _torch.without_modes():
            return function(*args, **kwargs)

    setattr(LazyTensor, function.__name__, call)
    return function


def _read(tensor: LazyTensor, what: str) -> torch.Tensor:
    """The data of `tensor`, counted as a sync caused by `what`."""
    metrics.count_line(f"Sync::{what}", str(site()))
    real = plain(tensor)
    sync.rest()
    return real


# -- `new_*`: torch implements them by dispatch key, so they need wrappers -------------------------


@method
def new_tensor(
    self: LazyTensor, data: Any, *, dtype: Any = None, device: Any = None, **options: Any
) -> Any:
    """A lazy tensor from `data`, on this tensor's device by default."""
    return _made_like(self, torch.Tensor.new_tensor, data, dtype=dtype, device=device, **options)


@method
def new(self: LazyTensor, *args: Any, device: Any = None) -> Any:
    """A lazy tensor of this one's dtype and device, like `torch.Tensor.new`."""
    return _made_like(self, torch.Tensor.new, *args, device=device)


def _made_like(self: LazyTensor, make: Any, *args: Any, device: Any, **options: Any) -> Any:
    chosen = self.device if device is None else torch.device(device)
    if chosen.type == "lazy":
        if device is not None:
            options["device"] = chosen
        return make(self, *args, **options)
    args = tuple(plain(a) if isinstance(a, LazyTensor) else a for a in args)
    requires_grad = options.pop("requires_grad", False)
    like = torch.empty((0,), dtype=self.dtype, device=chosen)
    return wrap_data(make(like, *args, **options), chosen).requires_grad_(requires_grad)


# -- conversions to Python and NumPy -----------------------------------------------------------


@method
def numpy(self: LazyTensor, *, force: bool = False) -> Any:
    """A NumPy copy of the contents.

    On a concrete device the array is read-only: in eager it shares memory with the tensor, here it
    cannot, and a write that the tensor never sees must not go unnoticed.
    """
    if self.requires_grad and not force:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    array = _read(self, "numpy").detach().cpu().numpy(force=force).copy("K")
    if self.device.type != "lazy":
        array.flags.writeable = False
    return array


@method
def __array__(self: LazyTensor, dtype: Any = None, copy: Any = None) -> Any:
    array = numpy(self)
    return array if dtype is None else array.astype(dtype, copy=False)


@method
def tolist(self: LazyTensor) -> Any:
    """The contents as nested lists."""
    return _read(self, "tolist").tolist()


def _asked(name: str) -> None:
    """Let a conversion read the tensor, where torch would access its nonexistent memory."""
    original = getattr(torch.Tensor, name)
    what = name.strip("_")

    @functools.wraps(original)
    def convert(self: LazyTensor) -> Any:
        with asked_for(what):
            if not _torch.is_python_off():
                return original(self)
            with _torch.python_on():
                return original(self)

    setattr(LazyTensor, name, convert)


for _name in ("__bool__", "__complex__", "__float__", "__index__", "__int__"):
    _asked(_name)


@method
def __format__(self: LazyTensor, spec: str) -> str:
    if self.dim() == 0:
        return format(self.item(), spec)
    if spec:
        raise TypeError("unsupported format string passed to Tensor.__format__")
    return repr(self)


@method
def __repr__(self: LazyTensor, *, tensor_contents: Any = None) -> str:
    text = repr(_read(self, "repr").detach())
    text = text[: -len(")")]
    if self.device.type == "lazy":
        text += f", device='{self.device}'"
    if self.grad_fn is not None:
        text += f", grad_fn=<{type(self.grad_fn).__name__}>"
    elif self.requires_grad:
        text += ", requires_grad=True"
    is_parameter = getattr(self, "_is_param", False)
    return f"Parameter containing:\n{text})" if is_parameter else f"{text})"


@method
def data_ptr(self: LazyTensor) -> int:
    """The address of the data, computed on demand; valid until the next write."""
    own_buffer(self._lazy_storage)
    return _read(self, "data_ptr").data_ptr()


@method
def untyped_storage(self: LazyTensor) -> torch.UntypedStorage:
    """The storage of the data, computed on demand; valid until the next write.

    `set_` to it shares memory with this tensor, whenever it is called.
    """
    metrics.count_line("Sync::untyped_storage", str(site()))
    return storage_object(self)


@method
def set_(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """`set_` to the memory of lazy tensors, or to memory that no plain tensor uses."""
    source = args[0] if args else kwargs.get("source")
    if source is not None and not isinstance(source, LazyTensor):
        refuse_shared(self, source)
    return torch.Tensor.set_(self, *args, **kwargs)


@method
def __dlpack__(self: LazyTensor, **options: Any) -> Any:
    """Export a copy of the data to another framework."""
    if self.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    return plain_copy(self).__dlpack__(**options)


@method
def __dlpack_device__(self: LazyTensor) -> Any:
    return _read(self, "dlpack").__dlpack_device__()


@method
def is_shared(self: LazyTensor) -> bool:
    """False: a lazy tensor's memory belongs to one process."""
    return False


@method
def share_memory_(self: LazyTensor) -> LazyTensor:
    raise UnsupportedError(
        "a lazy tensor cannot be shared between processes; share `tensor.cpu()` and make it lazy "
        "in each process"
    )


# -- .data -------------------------------------------------------------------------------------


def same_storage(tensor: LazyTensor) -> LazyTensor:
    """Another tensor on the same storage, detached from autograd."""
    value = make_wrapper(
        LazyTensor, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), None,
        tensor.dtype, torch.strided, tensor.device, *_torch.lazy_keys(tensor.device.type),
    )  # fmt: skip
    value._lazy_storage, value._lazy_view = tensor._lazy_storage, tensor._lazy_view
    if tensor.is_conj() or tensor.is_neg():
        _torch.set_conj(value, tensor.is_conj())
        _torch.set_neg(value, tensor.is_neg())
    return value  # type: ignore[no-any-return]  # made by torch


def _get_data(self: LazyTensor) -> LazyTensor:
    return same_storage(self)


def _set_data(self: LazyTensor, other: torch.Tensor) -> None:
    """`x.data = y`: `x` becomes an alias of `y`."""
    if not isinstance(other, LazyTensor):
        if not isinstance(other, torch.Tensor):
            name = type(other).__name__
            raise TypeError(f"Variable data has to be a tensor, but got {name}")
        if other.device != self.device:
            raise UnsupportedError(
                f"cannot set .data of a tensor on {self.device} to a plain tensor on "
                f"{other.device}; use `.to('{self.device}')` first"
            )
        other = wrap_data(other.detach().clone(), other.device)
    _torch.set_metadata(self, other)
    self._lazy_storage, self._lazy_view = other._lazy_storage, other._lazy_view


LazyTensor.data = property(_get_data, _set_data)  # type: ignore[assignment]  # an attribute in the base


# -- copies and files --------------------------------------------------------------------------


@method
def __copy__(self: LazyTensor) -> LazyTensor:
    """Another tensor on the same storage."""
    result = same_storage(self)
    result.requires_grad_(self.requires_grad)
    result.__dict__.update(self.__dict__)
    return result


@method
def __deepcopy__(self: LazyTensor, memo: dict[int, Any]) -> Any:
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment.  If you were attempting to deepcopy a module, this may be "
            "because of a torch.nn.utils.weight_norm usage, see "
            "https://github.com/pytorch/pytorch/pull/103001"
        )
    is_parameter = "_is_param" in self.__dict__
    with torch.no_grad():
        if is_parameter and self._lazy_view:
            result: Any = self.detach().clone()
        else:
            result = same_storage(self)
            result._lazy_storage = _copy_storage(self._lazy_storage, {} if is_parameter else memo)
    result.requires_grad_(self.requires_grad)
    memo[id(self)] = result
    if is_parameter:  # as `Parameter.__deepcopy__`: contents only
        result._is_param = True
        return result
    rest = {k: v for k, v in self.__dict__.items() if k not in ("_lazy_storage", "_lazy_view")}
    result.__dict__.update(copy.deepcopy(rest, memo))
    if self.grad is not None:
        result.grad = copy.deepcopy(self.grad, memo)
    return result


def _copy_storage(storage: LazyStorage, memo: dict[int, Any]) -> LazyStorage:
    """A storage with the same contents, shared: values and buffers are never modified."""
    known = memo.get(id(storage))
    if known is None:
        with TRACE.lock:
            known = LazyStorage(storage.type, storage.value, storage.data)
            TRACE.enlist(known)
        memo[id(storage)] = known
        memo.setdefault(id(memo), []).append(storage)  # keeps the id valid
    return known


@method
def __reduce_ex__(self: LazyTensor, protocol: Any) -> Any:
    """Pickle like a plain tensor, with `lazy:N` as the location of its storage."""
    real = _read(self, "pickle").detach()
    if self.device.type == "lazy":
        setattr(real.untyped_storage(), LOCATION, str(self.device))
    args: tuple[Any, ...] = (
        _torch.typed_storage(real), real.storage_offset(), tuple(real.shape), real.stride(),
        self.requires_grad, OrderedDict(),
    )  # fmt: skip
    if getattr(self, "_is_param", False):
        real_rebuild = _Rebuilt(args)
        return _torch.rebuild_parameter, (real_rebuild, self.requires_grad, OrderedDict())
    return _torch.rebuild_tensor, args


class _Rebuilt:
    """Pickles as the tensor inside a parameter."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return _torch.rebuild_tensor, self.args


# -- TorchDynamo ---------------------------------------------------------------------------------


class _Flatten:
    """The method `__tensor_flatten__`, hidden from TorchDynamo during capture, where it must see
    types only, and never the plain tensor inside."""

    def __get__(self, tensor: LazyTensor | None, owner: type) -> Callable[..., Any]:
        if _torch.CAPTURING.on:
            raise AttributeError("__tensor_flatten__")
        return _flatten if tensor is None else functools.partial(_flatten, tensor)


def _flatten(tensor: LazyTensor) -> tuple[list[str], Any]:
    return ["plain"], str(tensor.device)


LazyTensor.__tensor_flatten__ = _Flatten()  # type: ignore[attr-defined]  # looked up by torch


def _plain_property(self: LazyTensor) -> torch.Tensor:
    return plain(self)


LazyTensor.plain = property(_plain_property)  # type: ignore[attr-defined]  # named by __tensor_flatten__


def _unflatten(inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> LazyTensor:
    return wrap_data(inner["plain"], torch.device(meta))


LazyTensor.__tensor_unflatten__ = staticmethod(_unflatten)  # type: ignore[attr-defined]  # looked up by torch
