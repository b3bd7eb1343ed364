"""Installs lazy tensors in torch: the device, kernels, hooks and methods, in this order."""

from torpor import _torch
from torpor.backend.registry import backends
from torpor.capture import frames
from torpor.custom import registration
from torpor.distributed import data_parallel, fully_shard, plain
from torpor.frontend import (  # noqa: F401  # register themselves
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
from torpor.frontend.optimizers import are_apart
from torpor.frontend.sharing import register_location
from torpor.native import attach  # noqa: F401  # register themselves
from torpor.overrides import composites, fused, gradients, packed, rnn, whole  # noqa: F401  # register themselves
from torpor.trace import values  # register themselves
from torpor.trace.tensor import LazyTensor
from torpor.transactions import finalizers  # noqa: F401  # registers itself

register_device()
register_location()
hooks.install()
plain.install()
data_parallel.install()
exchange.install()
whole.install()
foreign.install()
frames.install()
scripts.install()
subclasses.install()
fully_shard.install()
_torch.accept_lazy_autocast()
_torch.on_default_dtype(values.finish, values.forget_types)
registration.on_change(values.finish, values.forget_types)
registration.on_backends(backends)
_torch.accept_lazy_attention()
_torch.accept_lazy_states(mode.eager)
_torch.accept_lazy_losses(values.physical, gradients.keep_lazy)
_torch.prefer_foreach(LazyTensor, are_apart)
_torch.wait_at_once(lambda result: isinstance(result, LazyTensor))
_torch.register_device_module("lazy", device_module)
