"""Images: a convolutional net on digits, and a recipe with mixup and weight averaging."""

from __future__ import annotations

import copy
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torpor.bench.wild.loop import Loop


def pictures(count: int, size: int, channels: int = 1, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Noisy images with a bright bar whose position indicates the class, and the classes."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=g)
    images = torch.rand(count, channels, size, size, generator=g) * 0.4
    rows = torch.arange(size) - (labels * (size - 3) // 10)[:, None]
    bright = ((rows >= 0) & (rows < 3))[:, None, :, None]
    images[..., 2:-2] += 0.6 * bright
    return images, labels


# --- digits ------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32 * 12 * 12, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    loss, correct = 0.0, 0
    for data, target in loader:
        output = model(data)
        loss += F.nll_loss(output, target, reduction="sum").item()
        guess = output.argmax(dim=1, keepdim=True)
        correct += guess.eq(target.view_as(guess)).sum().item()
    return loss / 1000


def mnist(loop: Loop) -> None:
    """The first example everybody runs."""
    torch.manual_seed(1)
    train_loader = DataLoader(TensorDataset(*pictures(6400, 28)), batch_size=64, shuffle=True)
    test_loader = DataLoader(TensorDataset(*pictures(1000, 28, seed=2)), batch_size=250)
    model = loop.compile(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in itertools.count():
        model.train()
        for batch, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            if batch % 10 == 0:
                loop.log(loss.item())
            loop.step()
        loop.log(test(model, test_loader))
        scheduler.step()


# --- a recipe ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.layers = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.stem(x))
        scores: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


class ModelEma:
    """An exponential moving average of the model's weights."""

    def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for ours, theirs in pairs:
            ours.copy_(self.decay * ours + (1.0 - self.decay) * theirs)


def mixup(x: Tensor, target: Tensor, alpha: float = 0.2) -> tuple[Tensor, Tensor]:
    """A batch mixed with its reverse, and smoothed targets mixed likewise."""
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    soft = torch.full((len(target), 10), 0.1 / 10)
    soft.scatter_(1, target.view(-1, 1), 0.9 + 0.1 / 10)
    flipped = x.flip(0).mul_(1.0 - share)
    return x.mul_(share).add_(flipped), soft * share + soft.flip(0) * (1.0 - share)


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.sum, self.count = self.sum + value * n, self.count + n


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """No weight decay for biases and norms."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def image_recipe(loop: Loop) -> None:
    """Mixup, label smoothing, warm-up and cosine per update, clipping, weight averaging."""
    torch.manual_seed(42)
    dataset = TensorDataset(*pictures(2048, 32, channels=3))
    loader = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)
    model = ResNet()
    ema = ModelEma(model)
    optimizer = torch.optim.SGD(parameter_groups(model, 2e-5), lr=0.05, momentum=0.9, nesterov=True)
    train_model, updates, meter = loop.compile(model), 0, AverageMeter()
    for _ in itertools.count():
        train_model.train()
        for images, target in loader:
            rate = 0.05 * min(1.0, updates / 20, 0.5 + 0.5 * math.cos(updates / 100))
            for group in optimizer.param_groups:
                group["lr"] = rate
            mixed, soft = mixup(images, target)
            loss = torch.sum(-soft * F.log_softmax(train_model(mixed), dim=-1), dim=-1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ema.update(model)
            updates += 1
            if updates % 10 == 0:
                meter.update(loss.item(), len(images))
                loop.log(meter.sum / meter.count)
            loop.step()
