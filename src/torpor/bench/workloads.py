"""The workloads: ordinary programs, built from a seed, independent of the runner.

A workload is a frozen dataclass of sizes. `build(place, device)` makes the program; `place` moves a
module or a tensor to the runner's device. Optional libraries are imported when a program is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torpor.bench.models import GPT, MLP, ConvNet
from torpor.errors import did_you_mean

SEED = 1337
CLASSES = 10
ToDevice = Callable[[Any], Any]
Precision = Callable[[], AbstractContextManager[Any]]


class BenchProgram(ABC):
    """One model with one batch; `step` runs it once and sets `result`, which is not read."""

    ends_step = True  # whether it ends with an optimizer's step or a call without gradients

    def __init__(
        self, function: Callable[..., Tensor], batch: Iterable[Tensor], precision: Precision
    ) -> None:
        self.function = function  # the function that a runner may compile
        self.batch = tuple(batch)
        self.precision = precision
        self.result: Tensor | None = None

    @abstractmethod
    def step(self) -> None:
        """Run once."""


class Training(BenchProgram):
    """Forward, backward, optimizer step; `function` returns the loss."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        batch: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        precision: Precision = nullcontext,
    ) -> None:
        super().__init__(function, batch, precision)
        self.optimizer = optimizer

    def step(self) -> None:
        with self.precision():
            loss = self.function(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.result = loss.detach()


class Inference(BenchProgram):
    """A model without gradients."""

    def step(self) -> None:
        with torch.no_grad(), self.precision():
            self.result = self.function(*self.batch)


class Calculation(Inference):
    """Tensor arithmetic outside of modules, so that no hook sees where a step ends."""

    ends_step = False


def bf16(device: str) -> Precision:
    """Autocast as in GPU training scripts."""
    return lambda: torch.autocast(device, torch.bfloat16)


@dataclass(frozen=True)
class Workload(ABC):
    """Sizes of a program."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A description of the program."""

    @abstractmethod
    def make(self, place: ToDevice, device: str) -> BenchProgram:
        """Make the program; torch is already seeded."""

    def build(self, place: ToDevice, device: str, seed: int = SEED) -> BenchProgram:
        """Make the program from a seed: same weights, batch and random numbers for every runner."""
        torch.manual_seed(seed)
        program = self.make(place, device)
        torch.manual_seed(seed)
        return program


@dataclass(frozen=True)
class Chain(Workload):
    elements: int = 4_000_000
    ops: int = 30

    @property
    def title(self) -> str:
        return f"{self.ops} elementwise ops on {_short(self.elements)} floats"

    def make(self, place: ToDevice, device: str) -> BenchProgram:
        turns = self.ops // 3

        def chain(x: Tensor) -> Tensor:
            for _ in range(turns):
                x = (x * 1.01 + 0.1).relu()
            return x

        return Calculation(chain, [place(torch.randn(self.elements))], nullcontext)


@dataclass(frozen=True)
class Conv(Workload):
    stages: int = 3
    channels: int = 32
    batch: int = 32
    size: int = 32

    @property
    def title(self) -> str:
        return f"conv net, {2 * self.stages} layers, training, batch {self.batch}"

    def make(self, place: ToDevice, device: str) -> BenchProgram:
        model = place(ConvNet(self.stages, self.channels, CLASSES))
        images = place(torch.randn(self.batch, 3, self.size, self.size))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return _classification(model, images, place, optimizer, CLASSES)


@dataclass(frozen=True)
class SmallGPT(Workload):
    layers: int = 12
    width: int = 64
    heads: int = 4
    batch: int = 4
    length: int = 32
    vocabulary: int = 128
    adamw: bool = False

    @property
    def title(self) -> str:
        rule = "AdamW" if self.adamw else "SGD"
        return f"{self.layers}-layer width-{self.width} GPT, training, {rule}"

    def make(self, place: ToDevice, device: str) -> BenchProgram:
        model = place(GPT(self.layers, self.width, self.heads, self.length, self.vocabulary))
        tokens = torch.randint(self.vocabulary, (self.batch, self.length + 1))
        batch = place(tokens[:, :-1].contiguous()), place(tokens[:, 1:].flatten())
        rule = torch.optim.AdamW if self.adamw else torch.optim.SGD

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(model(tokens).flatten(0, 1), targets)

        return Training(loss, batch, rule(model.parameters(), lr=1e-3))


@dataclass(frozen=True)
class MLPTraining(Workload):
    layers: int = 16
    width: int = 1024
    batch: int = 64

    @property
    def title(self) -> str:
        return f"{self.layers}-layer width-{self.width} MLP, training, AdamW, batch {self.batch}"

    def make(self, place: ToDevice, device: str) -> BenchProgram:
        model = place(MLP(self.layers, self.width))
        inputs, targets = (place(torch.randn(self.batch, self.width)) for _ in range(2))

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(model(inputs), targets)

        return Training(loss, (inputs, targets), torch.optim.AdamW(model.parameters(), lr=1e-3))


@dataclass(frozen=True)
class GPT2(Workload):
    """Hugging Face's GPT-2; 0 means the small model's value."""

    batch: int = 8
    length: int = 1024
    layers: int = 0
    width: int = 0
    vocabulary: int = 0
    dropout: float = 0.1

    @property
    def title(self) -> str:
        kind = "" if self.dropout else ", no dropout"
        return f"GPT-2 small, training, bf16, AdamW{kind}, {self.batch}×{self.length} tokens"

    def make(self, place: ToDevice, device: str) -> BenchProgram:
        transformers = _library("transformers")
        sizes = {"n_layer": self.layers, "n_embd": self.width, "vocab_size": self.vocabulary}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
        config = transformers.GPT2Config(use_cache=False, **dropout, **_chosen(sizes))
        model = place(transformers.GPT2LMHeadModel(config).train())
        tokens = place(torch.randint(config.vocab_size, (self.batch, self.length)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def loss(tokens: Tensor) -> Tensor:
            found: Tensor = model(input_ids=tokens, labels=tokens).loss
            return found

        return Training(loss, [tokens], optimizer, bf16(device))


@dataclass(frozen=True)
class Bert(Workload):
    """Hugging Face's BERT; 0 means the base model's value."""

    batch: int = 8
    length: int = 128
    layers: int = 0
    width: int = 0

    @property
    def title(self) -> str:
        return f"BERT base, inference, bf16, {self.batch}×{self.length} tokens"

    def make(self, place: ToDevice, device: str) -> BenchProgram:
        transformers = _library("transformers")
        sizes = {"num_hidden_layers": self.layers, "hidden_size": self.width}
        config = transformers.BertConfig(**_chosen(sizes))
        model = place(transformers.BertModel(config).eval().to(torch.bfloat16))
        tokens = place(torch.randint(config.vocab_size, (self.batch, self.length)))

        def states(tokens: Tensor) -> Tensor:
            found: Tensor = model(input_ids=tokens).last_hidden_state
            return found

        return Inference(states, [tokens], nullcontext)


@dataclass(frozen=True)
class ResNet50(Workload):
    batch: int = 64
    size: int = 224

    @property
    def title(self) -> str:
        return f"ResNet-50, training, bf16, SGD with momentum, batch {self.batch}"

    def make(self, place: ToDevice, device: str) -> BenchProgram:
        model = place(_library("torchvision").models.resnet50().train())
        images = place(torch.randn(self.batch, 3, self.size, self.size))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return _classification(model, images, place, optimizer, 1000, bf16(device))


def _classification(
    model: nn.Module,
    images: Tensor,
    place: ToDevice,
    optimizer: torch.optim.Optimizer,
    classes: int,
    precision: Precision = nullcontext,
) -> BenchProgram:
    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    labels = place(torch.randint(classes, (images.shape[0],)))
    return Training(loss, (images, labels), optimizer, precision)


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{name} is not installed ({error})") from error


def _chosen(sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size}


def _short(number: int) -> str:
    return f"{number / 1e6:g}M" if number >= 1_000_000 else f"{number:,}"


FULL: dict[str, Workload] = {
    "chain": Chain(),
    "conv": Conv(),
    "gpt": SmallGPT(6, 256, 4, batch=8, length=128, vocabulary=1024, adamw=True),
    "small-gpt": SmallGPT(),
    "gpt2": GPT2(),
    "gpt2-no-dropout": GPT2(dropout=0.0),
    "resnet50": ResNet50(),
    "bert": Bert(),
    "mlp": MLPTraining(),
}
TINY: dict[str, Workload] = {
    "chain": Chain(elements=1000),
    "conv": Conv(stages=1, channels=4, batch=2, size=8),
    "gpt": SmallGPT(2, 16, 2, batch=2, length=8, vocabulary=32, adamw=True),
    "small-gpt": SmallGPT(2, 16, 2, batch=2, length=8, vocabulary=32),
    "gpt2": GPT2(batch=2, length=16, layers=2, width=48, vocabulary=64),
    "gpt2-no-dropout": GPT2(2, 16, layers=2, width=48, vocabulary=64, dropout=0.0),
    "resnet50": ResNet50(batch=2, size=64),
    "bert": Bert(batch=2, length=16, layers=2, width=48),
    "mlp": MLPTraining(layers=2, width=16, batch=4),
}
SCALES = {"full": FULL, "tiny": TINY}
BY_DEVICE = {
    "cpu": ("chain", "conv", "gpt", "small-gpt"),
    "cuda": ("gpt2", "gpt2-no-dropout", "resnet50", "bert", "mlp"),
}


def check_name(name: str) -> None:
    """Raise on an unknown workload name, suggesting the closest one."""
    if name not in FULL:
        hint = did_you_mean(name, FULL)
        raise ValueError(f"no workload {name!r}: there are {', '.join(FULL)}{hint}")
