"""Which instructions update donated parameters, and nothing else: they are compiled apart, last.

A step that fails must not have written over a parameter. So a program first computes all that may
fail (indices are checked, memory is taken, ops of somebody's own are called), and what updates
parameters element by element runs when nothing can go wrong any more. That is where an optimizer's
arithmetic is: the gradients are there before it, in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch

from torpor.backends.fx.guards import may_refuse
from torpor.backends.fx.repeats import is_view
from torpor.backends.reference.lowering import Instruction, registers_in

_ELEMENTWISE: Final = frozenset(
    # besides the ops that torch calls pointwise
    {"_to_copy", "alias", "detach", "lift_fresh_copy", "copy", "copy_", "fill_", "zero_", "clone"}
)  # fmt: skip
_REDUCING: Final = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def updates(
    instructions: Sequence[Instruction],
    results: Iterable[int],
    donated: Mapping[int, int],
    alone: Callable[[Instruction], bool],
) -> set[Instruction]:
    """The instructions that only donated parameters are made of, and that cannot fail."""
    if not donated:
        return set()
    written = set(donated.values())
    early = set(results) - written  # registers that have to be there before anything is written
    late, found = set(written), set[Instruction]()
    for instruction in reversed(instructions):
        made = instruction.outputs
        wanted = late.intersection(made)
        if (
            wanted
            and early.isdisjoint(made)
            and _cannot_fail(instruction)
            and not alone(instruction)
        ):
            found.add(instruction)
            late.update(registers_in(instruction.args))
        else:
            early.update(registers_in(instruction.args))
    return found


def _cannot_fail(instruction: Instruction) -> bool:
    """It computes element by element, so that compiled code needs no memory besides its results."""
    spec = instruction.spec
    name = spec.target._opname
    if may_refuse(spec, instruction.args):
        return False
    if name.startswith("_foreach_"):
        constants = any(type(arg) is list and registers_in(arg) == [] for arg in instruction.args)
        return not (constants or name.startswith(_REDUCING))  # compilers call kernels of eager's
    known = torch.Tag.pointwise in spec.target.tags or name in _ELEMENTWISE
    return known or is_view(instruction)
