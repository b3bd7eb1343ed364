"""The programs by name, each with a number of steps that takes eager about 30 s on two cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from torpor.bench.wild.loop import Loop
from torpor.errors import did_you_mean


@dataclass(frozen=True)
class WildProgram:
    """An ordinary program, and for how long to run it."""

    name: str
    title: str
    function: str  # `module.function` in this package, imported in the worker
    steps: int
    uncompiled: str = ""  # why its users would not call torch.compile
    window: int = 20  # steps within which rounding errors stay small

    def load(self) -> Callable[[Loop], None]:
        """Import the program; it only ends by `loop.LoopEnded`."""
        module, _, name = self.function.partition(".")
        found: Callable[[Loop], None] = getattr(import_module(f"{__package__}.{module}"), name)
        return found


ALL = (
    WildProgram("mnist", "conv net on digits, shuffled TensorDataset", "images.mnist", 1400),
    WildProgram("vae", "variational autoencoder", "generative.vae", 4500),
    WildProgram("word-lm", "LSTM on text, update by hand", "text.word_language_model", 1700),
    WildProgram("nanogpt", "GPT on windows of a memmap", "text.nanogpt", 500),
    WildProgram("makemore", "MLP without modules, update by hand", "text.makemore", 90_000,
                uncompiled="no module and no function that could be compiled"),
    WildProgram("ddpm", "diffusion by a small U-net", "generative.ddpm", 1800),
    WildProgram("policy", "actor-critic in a world of Python's", "control.actor_critic", 1400),
    WildProgram("packed-lstm", "packed LSTM, changing lengths", "text.packed_lstm", 2000),
    WildProgram("lbfgs", "surface fitted by LBFGS", "control.lbfgs", 900,
                window=3),  # twenty evaluations per step amplify errors a thousandfold
    WildProgram("image-recipe", "ResNet, mixup, average of weights", "images.image_recipe", 1000),
    WildProgram("trainer", "transformer by a trainer class, accumulation", "control.trainer", 450),
    WildProgram("gan", "two conv nets against each other", "generative.gan", 4500),
)  # fmt: skip
PROGRAMS = {program.name: program for program in ALL}
SOAK = WildProgram("supernet", "another path at every step", "control.supernet", 10_000)


def check_names(names: list[str]) -> None:
    """Raise on an unknown program name, suggesting the closest one."""
    for name in names:
        if name not in PROGRAMS:
            hint = did_you_mean(name, PROGRAMS)
            raise ValueError(f"no program {name!r}: there are {', '.join(PROGRAMS)}{hint}")


def find(name: str) -> WildProgram:
    """The program with that name."""
    if name == SOAK.name:
        return SOAK
    check_names([name])
    return PROGRAMS[name]
