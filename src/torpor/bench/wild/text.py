"""Text: two language models, a name generator without modules, sentences of varying lengths."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

from torpor.bench.wild.loop import Loop

SYLLABLES = "an bel cor dan el fi gar hi il jo ka li mar na or pe ri sa ta ul vi wen ya zo".split()


def words(count: int, seed: int = 0) -> list[str]:
    """Random words of two to four syllables."""
    draw = random.Random(seed)
    return ["".join(draw.choices(SYLLABLES, k=draw.randint(2, 4))) for _ in range(count)]


def tokens(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """A text as integers, in which each depends on the previous one."""
    draw, text = random.Random(seed), [1]
    while len(text) < count:
        text.append((text[-1] * 7 + draw.randint(1, 5)) % vocabulary)
    return text


# --- a word language model -----------------------------------------------------------------------

Hidden = tuple[Tensor, Tensor]


class RNNModel(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.vocabulary, self.width, self.layers = vocabulary, width, layers
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        self.decoder = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, x: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.vocabulary)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch: int) -> Hidden:
        weight = next(self.parameters())
        shape = (self.layers, batch, self.width)
        return weight.new_zeros(shape), weight.new_zeros(shape)


def batchify(data: Tensor, batch: int) -> Tensor:
    count = data.size(0) // batch
    return data.narrow(0, 0, count * batch).view(batch, -1).t().contiguous()


def get_window(source: Tensor, i: int, bptt: int = 35) -> tuple[Tensor, Tensor]:
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


@torch.no_grad()
def evaluate_words(model: nn.Module, raw: RNNModel, source: Tensor) -> float:
    model.eval()
    total, hidden = 0.0, raw.init_hidden(10)
    for i in range(0, source.size(0) - 1, 35):
        data, targets = get_window(source, i)
        output, hidden = model(data, hidden)
        total += len(data) * F.nll_loss(output, targets).item()
    return total / (len(source) - 1)


def word_language_model(loop: Loop) -> None:
    """An LSTM over windows of one long text, carrying its hidden state; manual update."""
    torch.manual_seed(1111)
    train_data = batchify(torch.tensor(tokens(70_001, 1000)), 20)
    val_data = batchify(torch.tensor(tokens(2_501, 1000, seed=1)), 10)
    raw = RNNModel()
    model, lr = loop.compile(raw), 5.0
    for _ in itertools.count():
        model.train()
        total, hidden = 0.0, raw.init_hidden(20)
        for batch, i in enumerate(range(0, train_data.size(0) - 1, 35)):
            data, targets = get_window(train_data, i)
            model.zero_grad()
            hidden = (hidden[0].detach(), hidden[1].detach())
            output, hidden = model(data, hidden)
            loss = F.nll_loss(output, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            total += loss.item()
            if batch % 10 == 0 and batch > 0:
                loop.log(total / 10)
                total = 0.0
            loop.step()
        loop.log(evaluate_words(model, raw, val_data))


# --- a GPT in one file -------------------------------------------------------------------------


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 65
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.1


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.n_head, self.dropout = config.n_head, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        p = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return out


class GPTBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.ln_1, self.attn = nn.LayerNorm(width), CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.dropout(self.c_proj(F.gelu(self.c_fc(self.ln_2(x)))))
        return out


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def get_batch(loop: Loop, split: str, size: int = 12, block: int = 64) -> tuple[Tensor, Tensor]:
    data = np.memmap(loop.folder / f"{split}.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block, (size,))
    x = torch.stack([torch.from_numpy(data[i : i + block].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block].astype(np.int64)) for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss(loop: Loop, model: nn.Module, iters: int = 10) -> dict[str, float]:
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(iters)
        for k in range(iters):
            _, loss = model(*get_batch(loop, split))
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def get_lr(it: int, warmup: int = 20, decay: int = 1000) -> float:
    if it < warmup:
        return 1e-3 * (it + 1) / (warmup + 1)
    return 1e-4 + 0.5 * (1.0 + math.cos(math.pi * min(1.0, (it - warmup) / decay))) * 9e-4


def nanogpt(loop: Loop) -> None:
    """Windows of a memmap, AdamW with groups, a learning rate per step, clipping, evaluation."""
    torch.manual_seed(1337)
    for split, count in (("train", 200_000), ("val", 20_000)):
        np.array(tokens(count, 65, seed=count), dtype=np.uint16).tofile(
            loop.folder / f"{split}.bin"
        )
    raw = GPT(GPTConfig())
    decay = [p for p in raw.parameters() if p.dim() >= 2]
    rest = [p for p in raw.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    model = loop.compile(raw)
    x, y = get_batch(loop, "train")
    for it in itertools.count():
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        if it % 100 == 0:
            loop.log(estimate_loss(loop, model)["val"])
        _, loss = model(x, y)
        x, y = get_batch(loop, "train")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if it % 10 == 0:
            loop.log(loss.item())
        loop.step()


# --- names ------------------------------------------------------------------------------------


def build_dataset(names: list[str], block: int = 3) -> tuple[Tensor, Tensor]:
    stoi = {c: i + 1 for i, c in enumerate(sorted(set("".join(names))))} | {".": 0}
    x, y = [], []
    for name in names:
        context = [0] * block
        for c in name + ".":
            x.append(context)
            y.append(stoi[c])
            context = context[1:] + [stoi[c]]
    return torch.tensor(x), torch.tensor(y)


def makemore(loop: Loop) -> None:
    """No module and no optimizer: a list of tensors, updated manually."""
    g = torch.Generator().manual_seed(2147483647)
    xs, ys = build_dataset(words(4000))
    letters = int(ys.max()) + 1
    c = torch.randn((letters, 10), generator=g)
    w1 = torch.randn((30, 200), generator=g)
    b1 = torch.randn(200, generator=g)
    w2 = torch.randn((200, letters), generator=g)
    b2 = torch.randn(letters, generator=g)
    parameters = [c, w1, b1, w2, b2]
    for p in parameters:
        p.requires_grad = True
    for i in itertools.count():
        ix = torch.randint(0, xs.shape[0], (32,), generator=g)
        emb = c[xs[ix]]
        h = torch.tanh(emb.view(-1, 30) @ w1 + b1)
        logits = h @ w2 + b2
        loss = F.cross_entropy(logits, ys[ix])
        for p in parameters:
            p.grad = None
        loss.backward()
        lr = 0.1 if i < 5000 else 0.01
        for p in parameters:
            assert p.grad is not None
            p.data += -lr * p.grad
        loop.log(loss.log10().item())
        loop.step()


# --- sentences of varying lengths ----------------------------------------------------------------


class LSTMClassifier(nn.Module):
    def __init__(self, vocabulary: int = 500, width: int = 64, classes: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, width, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(text), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        scores: Tensor = self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1))
        return scores


class Sentences(Dataset[list[int]]):
    def __init__(self, lengths: list[int], draw: random.Random) -> None:
        self.rows = [[draw.randint(1, 499) for _ in range(length)] for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[int]:
        return self.rows[index]


def collate(batch: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    text = pad_sequence([torch.tensor(s) for s in batch], batch_first=True)
    lengths = torch.tensor([len(s) for s in batch])
    return text, lengths, torch.tensor([s[0] % 4 for s in batch])


def packed_lstm(loop: Loop) -> None:
    """Batches padded to their longest sentence, then packed; another shape at every step."""
    torch.manual_seed(0)
    draw = random.Random(0)
    sentences = Sentences([draw.randint(4, 40) for _ in range(3200)], draw)
    loader = DataLoader(sentences, batch_size=16, shuffle=True, collate_fn=collate)
    model = loop.compile(LSTMClassifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for _ in itertools.count():
        total, right = 0.0, 0
        for text, lengths, labels in loader:
            optimizer.zero_grad()
            output = model(text, lengths)
            loss = criterion(output, labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
            right += (output.argmax(1) == labels).sum().item()
            loop.log(loss.item())
            loop.step()
