"""Two well-known models as they are trained on a GPU: 20 steps in bfloat16, curves against eager's.

bfloat16 keeps three digits, and a compiler keeps more of them between ops than eager does: a curve
may be off by a hundredth. How far eager in bfloat16 is from eager in float32 is told beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torpor
from torpor.backends.inductor.compile import COMPILE_AFTER

STEPS = 20
CLOSE = 1e-2  # relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers and torchvision
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
]

# Nothing is chosen by trying out what is faster, so that a curve is the same each time: other
# kernels round otherwise, and twenty steps make percents of it.
OPTIONS: dict[str, dict[str, Any]] = {
    "torchscript": {"cuda": True},
    "inductor": {"deterministic": True, "compile_after": COMPILE_AFTER},
}

Batch = tuple[Tensor, ...]
Losses = list[float]


@dataclass(frozen=True)
class Workload:
    """A model, the loss of a batch, what there is to learn, and who learns it."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[torch.Generator], Batch]
    optimizer: Callable[..., torch.optim.Optimizer]


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(use_cache=False)  # dropout 0.1, as it comes
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _next_words(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _words(generator: torch.Generator) -> Batch:
    return (torch.randint(50257, (4, 512), generator=generator),)


def _resnet50() -> nn.Module:
    torchvision = pytest.importorskip("torchvision")
    model: nn.Module = torchvision.models.resnet50()
    return model


def _class(model: nn.Module, batch: Batch) -> Tensor:
    pictures, classes = batch
    return nn.functional.cross_entropy(model(pictures), classes)


def _pictures(generator: torch.Generator) -> Batch:
    classes = torch.randint(1000, (32,), generator=generator)
    return (torch.randn(32, 3, 224, 224, generator=generator), classes)


WORKLOADS = {
    "gpt2-small": Workload(_gpt2, _next_words, _words, partial(torch.optim.AdamW, lr=3e-4)),
    "resnet50": Workload(
        _resnet50, _class, _pictures, partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    ),
}


def _train(workload: Workload, place: Callable[[Any], Any], bfloat16: bool) -> Losses:
    torch.manual_seed(0)
    model = place(workload.build().cuda()).train()
    optimizer = workload.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / STEPS, total_iters=STEPS)
    batches = [workload.batch(torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    losses = []
    for step in range(STEPS):
        batch = tuple(place(tensor.cuda()) for tensor in batches[step % 2])
        with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16):
            loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def _as_it_is(thing: Any) -> Any:
    return thing


@cache
def _eager(name: str, bfloat16: bool) -> Losses:
    return _train(WORKLOADS[name], _as_it_is, bfloat16)


def _distance(expected: Losses, actual: Losses) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


@pytest.fixture
def as_a_user_has_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run on the reference first, as they do by default; cuDNN does not try things out."""
    monkeypatch.setattr(torpor.config, "compile_after", COMPILE_AFTER)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


@pytest.mark.timeout(1800)  # compiling GPT-2's step takes minutes
@pytest.mark.usefixtures("as_a_user_has_it")
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("backend", ["reference", "torchscript", "inductor"])
def test_twenty_steps_in_bfloat16_follow_eagers_curve(backend: str, name: str) -> None:
    expected = _eager(name, True)
    with torpor.using(backend, **OPTIONS.get(backend, {})):
        actual = _train(WORKLOADS[name], torpor.lazy, True)
    distance, own = _distance(expected, actual), _distance(_eager(name, False), expected)
    print(f"{name} on {backend}: {distance:.1e} from eager (eager from float32: {own:.1e})")
    _note(name, {"eager": expected, "eager float32": _eager(name, False), backend: actual})
    assert distance < CLOSE, (expected, actual)
    assert expected[-1] < expected[0] - 0.5  # there was something to follow


def _note(name: str, curves: dict[str, Losses]) -> None:
    """Keep the curves where `TORPOR_CURVES` names a folder."""
    if folder := os.environ.get("TORPOR_CURVES"):
        file = Path(folder, f"{name}.json")
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | curves))
