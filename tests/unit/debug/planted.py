"""Backends with a wrong kernel planted in them, for tools that have to find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torpor.backend import BackendData, BackendDevice, Computation
from torpor.backends.kernels import load, run_node, store
from torpor.backends.reference import ReferenceBackend
from torpor.ir.node import Node

MARK = (13, 7)
"""The shape that the planted kernels get wrong."""


class Planted(ReferenceBackend):
    """Runs node by node and lets a fault change what one node computes."""

    exact = False  # does not say whose kernels it runs

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        graph = computation.graph
        env = dict(zip(graph.inputs, load(arguments), strict=True))
        for node in graph.nodes:
            outputs = run_node(node, env, device)
            if self.is_wrong(node, graph.outputs):
                outputs[0] = self.spoil(outputs[0])
            env.update(zip(node.outputs, outputs, strict=True))
        return store([env[value] for value in graph.outputs], computation, arguments)

    def is_wrong(self, node: Node, outputs: Sequence[Any]) -> bool:
        return node.op.name == "aten.tanh.default" and node.outputs[0].type.shape == MARK

    def spoil(self, tensor: torch.Tensor) -> torch.Tensor:
        """Off by a part in a thousand at one element."""
        spoilt = tensor.clone()
        spoilt.view(-1)[5] *= 1.001
        return spoilt


class WrongInOneBit(Planted):
    """The same, off by one unit in the last place, in the name of eager's kernels."""

    exact = True

    def spoil(self, tensor: torch.Tensor) -> torch.Tensor:
        spoilt = tensor.clone()
        flat = spoilt.view(-1)
        flat[5] = torch.nextafter(flat[5], torch.tensor(float("inf")))
        return spoilt


class WrongWhenFused(Planted):
    """Wrong where a tanh and the product that made its operand are compiled into one kernel.

    A value that is an output of the graph ends a kernel, so that looking at it hides the fault.
    """

    def is_wrong(self, node: Node, outputs: Sequence[Any]) -> bool:
        if not super().is_wrong(node, outputs):
            return False
        before = node.operands[0]
        return before.node.op.name == "aten.mul.Tensor" and before not in outputs


class Sound(Planted):
    """Nothing is wrong with it."""

    def is_wrong(self, node: Node, outputs: Sequence[Any]) -> bool:
        return False
