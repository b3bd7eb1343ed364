"""Loading data: workers, samplers, collate functions, shared memory, files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from tests.wild.placements import Placement, program
from tests.wild.synthetic import clusters


class Made(Dataset):
    """Tensors that are made when they are asked for."""

    def __init__(self, count: int = 48) -> None:
        self.count = count
        self.scale = torch.arange(8.0) + 1

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=g) * self.scale
        x[index % 8] = 0
        return {"x": x, "y": index % 3, "name": f"n{index}"}


class Arrays(Dataset):
    """Rows of a numpy array, the same buffer handed out each time."""

    def __init__(self) -> None:
        self.points, self.labels = clusters(48)
        self.buffer = np.zeros(8, np.float32)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, np.int64]:
        self.buffer[:] = self.points[index]
        return torch.from_numpy(self.buffer).clone(), self.labels[index]


class Stream(IterableDataset):
    """No length; each worker takes its share."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, 24, every):
            yield torch.full((8,), float(i)).sin_()


def _collate(batch: list[dict[str, Any]]) -> tuple[Tensor, Tensor, list[str]]:
    x = torch.stack([b["x"] for b in batch])
    return (
        x / x.norm(dim=1, keepdim=True),
        torch.tensor([b["y"] for b in batch]),
        [b["name"] for b in batch],
    )


def _seeded(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def _tensors() -> TensorDataset:
    points, labels = clusters(48)
    return TensorDataset(torch.from_numpy(points), torch.from_numpy(labels))


class Learner:
    """A model that learns from whatever loader there is, and notes what it was given."""

    def __init__(self, how: Placement) -> None:
        self.how, self.model = how, how.model(nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[float] = []
        self.sums: list[float] = []

    def see(self, x: Tensor, y: Tensor | None = None) -> None:
        self.sums.append(float(x.sum()))
        y = torch.zeros(len(x), dtype=torch.long) if y is None else y
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x.to(self.how.device)), y.to(self.how.device))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def found(self) -> dict[str, Any]:
        weight = self.model.weight.detach()
        return {"losses": self.losses, "sums": self.sums, "weight": weight}


def _with_workers(how: Placement, context: str) -> dict[str, Any]:
    learner = Learner(how)
    common: dict[str, Any] = {"batch_size": 8, "num_workers": 2, "multiprocessing_context": context}
    data = _tensors()
    kept = DataLoader(data, shuffle=True, persistent_workers=True, **common)
    for _ in range(2):
        for x, y in kept:
            learner.see(x, y)
    names: list[str] = []
    common["num_workers"] = 1
    for x, y, some in DataLoader(Made(), collate_fn=_collate, worker_init_fn=_seeded, **common):
        learner.see(x, y)
        names += some
    same = bool((data.tensors[0] == _tensors().tensors[0]).all())
    return {**learner.found(), "names": names, "untouched": same}


@program()
def workers_by_fork(how: Placement) -> dict[str, Any]:
    """Two forked workers that stay, then one with a collate function of their own."""
    return _with_workers(how, "fork")


@program()
def workers_by_spawn(how: Placement) -> dict[str, Any]:
    """The same with workers that begin as new processes."""
    return _with_workers(how, "spawn")


@program()
def workers_of_arrays(how: Placement) -> dict[str, Any]:
    """Numpy's rows and a stream, by workers; then the data set read again in the parent."""
    learner, arrays = Learner(how), Arrays()
    for x, y in DataLoader(arrays, batch_size=12, num_workers=2, pin_memory=False):
        learner.see(x, y)
    for x in DataLoader(Stream(), batch_size=4, num_workers=2, prefetch_factor=3):
        learner.see(x)
    x, y = next(iter(DataLoader(arrays, batch_size=48)))
    learner.see(x, y)
    return learner.found()


@program()
def samplers(how: Placement) -> dict[str, Any]:
    """Splits, subsets, weights, joined sets, a generator of one's own, batches by a sampler."""
    learner, data = Learner(how), _tensors()
    train, valid = random_split(data, [36, 12], generator=torch.Generator().manual_seed(4))
    counts = torch.bincount(data.tensors[1], minlength=3)
    weights = (1.0 / counts.float())[data.tensors[1][list(train.indices)]]
    sampler = WeightedRandomSampler(weights, num_samples=36, replacement=True)
    for x, y in DataLoader(train, batch_size=9, sampler=sampler):
        learner.see(x, y)
    joined = ConcatDataset([valid, Subset(data, range(6))])
    draw = torch.Generator().manual_seed(11)
    for x, y in DataLoader(joined, batch_size=6, shuffle=True, generator=draw):
        learner.see(x, y)
    for x, y in DataLoader(data, batch_sampler=[[0, 5, 7], [1, 2, 3], [40, 41, 47]]):
        learner.see(x, y)
    return {**learner.found(), "indices": list(valid.indices), "draw": draw.get_state()}


@program()
def numpy_shares_memory(how: Placement) -> dict[str, Any]:
    """A buffer that numpy fills again and again, an index array shuffled in place."""
    points, labels = clusters(48)
    learner = Learner(how)
    buffer, target = np.zeros((12, 8), np.float32), np.zeros(12, np.int64)
    x, y = torch.from_numpy(buffer), torch.from_numpy(target)
    for step in range(8):
        rows = np.arange(12) + (step * 12) % 48
        buffer[:], target[:] = points[rows], labels[rows]
        learner.see(x, y)
    index, draw = np.arange(48), np.random.default_rng(3)
    all_x, all_y = torch.from_numpy(points), torch.from_numpy(labels)
    outputs = []
    for _ in range(4):
        draw.shuffle(index)
        learner.see(all_x[index[:16]], all_y[index[:16]])
        outputs.append(learner.model(all_x[index[:2]].to(how.device)))
    x.mul_(2)
    all_x.numpy()[0, 0] = 100.0
    with torch.no_grad():
        weight = learner.model.weight.detach().cpu().numpy().copy()
    return {
        **learner.found(), "outputs": [o.detach() for o in outputs], "buffer": buffer.copy(),
        "first": float(all_x[0, 0]), "array": weight,
    }  # fmt: skip


@program()
def files(how: Placement) -> dict[str, Any]:
    """Data and models to files and back: torch.save, numpy, a partial state, another device."""
    learner, data = Learner(how), _tensors()
    torch.save(data.tensors, how.folder / "data.pt")
    x, y = torch.load(how.folder / "data.pt")
    np.savez(how.folder / "data.npz", x=x.numpy(), y=y.numpy())
    arrays = np.load(how.folder / "data.npz")
    for start in range(0, 48, 8):
        part = slice(start, start + 8)
        learner.see(torch.tensor(arrays["x"][part]), torch.as_tensor(arrays["y"][part]))
    torch.save(learner.model, how.folder / "whole.pt")
    torch.save({"o": learner.optimizer.state_dict(), "e": 3}, how.folder / "rest.pt")
    whole = torch.load(how.folder / "whole.pt", weights_only=False)
    rest = torch.load(how.folder / "rest.pt")
    larger = how.model(nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 2)))
    state = {f"0.{k}": v for k, v in whole.state_dict().items()}
    missing = larger.load_state_dict(state, strict=False)
    with torch.no_grad():
        output = larger[0](x[:4].to(how.device))
    return {
        **learner.found(), "output": output, "missing": list(missing.missing_keys),
        "rest": rest["o"]["param_groups"], "epoch": rest["e"],
    }  # fmt: skip
