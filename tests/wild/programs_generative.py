"""Programs that make pictures and points: autoencoders, adversaries, diffusion."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.wild.placements import Placement, program
from tests.wild.synthetic import digits, waves


class VAE(nn.Module):
    def __init__(self, pixels: int = 256) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(pixels, 64), nn.Linear(64, 6), nn.Linear(64, 6)
        self.fc3, self.fc4 = nn.Linear(6, 64), nn.Linear(64, pixels)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def sample(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        std = torch.exp(0.5 * log_variance)
        return mean + torch.randn_like(std) * std

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x.view(len(x), -1))
        return self.decode(self.sample(mean, log_variance)), mean, log_variance


def _elbo(made: Tensor, x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(made, x.view(len(x), -1), reduction="sum")
    return bce - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


@program()
def vae(how: Placement) -> dict[str, Any]:
    """Noise drawn inside the model, a sum of two losses, samples at the end."""
    pictures, _ = digits(200)
    data = torch.from_numpy(pictures).unsqueeze(1).float() / 255
    loader = DataLoader(data, batch_size=40, shuffle=True)
    model = how.model(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    totals = []
    for _ in range(3):
        model.train()
        total = 0.0
        for x in loader:
            x = x.to(how.device)
            optimizer.zero_grad()
            loss = _elbo(*(lambda out, x=x: (out[0], x, out[1], out[2]))(model(x)))
            loss.backward()
            total += loss.item()
            optimizer.step()
        totals.append(total / len(data))
    model.eval()
    with torch.no_grad():
        sample = model.decode(torch.randn(4, 6).to(how.device)).cpu().view(4, 1, 16, 16)
        made, _, _ = model(data[:8].to(how.device))
    comparison = torch.cat([data[:4], made.view(-1, 1, 16, 16)[:4].cpu()])
    return {"totals": totals, "sample": sample, "comparison": comparison}


def _mlp(*widths: int, last: nn.Module | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1], *([last] if last else []))


def _real(count: int) -> Tensor:
    x, y = waves(count)
    return torch.cat([torch.from_numpy(x), torch.from_numpy(y)], 1)


@program()
def gan(how: Placement) -> dict[str, Any]:
    """Two optimizers; what one made is detached for the other."""
    generator = how.model(_mlp(4, 32, 3))
    judge = how.model(_mlp(3, 32, 1, last=nn.Sigmoid()))
    to_make = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    to_judge = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCELoss()
    fixed, reported = torch.randn(5, 4).to(how.device), []
    for (real,) in DataLoader(TensorDataset(_real(240)), batch_size=20, shuffle=True):
        real = real.to(how.device)
        judge.zero_grad()
        label = torch.full((len(real),), 1.0, device=how.device)
        loss_real = criterion(judge(real).view(-1), label)
        loss_real.backward()
        fake = generator(torch.randn(len(real), 4, device=how.device))
        label.fill_(0.0)
        loss_fake = criterion(judge(fake.detach()).view(-1), label)
        loss_fake.backward()
        to_judge.step()
        generator.zero_grad()
        label.fill_(1.0)
        loss_made = criterion(judge(fake).view(-1), label)
        loss_made.backward()
        to_make.step()
        reported.append((loss_real.item() + loss_fake.item(), loss_made.mean().item()))
    with torch.no_grad():
        return {"told": reported, "made": generator(fixed).cpu()}


def _penalty(judge: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    share = torch.rand(len(real), 1).to(real.device)
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    score = judge(between)
    (gradient,) = torch.autograd.grad(
        score, between, torch.ones_like(score), create_graph=True, retain_graph=True
    )
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


@program()
def gradient_penalty(how: Placement) -> dict[str, Any]:
    """A gradient inside the loss: the gradient of a gradient."""
    generator, judge = how.model(_mlp(4, 24, 3)), how.model(_mlp(3, 24, 1))
    to_make = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    to_judge = torch.optim.RMSprop(judge.parameters(), lr=1e-3)
    real, reported = _real(128), []
    for step in range(12):
        batch = real[torch.randperm(128)[:32]].to(how.device)
        fake = generator(torch.randn(32, 4).to(how.device))
        loss = judge(fake.detach()).mean() - judge(batch).mean()
        loss = loss + 10.0 * _penalty(judge, batch, fake.detach())
        to_judge.zero_grad()
        loss.backward()
        to_judge.step()
        reported.append(loss.item())
        if step % 3 == 2:
            to_make.zero_grad()
            (-judge(generator(torch.randn(32, 4).to(how.device))).mean()).backward()
            to_make.step()
    return {"told": reported, "judge": judge.state_dict(), "generator": generator.state_dict()}


class Embedding(nn.Module):
    """Time as sines and cosines."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, t: Tensor) -> Tensor:
        half = self.width // 2
        speed = torch.exp(torch.arange(half, device=t.device) * -(math.log(10_000) / (half - 1)))
        angle = t[:, None].float() * speed[None, :]
        return torch.cat((angle.sin(), angle.cos()), dim=-1)


class Denoiser(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(Embedding(width), nn.Linear(width, width), nn.SiLU())
        self.down, self.mid = (
            nn.Conv2d(1, width, 3, padding=1),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.norm = nn.GroupNorm(4, width)
        self.up = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        first = F.silu(self.down(x))
        h = F.avg_pool2d(first, 2) + self.time(t)[:, :, None, None]
        h = F.interpolate(F.silu(self.norm(self.mid(h))), scale_factor=2)
        return self.up(torch.cat([first, h], dim=1))


class Diffusion(nn.Module):
    """The noise schedule as buffers, the loss and the way back."""

    def __init__(self, model: nn.Module, steps: int = 12) -> None:
        super().__init__()
        self.model, self.steps = model, steps
        beta = torch.linspace(1e-3, 0.2, steps)
        alpha = torch.cumprod(1.0 - beta, dim=0)
        self.register_buffer("beta", beta)
        self.register_buffer("alpha", alpha)
        self.register_buffer("alpha_before", F.pad(alpha[:-1], (1, 0), value=1.0))

    def at(self, values: Tensor, t: Tensor) -> Tensor:
        return values.gather(-1, t).view(-1, 1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, self.steps, (len(x),), device=x.device).long()
        noise, alpha = torch.randn_like(x), self.at(self.alpha, t)
        return F.mse_loss(self.model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, t), noise)

    @torch.no_grad()
    def sample(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        x = torch.randn(shape, device=device)
        for i in reversed(range(self.steps)):
            t = torch.full((shape[0],), i, device=device, dtype=torch.long)
            beta, alpha = self.at(self.beta, t), self.at(self.alpha, t)
            x = (x - beta / (1 - alpha).sqrt() * self.model(x, t)) / (1 - beta).sqrt()
            if i > 0:
                spread = beta * (1 - self.at(self.alpha_before, t)) / (1 - alpha)
                x = x + spread.sqrt() * torch.randn_like(x)
        return x.clamp(-1, 1)


@program()
def ddpm(how: Placement) -> dict[str, Any]:
    """Diffusion: random times and noise, buffers by index, a loop that samples."""
    pictures, _ = digits(96)
    data = torch.from_numpy(pictures).float().div(127.5).sub(1).unsqueeze(1)
    loader = DataLoader(TensorDataset(data), batch_size=16, shuffle=True)
    diffusion = how.model(Diffusion(Denoiser()))
    optimizer = torch.optim.AdamW(diffusion.parameters(), lr=2e-3)
    losses = []
    for _ in range(2):
        for (x,) in loader:
            loss = diffusion(x.to(how.device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "samples": diffusion.sample((4, 1, 16, 16), how.device).cpu()}
