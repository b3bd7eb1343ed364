"""The intermediate representation."""

from torpor.ir.graph import Graph
from torpor.ir.node import Node, OpKind, Value
from torpor.ir.types import ScalarType, TensorType

__all__ = ["Graph", "Node", "OpKind", "ScalarType", "TensorType", "Value"]
