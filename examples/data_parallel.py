"""Data parallel: `torchrun --nproc-per-node 2 examples/data_parallel.py`.

DistributedDataParallel as ever. Its buckets are all-reduced inside the step: forward, backward,
communication and optimizer are one graph.
"""

import torch
import torch.distributed as dist
from small_gpt import GPT, batches, report, start, train
from torch.nn.parallel import DistributedDataParallel

import torpor

options = start(__doc__)
model = GPT()
if not options.eager:
    model = torpor.lazy(model)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = batches(options.steps, 16, dist.get_rank(), dist.get_world_size())
report(train(model, optimizer, data))
