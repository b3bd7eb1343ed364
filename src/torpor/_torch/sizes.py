"""Symbolic sizes: fake tensors that have them, guards on them, and arithmetic in fx graphs.

Uses `ShapeEnv` and the sympy functions of `torch.utils._sympy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from torpor._torch.dispatch import without_torch_function
from torpor._torch.fakes import quiet_fakes


class OpenSizes:
    """Fake tensors with torch's symbolic sizes, and the guards that tracing put on these."""

    def __init__(self, hints: dict[str, int]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self.environment = ShapeEnv(
            allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False
        )
        self.mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=self.environment)
        self.sizes: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        for name, hint in hints.items():
            source = ConstantSource(name)
            symbol = self.environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            self._names[symbol] = name
            self.sizes[name] = self.environment.create_symintnode(symbol, hint=hint, source=source)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Run the body on fake tensors, below autograd, preferring kernels that support symbols."""
        from torch._dispatch.python import enable_python_dispatcher

        quietly = (without_torch_function(), torch.no_grad(), quiet_fakes())
        with quietly[0], quietly[1], quietly[2], enable_python_dispatcher(), self.mode:
            yield

    def tensor(self, type_: Any, device: torch.device) -> torch.Tensor:
        """A fake tensor of that type, whose sizes may be symbolic."""
        if type(type_.offset) is int and type_.offset == 0:
            made = torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=device)
        else:
            base = torch.empty((type_.offset + type_.span,), dtype=type_.dtype, device=device)
            made = base.as_strided(type_.shape, type_.stride, type_.offset)
        if type_.conj:
            made = made.conj()
        return made._neg_view() if type_.neg else made

    def formula(self, number: Any) -> Any:
        """A number as an expression: an int, or a sum of products of names and other formulas.

        A formula is `(terms, divisor)`, a term `(number, factors)`; the sum is divided, rounding
        down. None if the number is not of that form.
        """
        if type(number) is not torch.SymInt:
            return number
        return _formula(self._without_choices(number.node.expr), self._names)

    def _without_choices(self, expression: Any) -> Any:
        """Replace `Min` and `Max` by their current winner, adding a guard."""
        from torch.utils._sympy.functions import Max, Min

        while choices := expression.atoms(Min, Max):
            choice = min(choices, key=lambda one: one.count_ops())  # innermost first
            found = choice.args[0]
            for other in choice.args[1:]:
                less = found <= other if isinstance(choice, Min) else found >= other
                found = found if self.environment.evaluate_expr(less) else other
            expression = expression.xreplace({choice: found})
        return expression

    def at(self, number: Any, values: dict[str, int]) -> int:
        """Evaluate a number for these values of the names."""
        if type(number) is not torch.SymInt:
            return int(number)
        return int(number.node.expr.xreplace({s: values[n] for s, n in self._names.items()}))

    def conditions(self) -> list[str]:
        """The guards on sizes, as Python expressions of their names."""
        import sympy  # type: ignore[import-untyped]  # has no types
        from torch.utils._sympy.printers import PythonPrinter

        renamed = {s: sympy.Symbol(n, integer=True, positive=True) for s, n in self._names.items()}
        texts = [
            PythonPrinter().doprint(guard.expr.xreplace(renamed))
            for guard in self.environment.guards
        ]
        return list(dict.fromkeys(texts))


def _formula(expression: Any, names: dict[Any, str]) -> Any:
    import sympy

    terms = []
    for term in sympy.Add.make_args(sympy.expand(expression, deep=False)):
        factor, others = 1, []
        for part in sympy.Mul.make_args(term):
            base, power = part.as_base_exp()
            if part.is_Integer:
                factor *= int(part)
                continue
            one = names.get(base) if base.is_Symbol else _rounded_down(base, names)
            if one is None or not power.is_Integer or power < 1:
                return None
            others += [one] * int(power)
        terms.append((factor, tuple(others)))
    return tuple(terms), 1


def _rounded_down(expression: Any, names: dict[Any, str]) -> Any:
    from torch.utils._sympy.functions import FloorDiv

    if not isinstance(expression, FloorDiv) or not expression.args[1].is_Integer:
        return None
    inside, divisor = _formula(expression.args[0], names), int(expression.args[1])
    return None if inside is None or divisor < 1 else (inside[0], divisor)


_NUMBERS: Final[dict[type, type]] = {torch.SymInt: int, torch.SymFloat: float}


def fold_known_sizes(module: torch.fx.GraphModule) -> None:
    """Replace arithmetic on sizes that turned out to be constant by numbers.

    A trace may find out late that it is specialized to one size. Earlier nodes are then arithmetic
    on constants, at which Inductor fails, as it expects quotients to be integers.
    """
    from torch.fx.node import map_arg

    known: dict[torch.fx.Node, int | float] = {}
    for node in module.graph.nodes:
        if node.all_input_nodes and not known.keys().isdisjoint(node.all_input_nodes):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: known.get(n, n))
        value = node.meta.get("val")
        if node.op == "call_function" and type(value) in _NUMBERS and _is_constant(value):
            known[node] = _NUMBERS[type(value)](value)
    for node in reversed(known):
        module.graph.erase_node(node)
    module.recompile()


def _is_constant(number: torch.SymInt | torch.SymFloat) -> bool:
    return not number.node.expr.free_symbols
