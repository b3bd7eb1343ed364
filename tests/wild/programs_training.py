"""What training scripts do besides training: averages, freezing, folds, early stops, logs."""

from __future__ import annotations

import copy
import csv
import io
import json
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from tests.wild.placements import Placement, program
from tests.wild.synthetic import clusters, waves


def _classifier(norm: bool = False) -> nn.Sequential:
    middle = [nn.BatchNorm1d(24)] if norm else []
    return nn.Sequential(nn.Linear(8, 24, bias=not norm), *middle, nn.ReLU(), nn.Linear(24, 3))


def _clusters(count: int, seed: int = 2) -> TensorDataset:
    points, labels = clusters(count, seed=seed)
    return TensorDataset(torch.from_numpy(points), torch.from_numpy(labels))


def _epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, how: Placement
) -> float:
    model.train()
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(how.device)), y.to(how.device))
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    return total / len(loader.dataset)


@torch.no_grad()
def _score(model: nn.Module, data: TensorDataset, how: Placement) -> float:
    model.eval()
    x, y = (t.to(how.device) for t in data.tensors)
    return F.cross_entropy(model(x), y).item()


@program()
def weight_averages(how: Placement) -> dict[str, Any]:
    """Averages of weights: the mean of late epochs with fresh statistics, and a moving one."""
    data = _clusters(120)
    loader = DataLoader(data, batch_size=24, shuffle=True)
    model = how.model(_classifier(norm=True))
    mean = AveragedModel(model)
    moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    flat = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    losses, rates = [], []
    for epoch in range(5):
        losses.append(_epoch(model, loader, optimizer, how))
        moving.update_parameters(model)
        if epoch >= 2:
            mean.update_parameters(model)
            flat.step()
        else:
            cosine.step()
        rates.append(optimizer.param_groups[0]["lr"])
    update_bn(DataLoader([x.to(how.device) for x, _ in data], batch_size=24), mean)
    return {
        "losses": losses, "rates": rates, "mean": _score(mean, data, how),
        "moving": _score(moving, data, how), "averaged": int(mean.n_averaged),
        "state": mean.module.state_dict(),
    }  # fmt: skip


@program()
def early_stopping(how: Placement) -> dict[str, Any]:
    """The best state by deepcopy, patience, a rate that is cut on plateaus, and the way back."""
    train, valid = _clusters(80), _clusters(40, seed=5)
    loader = DataLoader(train, batch_size=16, shuffle=True)
    model = how.model(_classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    best, best_state, patience, scores = float("inf"), {}, 2, []
    for _ in range(8):
        _epoch(model, loader, optimizer, how)
        score = _score(model, valid, how)
        plateau.step(score)
        scores.append(score)
        if score < best - 1e-4:
            best, best_state, patience = score, copy.deepcopy(model.state_dict()), 2
        else:
            patience -= 1
        if patience == 0:
            break
    model.load_state_dict(best_state)
    again = _score(model, valid, how)
    return {"scores": scores, "best": best, "same": abs(again - best) < 1e-6, "state": best_state}


@program()
def transfer(how: Placement) -> dict[str, Any]:
    """A trained body is frozen, gets a new head, and is thawed with a rate of its own."""
    loader = DataLoader(_clusters(80), batch_size=20, shuffle=True)
    model = how.model(_classifier())
    _epoch(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), how)
    body = model[0].weight.detach().clone()
    for p in model.parameters():
        p.requires_grad = False
    model[2] = how.model(nn.Linear(24, 3))
    head = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
    losses = [_epoch(model, loader, head, how) for _ in range(2)]
    frozen = torch.equal(body, model[0].weight) and model[0].weight.grad is None
    for p in model[0].parameters():
        p.requires_grad_(True)
    both = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters()}], lr=1e-2
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(both, max_lr=[1e-3, 1e-2], total_steps=4)
    for _ in range(3):
        losses.append(_epoch(model, loader, both, how))
        schedule.step()
    return {
        "losses": losses,
        "frozen": frozen,
        "rates": schedule.get_last_lr(),
        "w": model[0].weight,
    }


@program()
def folds(how: Placement) -> dict[str, Any]:
    """Five folds, the same model initialised anew for each; metrics by numpy."""
    x, y = _clusters(100).tensors
    parts = np.array_split(np.random.default_rng(0).permutation(100), 5)
    scores, matrix = [], np.zeros((3, 3), dtype=np.int64)
    model = how.model(_classifier())
    for fold, valid in enumerate(parts):
        train = np.concatenate([p for i, p in enumerate(parts) if i != fold])
        torch.manual_seed(fold)
        model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
        optimizer = torch.optim.NAdam(model.parameters(), lr=2e-2)
        loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=20, shuffle=True)
        for _ in range(2):
            _epoch(model, loader, optimizer, how)
        with torch.no_grad():
            guess = model.eval()(x[valid].to(how.device)).argmax(1).cpu().numpy()
        truth = y[valid].numpy()
        scores.append(float((guess == truth).mean()))
        np.add.at(matrix, (truth, guess), 1)
    recall = np.diag(matrix) / matrix.sum(1)
    return {"scores": scores, "matrix": matrix, "mean": float(np.mean(scores)), "recall": recall}


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.expm1().log()


class Tied(nn.Module):
    """An autoencoder whose second half is the first, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = parametrizations.weight_norm(nn.Linear(8, 5))
        self.bias = nn.Parameter(torch.zeros(8))
        self.scale = nn.Linear(5, 5)
        parametrize.register_parametrization(self.scale, "weight", Positive())
        self.judge = parametrizations.spectral_norm(nn.Linear(8, 4))
        self.turn = parametrizations.orthogonal(nn.Linear(5, 5, bias=False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.turn(torch.tanh(self.scale(self.encode(x))))
        made = F.linear(h, self.encode.weight.t(), self.bias)
        return made, self.judge(made)


@program()
def parametrized(how: Placement) -> dict[str, Any]:
    """Weight norm, spectral norm, an orthogonal and a positive weight, tied halves, pruning."""
    x = _clusters(40).tensors[0].to(how.device)
    with torch.no_grad():
        start = Tied()
        start.scale.weight = torch.rand(5, 5) + 0.5
    model = how.model(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with parametrize.cached():
            made, judged = model(x)
        loss = F.mse_loss(made, x) + 0.1 * judged.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parametrize.remove_parametrizations(model.scale, "weight")
    square = model.turn.weight @ model.turn.weight.t()
    return {
        "losses": losses, "positive": bool((model.scale.weight > 0).all()),
        "norm": model.encode.weight.norm(dim=1).detach(), "square": square.detach(),
        "names": list(model.state_dict()),
    }  # fmt: skip


@program(placements=("enable", "device"))
def k_means(how: Placement) -> dict[str, Any]:
    """No parameters, no gradients: a loop until nothing moves."""
    points, labels = clusters(150, features=4)
    x = torch.from_numpy(points).to(how.device)
    centres = x[torch.randperm(len(x))[:3]].clone()
    steps = 0
    for _ in range(20):
        steps += 1
        nearest = torch.cdist(x, centres).argmin(dim=1)
        new = torch.stack([x[nearest == k].mean(0) for k in range(3)])
        moved = (new - centres).norm().item()
        centres = new
        if moved < 1e-4:
            break
    counts = torch.bincount(nearest, minlength=3)
    onehot = torch.zeros(len(x), 3, device=how.device).scatter_(1, nearest[:, None], 1.0)
    means = (onehot.t() @ x) / onehot.sum(0)[:, None]
    purity = sum(np.bincount(labels[(nearest == k).cpu().numpy()]).max() for k in range(3))
    return {
        "centres": centres, "counts": counts, "steps": steps, "purity": int(purity), "means": means,
    }  # fmt: skip


@program()
def logging(how: Placement) -> dict[str, Any]:
    """Numbers in every form people print them: formats, JSON, CSV, a bar's postfix, numpy."""
    x, y = (torch.from_numpy(t) for t in waves(96))
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = how.model(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    table, running, lines = io.StringIO(), 0.0, []
    writer = csv.DictWriter(table, ["step", "loss", "mae"])
    writer.writeheader()
    for step, (a, b) in enumerate(loader, 1):
        made = model(a.to(how.device))
        loss = F.mse_loss(made, b.to(how.device))
        optimizer.zero_grad()
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        running += (loss.item() - running) / step
        mae = np.abs(made.detach().cpu().numpy() - b.numpy()).mean()
        writer.writerow({"step": step, "loss": f"{loss:.3f}", "mae": f"{mae:.3f}"})
        postfix = {"loss": round(float(loss), 2), "norm": f"{total.item():.2f}"}
        lines.append(f"step {step:>3} " + ", ".join(f"{k}={v}" for k, v in postfix.items()))
    best = max(model.parameters(), key=lambda p: p.numel())
    report = {
        "loss": round(loss.tolist(), 3), "shape": list(best.shape), "devices": 1,
        "worst": int(made.flatten().argmax()), "any": bool(torch.isnan(loss)),
    }  # fmt: skip
    return {
        "table": table.getvalue(), "json": json.dumps(report), "lines": lines, "running": running,
        "str": str(torch.round(loss.detach().cpu(), decimals=2))[:11], "shapes": f"{made.shape}",
        "asarray": np.asarray(best.detach().cpu()).round(3), "list": b[0].tolist(),
    }  # fmt: skip


@program()
def two_models(how: Placement) -> dict[str, Any]:
    """Distillation: a teacher that is only asked, a student that learns, weights handed over."""
    data = _clusters(96)
    loader = DataLoader(data, batch_size=24, shuffle=True)
    teacher, student = how.model(_classifier()), how.model(nn.Linear(8, 3))
    _epoch(teacher, loader, torch.optim.Adam(teacher.parameters(), lr=2e-2), how)
    teacher.requires_grad_(False).eval()
    optimizer = torch.optim.Adagrad(student.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        for x, y in loader:
            x, y = x.to(how.device), y.to(how.device)
            with torch.inference_mode():
                soft = F.softmax(teacher(x) / 2, dim=-1)
            said = student(x)
            loss = F.kl_div(F.log_softmax(said / 2, -1), soft.clone(), reduction="batchmean") * 4
            loss = 0.5 * loss + 0.5 * F.cross_entropy(said, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    vector = nn.utils.parameters_to_vector(student.parameters()).detach()
    copied = copy.deepcopy(student)
    nn.utils.vector_to_parameters(vector * 0.5, copied.parameters())
    return {"losses": losses, "vector": vector, "half": copied.weight.detach()}
