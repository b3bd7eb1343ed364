"""Puts lazy tensors in their place: the device, kernels, hooks and methods, in this order."""

from torpor import _torch
from torpor.backend.registry import backends
from torpor.custom import registration
from torpor.frontend import (  # noqa: F401  # register themselves
    compiled,
    device_module,
    exchange,
    foreign,
    hooks,
    methods,
    mode,
    scripts,
    subclasses,
)
from torpor.frontend.devices import register_device
from torpor.frontend.sharing import register_location
from torpor.native import recorder  # noqa: F401  # register themselves
from torpor.overrides import composites, fused, gradients, packed, rnn, whole  # noqa: F401  # register themselves
from torpor.trace import values  # register themselves
from torpor.trace.tensor import LazyTensor

register_device()
register_location()
hooks.install()
exchange.install()
whole.install()
foreign.install()
compiled.install()
scripts.install()
subclasses.install()
_torch.accept_lazy_autocast()
_torch.on_default_dtype(values.finish, values.forget_types)
registration.on_change(values.finish, values.forget_types)
registration.on_backends(backends)
_torch.accept_lazy_attention()
_torch.accept_lazy_states(mode.eager)
_torch.accept_lazy_losses(values.physical, gradients.keep_lazy)
_torch.prefer_foreach(LazyTensor)
_torch.register_device_module("lazy", device_module)
