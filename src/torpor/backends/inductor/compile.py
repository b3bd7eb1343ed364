"""The Inductor backend: a step's forward, backward and optimizer as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch
from torpor.backends.fx.backend import FxBackend
from torpor.backends.fx.program import Compiled
from torpor.backends.fx.trace import Piece, Traced
from torpor.backends.inductor.lowering import decompositions, miscompiles
from torpor.backends.inductor.options import check_rng, check_settings
from torpor.backends.inductor.runtime import out_of_graph_memory
from torpor.backends.reference.lowering import Instruction

MAX_NODES = 4000
"""Nodes compiled together. A training step of 2,000 took as long per node as pieces of 250 did."""


COMPILE_AFTER = 4
"""Runs on the reference backend before a graph is compiled. In the first steps of a training
numbers that change become inputs, and optimizers make their state: such graphs are met once."""


ON_CPUS = {"cpp_wrapper": True}
"""Settings for graphs of the CPU. One C++ function for all kernels of a graph runs without Python's
lock, and so beside the thread that records; otherwise each kernel waits for its turn."""


class InductorBackend(FxBackend):
    """Compiles graphs with `torch._inductor`.

    `rng` is "exact": random numbers are eager's; or "fast": Inductor draws its own, inside fused
    kernels, from a seed of the device's generator. `cuda_graphs` replays a step as one CUDA graph.
    A graph of more than `max_nodes` nodes is compiled in parts; one that was met `compile_after`
    times or less runs on the reference backend. Every other option is a setting of Inductor's
    (`torch._inductor.config`), dots and all: `{"max_autotune": True}`.
    """

    def __init__(
        self,
        *,
        rng: str = "exact",
        cuda_graphs: bool = False,
        max_nodes: int = MAX_NODES,
        compile_after: int = COMPILE_AFTER,
        **settings: Any,
    ) -> None:
        super().__init__(max_nodes=max_nodes)
        check_rng(rng)
        check_settings(settings)
        self.draws = rng == "fast"
        self.cuda_graphs = cuda_graphs
        self.compile_after = compile_after
        self.settings = settings

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        return decompositions()

    def blamed_ops(self, error: BaseException) -> set[str]:
        return _torch.ops_inductor_refused(error)

    def miscompiles(self, instruction: Instruction) -> bool:
        return miscompiles(instruction.spec, instruction.args)

    def compile_module(self, traced: Traced, piece: Piece) -> tuple[Compiled, Callable[[], str]]:
        donated = tuple(piece.inputs.index(parameter) for parameter in piece.donated)
        graphs = self.cuda_graphs and all(t.device.type == "cuda" for t in traced.inputs)
        static = donated if graphs else ()
        settings = self.settings if _on_gpu(traced) else ON_CPUS | self.settings
        code = _torch.inductor_compile(
            traced.module, traced.inputs, traced.mode, settings, graphs, static
        )
        run = out_of_graph_memory(code) if graphs else code
        return run, lambda: str(getattr(code, "source_code", traced.module.code))


def _on_gpu(traced: Traced) -> bool:
    made = (node.meta.get("val") for node in traced.module.graph.nodes)
    tensors = (value for value in made if isinstance(value, torch.Tensor))
    return any(tensor.device.type != "cpu" for tensor in tensors)
