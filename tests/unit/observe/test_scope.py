"""Which module recorded a node: its name within the outermost one, in both directions."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torpor
from torpor.ir.node import TABLE
from torpor.observe.history import HISTORY
from torpor.trace.values import forget_types


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    torpor.use("reference")
    torpor.sync(wait=True)
    forget_types()
    HISTORY.clear()
    yield
    torpor.sync(wait=True)
    TABLE.clear()


def scopes() -> Counter[tuple[str, str] | None]:
    """How many nodes of all graphs each module recorded."""
    torpor.sync(wait=True)
    graphs = [record.graph for record in HISTORY.records if record.graph is not None]
    return Counter(node.scope for graph in graphs for node in graph.nodes)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x * 2


def test_a_node_has_the_name_of_the_innermost_module() -> None:
    model = Twice().to("lazy")
    y = model(torch.ones(2, 4, device="lazy")) + 1
    found = scopes()
    assert found["forward", "Twice.parts.0"] == 1
    assert found["forward", "Twice.parts.1.1"] == 1
    assert found["forward", "Twice"] == 1
    assert found["forward", "Twice.parts.1.0"] >= 1
    assert found[None] >= 1
    del y


def test_a_derivative_belongs_to_the_module_of_its_op() -> None:
    model = Twice().to("lazy")
    x = torch.ones(2, 4, device="lazy", requires_grad=True)
    model(x).sum().backward()
    found = scopes()
    assert found["backward", "Twice.parts.0"] >= 1
    assert found["backward", "Twice.parts.1.1"] >= 1
    assert found["backward", "Twice"] >= 1
    assert found["backward", "Twice.parts.1.0"] >= 2  # of an op that is taken apart


def test_what_is_computed_again_in_the_backward_pass_is_of_the_backward_pass() -> None:
    model = Twice().to("lazy")
    x = torch.ones(2, 4, device="lazy", requires_grad=True)
    checkpoint(model, x * 3, use_reentrant=False).sum().backward()
    assert all(scope is None or scope[0] in ("forward", "backward") for scope in scopes())


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_has_its_name(foreach: bool) -> None:
    model = nn.Linear(3, 1).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    model(torch.ones(2, 3, device="lazy")).sum().backward()
    optimizer.step()
    assert scopes()["optimizer", "SGD"] >= 1


class Plain(torch.optim.Optimizer):
    """An optimizer of the user's."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # as users write it
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def test_so_has_one_of_the_users() -> None:
    model = nn.Linear(3, 1).to("lazy")
    optimizer = Plain(model.parameters(), {"lr": 0.1})
    model(torch.ones(2, 3, device="lazy")).sum().backward()
    optimizer.step()
    assert scopes()["optimizer", "Plain"] == 2


class Makes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Tanh()(x)  # type: ignore[no-any-return]  # a module is untyped


def test_a_module_that_nobody_holds_has_its_class_for_a_name() -> None:
    y = Makes()(torch.ones(3, device="lazy", requires_grad=True))
    assert scopes()["forward", "Makes.Tanh"] == 1
    del y


def test_a_module_that_is_added_later_is_found() -> None:
    model = nn.Sequential(nn.Tanh()).to("lazy")
    x = torch.ones(3, device="lazy", requires_grad=True)
    y = model(x)
    model.append(nn.Sigmoid())
    z = model(x)
    assert scopes()["forward", "Sequential.1"] == 1
    del y, z


def test_a_node_met_again_keeps_its_module() -> None:
    x = torch.ones(3).to("lazy")
    y = nn.Tanh()(x.requires_grad_())
    z = torch.tanh(x)
    assert scopes() == {("forward", "Tanh"): 1}
    del y, z
