"""Tensor parallel: `torchrun --nproc-per-node 2 examples/tensor_parallel.py [--sequence]`.

`parallelize_module` as ever: attention and MLP are split over ranks by columns, then by rows. With
`--sequence` what is between them is split along the sequence. Every rank sees all data.
"""

import sys

import torch
import torch.distributed as dist
from small_gpt import GPT, batches, report, start, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torpor


def split(model: GPT, mesh: DeviceMesh, sequence: bool = False) -> GPT:
    """Split every block over the ranks of `mesh`."""
    between = Shard(1) if sequence else Replicate()
    into = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    plan = {
        "attention": into,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp": into,
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=between),
    }
    ends = {"head": ColwiseParallel(input_layouts=between, output_layouts=Replicate())}
    if sequence:
        plan |= {"before_attention": SequenceParallel(), "before_mlp": SequenceParallel()}
        ends |= {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
        }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, ends)


if __name__ == "__main__":
    sequence = "--sequence" in sys.argv
    if sequence:
        sys.argv.remove("--sequence")
    options = start(__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = split(GPT(), init_device_mesh(device, (dist.get_world_size(),)), sequence)
    if not options.eager:
        model = torpor.lazy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    report(train(model, optimizer, batches(options.steps, 16)))
