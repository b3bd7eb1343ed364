"""``python -m benchmarks.sizes``: what sizes that change from step to step cost.

Training: lengths of 16 to 128, batches of 1 to 8, a schedule with warm-up; how many graphs are
compiled, how far the losses are from eager's, and what a step takes against one whose graph was
compiled for its size alone, the two taking turns. Generation: tokens with a growing cache.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torpor
from torpor.bench.models import Block
from torpor.bench.runners import torpor_unsettled
from torpor.cli import terminal
from torpor.symbols.leaves import SIZES

LAYERS, WIDTH, HEADS, VOCABULARY, LONGEST = 4, 128, 4, 500, 128
TIMED = ((8, 128), (4, 64), (2, 24))  # batch, length
ROUNDS = 11
MOST_TURNS = 20  # to warm up


class Model(nn.Module):
    """A GPT that takes any length up to its longest."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, future)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Training:
    """A model, its optimizer and schedule, and the sizes that come."""

    def __init__(self, steps: int, layers: int, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Model(layers).to(device)
        self.draw = torch.Generator().manual_seed(1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min((s + 1) / 20, 0.5 * (1 + math.cos(math.pi * s / steps)))
        )

    def sizes(self) -> tuple[int, int]:
        batch = int(torch.randint(1, 9, (), generator=self.draw))
        return batch, int(torch.randint(16, LONGEST + 1, (), generator=self.draw))

    def step(self, size: tuple[int, int]) -> Tensor:
        tokens = torch.randint(0, VOCABULARY, size, generator=self.draw).to(self.device)
        scores = self.model(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


def train(steps: int, layers: int, device: str, advance: Any) -> tuple[Training, list[float]]:
    training = Training(steps, layers, device)
    losses = []
    for step in range(steps):
        losses.append(training.step(training.sizes()))
        training.schedule.step()
        advance(f"{device}: step {step + 1}")
    return training, [loss.item() for loss in losses]


@contextmanager
def sizes_as_numbers() -> Iterator[None]:
    """Steps in the body are recorded with their sizes as parts of their graphs."""
    before, SIZES.active = SIZES.active, False
    try:
        yield
    finally:
        SIZES.active = before


def timed(training: Training, size: tuple[int, int]) -> float:
    start = time.perf_counter()
    training.step(size)
    torpor.sync(wait=True)
    return (time.perf_counter() - start) * 1e3


def unsettled() -> int:
    """Grows while steps are not yet what they will be."""
    return torpor_unsettled() + sum(torpor.metrics.new_nodes().values())


def warm_up(training: Training, size: tuple[int, int]) -> None:
    """Both kinds of step in turns, until they come to rest."""
    for _ in range(MOST_TURNS):
        before = unsettled()
        for _ in range(2):
            timed(training, size)
            with sizes_as_numbers():
                timed(training, size)
        if unsettled() == before:
            return
    raise RuntimeError(
        f"steps of {size} are still compiled or interpreted after {MOST_TURNS} turns"
    )


def race(training: Training, size: tuple[int, int], rounds: int, advance: Any) -> dict[str, Any]:
    """A step by the graph for all sizes against one by the graph for this size alone."""
    warm_up(training, size)
    open_, fixed = [], []
    for turn in range(rounds):
        open_.append(timed(training, size))
        with sizes_as_numbers():
            fixed.append(timed(training, size))
        advance(f"{size}: round {turn + 1}")
    ratio = statistics.median(a / b for a, b in zip(open_, fixed, strict=True))
    ms = statistics.median(open_), statistics.median(fixed)
    return {"size": size, "any_size_ms": ms[0], "this_size_ms": ms[1], "ratio": ratio}


def training_part(arguments: argparse.Namespace) -> dict[str, Any]:
    steps = arguments.steps
    with terminal.progress("training", 2 * steps) as advance:
        _, expected = train(steps, arguments.layers, "cpu", advance)
        torpor.metrics.reset()
        training, losses = train(steps, arguments.layers, "lazy", advance)
    counters = dict(torpor.metrics.counters())
    far = max(abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True))
    with terminal.progress("racing", len(TIMED) * arguments.rounds) as advance:
        races = [race(training, size, arguments.rounds, advance) for size in TIMED]
    return {
        "steps": steps,
        "compiles": counters.get("UncachedCompile", 0),
        "interpreted": counters.get("InterpretedGraph", 0),
        "loss_difference": far,
        "races": races,
    }


def families() -> Iterator[tuple[str, Any]]:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    size = {"vocab_size": 200, "pad_token_id": 1, "eos_token_id": 0, "bos_token_id": 0}
    gpt = GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=512, **size)
    llama = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, **size,
    )  # fmt: skip
    t5 = T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=3, num_heads=4, vocab_size=200,
        decoder_start_token_id=0,
    )  # fmt: skip
    yield "gpt2", GPT2LMHeadModel(gpt)
    yield "llama", LlamaForCausalLM(llama)
    yield "t5", T5ForConditionalGeneration(t5)


def generation_part(tokens: int) -> list[dict[str, Any]]:
    rows = []
    for name, model in families():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2)
        model.eval()
        prompt = torch.randint(5, 200, (2, 7))
        asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        asked["attention_mask"] = torch.ones_like(prompt)
        with torch.no_grad():
            expected = model.generate(prompt, **asked)
            torpor.metrics.reset()
            asked["attention_mask"] = asked["attention_mask"].to("lazy")
            actual = model.to("lazy").generate(prompt.to("lazy"), **asked).cpu()
        compiles = torpor.metrics.counters().get("UncachedCompile", 0)
        equal = torch.equal(expected, actual)
        rows.append({"model": name, "tokens": tokens, "compiles": compiles, "equal": equal})
    return rows


def report(results: dict[str, Any]) -> None:
    training = results["training"]
    terminal.heading(
        f"{training['steps']} steps of random sizes: {training['compiles']} compiles,"
        f" losses within {training['loss_difference']:.1e} of eager's"
    )
    rows = [
        (f"{r['size'][0]} x {r['size'][1]}", f"{r['any_size_ms']:.1f}",
         f"{r['this_size_ms']:.1f}", f"{r['ratio']:.2f}")
        for r in training["races"]
    ]  # fmt: skip
    terminal.table(("batch x length", "any size ms", "this size ms", "ratio"), rows)
    terminal.heading("tokens with a growing cache")
    rows = [
        (r["model"], str(r["tokens"]), str(r["compiles"]), "equal" if r["equal"] else "DIFFERENT")
        for r in results["generation"]
    ]
    terminal.table(("model", "tokens", "compiles", "to eager's"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="benchmarks.sizes")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torpor.config.cache = False
    torpor.use(arguments.backend)
    results = {
        "training": training_part(arguments),
        "generation": generation_part(arguments.tokens) if arguments.tokens else [],
    }
    report(results)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    training = results["training"]
    held = training["compiles"] <= 4 and all(r["ratio"] <= 1.15 for r in training["races"])
    held = held and all(r["equal"] and r["compiles"] <= 4 for r in results["generation"])
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
