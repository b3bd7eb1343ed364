"""The Inductor backend: a step's forward, backward and optimizer as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from torpor import _torch
from torpor.backend.device import BackendDevice
from torpor.backend.lowering import Computation
from torpor.backends import provenance
from torpor.backends.blocks.program import Compiled, Piece, Program
from torpor.backends.fx.backend import FxBackend
from torpor.backends.fx.trace import Traced, fake_inputs
from torpor.backends.inductor.cuda_graphs import GraphedCode, replayed
from torpor.backends.inductor.lowering import decompositions, miscompiles
from torpor.backends.inductor.options import check_rng, check_settings
from torpor.backends.inductor.saved import dump_code, load_code
from torpor.backends.inductor.taped import Taped, taped
from torpor.ir.node import Node

MAX_NODES = 4000
"""The most nodes compiled together; as fast per node, for a step of 2,000, as pieces of 250."""


COMPILE_AFTER = 4
"""Runs on the reference backend before a graph is compiled. In the first steps of a training,
changing numbers are promoted and optimizers create their state; such graphs occur once. If
compiling does not pay yet after that many runs, it happens later (`compiling/worth.py`)."""


ON_GPUS: Final = {"emulate_precision_casts": True, "reorder_for_locality": False}
"""Inductor settings for GPU graphs. Intermediates in kernels are rounded as eager rounds them: the
loss of ResNet-50 in bfloat16 is off by 0.6 % after 20 steps, by 1.0 % without. And Inductor must
not move computation later: a weight's gradient needs less memory than the operands it is made from.
"""


class InductorBackend(FxBackend):
    """Compiles graphs with `torch._inductor`.

    `rng` is "exact" (random numbers equal eager's) or "fast" (Inductor generates them inside fused
    kernels, seeded from the device's generator). With `cuda_graphs`, a step on a GPU is replayed as
    one CUDA graph once it has repeated a few times, where that is safe. A graph of more than
    `max_nodes` nodes is compiled in parts; one seen up to `compile_after` times runs on the
    reference backend. Equal subgraphs, such as the layers of a network, are compiled once, unless
    `equal_subgraphs` is False. All other options are settings of Inductor
    (`torch._inductor.config`), including dotted ones: `{"max_autotune": True}`.
    """

    def __init__(
        self,
        *,
        rng: str = "exact",
        cuda_graphs: bool = True,
        max_nodes: int = MAX_NODES,
        compile_after: int = COMPILE_AFTER,
        equal_subgraphs: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(max_nodes=max_nodes, equal_subgraphs=equal_subgraphs)
        check_rng(rng)
        check_settings(settings)
        self.draws = rng == "fast"
        self.cuda_graphs = cuda_graphs
        self.compile_after = compile_after
        self.settings = settings
        self.compiles_in_background = not any("autotune" in s for s in settings)  # which draws

    @property
    def weighs_compiles(self) -> bool:
        """False if the user asked for reproducible runs, or said after which run to compile."""
        return "compile_after" not in self.options and not (
            torch.are_deterministic_algorithms_enabled()
        )

    def traced_decompositions(self) -> dict[Any, Callable[..., Any]]:
        return decompositions()

    def blamed_ops(self, error: BaseException) -> set[str]:
        return _torch.ops_inductor_refused(error)

    def prefers_channels_last(self, traced: Traced) -> bool:
        return _torch.inductor_prefers_channels_last(traced.module)

    def miscompiles(self, node: Node) -> bool:
        return miscompiles(node)

    def expect(self, device: BackendDevice) -> None:
        if device.torch_device.type == "cuda":
            _torch.start_inductor_workers()

    def in_background(self, program: Program) -> AbstractContextManager[Callable[[], None]]:
        if program.device.type == "cpu":
            _torch.try_best_vectors()
        return _torch.kernels_in_background()

    def compile_module(self, traced: Traced, piece: Piece) -> tuple[Compiled, Callable[[], str]]:
        usual = ON_GPUS if _on_gpu(traced) else _on_cpus()
        settings = usual | self.settings
        code = _torch.inductor_compile(traced.module, traced.inputs, traced.mode, settings)
        return code, lambda: str(getattr(code, "source_code", traced.module.code))

    def runs_here(self, computation: Computation, in_turn: bool) -> bool:
        replayed = computation.program.replayed
        # a replay returns immediately, and a capture needs the program's generator set aside
        return in_turn or (isinstance(replayed, GraphedCode) and replayed.off is None)

    def runs_on_one_core(self, computation: Computation) -> bool:
        replayed = computation.program.replayed
        return isinstance(replayed, Taped) and replayed.leaves_cores()

    def function(
        self, computation: Computation, device: BackendDevice
    ) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        replayed = computation.program.replayed
        if isinstance(replayed, Taped):
            replayed.one_core = False  # it runs on the calling thread, overlapping with nothing
        return super().function(computation, device)

    # -- CUDA graphs and tapes ---------------------------------------------------------------------

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        compiled = super().compile(computations)
        for computation in compiled:
            self._replay(computation.program)
        return compiled

    def load(self, computation: Computation, saved: bytes) -> Computation:
        loaded = super().load(computation, saved)
        self._replay(loaded.program)
        return loaded

    def _replay(self, program: Program) -> None:
        if program.sizes:
            return
        if self.cuda_graphs:
            # with exact rng, only graphs from TorchDynamo draw when run, each in its turn
            program.replayed = replayed(program, may_draw=not self.draws)
        if program.replayed is None:
            program.replayed = taped(program)

    # -- graphs in the disk cache ------------------------------------------------------------------

    def cache_key(self) -> str | None:
        settings = _torch.inductor_settings()
        if settings is None:
            return None
        own = {"rng": self.draws, "max_nodes": self.max_nodes, "equal": self.equal_subgraphs}
        return "\n".join((
            repr((sorted(own.items()), sorted(self.settings.items()))),
            settings,
            provenance.software(),
            provenance.settings_of_torch(),
            provenance.processor(),
            provenance.graphics(),
            provenance.compiler(),
        ))  # fmt: skip

    def dump_code(self, code: Any) -> bytes | None:
        return dump_code(code)

    def load_code(
        self, saved: bytes, piece: Piece, program: Program
    ) -> tuple[Compiled, Callable[[], str]]:
        def inputs() -> tuple[list[torch.Tensor], Any]:
            found = fake_inputs(piece, program.types, program.device, program.hints)
            return found[:2]

        return load_code(saved, inputs)


def _on_cpus() -> dict[str, Any]:
    """Inductor settings for CPU graphs."""
    return {"cpp.vec_isa_ok": True} if _torch.best_vectors_work() else {}


def _on_gpu(traced: Traced) -> bool:
    made = (node.meta.get("val") for node in traced.module.graph.nodes)
    tensors = (value for value in made if isinstance(value, torch.Tensor))
    return any(tensor.device.type != "cpu" for tensor in tensors)
