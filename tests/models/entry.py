"""What one model of the zoo is: how to build it, feed it, and read its loss.

For the reader who adds a model. An `Entry` says nothing about laziness: `harness` trains the same
entry eagerly and lazily and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Phase:
    """One optimizer's share of a step: the loss it lowers and the submodule it updates."""

    loss: Loss
    submodule: str = ""  # "" is the whole model


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a transformers model computes itself when it is given labels."""
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True)
class Entry:
    """A model, its data and its loss; every part seeded, so two runs see the same numbers."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    draw_batch: Callable[[torch.Generator], Batch]
    phases: tuple[Phase, ...] = (Phase(own_loss),)
    clip_norm: float | None = None
    draw_prompt: Callable[[torch.Generator], Batch] | None = None
    produce: Callable[[nn.Module, Batch], Batch] | None = None  # what the model yields for a prompt
    strategies: tuple[str, ...] = ()  # ways of `transformers` generation to test
    experts: str | None = None  # how experts are multiplied in generation, see `architectures`

    def build(self) -> nn.Module:
        """A fresh model on the CPU with the same weights at every call."""
        torch.manual_seed(1)
        return self.make()

    def build_for_generation(self) -> nn.Module:
        """The model as it is asked to produce something."""
        model = self.build()
        if self.experts is not None:
            model.set_experts_implementation(self.experts)  # type: ignore[operator]
        return model

    def batch(self, step: int = 0) -> Batch:
        """The CPU batch of a step, from a private generator: the global one is not touched."""
        return self.draw_batch(torch.Generator().manual_seed(100 + step))

    def prompt(self) -> Batch:
        """The CPU prompt that `produce` or `generate` starts from."""
        assert self.draw_prompt is not None, f"{self.name} does not generate"
        return self.draw_prompt(torch.Generator().manual_seed(7))
