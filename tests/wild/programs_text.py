"""Text: language models of three generations, names, packed sequences, translation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, RandomSampler

from tests.wild.placements import Placement, program
from tests.wild.synthetic import NAMES, corpus, sentences

# --- a word language model ---------------------------------------------------------------------


class RNNModel(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2)
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.width = width

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), hidden

    def begin(self, size: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(2, size, self.width), weight.new_zeros(2, size, self.width)


def _batchify(data: Tensor, size: int) -> Tensor:
    count = data.size(0) // size
    return data.narrow(0, 0, count * size).view(size, -1).t().contiguous()


def _detached(hidden: Any) -> Any:
    if isinstance(hidden, Tensor):
        return hidden.detach()
    return tuple(_detached(each) for each in hidden)


@program()
def word_language_model(how: Placement) -> dict[str, Any]:
    """An LSTM whose parameters are updated by hand, and a rate that is lowered when it fails."""
    numbers, letters = corpus()
    data = _batchify(torch.tensor(numbers.astype(np.int64))[:1200], 10).to(how.device)
    train, valid = data[:90], data[90:]
    model = how.model(RNNModel(len(letters), 24))
    criterion, lr, best, log = nn.NLLLoss(), 5.0, None, []
    for _ in range(2):
        model.train()
        hidden, total = model.begin(10), 0.0
        for i in range(0, len(train) - 1, 10):
            length = min(10, len(train) - 1 - i)
            x, y = train[i : i + length], train[i + 1 : i + 1 + length].view(-1)
            model.zero_grad()
            hidden = _detached(hidden)
            output, hidden = model(x, hidden)
            loss = criterion(output, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            total += loss.item()
        found = _evaluate(model, valid, criterion)
        log.append(f"{total / 9:5.3f} ppl {math.exp(total / 9):8.2f} valid {found:5.3f}")
        if best is None or found < best:
            best = found
        else:
            lr /= 4.0
    return {"loss": total, "valid": best, "lr": lr, "lines": len(log), "words": _speak(model, how)}


@torch.no_grad()
def _evaluate(model: RNNModel, data: Tensor, criterion: nn.Module) -> float:
    model.eval()
    total, hidden = 0.0, model.begin(10)
    for i in range(0, len(data) - 1, 10):
        length = min(10, len(data) - 1 - i)
        output, hidden = model(data[i : i + length], hidden)
        hidden = _detached(hidden)
        total += length * criterion(output, data[i + 1 : i + 1 + length].view(-1)).item()
    return total / (len(data) - 1)


@torch.no_grad()
def _speak(model: RNNModel, how: Placement) -> list[int]:
    hidden, words = model.begin(1), []
    x = torch.randint(5, (1, 1), dtype=torch.long).to(how.device)
    for _ in range(10):
        output, hidden = model(x, hidden)
        weights = output.squeeze().div(1.0).exp().cpu()
        x.fill_(torch.multinomial(weights, 1)[0])
        words.append(int(x))
    return words


# --- a GPT, as one file that trains and one class that does ---------------------------------------


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 32
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32
    dropout: float = 0.1


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.dropout, self.heads, self.flash = config.dropout, config.n_head, flash
        size = config.block_size
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(size, size)).view(1, 1, size, size))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(c, dim=2)
        )
        if self.flash:
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = F.dropout(F.softmax(att, dim=-1), self.dropout, self.training) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Layer(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool) -> None:
        super().__init__()
        width = config.n_embd
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(config, flash)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(),
            nn.Linear(4 * width, width, bias=False), nn.Dropout(config.dropout),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool = True) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Layer(config, flash) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Any]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=-1)

    def groups(self, decay: float) -> list[dict[str, Any]]:
        named = {n: p for n, p in self.named_parameters() if p.requires_grad}
        return [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def generate(self, idx: Tensor, count: int, temperature: float, top_k: int) -> Tensor:
        for _ in range(count):
            logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1, :] / temperature
            v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
            logits[logits < v[:, [-1]]] = -float("Inf")
            following = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
            idx = torch.cat((idx, following), dim=1)
        return idx


class NanoTrainer:
    """The training loop of one file: its state is what a checkpoint holds."""

    def __init__(self, how: Placement) -> None:
        self.how = how
        self.file = how.folder / "train.bin"
        corpus()[0].tofile(self.file)
        self.model = how.model(GPT(GPTConfig()))
        self.optimizer = torch.optim.AdamW(self.model.groups(0.1), lr=1e-2, betas=(0.9, 0.95))
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.losses: list[float] = []

    def batch(self) -> tuple[Tensor, Tensor]:
        data = np.memmap(self.file, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - 16, (6,))
        x, y = (
            torch.stack([torch.from_numpy(data[i + s : i + s + 16].astype(np.int64)) for i in ix])
            for s in (0, 1)
        )
        return x.to(self.how.device), y.to(self.how.device)

    def rate(self, step: int) -> float:
        if step < 3:
            return 1e-2 * (step + 1) / 4
        return 1e-3 + 0.5 * (1.0 + math.cos(math.pi * (step - 3) / 12)) * 9e-3

    @torch.no_grad()
    def estimate(self) -> float:
        self.model.eval()
        losses = torch.zeros(3)
        for k in range(3):
            _, loss = self.model(*self.batch())
            losses[k] = loss.item()
        self.model.train()
        return losses.mean().item()

    def train(self, start: int, stop: int) -> None:
        x, y = self.batch()
        for step in range(start, stop):
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(step)
            for _ in range(2):
                with nullcontext():
                    _, loss = self.model(x, y)
                    loss = loss / 2
                x, y = self.batch()
                self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.item() * 2)

    def save(self) -> None:
        checkpoint = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "args": vars(self.model.config), "rng": torch.get_rng_state(),
        }  # fmt: skip
        torch.save(checkpoint, self.how.folder / "ckpt.pt")

    def resume(self) -> None:
        checkpoint = torch.load(self.how.folder / "ckpt.pt", map_location="cpu")
        self.model = self.how.model(GPT(GPTConfig(**checkpoint["args"])))
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer = torch.optim.AdamW(self.model.groups(0.1), lr=1e-2, betas=(0.9, 0.95))
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])


@program()
def nanogpt(how: Placement) -> dict[str, Any]:
    """Batches from a file by memmap, accumulation, a checkpoint, and training on from it."""
    trainer = NanoTrainer(how)
    trainer.train(0, 8)
    estimates = [trainer.estimate()]
    trainer.save()
    trainer.train(8, 12)
    went_on = trainer.losses[8:]
    trainer.resume()
    trainer.train(8, 12)
    estimates.append(trainer.estimate())
    start = torch.zeros((2, 1), dtype=torch.long, device=how.device)
    tokens = trainer.model.eval().generate(start, 12, temperature=0.8, top_k=8)
    again = trainer.losses[12:]
    return {
        "losses": trainer.losses,
        "estimates": estimates,
        "tokens": tokens.tolist(),
        "resumed": [f"{one:.3f}" == f"{other:.3f}" for one, other in zip(went_on, again)],
    }


class SortData(Dataset):
    """Digits, and the same digits in order: what is to be learnt."""

    def __init__(self, length: int = 6, digits: int = 3) -> None:
        self.length, self.digits = length, digits

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(self.digits, size=(self.length,), dtype=torch.long)
        whole = torch.cat((x, torch.sort(x)[0]), dim=0)
        y = whole[1:].clone()
        y[: self.length - 1] = -1
        return whole[:-1].clone(), y


class Trainer:
    """A loop in a class, with callbacks."""

    def __init__(
        self, config: dict[str, Any], model: nn.Module, data: Dataset, how: Placement
    ) -> None:
        self.config, self.model, self.data, self.how = config, how.model(model), data, how
        self.callbacks: dict[str, list[Callable[[Trainer], None]]] = defaultdict(list)
        self.steps, self.loss = 0, torch.zeros(())

    def add_callback(self, event: str, callback: Callable[[Trainer], None]) -> None:
        self.callbacks[event].append(callback)

    def run(self) -> None:
        optimizer = torch.optim.AdamW(self.model.groups(0.1), lr=self.config["lr"])
        sampler = RandomSampler(self.data, replacement=True, num_samples=int(1e5))
        loader = DataLoader(self.data, sampler=sampler, batch_size=16, num_workers=0)
        self.model.train()
        batches = iter(loader)
        while self.steps < self.config["steps"]:
            x, y = (t.to(self.how.device) for t in next(batches))
            _, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            for callback in self.callbacks["batch_end"]:
                callback(self)
            self.steps += 1


@program()
def mingpt(how: Placement) -> dict[str, Any]:
    """A trainer with callbacks, attention by hand, a data set that draws its own samples."""
    model = GPT(GPTConfig(block_size=11, vocab_size=3, dropout=0.0), flash=False)
    trainer = Trainer({"lr": 3e-3, "steps": 14}, model, SortData(), how)
    lines: list[float] = []
    trainer.add_callback("batch_end", lambda t: lines.append(t.loss.item()))
    trainer.add_callback("batch_end", lambda t: str(f"iter {t.steps}: loss {t.loss.item():.5f}"))
    trainer.run()
    model = trainer.model.eval()
    x = torch.tensor([[0, 2, 1, 0, 1, 1]], dtype=torch.long).to(how.device)
    logits, _ = model(x)
    return {
        "losses": lines,
        "logits": logits.detach(),
        "sorted": model.generate(x, 6, 1.0, 1).cpu(),
    }


# --- names ------------------------------------------------------------------------------------


def _contexts(letters: dict[str, int], size: int = 3) -> tuple[Tensor, Tensor]:
    x, y = [], []
    for name in NAMES:
        context = [0] * size
        for c in name + ".":
            x.append(context)
            y.append(letters[c])
            context = context[1:] + [letters[c]]
    return torch.tensor(x), torch.tensor(y)


@program(placements=("enable", "device"))
def makemore_by_hand(how: Placement) -> dict[str, Any]:
    """No module at all: a list of tensors, gradients set to None, and data moved by hand."""
    letters = {c: i for i, c in enumerate(["."] + sorted(set("".join(NAMES))))}
    g = torch.Generator().manual_seed(2147483647)
    count = len(letters)
    xs, ys = (t.to(how.device) for t in _contexts(letters))
    shapes = ((count, 4), (12, 24), (24,), (24, count), (count,))
    parameters = [torch.randn(shape, generator=g).mul(0.3).to(how.device) for shape in shapes]
    for p in parameters:
        p.requires_grad = True
    c, w1, b1, w2, b2 = parameters
    losses = []
    for step in range(20):
        ix = torch.randint(0, len(xs), (32,), generator=g).to(how.device)
        h = torch.tanh(c[xs[ix]].view(-1, 12) @ w1 + b1)
        loss = F.cross_entropy(h @ w2 + b2, ys[ix])
        for p in parameters:
            p.grad = None
        loss.backward()
        for p in parameters:
            p.data += -(0.1 if step < 15 else 0.01) * p.grad
        losses.append(loss.log10().item())
    return {"losses": losses, "parameters": parameters, "names": _names(parameters, letters, g)}


def _names(parameters: list[Tensor], letters: dict[str, int], g: torch.Generator) -> list[str]:
    c, w1, b1, w2, b2 = parameters
    found, back = [], {i: s for s, i in letters.items()}
    for _ in range(3):
        out, context = [], [0] * 3
        while len(out) < 8:
            h = torch.tanh(c[torch.tensor([context])].view(1, -1) @ w1 + b1)
            probabilities = F.softmax(h @ w2 + b2, dim=1).detach().cpu()
            index = torch.multinomial(probabilities, num_samples=1, generator=g).item()
            if index == 0:
                break
            context = context[1:] + [index]
            out.append(back[index])
        found.append("".join(out))
    return found


@program()
def bigrams(how: Placement) -> dict[str, Any]:
    """Counts of pairs, then the same by one layer of weights on one-hot letters."""
    letters = {c: i for i, c in enumerate(["."] + sorted(set("".join(NAMES))))}
    pairs = [p for name in NAMES for p in zip("." + name, name + ".")]
    xs, ys = (torch.tensor([letters[p[k]] for p in pairs]) for k in (0, 1))
    counts = torch.zeros((len(letters), len(letters)), dtype=torch.int32)
    for one, other in pairs:
        counts[letters[one], letters[other]] += 1
    chance = (counts + 1).float()
    chance /= chance.sum(1, keepdim=True)
    layer = how.model(nn.Linear(len(letters), len(letters), bias=False))
    xs, ys, losses = xs.to(how.device), ys.to(how.device), []
    for _ in range(12):
        logits = layer(F.one_hot(xs, num_classes=len(letters)).float())
        e = logits.exp()
        probabilities = e / e.sum(1, keepdims=True)
        loss = -probabilities[torch.arange(len(xs)).to(how.device), ys].log().mean()
        loss = loss + 0.01 * (layer.weight**2).mean()
        layer.weight.grad = None
        loss.backward()
        layer.weight.data += -20 * layer.weight.grad
        losses.append(loss.item())
    return {"losses": losses, "chance": chance, "weight": layer.weight.detach()}


# --- sequences of many lengths ------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self, words: int = 20, tags: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 10, batch_first=True, bidirectional=True)
        self.out = nn.Linear(20, tags)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(x), lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(output)


def _collate(batch: list[np.ndarray]) -> tuple[Tensor, Tensor, Tensor]:
    sequences = [torch.as_tensor(s) for s in batch]
    lengths = torch.tensor([len(s) for s in sequences])
    x = pad_sequence(sequences, batch_first=True, padding_value=0)
    y = pad_sequence([s % 4 for s in sequences], batch_first=True, padding_value=-100)
    return x, y, lengths


@program()
def packed_lstm(how: Placement) -> dict[str, Any]:
    """Batches padded to their longest, packed by their lengths; another shape at every step."""
    loader = DataLoader(sentences(64), batch_size=8, shuffle=True, collate_fn=_collate)
    model = how.model(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, right, shapes = [], 0, []
    for _ in range(2):
        for x, y, lengths in loader:
            logits = model(x.to(how.device), lengths)
            y = y.to(how.device)
            loss = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right += int(((logits.argmax(-1) == y) & (y != -100)).sum())
            shapes.append(tuple(logits.shape))
    return {"losses": losses, "right": right, "shapes": shapes, "out": model.out.weight.detach()}


class Encoder(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(words, width), nn.GRU(width, width)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(self.embedding(x).view(1, 1, -1), hidden)


class Decoder(nn.Module):
    """Attention over what the encoder said, one word at a time."""

    def __init__(self, words: int, width: int, longest: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(words, width), nn.GRU(width, width)
        self.attention, self.combine = nn.Linear(2 * width, longest), nn.Linear(2 * width, width)
        self.out = nn.Linear(width, words)

    def forward(self, x: Tensor, hidden: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(x).view(1, 1, -1)
        weights = F.softmax(self.attention(torch.cat((embedded[0], hidden[0]), 1)), dim=1)
        seen = torch.bmm(weights.unsqueeze(0), said.unsqueeze(0))
        output = F.relu(self.combine(torch.cat((embedded[0], seen[0]), 1)).unsqueeze(0))
        output, hidden = self.gru(output, hidden)
        return F.log_softmax(self.out(output[0]), dim=1), hidden


@program()
def seq2seq(how: Placement) -> dict[str, Any]:
    """One pair at a time, teacher forcing by a coin, decoding until the end is read."""
    longest, width, words = 7, 16, 14
    draw = np.random.default_rng(6)
    pairs = [draw.integers(2, words, draw.integers(2, 6)) for _ in range(12)]
    encoder, decoder = how.model(Encoder(words, width)), how.model(Decoder(words, width, longest))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (encoder, decoder)]
    losses = []
    for number, source in enumerate(pairs):
        target = [*source[::-1], 1]
        for optimizer in optimizers:
            optimizer.zero_grad()
        said, hidden = _encode(encoder, source, longest, width, how)
        x, loss = torch.tensor([[0]], device=how.device), torch.zeros(1, device=how.device)
        for word in target:
            output, hidden = decoder(x, hidden, said)
            truth = torch.tensor([word]).to(how.device)
            loss = loss + F.nll_loss(output, truth)
            x = truth if number % 2 else output.topk(1)[1].squeeze().detach()
            if x.item() == 1:
                break
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item() / len(target))
    with torch.no_grad():
        said, hidden = _encode(encoder, pairs[0], longest, width, how)
        x, decoded = torch.tensor([[0]], device=how.device), []
        while len(decoded) < longest:
            output, hidden = decoder(x, hidden, said)
            x = output.data.topk(1)[1].squeeze().detach()
            decoded.append(x.item())
            if decoded[-1] == 1:
                break
    return {"losses": losses, "decoded": decoded}


def _encode(
    encoder: Encoder, source: np.ndarray, longest: int, width: int, how: Placement
) -> tuple[Tensor, Tensor]:
    said = torch.zeros(longest, width, device=how.device)
    hidden = torch.zeros(1, 1, width, device=how.device)
    for i, word in enumerate(source):
        output, hidden = encoder(torch.tensor([word]).to(how.device), hidden)
        said[i] = output[0, 0]
    return said, hidden
