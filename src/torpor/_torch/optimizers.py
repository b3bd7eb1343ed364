"""Steps of torch's optimizers: replacing them, and the numbers that they pass to ops."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch.overrides import TorchFunctionMode

_NUMBERS = frozenset({float, int})


def replace_step(kind: type[torch.optim.Optimizer], around: Callable[..., Any]) -> bool:
    """Make steps of `kind` run `around(step, optimizer, ...)`, inside their hooks; False: cannot.

    Schedulers keep references to the function that calls the hooks, so its closure is changed.
    """
    hooked: Any = kind.step
    inner = getattr(hooked, "__wrapped__", None)
    places = getattr(getattr(hooked, "__code__", None), "co_freevars", ())
    if not getattr(hooked, "hooked", False) or inner is None or "func" not in places:
        return False
    cell = hooked.__closure__[places.index("func")]
    if cell.cell_contents is inner:
        cell.cell_contents = lambda *args, **kwargs: around(inner, *args, **kwargs)
    return True


def around_adam(around: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Replace the loop over parameters that Adam and AdamW run by default on a CPU."""
    module: Any = sys.modules[torch.optim.Adam.__module__]
    loop = module._single_tensor_adam
    module._single_tensor_adam = functools.wraps(loop)(around(loop))


def has_function_modes() -> bool:
    """Whether a mode intercepts torch functions on this thread."""
    return bool(_C._len_torch_function_stack())


class ForeachCalls(TorchFunctionMode):
    """Records the foreach functions that its body calls, and the numbers passed to them.

    `calls` has the name of each, and how many numbers each argument contains; `numbers` has all the
    numbers. `watch` is called with every function, its arguments and its result.
    """

    def __init__(self, watch: Callable[[Any, Any, Any, Any], None] | None = None) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.numbers: list[Any] = []
        self.watch = watch

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name.startswith("_foreach_"):
            self.calls.append((name, *[self._note(arg) for arg in (*args[1:], *kwargs.values())]))
        if self.watch is not None:
            self.watch(name, args, kwargs, result)
        return result

    def _note(self, arg: Any) -> Any:
        if _is_number(arg):
            self.numbers.append(_plain(arg))
            return 0
        if type(arg) in (list, tuple) and arg and all(map(_is_number, arg)):
            self.numbers += map(_plain, arg)
            return len(arg)
        return None


def _is_number(arg: Any) -> bool:
    return type(arg) in _NUMBERS or isinstance(arg, float)  # NumPy's are floats too


def _plain(number: Any) -> Any:
    return number if type(number) is int else float(number)


def count_a_step(counters: list[torch.Tensor]) -> None:
    """Increment the step counters of an optimizer, like torch's optimizers."""
    torch._foreach_add_(counters, torch.tensor(1.0, device="cpu"), alpha=1.0)
