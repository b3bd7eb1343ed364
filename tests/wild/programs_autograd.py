"""What research code asks of autograd: closures, second derivatives, hooks, saved memory."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.wild.placements import Placement, program
from tests.wild.synthetic import clusters, waves


def _net(*widths: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), act()]
    return nn.Sequential(*layers[:-1])


def _points(how: Placement, count: int = 64) -> tuple[Tensor, Tensor]:
    x, y = waves(count)
    return torch.from_numpy(x).to(how.device), torch.from_numpy(y).to(how.device)


@program()
def lbfgs(how: Placement) -> dict[str, Any]:
    """A closure that is called as often as the optimizer likes; numbers steer its loops."""
    x, y = _points(how)
    model = how.model(_net(2, 16, 1).double())
    x, y = x.double(), y.double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.8, max_iter=6, line_search_fn="strong_wolfe"
    )
    calls, losses = 0, []

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(4):
        losses.append(optimizer.step(closure).item())
    with torch.no_grad():
        prediction = model(x[:5])
    return {"losses": losses, "calls": calls, "prediction": prediction.cpu().numpy()}


@program()
def per_sample_gradients(how: Placement) -> dict[str, Any]:
    """Gradients of every sample by vmap, clipped one by one, noise added, as privacy asks."""
    points, labels = clusters(48)
    x, y = torch.from_numpy(points).to(how.device), torch.from_numpy(labels).to(how.device)
    model = how.model(_net(8, 16, 3))

    def loss_of(parameters: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (one[None],)), label[None])

    each = vmap(grad(loss_of), in_dims=(None, 0, 0))
    norms, losses = [], []
    for _ in range(6):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients = each(parameters, x, y)
        flat = torch.cat([g.flatten(1) for g in gradients.values()], 1)
        norm = flat.norm(dim=1)
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                clipped = torch.einsum("n,n...->...", factor, gradients[name]) / len(x)
                p -= 0.5 * (clipped + 0.01 * torch.randn_like(p))
            losses.append(F.cross_entropy(model(x), y).item())
        norms.append(norm.mean().item())
    return {"norms": norms, "losses": losses, "gradient": gradients["0.weight"][0]}


@program()
def second_derivatives(how: Placement) -> dict[str, Any]:
    """A hessian, a jacobian, a product with the hessian by double backward, a fisher diagonal."""
    x, y = _points(how, 24)
    model = how.model(_net(2, 6, 1).double())
    x, y = x.double(), y.double()
    named = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    bends = hessian(loss_of)(named)["0.weight"]["0.weight"].reshape(12, 12)
    jacobian = jacrev(lambda p: functional_call(model, p, (x[:3],)))(named)["2.weight"]
    parameters = list(model.parameters())
    products = []
    for _ in range(5):
        vector = [torch.randn_like(p) for p in parameters]
        first = torch.autograd.grad(F.mse_loss(model(x), y), parameters, create_graph=True)
        dot = sum((g * v).sum() for g, v in zip(first, vector, strict=True))
        product = torch.autograd.grad(dot, parameters)
        products.append(sum(float((p * p).sum()) for p in product))
    fisher = [torch.zeros_like(p) for p in parameters]
    for i in range(6):
        model.zero_grad()
        model(x[i]).sum().backward()
        for f, p in zip(fisher, parameters, strict=True):
            f += p.grad.detach() ** 2 / 6
    return {"hessian": bends, "jacobian": jacobian, "products": products, "fisher": fisher}


@program(placements=("enable", "lazy"))
def amp(how: Placement) -> dict[str, Any]:
    """Autocast to bfloat16, a scaler that is switched off. (torch refuses `autocast("lazy")`.)"""
    points, labels = clusters(96)
    x, y = torch.from_numpy(points), torch.from_numpy(labels)
    model = how.model(
        nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses, kinds = [], set()
    for step in range(12):
        part = slice((step * 24) % 96, (step * 24) % 96 + 24)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x[part])
            kinds.add(str(output.dtype))
            loss = F.cross_entropy(output, y[part])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    with torch.no_grad(), torch.autocast("cpu"):
        output = model(x)
    right = float((output.argmax(1) == y).float().mean())
    return {"losses": torch.stack(losses).bfloat16(), "kinds": sorted(kinds), "right": right}


class Deep(nn.Module):
    """Blocks whose insides are computed again for the backward pass; dropout must repeat itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)
        )
        self.tail = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.first, self.last, self.reentrant = nn.Linear(8, 16), nn.Linear(16, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(checkpoint_sequential(self.tail, 2, x, use_reentrant=False))


@program()
def gradient_checkpointing(how: Placement) -> dict[str, Any]:
    """Both kinds of checkpoint."""
    points, labels = clusters(60)
    x, y = torch.from_numpy(points).to(how.device), torch.from_numpy(labels).to(how.device)
    found: dict[str, Any] = {}
    for reentrant in (False, True):
        torch.manual_seed(3)
        model = how.model(Deep(reentrant))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[f"reentrant={reentrant}"] = {"losses": losses, "weight": model.first.weight.detach()}
    return found


@program()
def hooks(how: Placement) -> dict[str, Any]:
    """Features taken by forward hooks, gradients changed by tensor hooks, grad-CAM."""
    points, labels = clusters(40)
    x, y = torch.from_numpy(points).to(how.device), torch.from_numpy(labels).to(how.device)
    model = how.model(_net(8, 16, 16, 3, act=nn.ReLU))
    features: dict[str, Tensor] = {}
    seen: list[float] = []
    model[1].register_forward_hook(lambda m, i, o: features.__setitem__("first", o.detach()))
    model[3].register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].abs().max().item()))
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    x = x.clone().requires_grad_()
    kept = model[0](x)
    kept.retain_grad()
    score = model[1:](kept)[:, 0].sum()
    score.backward()
    cam = (kept.grad.mean(0) * kept.detach()).relu().sum(1)
    return {"losses": losses, "seen": seen, "features": features["first"], "cam": cam, "x": x.grad}


class Straight(torch.autograd.Function):
    """Rounds forward, passes backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        ctx.save_for_backward(x)
        return (x * levels).round() / levels

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1), None


@program()
def custom_function(how: Placement) -> dict[str, Any]:
    """Quantization-aware training with a function of one's own."""
    x, y = _points(how, 60)
    model = how.model(_net(2, 16, 1))
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        h = Straight.apply(torch.tanh(model[0](x)), 8)
        loss = F.huber_loss(model[2](h), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "values": sorted(set(h.detach().flatten().tolist()))}
