"""Runs one zoo entry eagerly or lazily and says whether two runs are the same.

Bit for bit on a backend with eager's kernels; on one with kernels of its own the losses are within
1e-4, and what was drawn (dropout masks, the generator's state) is equal.

`where` says which tensors the program holds:

- ``eager``     plain tensors on the device under test, the CPU or a GPU: the judge;
- ``lazy``      the virtual device, `model.to("lazy")`;
- ``concrete``  lazy on the device under test, `torpor.lazy(model)`;
- ``mode``      lazy there without touching the script, `with torpor.mode()`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import backend_under_test
from torpor.backends import kernels
from torpor.testing.comparison import difference

from .entry import Batch, Entry, Phase
from .zoo import ZOO

STEPS = 5
NEW_TOKENS = 8
RELATIVE = 1e-4  # how far a loss may be off on a backend with kernels of its own
Placeable = TypeVar("Placeable", Tensor, nn.Module)


@dataclass(frozen=True)
class Run:
    """What a run leaves behind, all of it on the CPU."""

    losses: list[float] = field(default_factory=list)
    tensors: Batch = field(default_factory=dict)
    best_step: float = math.inf  # seconds of the quickest step
    counters: Counter[str] = field(default_factory=Counter)
    drawn: Batch = field(default_factory=dict)  # the generator's state and, if watched, masks
    by_eager: int = 0  # nodes that eager's kernels ran, in the step with most of them


@functools.cache
def eager_training(name: str) -> Run:
    """The judge's training run, once for each process."""
    return train(ZOO[name], "eager")


@functools.cache
def eager_generation(name: str, strategy: str) -> Run:
    """The judge's generation, once for each process."""
    return generate(ZOO[name], strategy, "eager")


def train(entry: Entry, where: str, *, read: str = "each step") -> Run:
    """Train five steps; `read` is when the losses become numbers: "each step" or "at the end"."""
    with _running(where) as counters:
        model = place(entry.build(), where).train()
        updates = [_Update(model, phase, entry.clip_norm) for phase in entry.phases]
        batches = [_place_batch(entry.batch(step), where) for step in range(STEPS)]
        seed_everything(0)
        losses: list[Any] = []
        times = []
        by_eager = [0]
        with _dropout_watched() as masks, _fallbacks_watched() as nodes:
            for batch in batches:
                begun, before = time.perf_counter(), len(nodes)
                for update in updates:
                    loss = update(batch)
                    losses.append(loss.item() if read == "each step" else loss.detach())
                times.append(time.perf_counter() - begun)
                by_eager.append(len(nodes) - before)
        drawn = {"generator": _generator_state(), **to_cpu(masks)}
        numbers = [loss.item() if isinstance(loss, Tensor) else loss for loss in losses]
        state = to_cpu(model.state_dict())
    return Run(numbers, state, min(times), counters, drawn, max(by_eager))


def generate(entry: Entry, strategy: str, where: str) -> Run:
    """What the untrained model produces for its prompt; tokens come with their logits."""
    with _running(where) as counters:
        model = place(entry.build_for_generation(), where).eval()
        prompt = _place_batch(entry.prompt(), where)
        seed_everything(3)
        begun = time.perf_counter()
        with torch.no_grad():
            if entry.produce is not None:
                produced = to_cpu(entry.produce(model, prompt))
            else:
                produced = to_cpu(_generate_tokens(model, prompt, strategy))
        taken = time.perf_counter() - begun
    return Run([], produced, taken, counters)


def seed_everything(seed: int) -> None:
    """Seed the three generators models draw from (wav2vec2 masks time with NumPy's)."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _generator_state() -> Tensor:
    """The states of the generators of the CPU and of the device under test."""
    states = [torch.get_rng_state()]
    if backend_under_test.DEVICE == "cuda":
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def place(thing: Placeable, where: str) -> Placeable:
    """Bring a CPU tensor or module to where it runs."""
    if where == "lazy":
        return thing.to("lazy")
    thing = thing.to(backend_under_test.DEVICE)
    if where == "concrete":
        import torpor

        placed: Placeable = torpor.lazy(thing)
        return placed
    return thing


def to_cpu(tensors: Batch) -> Batch:
    """Plain CPU copies, so that a later step cannot change what was read."""
    return {name: _plain(tensor.detach().cpu()).clone() for name, tensor in tensors.items()}


def differences(expected: Run, actual: Run) -> list[str]:
    """Every loss and tensor in which two runs differ; an empty list means that they agree."""
    if backend_under_test.BIT_EXACT:
        return differing_bits(expected, actual)
    return _differing_numbers(expected, actual)


def differing_bits(expected: Run, actual: Run) -> list[str]:
    """Every loss and tensor in which two runs are not equal bit for bit."""
    found = [
        f"loss {step}: {wanted!r} became {got!r}"
        for step, (wanted, got) in enumerate(zip(expected.losses, actual.losses, strict=True))
        if wanted.hex() != got.hex()
    ]
    if expected.tensors.keys() != actual.tensors.keys():
        found.append(f"names: {sorted(expected.tensors.keys() ^ actual.tensors.keys())}")
    for name in expected.tensors.keys() & actual.tensors.keys():
        found += _difference(name, expected.tensors[name], actual.tensors[name])
    return found


def _differing_numbers(expected: Run, actual: Run) -> list[str]:
    """Losses off by more than `RELATIVE`; draws that are not equal; what is produced, if not close.

    Trained parameters are judged by the losses they lead to: Adam makes a full step of a gradient
    that is nothing but rounding errors.
    """
    found = [
        f"loss {step}: {wanted!r} became {got!r}"
        for step, (wanted, got) in enumerate(zip(expected.losses, actual.losses, strict=True))
        if not math.isclose(wanted, got, rel_tol=RELATIVE)
    ]
    if expected.drawn.keys() != actual.drawn.keys():
        found.append(f"draws: {sorted(expected.drawn.keys() ^ actual.drawn.keys())}")
    for name in expected.drawn.keys() & actual.drawn.keys():
        found += _differing_draw(name, expected.drawn[name], actual.drawn[name])
    if not expected.losses:
        wrong = {n: difference(actual.tensors[n], t) for n, t in expected.tensors.items()}
        found += [f"{name}: {text}" for name, text in wrong.items() if text]
    return found


def _differing_draw(name: str, expected: Tensor, actual: Tensor) -> list[str]:
    """Where dropout had nothing to drop in either run (2), the mask is not to be seen."""
    unseen = (expected == 2) | (actual == 2) if name != "generator" else torch.tensor(False)
    unequal = (expected != actual) & ~unseen
    return [f"{name}: {int(unequal.sum())} of {unequal.numel()} differ"] if unequal.any() else []


@contextlib.contextmanager
def _dropout_watched() -> Iterator[Batch]:
    """Notes the mask of every dropout where bits alone do not tell: 0 dropped, 1 kept, 2 unseen."""
    masks: Batch = {}
    if backend_under_test.BIT_EXACT:
        yield masks
        return
    dropout = F.dropout

    def watching(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        seen = input.detach() != 0
        output = dropout(input, p, training, inplace)
        if training:
            kept = (output.detach() != 0).to(torch.uint8)
            masks[f"mask {len(masks)}"] = torch.where(seen, kept, 2)
        return output

    with mock.patch.object(F, "dropout", watching):
        yield masks


class _Update:
    """One phase's optimizer, scheduler and clipping."""

    def __init__(self, model: nn.Module, phase: Phase, clip_norm: float | None) -> None:
        self.model, self.loss, self.clip_norm = model, phase.loss, clip_norm
        self.parameters = [
            p for p in model.get_submodule(phase.submodule).parameters() if p.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-3, weight_decay=0.05)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, start_factor=0.2, total_iters=4
        )

    def __call__(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        return loss


def _generate_tokens(model: Any, prompt: Batch, strategy: str) -> Batch:
    settings: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sample": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        "beam": {"do_sample": False, "num_beams": 3},
    }
    output = model.generate(
        **prompt,
        **settings[strategy],
        max_new_tokens=NEW_TOKENS,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return {"tokens": output.sequences, "logits": torch.stack(output.logits)}


@contextlib.contextmanager
def _running(where: str) -> Iterator[Counter[str]]:
    """The surroundings of a run; the counters it moved are in the yielded one afterwards."""
    moved: Counter[str] = Counter()
    if where == "eager":
        yield moved
        return
    import torpor

    before = Counter(torpor.metrics.counters())
    mode = torpor.mode() if where == "mode" else contextlib.nullcontext()
    after = mock.patch.object(torpor.config, "compile_after", backend_under_test.COMPILE_AFTER)
    with torpor.using(backend_under_test.NAME) as backend, after, mode:
        backend.default_device_type = backend_under_test.DEVICE
        yield moved
    moved.update(Counter(torpor.metrics.counters()) - before)


@contextlib.contextmanager
def _fallbacks_watched() -> Iterator[list[str]]:
    """The ops that a backend leaves to eager's kernels, each time they run."""
    nodes: list[str] = []
    run_node = kernels.run_node

    def noting(node: Any, *rest: Any) -> Any:
        nodes.append(node.op.name)
        return run_node(node, *rest)

    with mock.patch.object(kernels, "run_node", noting):
        yield nodes


def _place_batch(batch: Batch, where: str) -> Batch:
    return {name: place(tensor, where) for name, tensor in batch.items()}


def _plain(tensor: Tensor) -> Tensor:
    """A plain tensor out of one that is lazy on the CPU, where `.cpu()` is the identity."""
    return tensor if type(tensor) is Tensor else torch.from_numpy(tensor.numpy().copy())


def _difference(name: str, expected: Tensor, actual: Tensor) -> list[str]:
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return [f"{name}: {expected.dtype} {expected.shape} became {actual.dtype} {actual.shape}"]
    if expected.numpy().tobytes() == actual.numpy().tobytes():  # tells 0.0 from -0.0
        return []
    unequal = expected != actual
    gap = (expected.double() - actual.double()).abs().max().item()
    return [f"{name}: {int(unequal.sum())} of {unequal.numel()} differ, by up to {gap:.2e}"]
