"""What `_torch.sizes` takes from inside torch still is what torpor takes it for."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torpor import _torch
from torpor.ir.types import TensorType


def test_OpenSizes() -> None:
    opened = _torch.OpenSizes({"s0": 37, "s1": 8})
    long, wide = opened.sizes["s0"], opened.sizes["s1"]
    type_ = TensorType.uninterned((wide, long), (long, 1), torch.float32, torch.device("cpu"))
    with opened.tracing():
        tensor = opened.tensor(type_, torch.device("cpu"))
        torch.ops.aten.view.default(tensor, [wide * long])
        assert opened.conditions() == []
        torch.ops.aten.slice.Tensor(tensor, 1, 0, 20)
        torch.ops.aten.add.Tensor(tensor, torch.empty(37))
    assert set(opened.conditions()) == {"s0 >= 20", "s0 == 37"}


def test_OpenSizes_formulas() -> None:
    opened = _torch.OpenSizes({"s0": 37, "s1": 8})
    long, wide = opened.sizes["s0"], opened.sizes["s1"]
    assert opened.formula(5) == 5
    assert opened.formula(3 * long * long + 1) == (((1, ()), (3, ("s0", "s0"))), 1)
    assert opened.formula((long + 1) // 4) == (((1, ((((1, ()), (1, ("s0",))), 4),)),), 1)
    assert opened.formula(long % 5) is None
    assert opened.at((long + 1) // 4 * wide, {"s0": 11, "s1": 2}) == 6
    assert opened.conditions() == []
    assert opened.formula(torch.sym_min(long, wide)) == (((1, ("s1",)),), 1)
    assert opened.conditions() in (["s1 <= s0"], ["s0 >= s1"])


def test_fold_known_sizes() -> None:
    opened = _torch.OpenSizes({"s0": 37, "s1": 8})
    long, wide = opened.sizes["s0"], opened.sizes["s1"]

    def scaled(x: torch.Tensor, long: int, wide: int) -> torch.Tensor:
        y = x * (long / (long - 1)) * (wide / 3)
        torch._check(long == 37)
        return y

    with opened.mode:
        module = make_fx(scaled)(torch.empty(long, wide), long, wide)
        _torch.fold_known_sizes(module)
    scales = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    numbers = [node.args[1] for node in scales]
    assert numbers[0] == 37 / 36
    assert isinstance(numbers[1], torch.fx.Node)  # of a size that is open
    assert torch.equal(module(torch.ones(37, 8), 37, 8), scaled(torch.ones(37, 8), 37, 8))
