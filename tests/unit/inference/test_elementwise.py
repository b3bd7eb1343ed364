"""Types of elementwise ops told directly are those torch tells: every op, many layouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch

from torpor.inference import infer
from torpor.inference._generated.elementwise import RESULT_OF
from torpor.inference.elementwise import elementwise_types
from torpor.ir.node import Value, leaf, scalar
from torpor.ir.types import TensorType
from torpor.ops.spec import ArgKind, OpSpec, spec_of
from torpor.text.torch_parser import find_op

F64 = torch.float64
Layout = tuple[TensorType, ...]


def types(*tensors: torch.Tensor) -> tuple[TensorType, ...]:
    return tuple(map(TensorType.of_tensor, tensors))


LAYOUTS = {
    "contiguous": types(torch.empty(2, 3, 4)),
    "numbers of no dimension": types(torch.empty(())),
    "double": types(torch.empty(2, 3, dtype=F64)),
    "transposed": types(torch.empty(3, 2).t()),
    "transposed and contiguous": types(torch.empty(3, 2).t(), torch.empty(2, 3)),
    "contiguous and transposed": types(torch.empty(2, 3), torch.empty(3, 2).t()),
    "channels last": types(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "channels last and a bias": types(
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.empty(3, 1, 1)
    ),
    "broadcast": types(torch.empty(2, 1, 4), torch.empty(3, 1), torch.empty(2, 3, 4)),
    "row and column": types(torch.empty(1, 4), torch.empty(3, 1)),
    "big and small": types(torch.empty(2, 3, 4), torch.empty(4), torch.empty(())),
    "expanded": types(torch.empty(3, 1).expand(3, 4), torch.empty(3, 4)),
    "sliced": types(torch.empty(4, 6)[:, ::2], torch.empty(4, 6)[:, 1:4]),
    "odd strides of single rows": types(torch.empty_strided((1, 3), (7, 1))),
    "permuted": types(torch.empty(4, 2, 3).permute(1, 2, 0), torch.empty(2, 3, 4)),
    "at an offset": types(torch.empty(10)[4:].view(2, 3)),
    "do not fit": types(torch.empty(2, 3), torch.empty(2, 4)),
    "empty": types(torch.empty(0, 3)),
    "mixed dtypes": types(torch.empty(3), torch.empty(3, dtype=F64)),
    "integers": types(torch.empty(3, dtype=torch.int64)),
}
NUMBERS = (2, 0.5, -1, True, 1j)


def calls(
    spec: OpSpec, layout: tuple[TensorType, ...]
) -> Iterator[tuple[list[Any], dict[Any, Any]]]:
    """The op on tensors laid out so, with numbers of all kinds where it takes some."""
    takes = any(a.kind in (ArgKind.SCALAR, ArgKind.SCALARS, ArgKind.FLOAT) for a in spec.arguments)
    sample = {scalar(0, float): 0.5}
    for number in (*NUMBERS, *sample) if takes else NUMBERS[:1]:
        tensors = iter([leaf(i, t) for i, t in enumerate(islice(cycle(layout), 8))])
        yield [_argument(a, tensors, layout, number) for a in spec.arguments], sample
    places = [i for i, a in enumerate(spec.arguments) if a.kind is ArgKind.TENSOR][1:]
    for place in places[:1]:  # a wrapped number in the place of a tensor
        for number in NUMBERS:
            tensors = iter([leaf(i, t) for i, t in enumerate(islice(cycle(layout), 8))])
            bound = [_argument(a, tensors, layout, 2) for a in spec.arguments]
            bound[place] = number
            yield bound, sample


def _argument(argument: Any, tensors: Any, layout: Layout, number: Any) -> Any:
    if argument.kind is ArgKind.TENSOR:
        return next(tensors)
    if argument.kind is ArgKind.TENSORS:
        return tuple(leaf(20 + i, t) for i, t in enumerate((next(tensors).type, layout[0])))
    if argument.kind is ArgKind.SCALARS:
        return (number, number)
    if argument.kind in (ArgKind.SCALAR, ArgKind.FLOAT):
        return number
    return argument.default


def asked(spec: OpSpec, bound: list[Any], sample: dict[Value, Any]) -> Any:
    """What torch tells, or its refusal."""
    try:
        device = infer.common_device(spec, bound)
        return infer._ask_torch(spec, bound, sample, lambda device: device, device)
    except Exception as error:
        return error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_direct_types_are_torchs(layout: str) -> None:
    reported = 0
    differences = []
    for name in RESULT_OF:
        spec = spec_of(find_op(name))
        for bound, sample in calls(spec, LAYOUTS[layout]):
            direct = elementwise_types(spec, bound)
            if direct is None:
                continue
            reported += 1
            answer = asked(spec, bound, sample)
            if answer != direct:
                differences.append(f"{name}{bound}: {direct}, and torch says {answer}")
    assert differences == []
    nothing = {"do not fit", "empty", "mixed dtypes", "integers"}
    assert reported == 0 if layout in nothing - {"do not fit", "mixed dtypes"} else reported > 50


def test_complex_numbers_and_flags_are_left_to_torch() -> None:
    x = leaf(0, LAYOUTS["contiguous"][0])
    add = spec_of(torch.ops.aten.add.Tensor)
    assert elementwise_types(add, [x, x, 1]) == (x.type,)
    for alpha in (True, 1j, None):
        assert elementwise_types(add, [x, x, alpha]) is None
    assert elementwise_types(add, [x, 1j, 1]) is None
    gelu = spec_of(torch.ops.aten.gelu.default)
    assert elementwise_types(gelu, [x, gelu.arguments[1].default]) == (x.type,)
    assert elementwise_types(gelu, [x, "tanh"]) is None


def test_operands_on_two_devices_are_left_to_torch() -> None:
    x = leaf(0, LAYOUTS["contiguous"][0])
    y = leaf(1, x.type.on(torch.device("meta")))
    assert elementwise_types(spec_of(torch.ops.aten.add.Tensor), [x, y, 1]) is None
