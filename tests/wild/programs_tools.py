"""What else people take from torch's own tool box."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from tests.wild.placements import Placement, program
from tests.wild.synthetic import clusters


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _data(how: Placement, count: int = 64) -> tuple[Tensor, Tensor]:
    points, labels = clusters(count)
    return torch.from_numpy(points).to(how.device), torch.from_numpy(labels).to(how.device)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self, words: int = 20, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.attention = nn.MultiheadAttention(width, 2, 0.1, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        ahead = torch.triu(torch.ones(ids.shape[1], ids.shape[1], device=ids.device), 1).bool()
        y, _ = self.attention(x, x, x, attn_mask=ahead, key_padding_mask=ids == 0)
        return self.out(self.norm(x + y))


@program()
def tied_weights(how: Placement) -> dict[str, Any]:
    """Tied weights, attention with masks, padding; clipped; a scheduler; resumed from pickles."""
    model = how.model(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=24)
    draw, losses = np.random.default_rng(0), []

    def steps(count: int) -> None:
        for _ in range(count):
            ids = torch.from_numpy(draw.integers(1, 20, (4, 9)))
            ids[0, 6:] = 0
            ids = ids.to(how.device)
            loss = F.cross_entropy(
                model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0
            )
            optimizer.zero_grad()
            loss.backward()
            losses.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
            optimizer.step()
            schedule.step()

    steps(12)
    kept = pickle.dumps((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    steps(4)
    weights, state, when = pickle.loads(kept)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    schedule.load_state_dict(when)
    steps(8)
    return {"losses": losses, "tied": model.out.weight is model.embedding.weight, **_state(model)}


@program()
def checkpointed_segments(how: Placement) -> dict[str, Any]:
    """Both kinds of checkpointing with dropout; in-place activations; gradients of inputs."""
    parts = [
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.2)) for _ in range(4)
    ]
    model = how.model(nn.Sequential(*parts, nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    x, y = _data(how)
    losses = []
    for step in range(14):
        inputs = x[step : step + 16].clone().requires_grad_()
        if step % 2:
            said = checkpoint_sequential(model, 2, inputs, use_reentrant=False)
        else:
            said = checkpoint(model, inputs, use_reentrant=True)
        loss = F.cross_entropy(said, y[step : step + 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert inputs.grad is not None
        losses.append((loss.item(), inputs.grad.norm().item()))
    return {"losses": losses, **_state(model)}


@program()
def averaged(how: Placement) -> dict[str, Any]:
    """`swa_utils`: averages, their scheduler and batch statistics; groups added while training."""
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

    body = how.model(
        nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Hardswish(inplace=True))
    )
    head = how.model(nn.Linear(12, 3))
    model = nn.Sequential(body, head)
    optimizer = torch.optim.Adam([{"params": body.parameters(), "lr": 1e-2, "weight_decay": 0.1}])
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa, slow = AveragedModel(model), None
    x, y = _data(how)
    losses = []
    for step in range(16):
        if step == 5:
            optimizer.add_param_group(
                {"params": head.parameters(), "lr": 3e-2, "betas": (0.8, 0.9)}
            )
        loss = F.cross_entropy(model(x[step::4]), y[step::4])
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        if step > 8:
            slow = slow or SWALR(optimizer, 5e-3, anneal_epochs=3)
            swa.update_parameters(model)
            slow.step()
        losses.append(loss.item())
    update_bn([(x[:32],), (x[32:],)], swa)
    return {"losses": losses, "ema": _state(ema), "swa": _state(swa)}


@program()
def learning_rate_finder(how: Placement) -> dict[str, Any]:
    """Try rates from small to large, put everything back, train; a copy of the best is kept."""
    model = how.model(_mlp(8, 16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-5, momentum=0.9)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    x, y = _data(how, 96)
    tried, rate, smooth, best = [], 1e-4, 0.0, float("inf")
    for step in range(20):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = F.cross_entropy(model(x[:32]), y[:32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        smooth = 0.8 * smooth + 0.2 * loss.item()
        value = smooth / (1 - 0.8 ** (step + 1))
        tried.append(value)
        if step > 3 and value > 4 * best:
            break
        best, rate = min(best, value), rate * 1.6
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    optimizer.param_groups[0]["lr"] = 0.05
    losses, patience, kept = [], 0, copy.deepcopy(model)
    lowest = float("inf")
    for _ in range(25):
        model.train()
        loss = F.cross_entropy(model(x[:64]), y[:64], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            valid = F.cross_entropy(model(x[64:]), y[64:])
        losses.append(valid.item())
        if valid < lowest - 1e-4:
            lowest, kept, patience = float(valid), copy.deepcopy(model), 0
        else:
            patience += 1
        if patience == 3:
            break
    return {"tried": tried, "losses": losses, "best": _state(kept), "last": _state(model)}


@program()
def normalised_weights(how: Placement) -> dict[str, Any]:
    """Spectral and weight norm, orthogonal weights; removed again before it is saved."""
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(8, 12)), nn.LeakyReLU(0.1, inplace=True),
        parametrizations.weight_norm(nn.Linear(12, 8)), nn.SiLU(inplace=True),
        parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 3),
    )  # fmt: skip
    model = how.model(model)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3, momentum=0.5, centered=True)
    x, y = _data(how)
    losses = []
    for step in range(14):
        loss = F.multi_margin_loss(model(x[step % 4 :: 4]), y[step % 4 :: 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for place, name in ((2, "weight"), (4, "weight")):
        nn.utils.parametrize.remove_parametrizations(model[place], name)
    model.eval()
    with torch.no_grad():
        said = model(x)
    return {"losses": losses, "said": said.cpu(), **_state(model)}


@program()
def sparse_embeddings(how: Placement) -> dict[str, Any]:
    """Embeddings with sparse gradients and their own optimizer, `max_norm`, bags with offsets."""
    words = how.model(nn.Embedding(12, 6, sparse=True))
    bags = how.model(nn.EmbeddingBag(12, 6, mode="mean", padding_idx=0))
    bounded = how.model(nn.Embedding(12, 6, max_norm=1.0, scale_grad_by_freq=True))
    head = how.model(nn.Linear(6, 1))
    sparse = torch.optim.SparseAdam(words.parameters(), 1e-2)
    dense = torch.optim.Adagrad(
        [*bags.parameters(), *bounded.parameters(), *head.parameters()], 5e-2, lr_decay=0.01
    )
    draw, losses = np.random.default_rng(1), []
    for _ in range(12):
        ids = torch.from_numpy(draw.integers(0, 12, 10)).to(how.device)
        offsets = torch.tensor([0, 3, 7], device=how.device)
        mixed = words(ids[:3]) + bags(ids, offsets) + bounded(ids[3:6])
        loss = (head(mixed) - 1).square().mean()
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    return {"losses": losses, **_state(words), "bags": _state(bags), "bounded": _state(bounded)}


class Rows(IterableDataset[Any]):
    """A generator as a data set, split among workers."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for row in range(first, 40, step):
            yield {"x": torch.full((8,), row / 40), "y": row % 3, "name": f"row{row}"}


@program()
def loaders(how: Placement) -> dict[str, Any]:
    """Persistent workers, `random_split`, a generator as data set; gradients accumulated."""
    points, labels = clusters(60)
    whole = TensorDataset(torch.from_numpy(points), torch.from_numpy(labels))
    train, valid = random_split(whole, [0.75, 0.25], torch.Generator().manual_seed(3))
    model = how.model(_mlp(8, 10, 3))
    optimizer = torch.optim.NAdam(model.parameters(), 1e-2)
    loader = DataLoader(train, 9, shuffle=True, num_workers=2, persistent_workers=True)
    losses, names = [], []
    for _ in range(3):
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x.to(how.device)), y.to(how.device)) / 2
            loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        right = 0
        with torch.inference_mode():
            for x, y in DataLoader(valid, 4):
                right += int((model(x.to(how.device)).argmax(1).cpu() == y).sum())
        model.train()
        losses.append(right)
    for batch in DataLoader(Rows(), 5, num_workers=2):
        names += batch["name"]
        losses.append(
            F.cross_entropy(model(batch["x"].to(how.device)), batch["y"].to(how.device)).item()
        )
    return {"losses": losses, "names": names, **_state(model)}


class Scaled(torch.autograd.Function):
    """Saves tensors and other things, and does not need all gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, mode: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.scale, ctx.mode = scale, mode
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        return x * scale, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.mode == "clip":
            grad = grad.clamp(-0.01, 0.01)
        return grad * ctx.scale * x.sign(), None, None


@program()
def changed_gradients(how: Placement) -> dict[str, Any]:
    """Hooks that change gradients, a function of one's own, gradients kept of inner results."""
    model = how.model(_mlp(8, 12, 3))
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    model[2].register_full_backward_hook(lambda module, into, out: (into[0].clamp(-1e-2, 1e-2),))
    seen: list[float] = []
    model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    model[1].register_forward_hook(lambda module, args, out: out + 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = _data(how)
    losses = []
    for step in range(12):
        hidden = model[1](model[0](x[step::3]))
        hidden.retain_grad()
        scaled, mask = Scaled.apply(hidden, 1.5, "clip" if step % 2 else "")
        loss = F.cross_entropy(model[2](scaled * mask), y[step::3])
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.grad += 0.01 * torch.randn_like(p)
        optimizer.step()
        losses.append((loss.item(), hidden.grad.abs().sum().item()))
    return {"losses": losses, "seen": seen, **_state(model)}


@program()
def functional(how: Placement) -> dict[str, Any]:
    """`torch.func`: an ensemble by `vmap`, meta learning through inner steps, Jacobians."""
    models = [how.model(_mlp(8, 6, 3)) for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    x, y = _data(how)
    base = models[0]

    def one(p: Any, b: Any, inputs: Tensor) -> Tensor:
        said: Tensor = torch.func.functional_call(base, (p, b), (inputs,))
        return said

    ensemble = torch.func.vmap(one, in_dims=(0, 0, None))(params, buffers, x)
    optimizer = torch.optim.Adam(base.parameters(), 1e-2)
    losses = []
    for step in range(10):
        fast = dict(base.named_parameters())
        for _ in range(2):
            inner = F.cross_entropy(torch.func.functional_call(base, fast, (x[:16],)), y[:16])
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), grads, strict=True)}
        outer = F.cross_entropy(
            torch.func.functional_call(base, fast, (x[16 + step :],)), y[16 + step :]
        )
        optimizer.zero_grad()
        outer.backward()
        optimizer.step()
        losses.append(outer.item())
    detached = {k: p.detach() for k, p in base.named_parameters()}
    jacobian = torch.func.jacrev(lambda z: torch.func.functional_call(base, detached, (z,)))(x[0])
    forward = torch.func.jacfwd(lambda z: torch.func.functional_call(base, detached, (z,)))(x[0])
    return {"ensemble": ensemble.detach().cpu(), "losses": losses, "jacobian": jacobian.cpu(),
            "forward": forward.cpu()}  # fmt: skip


@program(placements=("enable", "lazy"))
def scripted_and_compiled_parts(how: Placement) -> dict[str, Any]:
    """A frozen scripted part, a compiled part and a plain one in one model."""
    scripted = torch.jit.script(_mlp(8, 8))
    compiled = torch.compile(how.model(_mlp(8, 8, 8)), backend="aot_eager")
    head = how.model(nn.Linear(8, 3))
    optimizer = torch.optim.Adam([*compiled.parameters(), *head.parameters()], 1e-2)
    x, y = _data(how)
    losses = []
    for step in range(10):
        with torch.no_grad():
            features = scripted(x[step::4])
        loss = F.cross_entropy(head(compiled(features)), y[step::4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "head": _state(head), "part": _state(compiled)}


@program()
def errors_in_the_loop(how: Placement) -> dict[str, Any]:
    """Batches that fail are skipped, overflows too; anomaly detection; training goes on."""
    model = how.model(nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(32, 3)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    draw, losses, errors = np.random.default_rng(2), [], []
    for step in range(16):
        ids = torch.from_numpy(draw.integers(0, 10, (5, 4)))
        if step % 5 == 3:
            ids[2, 2] = 11
        try:
            target = torch.from_numpy(draw.integers(0, 3, 5)).to(how.device)
            loss = F.cross_entropy(model(ids.to(how.device)), target)
            if step == 6:
                loss = loss * float("nan")
            if step % 7 == 5:
                loss = loss + torch.zeros(3, device=how.device) @ torch.zeros(4, device=how.device)
            optimizer.zero_grad()
            loss.backward()
            if not torch.isfinite(loss):
                raise FloatingPointError("loss")
            optimizer.step()
            losses.append(loss.item())
        except (IndexError, RuntimeError, FloatingPointError) as error:
            errors.append((step, type(error).__name__))
    return {"losses": losses, "errors": errors, **_state(model)}


@program()
def threads(how: Placement) -> dict[str, Any]:
    """Models trained by threads at once, each with its own numbers, while another one reads."""
    points, labels = clusters(64)
    models = [_mlp(8, 10, 3) for _ in range(3)]
    found: dict[int, Any] = {}

    def train(number: int) -> None:
        model = how.model(models[number])
        optimizer = torch.optim.SGD(model.parameters(), 0.1 * (number + 1))
        x, y = torch.from_numpy(points).to(how.device), torch.from_numpy(labels).to(how.device)
        losses = []
        for step in range(12):
            loss = F.cross_entropy(model(x[step % 3 :: 3]), y[step % 3 :: 3])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[number] = losses, _state(model)

    workers = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {str(number): found.get(number) for number in range(3)}


@program()
def round_trips(how: Placement) -> dict[str, Any]:
    """Through NumPy, buffers of bytes, `state_dict` with `assign`, half precision, and back."""
    convolution = nn.Conv1d(1, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    model = how.model(nn.Sequential(*convolution, nn.Linear(4, 3)))
    optimizer = torch.optim.Adamax(model.parameters(), 1e-2)
    x, y = _data(how)
    losses = []
    for step in range(12):
        loss = F.nll_loss(F.log_softmax(model(x[step::2].unsqueeze(1)), 1), y[step::2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu().numpy().item())
        if step == 5:
            weights = model[4].weight.detach().cpu().numpy().copy()
            weights[0] = weights[1] * 0.5
            with torch.no_grad():
                model[4].weight.copy_(torch.from_numpy(weights))
        if step == 8:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, map_location=how.device)
            model.load_state_dict(saved["model"], assign=True)
            optimizer = torch.optim.Adamax(model.parameters(), 1e-2)
            optimizer.load_state_dict(saved["optimizer"])
    half = copy.deepcopy(model).to(torch.bfloat16)
    with torch.no_grad():
        said = half(x[:4].unsqueeze(1).bfloat16()).float()
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return {"losses": losses, "half": said.cpu(), **_state(model)}


@program()
def pruned_and_decayed(how: Placement) -> dict[str, Any]:
    """Pruning while training, groups with and without decay, a layer thawed, warm restarts."""
    from torch.nn.utils import prune

    model = how.model(_mlp(8, 16, 16, 3))
    model[0].requires_grad_(False)
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-2, amsgrad=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5, 2)
    x, y = _data(how)
    losses = []
    for step in range(18):
        if step == 6:
            model[0].requires_grad_(True)
        if step == 10:
            prune.l1_unstructured(model[2], "weight", 0.4)
        loss = F.cross_entropy(model(x[step % 4 :: 4]), y[step % 4 :: 4])
        loss = loss + 1e-3 * sum(p.abs().sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    prune.remove(model[2], "weight")
    zeros = int((model[2].weight == 0).sum())
    return {"losses": losses, "zeros": zeros, **_state(model)}


class Siamese(nn.Module):
    """A module called several times in a step, with a buffer of its own and lists of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.scales = nn.ParameterDict(
            {"a": nn.Parameter(torch.ones(8)), "b": nn.Parameter(torch.zeros(1))}
        )
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("cached", torch.arange(8.0), persistent=False)
        self.bilinear = nn.Bilinear(8, 8, 1)

    def embed(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.normalize(F.gelu(layer(x)), dim=-1) * self.scales["a"]
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return x - self.seen + self.cached * self.scales["b"]

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.bilinear(self.embed(one), self.embed(other)).squeeze(-1)


@program()
def siamese(how: Placement) -> dict[str, Any]:
    """One module called twice, buffers replaced by assignment, several losses, hard negatives."""
    model = how.model(Siamese())
    optimizer = torch.optim.RAdam(model.parameters(), 2e-2)
    x, y = _data(how)
    losses = []
    for step in range(12):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(step))
        one, other = x[:32], x[:32][order.to(how.device)]
        same = (y[:32] == y[:32][order.to(how.device)]).float()
        loss = F.binary_cross_entropy_with_logits(model(one, other), same)
        anchor, positive = model.embed(one[:8]), model.embed(one[8:16])
        hard = torch.cdist(anchor, model.embed(x[32:])).argmin(1)
        loss = loss + F.triplet_margin_loss(anchor, positive, model.embed(x[32:][hard]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        top = model.embed(x).mm(model.embed(x).T).topk(3).indices
    return {"losses": losses, "top": top.cpu(), **_state(model)}
