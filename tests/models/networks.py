"""Small networks written out here: recurrent, convolutional, VAE, GAN, diffusion UNet.

They draw random numbers inside the step (dropout, latent noise, timesteps) and keep running
statistics, so a draw or an update that happens twice or never changes the loss.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import Batch, Entry, Phase

VOCABULARY = 48


class Recurrent(nn.Module):
    """A two-layer character model around `nn.LSTM` or `nn.GRU`, dropout between the layers."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.body = kind(16, 24, num_layers=2, dropout=0.2, batch_first=True, bidirectional=False)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.body(self.embed(tokens))
        logits: Tensor = self.head(hidden)
        return logits


def _next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _continue_text(model: nn.Module, batch: Batch) -> Batch:
    """Greedy continuation, the hidden state carried from token to token."""
    assert isinstance(model, Recurrent)
    token, state, chosen = batch["tokens"], None, []
    for _ in range(8):
        hidden, state = model.body(model.embed(token), state)
        token = model.head(hidden[:, -1:]).argmax(-1)
        chosen.append(token)
    return {"tokens": torch.cat(chosen, dim=1)}


class PackedTagger(nn.Module):
    """A bidirectional LSTM over packed sequences of unequal length, an `nn.LSTMCell` on top."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.body = nn.LSTM(12, 10, bidirectional=True, batch_first=True)
        self.cell = nn.LSTMCell(20, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.body(packed)[0], batch_first=True)
        state, logits = None, []
        for step in hidden.unbind(1):
            state = self.cell(step, state)
            logits.append(self.head(state[0]))
        return torch.stack(logits, dim=1)


def _tagging_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"], batch["lengths"])
    inside = torch.arange(logits.shape[1], device=logits.device) < batch["lengths"][:, None]
    return F.cross_entropy(logits[inside], batch["tags"][:, : logits.shape[1]][inside])


class ConvNet(nn.Module):
    """Convolutions with BatchNorm and 2-d dropout; depthwise, strided and transposed ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.BatchNorm2d(8, momentum=None),
            nn.SiLU(),
            nn.Dropout2d(0.2),
            nn.ConvTranspose2d(8, 6, 2, stride=2),
            nn.LeakyReLU(0.1),
            nn.AdaptiveAvgPool2d(3),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(54, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


def _class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["classes"], label_smoothing=0.1)


def _channels_last_loss(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["images"].to(memory_format=torch.channels_last)
    return F.cross_entropy(model(images), batch["classes"])


def _channels_last_net() -> nn.Module:
    return ConvNet().to(memory_format=torch.channels_last)


class Vae(nn.Module):
    """A variational autoencoder on 8×8 images; the latent noise is drawn in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2 * 6)
        )
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(images).chunk(2, dim=-1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(latent).view_as(images), mean, log_variance


def _evidence_loss(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["images"]
    logits, mean, log_variance = model(images)
    likelihood = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
    return (likelihood + divergence) / len(images)


def _decode_noise(model: nn.Module, batch: Batch) -> Batch:
    assert isinstance(model, Vae)
    noise = torch.randn_like(batch["images"].flatten(1)[:, :6])
    return {"images": model.decoder(noise).sigmoid()}


class Gan(nn.Module):
    """A generator with BatchNorm and a discriminator with spectral norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 4 * 4 * 8),
            nn.Unflatten(1, (8, 4, 4)),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 8, 4, stride=2, padding=1)),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(8 * 4 * 4, 1),
        )

    def fake(self, real: Tensor) -> Tensor:
        noise = torch.randn(len(real), 8, device=real.device)
        images: Tensor = self.generator(noise)
        return images


def _discriminator_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Gan)
    real = batch["images"]
    verdict_real, verdict_fake = (
        model.discriminator(real),
        model.discriminator(model.fake(real).detach()),
    )
    return F.binary_cross_entropy_with_logits(
        verdict_real, torch.ones_like(verdict_real)
    ) + F.binary_cross_entropy_with_logits(verdict_fake, torch.zeros_like(verdict_fake))


def _generator_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Gan)
    verdict = model.discriminator(model.fake(batch["images"]))
    return F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))


def timestep_embedding(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of the timestep at geometric frequencies."""
    exponent = torch.arange(width // 2, device=steps.device) / (width // 2)
    angles = steps[:, None].float() * torch.exp(-math.log(10_000.0) * exponent)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Residual(nn.Module):
    """Two convolutions with group norm, shifted by the timestep's embedding."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(4, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1)
        )
        self.shift = nn.Linear(time, outside)
        self.second = nn.Sequential(
            nn.GroupNorm(4, outside),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Conv2d(outside, outside, 3, padding=1),
        )
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(x) + self.shift(F.silu(time))[:, :, None, None]
        result: Tensor = self.second(hidden) + self.skip(x)
        return result


class SpatialAttention(nn.Module):
    """Self-attention over the pixels of a feature map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        mixed, _ = self.attention(pixels, pixels, pixels, need_weights=False)
        return x + mixed.transpose(1, 2).view_as(x)


class UNet(nn.Module):
    """A one-level denoising UNet: down, attention in the middle, up with a skip connection."""

    betas: Tensor
    kept: Tensor

    def __init__(self, steps: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.down = Residual(8, 8, 32)
        self.shrink = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = Residual(16, 16, 32)
        self.attend = SpatialAttention(16)
        self.up = Residual(16 + 8, 8, 32)
        self.head = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))
        self.register_buffer("betas", torch.linspace(1e-3, 0.2, steps))
        self.register_buffer("kept", torch.cumprod(1 - self.betas, dim=0))

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        time = self.time(timestep_embedding(steps, 16))
        skip = self.down(self.stem(x), time)
        hidden = self.attend(self.middle(self.shrink(skip), time))
        hidden = F.interpolate(hidden, scale_factor=2, mode="nearest")
        noise: Tensor = self.head(self.up(torch.cat([hidden, skip], dim=1), time))
        return noise


def _denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, UNet)
    images = batch["images"]
    steps = torch.randint(0, len(model.betas), (len(images),), device=images.device)
    noise = torch.randn_like(images)
    kept = model.kept[steps].view(-1, 1, 1, 1)
    return F.mse_loss(model(kept.sqrt() * images + (1 - kept).sqrt() * noise, steps), noise)


def _denoise(model: nn.Module, batch: Batch) -> Batch:
    """The last steps of ancestral sampling, from noise."""
    assert isinstance(model, UNet)
    images = torch.randn_like(batch["images"])
    for step in reversed(range(4)):
        beta, kept = model.betas[step], model.kept[step]
        steps = torch.full((len(images),), step, device=images.device)
        noise = model(images, steps)
        images = (images - beta / (1 - kept).sqrt() * noise) / (1 - beta).sqrt()
        if step:
            images = images + beta.sqrt() * torch.randn_like(images)
    return {"images": images}


def _tokens(generator: torch.Generator) -> Batch:
    return {"tokens": torch.randint(0, VOCABULARY, (3, 13), generator=generator)}


def _tagged(generator: torch.Generator) -> Batch:
    return {
        "tokens": torch.randint(0, VOCABULARY, (3, 9), generator=generator),
        "tags": torch.randint(0, 5, (3, 9), generator=generator),
        "lengths": torch.tensor([5, 9, 7]),
    }


def _photographs(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(4, 3, 12, 12, generator=generator),
        "classes": torch.randint(0, 4, (4,), generator=generator),
    }


def _digits(generator: torch.Generator) -> Batch:
    return {"images": torch.rand(4, 1, 8, 8, generator=generator)}


NETWORKS: tuple[Entry, ...] = (
    Entry(
        "lstm",
        "recurrent",
        lambda: Recurrent(nn.LSTM),
        _tokens,
        (Phase(_next_token_loss),),
        clip_norm=0.25,
        draw_prompt=_tokens,
        produce=_continue_text,
    ),
    Entry(
        "gru",
        "recurrent",
        lambda: Recurrent(nn.GRU),
        _tokens,
        (Phase(_next_token_loss),),
        clip_norm=0.25,
        draw_prompt=_tokens,
        produce=_continue_text,
    ),
    Entry("lstm_packed", "recurrent", PackedTagger, _tagged, (Phase(_tagging_loss),)),
    Entry("convnet", "vision", ConvNet, _photographs, (Phase(_class_loss),), clip_norm=1.0),
    Entry(
        "convnet_channels_last",
        "vision",
        _channels_last_net,
        _photographs,
        (Phase(_channels_last_loss),),
    ),
    Entry(
        "vae",
        "generative",
        Vae,
        _digits,
        (Phase(_evidence_loss),),
        draw_prompt=_digits,
        produce=_decode_noise,
    ),
    Entry(
        "gan",
        "generative",
        Gan,
        _digits,
        (Phase(_discriminator_loss, "discriminator"), Phase(_generator_loss, "generator")),
    ),
    Entry(
        "unet",
        "generative",
        UNet,
        _digits,
        (Phase(_denoising_loss),),
        clip_norm=1.0,
        draw_prompt=_digits,
        produce=_denoise,
    ),
)
