"""The XLA backend: graphs as jax functions, compiled ahead of their first run."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jaxlib
import numpy as np
import torch

from torpor import metrics
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backend.interface import MemoryInfo
from torpor.backend.lowering import Computation
from torpor.backends import decompositions, provenance
from torpor.backends.blocks.block_backend import BlockBackend
from torpor.backends.blocks.program import (
    Compiled,
    Piece,
    Program,
    ProgramRun,
    Step,
)
from torpor.backends.blocks.registers import Registers
from torpor.backends.xla import saved
from torpor.backends.xla.lowering import (
    MAX_NODES,
    XlaFunction,
    XlaLowering,
    XlaProgram,
    given_away,
    piece_of,
    why_not,
    with_checks,
)
from torpor.backends.xla.lowerings import TABLE
from torpor.backends.xla.lowerings.random import DRAWS
from torpor.backends.xla.runtime import (
    XlaCode,
    XlaData,
    array_of,
    exact,
    jax_device,
    lent,
    moved,
    place_of,
    run_alone,
    taken,
    tensor_of,
)
from torpor.errors import BackendError
from torpor.ir.graph import EAGER, Block, Graph
from torpor.ir.node import Node
from torpor.ir.types import TensorType


class XlaBackend(BlockBackend):
    """`jax.jit` on PJRT: the CPU, or a GPU if jax has one. Data are jax arrays."""

    host_devices = 1
    max_nodes = MAX_NODES
    takes_donations = True
    functional = True

    def __init__(self, *, rng: str = "exact") -> None:
        """`rng="fast"`: XLA draws random numbers itself, inside graphs; not eager's numbers."""
        super().__init__()
        if rng not in ("exact", "fast"):
            raise BackendError(f'rng is "exact" or "fast", not {rng!r}')
        self.draws = self.draws_from_seed = rng == "fast"
        kind = "cuda" if torch.cuda.is_available() and _has_gpu() else "cpu"
        self._default_type = BackendDeviceType(kind)

    # -- data ----------------------------------------------------------------------------------

    def placeholder(self, device: BackendDevice, type_: TensorType) -> XlaData:
        return XlaData(device, type_)

    def data_from_tensor(
        self, tensor: torch.Tensor, type_: TensorType, device: BackendDevice
    ) -> XlaData:
        with exact():
            return XlaData(device, type_, array_of(tensor, device))

    def tensor_from_data(
        self, data: BackendData, logical_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        assert isinstance(data, XlaData)
        with exact():
            place = place_of(data.type, data.device)
            tensor = tensor_of(data.ready(), data.type, place.torch_device)
        return tensor if logical_dtype is None else tensor.to(logical_dtype)

    def copy_data(self, data: BackendData) -> XlaData:
        assert isinstance(data, XlaData)
        held = data.ready()
        with exact():
            copy = held.clone() if isinstance(held, torch.Tensor) else held.copy()
        return XlaData(data.device, data.type, copy)

    def is_shared(self, data: BackendData) -> bool:
        assert isinstance(data, XlaData)
        return data.is_shared()

    # -- graphs --------------------------------------------------------------------------------

    def decompositions(self) -> Mapping[str, Callable[..., Any]]:
        return decompositions.core((*TABLE, *DRAWS))

    def lowering_context(
        self, name: str, device: BackendDevice, post_order: Any = None, emitted: Any = None
    ) -> XlaLowering:
        return XlaLowering(name, device, post_order, emitted)

    def why_not(self, node: Node) -> str | None:
        return why_not(node)

    def compile_blocks(
        self, graph: Graph, registers: Registers, program: Program
    ) -> Iterator[Step]:
        for block, checked in with_checks(graph.blocks, set(graph.inputs)):
            if block.kind == EAGER:
                yield from self.by_eager(map(registers.instruction, block.nodes))
            else:
                yield from self.compile_block(block, registers, program, checked)

    def compile_block(
        self, block: Block, registers: Registers, program: Program, checked: Sequence[Node] = ()
    ) -> list[Piece]:
        """A block as a piece that checks these nodes; it is compiled when all steps are known."""
        return [piece_of(block, checked, registers, program)]

    def complete(self, program: Program) -> None:
        """Compile the pieces that are not loaded, now that it is known what they may overwrite."""
        super().complete(program)
        assert isinstance(program, XlaProgram)
        device = self.backend_device(program.device)
        program.around = nullcontext  # jax knows no modes of torch
        program.run_alone = functools.partial(run_alone, program.types, device)
        donated = dict(given_away(program))
        program.commit = min(donated, default=len(program.steps))
        for place, step in enumerate(program.steps):
            if isinstance(step, Piece) and isinstance(step.run, XlaFunction):
                code = XlaCode(compiled(step.run, donated.get(place, ()), device))
                step.run, step.text = code, code.text

    # -- running -------------------------------------------------------------------------------

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        with exact():
            return super().execute(computation, arguments, device)

    def buffers(self, call: ProgramRun) -> list[Any] | None:
        given: list[Any] = []
        for argument in call.arguments:
            if isinstance(argument, XlaData):
                if argument.error is not None:
                    return None
                argument = argument.array
            given.append(argument)
        for place in call.program.guests:  # type: ignore[attr-defined]  # an XlaProgram
            given[place] = moved(given[place], call.device)
        if len(given) > len(call.program.graph.inputs):
            given[-1] = np.int64(given[-1])  # the seed
        return given

    def handles(self, call: ProgramRun, made: list[Any]) -> list[BackendData]:
        """Handles for the results, which may still be computed."""
        if call.device.type.name == "cpu":  # this thread is the queue's: it may wait for errors
            jax.block_until_ready(made)
        for place in call.program.sent:  # type: ignore[attr-defined]  # an XlaProgram
            made[place] = moved(made[place], place_of(call.types[place], call.device))
        pairs = zip(made, call.types, strict=True)
        return [XlaData(call.device, type_, array) for array, type_ in pairs]

    def by_reference(self, call: ProgramRun) -> list[BackendData]:
        metrics.count("StepsByEager")
        given = [lent(a) if isinstance(a, XlaData) else a for a in call.arguments]
        made = super().by_reference(dataclasses.replace(call, arguments=given))
        return [taken(one) for one in made]

    # -- graphs kept on disk -------------------------------------------------------------------

    def cache_key(self) -> str | None:
        return "\n".join((
            f"jax {jax.__version__} {jaxlib.__version__} {os.environ.get('XLA_FLAGS', '')}",
            f"draws {self.draws}",
            provenance.software(),
            provenance.settings_of_torch(),
            provenance.processor(),
            provenance.graphics(),
        ))  # fmt: skip

    def dump_code(self, code: Compiled) -> bytes | None:
        return saved.dump_code(code.compiled) if isinstance(code, XlaCode) else None

    def load_code(
        self, kept: bytes, piece: Piece, program: Program
    ) -> tuple[Compiled, Callable[[], str]]:
        device = self.backend_device(program.device)
        code = XlaCode(saved.load_code(kept, piece, device))
        return code, code.text

    # -- insight -------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        known = jax_device(self.backend_device(torch.device("lazy"))).memory_stats() or {}
        names = ("bytes_in_use", "peak_bytes_in_use", "num_allocs")
        return {name: known[name] for name in names if name in known}

    def memory_info(self, device: BackendDevice) -> MemoryInfo:
        place = jax_device(device)
        known = place.memory_stats()
        if known is None:  # the CPU does not say: what is alive
            used = sum(array.nbytes for array in jax.live_arrays() if array.device == place)
            return MemoryInfo(used, None)
        return MemoryInfo(known["bytes_in_use"], known.get("bytes_limit"))


def compiled(function: XlaFunction, donated: tuple[int, ...], device: BackendDevice) -> Any:
    """What XLA makes of a function, for one device; it may write over the arguments `donated`."""
    with exact(), jax.default_device(jax_device(device)), jax.default_matmul_precision("highest"):
        traced = jax.jit(function, donate_argnums=donated, keep_unused=True)
        return traced.lower(*function.structs()).compile()


def _has_gpu() -> bool:
    return any(device.platform == "gpu" for device in jax.devices())
