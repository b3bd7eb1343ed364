"""Image generation: an autoencoder, diffusion, a GAN."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torpor.bench.wild.images import pictures
from torpor.bench.wild.loop import Loop

# --- a variational autoencoder -------------------------------------------------------------------


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21, self.fc22 = nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 784))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def elbo(made: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(made, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def vae(loop: Loop) -> None:
    """Noise drawn inside the model, a sum of two losses, read at every step."""
    torch.manual_seed(1)
    images, labels = pictures(12_800, 28)
    loader = DataLoader(TensorDataset(images, labels), batch_size=128, shuffle=True)
    model = loop.compile(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in itertools.count():
        train_loss = 0.0
        for data, _ in loader:
            optimizer.zero_grad()
            made, mu, logvar = model(data)
            loss = elbo(made, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            loop.log(loss.item() / len(data))
            loop.step()


# --- diffusion ---------------------------------------------------------------------------------


class TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, t: Tensor) -> Tensor:
        half = self.width // 2
        speed = torch.exp(torch.arange(half, device=t.device) * -(math.log(10_000) / (half - 1)))
        angle = t[:, None] * speed[None, :]
        return torch.cat((angle.sin(), angle.cos()), dim=-1)


class ResBlock(nn.Module):
    def __init__(self, width_in: int, width: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width_in), nn.Conv2d(width_in, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time_width, width)
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        out: Tensor = h + self.skip(x)
        return out


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        time = 4 * width
        self.time = nn.Sequential(
            TimeEmbedding(width), nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time)
        )
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down1, self.down2 = ResBlock(width, width, time), ResBlock(width, 2 * width, time)
        self.mid = ResBlock(2 * width, 2 * width, time)
        self.up2, self.up1 = ResBlock(4 * width, width, time), ResBlock(2 * width, width, time)
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = self.time(t)
        one = self.down1(self.first(x), t)
        two = self.down2(F.avg_pool2d(one, 2), t)
        h = self.mid(F.avg_pool2d(two, 2), t)
        h = self.up2(torch.cat([F.interpolate(h, scale_factor=2), two], dim=1), t)
        h = self.up1(torch.cat([F.interpolate(h, scale_factor=2), one], dim=1), t)
        noise: Tensor = self.last(h)
        return noise


class Diffusion(nn.Module):
    """The noise schedule as buffers, and the loss."""

    sqrt_alpha: Tensor
    sqrt_rest: Tensor

    def __init__(self, model: nn.Module, steps: int = 200) -> None:
        super().__init__()
        self.model, self.steps = model, steps
        alpha = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, steps), dim=0)
        self.register_buffer("sqrt_alpha", alpha.sqrt())
        self.register_buffer("sqrt_rest", (1.0 - alpha).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, self.steps, (len(x),), device=x.device).long()
        noise = torch.randn_like(x)
        alpha, rest = (b.gather(0, t).view(-1, 1, 1, 1) for b in (self.sqrt_alpha, self.sqrt_rest))
        return F.mse_loss(self.model(alpha * x + rest * noise, t), noise)


def ddpm(loop: Loop) -> None:
    """Random times and noise, a U-net, schedules looked up in buffers."""
    torch.manual_seed(0)
    images, _ = pictures(1600, 16)
    loader = DataLoader(TensorDataset(images * 2 - 1), batch_size=16, shuffle=True)
    diffusion = Diffusion(loop.compile(UNet()))
    optimizer = torch.optim.AdamW(diffusion.parameters(), lr=1e-3)
    for _ in itertools.count():
        for (x,) in loader:
            loss = diffusion(x)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
            optimizer.step()
            loop.log(loss.item())
            loop.step()


# --- a GAN --------------------------------------------------------------------------------------


def make_generator(noise: int = 32, width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(noise, 2 * width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(2 * width), nn.ReLU(True),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width), nn.ReLU(True),
        nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )  # fmt: skip


def make_discriminator(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(2 * width, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
    )  # fmt: skip


def gan(loop: Loop) -> None:
    """Two optimizers; the generator's output is detached for one; scores read at every step."""
    torch.manual_seed(999)
    images, _ = pictures(3200, 16)
    loader = DataLoader(TensorDataset(images * 2 - 1), batch_size=32, shuffle=True)
    net_g, net_d = loop.compile(make_generator()), loop.compile(make_discriminator())
    opt_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion, log = nn.BCELoss(), []
    for _ in itertools.count():
        for i, (real,) in enumerate(loader):
            net_d.zero_grad()
            label = torch.full((len(real),), 1.0)
            output = net_d(real).view(-1)
            loss_real = criterion(output, label)
            loss_real.backward()
            score_real = output.mean().item()
            fake = net_g(torch.randn(len(real), 32, 1, 1))
            label.fill_(0.0)
            output = net_d(fake.detach()).view(-1)
            loss_fake = criterion(output, label)
            loss_fake.backward()
            opt_d.step()
            net_g.zero_grad()
            label.fill_(1.0)
            output = net_d(fake).view(-1)
            loss_g = criterion(output, label)
            loss_g.backward()
            score_fake = output.mean().item()
            opt_g.step()
            if i % 10 == 0:
                loop.log((loss_real + loss_fake).item())
                loop.log(loss_g.item())
                log.append(f"[{i}] D(x): {score_real:.4f} D(G(z)): {score_fake:.4f}")
            loop.step()
