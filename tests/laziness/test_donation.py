"""A step writes over buffers that nobody holds any more, and over no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import torpor
from tests.comparison import Put, assert_same
from torpor.backend import BackendData, BackendDevice, Computation, register
from torpor.backends.reference import ReferenceBackend


class Overwriting(ReferenceBackend):
    """The reference backend, with results written over donated parameters."""

    takes_donations = True

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        results = super().execute(computation, arguments, device)
        for parameter, result in computation.aliases.items():
            donated = arguments[parameter].tensor
            if results[result].error is None:
                donated.copy_(results[result].tensor)
                results[result] = BackendData(device, results[result].type, donated)
        return results


register("overwriting", Overwriting)


@pytest.fixture(autouse=True)
def overwriting(on_the_reference_backend: None) -> Iterator[None]:
    with torpor.using("overwriting"):
        torpor.metrics.reset()
        yield
        torpor.sync(wait=True)


def _address(tensor: torch.Tensor) -> int:
    data = tensor._lazy_storage.data
    return data.wait().tensor.data_ptr()


def _refused() -> int:
    return torpor.metrics.counters().get("DonationRefused", 0)


def _train(model: nn.Module, x: torch.Tensor, steps: int) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_training_equals_eager(put: Put) -> None:
    x = torch.ones(3, 4).cumsum(0)
    eager, lazy = _model(), put(_model())
    assert_same(_train(lazy, put(x), 6), _train(eager, x, 6))
    assert_same(list(lazy.state_dict().values()), list(eager.state_dict().values()))


def test_parameters_stay_where_they_are(put: Put) -> None:
    model, x = put(_model()), put(torch.ones(3, 4).cumsum(0))
    _train(model, x, 3)
    before = [_address(p) for p in model.parameters()]
    refused = _refused()
    _train(model, x, 4)
    torpor.wait()
    assert [_address(p) for p in model.parameters()] == before
    assert _refused() == refused


@pytest.mark.parametrize(
    "hold",
    [
        lambda p: p.detach().clone(),
        lambda p: torch.from_dlpack(p.detach()),
        lambda p: p.detach().cpu().clone(),
        lambda p: p.detach().numpy() if p.device.type == "cpu" else p.detach().cpu().numpy(),
        lambda p: p.detach()[1:].clone(),
        lambda p: p.detach() * 1,
    ],
    ids=["clone", "dlpack", "cpu", "numpy", "part", "product"],
)
def test_what_the_user_took_from_the_old_contents_stays(put: Put, hold: Any) -> None:
    parameter = put(torch.arange(4.0))
    torpor.sync(wait=True)
    for _ in range(3):
        held = hold(parameter)
        kept = [float(v) for v in held]
        parameter.add_(1)
        torpor.sync(wait=True)
        assert [float(v) for v in held] == kept
    assert parameter.tolist() == [3.0, 4.0, 5.0, 6.0]


def test_a_buffer_read_by_its_own_name_is_not_written_over(put: Put) -> None:
    parameter = put(torch.arange(4.0))
    torpor.sync(wait=True)
    data = parameter._lazy_storage.data
    parameter.add_(1)
    torpor.sync(wait=True)
    assert data.tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert parameter.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert _refused() == 1


def test_a_tensor_that_was_plain_keeps_its_numbers() -> None:
    plain = torch.arange(4.0)
    lazy = torpor.lazy(plain)
    lazy.add_(1)
    torpor.sync(wait=True)
    assert lazy.tolist() == [1.0, 2.0, 3.0, 4.0]
    kept = torch.arange(4.0)
    assert torch.equal(plain, kept) or torch.equal(plain, kept + 1)  # as without donation
    with torpor.using("reference"):
        other = torch.arange(4.0)
        again = torpor.lazy(other)
        again.add_(1)
        torpor.sync(wait=True)
    assert torch.equal(plain, other)


def test_a_copy_of_the_tensor_made_earlier_keeps_its_buffer(put: Put) -> None:
    first = put(torch.arange(4.0))
    torpor.sync(wait=True)
    second = first.clone()
    torpor.sync(wait=True)
    second.mul_(2)
    torpor.sync(wait=True)
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0]
    first.mul_(3)
    torpor.sync(wait=True)
    assert second.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_two_tensors_exchange_their_contents(put: Put) -> None:
    a, b = put(torch.arange(4.0)), put(torch.ones(4))
    torpor.sync(wait=True)
    for _ in range(3):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        torpor.sync(wait=True)
    assert (a.tolist(), b.tolist()) == ([1.0] * 4, [0.0, 1.0, 2.0, 3.0])
