"""The programs by name, each with as many steps as take eager some thirty seconds on two cores."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from torpor.bench.wild.loop import Loop


@dataclass(frozen=True)
class Program:
    """An ordinary program, and how long it is run."""

    name: str
    title: str
    function: str  # of a module of this package, loaded where it is run
    steps: int
    uncompiled: str = ""  # why its users would not call torch.compile
    window: int = 20  # steps in which a rounding error stays a small one

    def load(self) -> Callable[[Loop], None]:
        """The program; it never returns by itself (`loop.Done`)."""
        module, _, name = self.function.partition(".")
        found: Callable[[Loop], None] = getattr(import_module(f"{__package__}.{module}"), name)
        return found


ALL = (
    Program("mnist", "conv net on digits, shuffled TensorDataset", "images.mnist", 1400),
    Program("vae", "variational autoencoder", "generative.vae", 4500),
    Program("word-lm", "LSTM on windows of text, update by hand", "text.word_language_model", 1700),
    Program("nanogpt", "GPT on windows of a memmap", "text.nanogpt", 500),
    Program("makemore", "MLP without modules, update by hand", "text.makemore", 90_000,
            uncompiled="no module and no function that could be compiled"),
    Program("ddpm", "diffusion by a small U-net", "generative.ddpm", 1800),
    Program("policy", "actor-critic in a world of Python's", "control.actor_critic", 1400),
    Program("packed-lstm", "packed LSTM, changing lengths", "text.packed_lstm", 2000),
    Program("lbfgs", "surface fitted by LBFGS", "control.lbfgs", 900,
            window=3),  # twenty evaluations a step: it grows a thousandfold in each
    Program("image-recipe", "small ResNet, mixup, average of weights", "images.image_recipe", 1000),
    Program("trainer", "transformer by a trainer class, accumulation", "control.trainer", 450),
    Program("gan", "two conv nets against each other", "generative.gan", 4500),
)  # fmt: skip
PROGRAMS = {program.name: program for program in ALL}
SOAK = Program("supernet", "another path at every step", "control.supernet", 10_000)


def check_names(names: list[str]) -> None:
    """Refuse a name that no program has, with the nearest one."""
    for name in names:
        if name not in PROGRAMS:
            close = difflib.get_close_matches(name, PROGRAMS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"no program {name!r}: there are {', '.join(PROGRAMS)}{hint}")


def find(name: str) -> Program:
    """The program of that name."""
    if name == SOAK.name:
        return SOAK
    check_names([name])
    return PROGRAMS[name]
