"""Who runs an op: eager torch (the judge), the virtual device `lazy`, or concrete-lazy tensors.

A subject says how a plain tensor enters it, how results are read back, and what it counted. Lazy
ones run on the backend that `TORPOR_TEST_BACKEND` names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._lazy
from torch import Tensor

from tests import backend_under_test


class Subject:
    """Eager torch. The other subjects change what differs."""

    name = "eager"

    def enter(self, plain: Tensor) -> Tensor:
        """A tensor of this subject with the values and strides of `plain`, sharing no memory."""
        return plain.to(plain.device, copy=True)

    def device(self, device: str | torch.device) -> str | torch.device:
        """Where this subject runs what an eager program would run on `device`."""
        return device

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the op under test (a planted fault overrides this)."""
        return function(*args, **kwargs)

    def session(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a whole entry runs."""
        return contextlib.nullcontext()

    def factories(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a sample without any tensor runs."""
        return contextlib.nullcontext()

    def owns(self, tensor: Tensor) -> bool:
        return True

    def sync(self, tensors: Sequence[Tensor]) -> None:
        """Compute all of them at once."""

    def settle(self) -> None:
        """After an error: let no trace of it reach the next run."""

    def plain(self, tensor: Tensor) -> Tensor:
        """The same values as a plain CPU tensor."""
        return tensor.detach()

    def counters(self) -> dict[str, int]:
        return {}


def carried(tensor: Tensor) -> bool:
    """A lazy tensor can stand for it: sparse and meta tensors stay what they are."""
    return tensor.layout == torch.strided and tensor.device.type != "meta"


class Concrete(Subject):
    """`torpor.lazy(t)`: lazy, while `t.device` stays `cpu`."""

    name = "concrete"

    def __init__(self) -> None:
        import torpor

        self.torpor: Any = torpor
        self.settle()
        torpor.use(backend_under_test.NAME)

    def enter(self, plain: Tensor) -> Tensor:
        copy = plain.to(plain.device, copy=True)
        return self.torpor.lazy(copy) if carried(plain) else copy

    def session(self) -> contextlib.AbstractContextManager[Any]:
        # On a backend that compiles every op, nothing may stand in for it unseen.
        strict, after = backend_under_test.BIT_EXACT, backend_under_test.COMPILE_AFTER
        return mock.patch.multiple(self.torpor.config, strict=strict, compile_after=after)

    def factories(self) -> contextlib.AbstractContextManager[Any]:
        return self.torpor.mode()

    def owns(self, tensor: Tensor) -> bool:
        # autograd makes the gradient of an argument without influence itself: plain zeros
        return self.torpor.is_lazy(tensor) or not carried(tensor) or not tensor.any()

    def sync(self, tensors: Sequence[Tensor]) -> None:
        lazy = [t for t in tensors if self.torpor.is_lazy(t)]
        if lazy:
            self.torpor.sync(*lazy, wait=True)

    def settle(self) -> None:
        with contextlib.suppress(Exception):
            self.torpor.wait()

    def plain(self, tensor: Tensor) -> Tensor:
        return self.torpor.eager(tensor.detach())

    def counters(self) -> dict[str, int]:
        return dict(self.torpor.metrics.counters())


class Lazy(Concrete):
    """The virtual device `lazy`."""

    name = "lazy"

    def enter(self, plain: Tensor) -> Tensor:
        return plain.to("lazy") if carried(plain) else plain.to(plain.device, copy=True)

    def device(self, device: str | torch.device) -> str | torch.device:
        return torch.device("lazy") if torch.device(device).type == "cpu" else device

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        # op_db's random entries call LTC's mark_step on this device, inside their seeded scope,
        # lest the numbers change with the seed restored after it. Here they must not.
        with super().session(), mock.patch("torch._lazy.mark_step", return_value=None):
            yield

    def factories(self) -> contextlib.AbstractContextManager[Any]:
        # Most factories name their device in the sample; those that do not take the default one.
        return torch.device("lazy")

    def plain(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()


SUBJECTS: dict[str, type[Subject]] = {s.name: s for s in (Subject, Lazy, Concrete)}
