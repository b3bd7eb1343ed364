"""Recording: lazy tensors, and how every torch op on them becomes a node."""

from torpor import _torch
from torpor.backend.registry import backends
from torpor.ops import custom
from torpor.trace import (  # noqa: F401  # register their ops, give LazyTensor its methods
    compiled,
    composites,
    device_module,
    exchange,
    foreign,
    fused,
    gradients,
    hooks,
    methods,
    mode,
    native,
    packed,
    rnn,
    scripts,
    subclasses,
    values,
    whole,
)  # fmt: skip
from torpor.trace.devices import register_device
from torpor.trace.sharing import register_location
from torpor.trace.tensor import LazyTensor, is_lazy

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
custom.on_change(values.finish, values.forget_types)
custom.on_backends(backends)
_torch.accept_lazy_attention()
_torch.accept_lazy_states(mode.eager)
_torch.accept_lazy_losses(values.physical, gradients.keep_lazy)
_torch.prefer_foreach(LazyTensor)
_torch.register_device_module("lazy", device_module)

__all__ = ["LazyTensor", "is_lazy"]
