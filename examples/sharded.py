"""Sharded data parallel: `torchrun --nproc-per-node 2 examples/sharded.py [--resume FOLDER]`.

Each rank holds its shard of parameters, gradients and optimizer state. With `--resume` training
goes on from the checkpoint in FOLDER, if there is one, and leaves one there. The number of ranks
may be another one each time.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_gpt import GPT, batches, report, start, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import torpor
from torpor.distributed.sharded import shard_parameters

folder = None
if "--resume" in sys.argv:
    place = sys.argv.index("--resume")
    folder = sys.argv[place + 1]
    del sys.argv[place : place + 2]

options = start(__doc__)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = shard_parameters(GPT(), init_device_mesh(device, (dist.get_world_size(),)))
if not options.eager:
    model = torpor.lazy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if folder and Path(folder, ".metadata").exists():
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
losses = train(model, optimizer, batches(options.steps, 16, dist.get_rank(), dist.get_world_size()))
if folder:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
report(losses)
