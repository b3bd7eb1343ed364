"""Pictures: a convolutional net on digits, a training script with all extras, contrast."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.wild.placements import Placement, program
from tests.wild.synthetic import digits


class ToTensor:
    """A picture as floats between 0 and 1; as torchvision does, by asking for the tensor's type."""

    def __call__(self, picture: np.ndarray) -> Tensor:
        image = torch.from_numpy(picture[:, :, None].transpose((2, 0, 1))).contiguous()
        if isinstance(image, torch.ByteTensor):
            return image.to(dtype=torch.get_default_dtype()).div(255)
        return image


class Normalize:
    def __init__(self, mean: float, std: float) -> None:
        self.mean, self.std = torch.tensor([mean]), torch.tensor([std])

    def __call__(self, image: Tensor) -> Tensor:
        return image.clone().sub_(self.mean[:, None, None]).div_(self.std[:, None, None])


class Digits(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        self.pictures, self.labels = digits(count, seed=seed)
        self.transforms = [ToTensor(), Normalize(0.13, 0.31)]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image: Any = self.pictures[index]
        for transform in self.transforms:
            image = transform(image)
        return image, int(self.labels[index])


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 12, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(12 * 6 * 6, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


@program()
def mnist(how: Placement) -> dict[str, Any]:
    """The first example everybody runs."""
    train = DataLoader(Digits(320, seed=1), batch_size=32, shuffle=True)
    test = DataLoader(Digits(100, seed=9), batch_size=40)
    model = how.model(ConvNet())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses, scores = [], []
    for _ in range(2):
        model.train()
        for batch, (data, target) in enumerate(train):
            data, target = data.to(how.device), target.to(how.device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if batch % 3 == 0:
                losses.append(loss.item())
        scores.append(_test(model, test, how))
        scheduler.step()
    torch.save(model.state_dict(), how.folder / "mnist.pt")
    saved = torch.load(how.folder / "mnist.pt", map_location="cpu")
    return {"losses": losses, "scores": scores, "saved": saved, "lr": scheduler.get_last_lr()}


def _test(model: nn.Module, loader: DataLoader, how: Placement) -> tuple[float, int]:
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(how.device), target.to(how.device)
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            guess = output.argmax(dim=1, keepdim=True)
            correct += guess.eq(target.view_as(guess)).sum().item()
    return loss / len(loader.dataset), correct


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


def _small_resnet(classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
    )  # fmt: skip


class ModelEma:
    """A slow copy of the model, moved a little at every step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model).eval(), decay
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        ours, theirs = self.module.state_dict(), model.state_dict()
        for name, value in ours.items():
            if value.dtype.is_floating_point:
                value.copy_(value * self.decay + (1.0 - self.decay) * theirs[name].detach())
            else:
                value.copy_(theirs[name])


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum, self.count = self.sum + value * n, self.count + n

    @property
    def avg(self) -> float:
        return self.sum / max(self.count, 1)


def _mixup(images: Tensor, target: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    share = float(draw.beta(0.8, 0.8))
    hot = torch.full((len(target), 10), 0.1 / 10, device=target.device)
    hot.scatter_(1, target.view(-1, 1), 0.9 + 0.1 / 10)
    return images.mul(share).add_(images.flip(0).mul(1 - share)), hot * share + hot.flip(0) * (
        1 - share
    )


@program()
def image_recipe(how: Placement) -> dict[str, Any]:
    """A long recipe: mixup, label smoothing, warm-up, an average of weights, channels-last."""
    draw = np.random.default_rng(5)
    loader = DataLoader(Digits(160, seed=3), batch_size=32, shuffle=True, drop_last=True)
    model = how.model(_small_resnet().to(memory_format=torch.channels_last))
    average = ModelEma(model, decay=0.9)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decay, "weight_decay": 1e-3}, {"params": rest, "weight_decay": 0.0}],
        lr=0.05, momentum=0.9, nesterov=True,
    )  # fmt: skip
    losses, meter = [], AverageMeter()
    for update in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (update + 1) / 2)
        model.train()
        for images, target in loader:
            images = images.to(how.device).contiguous(memory_format=torch.channels_last)
            images, soft = _mixup(images, target.to(how.device), draw)
            loss = torch.sum(-soft * F.log_softmax(model(images), dim=-1), dim=-1).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update(model)
            meter.update(loss.item(), len(images))
        losses.append(meter.avg)
    images, target = next(iter(DataLoader(Digits(64, seed=8), batch_size=64)))
    with torch.no_grad():
        logits = average.module(images.to(how.device))
        smooth = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, target.to(how.device))
    top3 = logits.topk(3, dim=1).indices.cpu()
    return {
        "losses": losses,
        "smooth": smooth.item(),
        "top3": (top3 == target[:, None]).any(1).float().mean().item(),
        "average": average.module.state_dict(),
    }


class MoCo(nn.Module):
    """Two encoders, the second a slow copy, and a queue of what it said before."""

    def __init__(self, width: int = 16, length: int = 64) -> None:
        super().__init__()
        self.query = _small_resnet(width)
        self.key = _small_resnet(width)
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.data.copy_(theirs.data)
            ours.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(width, length), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def move_key(self, momentum: float = 0.9) -> None:
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.data = ours.data * momentum + theirs.data * (1.0 - momentum)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        start, count = int(self.place), len(keys)
        self.queue[:, start : start + count] = keys.T
        self.place[0] = (start + count) % self.queue.shape[1]

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            self.move_key()
            k = F.normalize(self.key(other), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.2
        self.enqueue(k)
        return logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device)


@program()
def contrastive_queue(how: Placement) -> dict[str, Any]:
    """Momentum contrast: buffers written by slices whose place comes from a buffer."""
    pictures, _ = digits(96)
    images = torch.from_numpy(pictures).float().div_(255).unsqueeze(1)
    model = how.model(MoCo())
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(24):
        batch = images[(step * 16) % 96 :][:16]
        one, other = (batch + 0.1 * torch.randn_like(batch) for _ in range(2))
        logits, labels = model(one.to(how.device), other.to(how.device))
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return {
        "losses": losses,
        "queue": model.queue,
        "place": model.place,
        "key": model.key[0].weight,
    }
