"""Saving and loading by ranks: what the tests of checkpoints compare."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import torpor
from tests.distributed import training
from tests.distributed.training import GPT, batches, train

SPREADS = [training.sharded, training.fsdp]
BEFORE, AFTER = 2, 3
"""Steps before the checkpoint, and after it."""


def _model(spread: training.Spread, lazy: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = spread(GPT(1, width=16), mesh)
    model = torpor.lazy(model) if lazy else model
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _data() -> list[torch.Tensor]:
    return list(batches(BEFORE + AFTER, 8, dist.get_rank(), dist.get_world_size()))


def write(folder: Path) -> dict[str, Any]:
    """Train, save, train on: what the others have to find too."""
    found: dict[str, Any] = {}
    for spread in SPREADS:
        for lazy in (False, True):
            model, optimizer = _model(spread, lazy)
            train(model, optimizer, _data()[:BEFORE])
            dcp.save(_state(model, optimizer), checkpoint_id=folder / f"{spread.__name__}{lazy}")
            found[f"{spread.__name__}{lazy}"] = train(model, optimizer, _data()[BEFORE:])
    found["pending"] = _pending(folder / "pending")
    found["meanwhile"] = _meanwhile(folder / "meanwhile")
    found["whole"] = _whole()
    return found


def _read(folder: Path, by: bool) -> dict[str, Any]:
    """Go on from every checkpoint: losses by who wrote it."""
    found: dict[str, Any] = {}
    for spread in SPREADS:
        for written in (False, True):
            model, optimizer = _model(spread, by)
            state = _state(model, optimizer)
            dcp.load(state, checkpoint_id=folder / f"{spread.__name__}{written}")
            set_state_dict(
                model, optimizer,
                model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            )  # fmt: skip
            losses = train(model, optimizer, _data()[BEFORE:])
            are_lazy = set(map(torpor.is_lazy, model.parameters()))
            found[f"{spread.__name__}{written}"] = losses, are_lazy == {by}
    return found


def read_both(folder: Path) -> list[dict[str, Any]]:
    return [_read(folder, by) for by in (False, True)]


def _doubled() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [parameter.detach() * 2 for parameter in GPT(1, width=16).parameters()]


def _double(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def _saved(folder: Path) -> list[torch.Tensor]:
    """What the checkpoint holds, read by a plain model."""
    plain = GPT(1, width=16)
    dcp.load(plain.state_dict(), checkpoint_id=folder)
    return [parameter.detach() for parameter in plain.parameters()]


def _equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _pending(folder: Path) -> tuple[bool, bool]:
    model, _ = _model(training.sharded, lazy=True)
    _double(model)
    pending = all(map(torpor.is_pending, model.parameters()))
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    return pending, _equal(_saved(folder), _doubled())


def _meanwhile(folder: Path) -> tuple[bool, bool]:
    """Training goes on while a checkpoint is written, by a thread and in a group of its own."""
    model, optimizer = _model(training.sharded, lazy=True)
    _double(model)
    group = dist.new_group(backend="gloo")
    state = torpor.eager(get_model_state_dict(model))
    future = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    train(model, optimizer, _data()[:2])
    future.result()  # type: ignore[union-attr]  # a future, of one kind or another
    gathered = next(model.parameters()).full_tensor()  # type: ignore[operator]  # a DTensor
    thread = threading.Thread(target=dist.barrier, args=(group,))
    thread.start()
    thread.join()
    return torpor.is_pending(gathered), _equal(_saved(folder), _doubled())


def _whole() -> bool:
    """The whole state on rank 0, and from there to all ranks."""
    model, _ = _model(training.sharded, lazy=True)
    _double(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    state = get_model_state_dict(model, options=options)
    torpor.sync()  # on all ranks, for rank 0 alone has something to read
    state = torpor.eager(state)
    _double(model)
    set_model_state_dict(model, state, options=options)
    found = [torpor.eager(p.full_tensor().detach()) for p in model.parameters()]  # type: ignore[operator]  # DTensors
    return _equal(found, _doubled())
