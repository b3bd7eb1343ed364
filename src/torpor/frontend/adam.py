"""Steps of Adam and AdamW on plain parameters on a CPU: one call of the native library.

torch calls about twelve ops for each parameter, from Python. The library rounds as they do
(`native/adam.h`); whether that holds for this torch on this processor is tried out at the first
step. Whatever it cannot do it leaves to torch before it has written anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from torpor import _torch, metrics
from torpor.backend.native_library import NATIVE

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_NUMBERS: Final = frozenset({float, int})
_UNUSUAL: Final = ("amsgrad", "capturable", "differentiable", "grad_scale", "found_inf")
_SIZES: Final = (2005, 3, 40_009)
_TRIALS: Final = (
    {"beta1": 0.9, "weight_decay": 0.0, "maximize": False, "decoupled_weight_decay": False},
    {"beta1": 0.5, "weight_decay": 0.1, "maximize": True, "decoupled_weight_decay": False},
    {"beta1": 0.9, "weight_decay": 0.1, "maximize": False, "decoupled_weight_decay": True},
)


class Adam:
    """The library's function, once it is there and rounds as torch does."""

    def __init__(self) -> None:
        self.on = False
        self.steps = 0  # of any optimizer while there is no library
        self.function: Callable[..., bool] | None = None
        self.is_refused = False

    def around(self, step: Callable[..., None]) -> Callable[..., None]:
        """What replaces `step`, torch's loop over parameters."""
        is_compiling = torch.compiler.is_compiling

        def single_tensor_adam(*lists: Any, **options: Any) -> None:
            if is_compiling() or not self.on or not lists[0] or type(lists[0][0]) not in _PLAIN:
                return step(*lists, **options)
            function = self.function or self._find(step)
            if function is None or not _call(function, lists, options):
                return step(*lists, **options)
            metrics.count("NativeAdamSteps")
            return None

        return single_tensor_adam

    def _find(self, step: Callable[..., None]) -> Callable[..., bool] | None:
        """Look for the library now and then: it may be built while the program runs."""
        self.steps += 1
        if self.is_refused or self.steps & (self.steps - 1):
            return None
        NATIVE.look()
        library = NATIVE.library
        alike = library and rounds_alike(library.adam, step)
        self.is_refused = alike is False
        self.function = library.adam if alike else None
        return self.function


def _call(function: Callable[..., bool], lists: Any, options: dict[str, Any]) -> bool:
    """Make the step, or return False."""
    if len(lists) != 6 or _torch.is_transforming():
        return False
    if any(options.get(name) not in (None, False) for name in _UNUSUAL):
        return False
    parameters, gradients, averages, squares, _, counters = lists
    numbers = [options.get(name) for name in ("lr", "beta1", "beta2", "weight_decay", "eps")]
    if not _NUMBERS.issuperset(map(type, numbers)):
        return False
    flags = options.get("maximize"), options.get("decoupled_weight_decay")
    return function(parameters, gradients, averages, squares, counters, *numbers, *flags)


@torch.no_grad()
def rounds_alike(function: Callable[..., bool], step: Callable[..., None]) -> bool | None:
    """Whether the library's steps have the bits of `step`, torch's; None: it makes none now."""
    with _torch.as_on_another_thread():
        found = [_is_alike(function, step, trial) for trial in _TRIALS]
    return None if None in found else all(found)


def _is_alike(
    function: Callable[..., bool], step: Callable[..., None], trial: dict[str, Any]
) -> bool | None:
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn() -> list[torch.Tensor]:
        return [
            torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
            for size in _SIZES
        ]

    squares = [one.square() for one in drawn()]
    counters = [torch.zeros((), dtype=torch.float32, device="cpu") for _ in _SIZES]
    mine = [drawn(), drawn(), squares, counters]
    eager = [[one.clone() for one in ones] for ones in mine]
    options = {
        **dict.fromkeys(_UNUSUAL[:3], False), **dict.fromkeys(_UNUSUAL[3:]), "has_complex": False,
        "lr": 1e-3, "beta2": 0.999, "eps": 1e-8, **trial,
    }  # fmt: skip
    for _ in range(3):
        gradients = drawn()
        if not _call(function, _lists(mine, gradients), options):
            return None
        step(*_lists(eager, gradients), **options)
    return all(
        torch.equal(one, other)
        for ours, theirs in zip(mine, eager, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def _lists(own: list[list[torch.Tensor]], gradients: list[torch.Tensor]) -> Any:
    parameters, averages, squares, counters = own
    return parameters, gradients, averages, squares, [], counters


ADAM: Final = Adam()
