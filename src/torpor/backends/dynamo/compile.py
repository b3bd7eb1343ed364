"""The adapter: passes a graph to a TorchDynamo backend as an fx module with example inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor import _torch
from torpor.backends.blocks.program import Compiled, Piece
from torpor.backends.dynamo.runtime import unboxed
from torpor.backends.fx.backend import FxBackend
from torpor.backends.fx.trace import Traced
from torpor.errors import BackendError, did_you_mean

MAX_NODES = 4000
"""The most nodes given to a compiler at a time."""


class DynamoBackend(FxBackend):
    """Compiles graphs with the TorchDynamo backend `compiler`, passing it `options`.

    With `equal_subgraphs`, equal subgraphs are compiled once. Opt-in: only the compiler knows
    whether its code may be called on the tensors of other layers.
    """

    def __init__(
        self,
        compiler: str,
        *,
        max_nodes: int = MAX_NODES,
        equal_subgraphs: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(max_nodes=max_nodes, equal_subgraphs=equal_subgraphs)
        self.compiler = _find(compiler)
        self.compiler_options = options

    def compile_module(self, traced: Traced, piece: Piece) -> tuple[Compiled, Callable[[], str]]:
        options = {"options": self.compiler_options} if self.compiler_options else {}
        with _torch.tracing_with(traced.mode):
            function = self.compiler(traced.module, traced.inputs, **options)
        return unboxed(function), lambda: traced.module.code


def _find(name: str) -> Callable[..., Any]:
    known = _torch.dynamo_backends()
    if name not in known:
        hint = did_you_mean(name, known, "dynamo:")
        raise BackendError(f"TorchDynamo has no backend {name!r}: it has {', '.join(known)}{hint}")
    return _torch.dynamo_compiler(name)
