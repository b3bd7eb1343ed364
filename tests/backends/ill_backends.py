"""Backends that refuse some ops until the variable `TESTS_WELL` is set, and an op of our own.

A module of its own: the programs that show what they refuse import it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torpor
from torpor.backend import Computation
from torpor.backends.dynamo import DynamoBackend
from torpor.backends.reference import ReferenceBackend


def is_well() -> bool:
    return "TESTS_WELL" in os.environ


class IllBackend(ReferenceBackend):
    """Compiles no graph with an exponential in it."""

    def __init__(self, reason: str = "no exponentials", **options: Any) -> None:
        super().__init__()
        self.reason = reason

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        for computation in computations:
            names = [node.op.name for node in computation.graph.nodes]
            if not is_well() and "aten.exp.default" in names:
                raise NotImplementedError(self.reason)
        return super().compile(computations)


class IllFxBackend(DynamoBackend):
    """Compiles no piece with a cosine in it; pieces are short."""

    def __init__(self) -> None:
        super().__init__("eager", max_nodes=2)

    def compile_module(self, traced: Any, piece: Any) -> tuple[Any, Callable[[], str]]:
        if not is_well() and "aten.cos.default" in traced.module.code.replace("ops.", ""):
            raise RuntimeError("no cosines")
        return super().compile_module(traced, piece)


class UnregisteredBackend(IllBackend):
    """Nobody registers it."""

    name = "tests-unregistered"


def hidden() -> IllBackend:
    """One that cannot be found by any name."""

    class Hidden(IllBackend):
        name = "tests-hidden"

    return Hidden()


@torch.library.custom_op("tests_ill::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


torpor.backend.register("tests-ill", IllBackend)
torpor.backend.register("tests-ill-fx", IllFxBackend)
