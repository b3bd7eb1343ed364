"""Other kinds of loops: a trainer class, a closure-based fit, an agent, random paths."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, Dataset

from torpor.bench.wild.loop import Loop

# --- a trainer ---------------------------------------------------------------------------------

Batch = dict[str, Tensor]


class Sentences(Dataset[Batch]):
    """Padded to a fixed length, like the output of a tokenizer."""

    def __init__(self, count: int, length: int = 48, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, 1000, (count, length), generator=g)
        self.lengths = torch.randint(8, length + 1, (count,), generator=g)
        self.labels = (self.ids[:, 0] > 500).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Batch:
        mask = (torch.arange(self.ids.size(1)) < self.lengths[index]).long()
        ids = self.ids[index] * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": self.labels[index]}


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2, self.dropout, self.heads = nn.LayerNorm(width), nn.Dropout(0.1), heads

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            layer(x).view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(c // self.heads) + mask
        y = self.dropout(F.softmax(scores, dim=-1)) @ v
        x = self.norm1(x + self.dropout(self.output(y.transpose(1, 2).reshape(b, t, c))))
        out: Tensor = self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return out


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, width, padding_idx=0), nn.Embedding(64, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList([EncoderLayer(width, heads) for _ in range(layers)])
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        places = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.dropout(self.norm(self.words(input_ids) + self.places(places)))
        mask = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
        return Output(F.cross_entropy(logits, labels), logits)


@dataclass
class Arguments:
    batch_size: int = 8
    gradient_accumulation_steps: int = 4
    learning_rate: float = 5e-4
    warmup_steps: int = 20
    max_steps: int = 1000
    logging_steps: int = 10
    eval_steps: int = 50


@dataclass
class Trainer:
    """A loop in a class: accumulation, schedule, logging, evaluation, callbacks."""

    model: nn.Module
    args: Arguments
    train_dataset: Sentences
    eval_dataset: Sentences
    callbacks: list[Callable[[], None]]
    log: Callable[[float], None]
    history: list[dict[str, float]] = field(default_factory=list)

    def rate_scale(self, step: int) -> float:
        if step < self.args.warmup_steps:
            return step / self.args.warmup_steps
        rest = self.args.max_steps - step
        return max(0.0, rest / (self.args.max_steps - self.args.warmup_steps))

    def training_step(self, inputs: Batch) -> Tensor:
        self.model.train()
        loss: Tensor = self.model(**inputs).loss / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        losses, predictions, labels = [], [], []
        for inputs in DataLoader(self.eval_dataset, batch_size=32):
            output = self.model(**inputs)
            losses.append(output.loss.repeat(len(inputs["labels"])))
            predictions.append(output.logits.argmax(-1))
            labels.append(inputs["labels"])
        right = torch.cat(predictions).numpy() == torch.cat(labels).numpy()
        loss = torch.cat(losses).mean().item()
        return {"eval_loss": loss, "eval_accuracy": float(right.mean())}

    def train(self) -> None:
        args = self.args
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate_scale)
        tr_loss, step = torch.tensor(0.0), 0
        for _ in itertools.count():
            loader = DataLoader(self.train_dataset, batch_size=args.batch_size, shuffle=True)
            for i, inputs in enumerate(loader):
                tr_loss += self.training_step(inputs)
                if (i + 1) % args.gradient_accumulation_steps:
                    continue
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                if step % args.logging_steps == 0:
                    self.log(tr_loss.item() / args.logging_steps)
                    tr_loss -= tr_loss
                if step % args.eval_steps == 0:
                    self.history.append(self.evaluate())
                    self.log(self.history[-1]["eval_loss"])
                for callback in self.callbacks:
                    callback()


def trainer(loop: Loop) -> None:
    """A transformer fine-tuned by a trainer class; batches are dictionaries."""
    torch.manual_seed(42)
    Trainer(
        loop.compile(Classifier()), Arguments(), Sentences(3200), Sentences(64, seed=1),
        callbacks=[loop.step], log=loop.log,
    ).train()  # fmt: skip


# --- a fit by closures -------------------------------------------------------------------------


def lbfgs(loop: Loop) -> None:
    """A surface fitted to all points at once; the optimizer calls a closure up to twenty times."""
    torch.manual_seed(0)
    x = torch.rand(256, 2, dtype=torch.double) * 4 - 2
    y = torch.sin(5 * x[:, :1]) * torch.cos(4 * x[:, 1:])
    model = nn.Sequential(
        nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
    ).double()
    compiled, criterion = loop.compile(model), nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(compiled(x), y)
        loss.backward()
        return loss

    for _ in itertools.count():
        loss = optimizer.step(closure)
        loop.log(loss.item())
        loop.step()


# --- an agent ----------------------------------------------------------------------------------


class Cart:
    """A cart to be balanced in the middle of a line; an episode always has 50 turns."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)

    def reset(self) -> list[float]:
        self.place, self.speed, self.turn = *(torch.rand(2, generator=self.g) - 0.5).tolist(), 0
        return [self.place, self.speed]

    def step(self, action: int) -> tuple[list[float], float, bool]:
        self.speed += 0.1 if action == 1 else -0.1
        self.place += 0.1 * self.speed
        self.turn += 1
        return [self.place, self.speed], 1.0 - abs(self.place), self.turn == 50


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine = nn.Linear(2, 128)
        self.action_head, self.value_head = nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.affine(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def actor_critic(loop: Loop) -> None:
    """One number is read in every turn of the environment; an update at the end of an episode."""
    torch.manual_seed(543)
    env, model = Cart(543), loop.compile(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in itertools.count():
        state, done, saved, rewards = env.reset(), False, [], []
        while not done:
            probs, value = model(torch.tensor(state))
            m = Categorical(probs)
            action = m.sample()
            saved.append((m.log_prob(action), value))
            state, reward, done = env.step(int(action.item()))
            rewards.append(reward)
        returns: list[float] = []
        for reward in rewards[::-1]:
            returns.insert(0, reward + 0.99 * (returns[0] if returns else 0.0))
        wanted = torch.tensor(returns)
        wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-8)
        policy_losses, value_losses = [], []
        for (log_prob, value), r in zip(saved, wanted, strict=True):
            policy_losses.append(-log_prob * (r - value.item()))
            value_losses.append(F.smooth_l1_loss(value, torch.tensor([r])))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        loop.log(loss.item())
        loop.step()


# --- random paths ------------------------------------------------------------------------------


class Supernet(nn.Module):
    """Layers with several candidates each, of which one is used at a time."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.others = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, path: list[int]) -> Tensor:
        kinds = (F.relu, torch.tanh, F.gelu, F.silu, torch.sigmoid, F.softplus)
        for choice, linear, other, norm in zip(
            path, self.linears, self.others, self.norms, strict=True
        ):
            y = (linear if choice % 2 else other)(x)
            x = x + kinds[choice // 2 % 6](norm(y) if choice >= 12 else y)
        score: Tensor = self.head(x)
        return score


def supernet(loop: Loop) -> None:
    """Architecture search: each step draws one of 191 million paths."""
    torch.manual_seed(0)
    draw = random.Random(0)
    x = torch.randn(4096, 32)
    y = torch.sin(x.sum(1, keepdim=True))
    model = Supernet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in itertools.count():
        ix = torch.randint(0, len(x), (32,))
        path = [draw.randrange(24) for _ in range(6)]
        loss = F.mse_loss(model(x[ix], path), y[ix])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.log(loss.item())
        loop.step()
