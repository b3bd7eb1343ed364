"""What `_torch.dtensor` takes from inside torch still is what torpor takes it for."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torpor
from torpor import _torch


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def _made(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])


def test_is_dtensor_knows_tensors_and_other_things(mesh: DeviceMesh) -> None:
    assert _torch.is_dtensor(_made(mesh))
    assert not any(map(_torch.is_dtensor, (torch.ones(1), torpor.lazy(torch.ones(1)), None, 1)))


def test_no_tensor_is_a_dtensor_while_the_module_is_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("half imported"))
    assert not _torch.is_dtensor(torch.ones(1))


def test_local_part_is_what_a_rank_holds(mesh: DeviceMesh) -> None:
    made = _made(mesh)
    assert _torch.local_part(made) is made._local_tensor
    plain = torch.ones(1)
    assert _torch.local_part(plain) is plain
    assert _torch.local_part(None) is None


def test_of_local_part_makes_another_dtensor_of_the_same_kind(mesh: DeviceMesh) -> None:
    parameter = torch.nn.Parameter(_made(mesh), requires_grad=False)
    twice = _torch.of_local_part(parameter, lambda part: part * 2)
    assert isinstance(twice, torch.nn.Parameter)
    assert isinstance(twice, DTensor)
    assert not twice.requires_grad
    assert (twice.placements, twice.shape) == (parameter.placements, parameter.shape)
    assert torch.equal(twice.to_local(), parameter.to_local() * 2)


def test_of_local_part_keeps_what_is_not_converted(mesh: DeviceMesh) -> None:
    made = _made(mesh)
    assert _torch.of_local_part(made, lambda part: part) is made


def test_of_local_part_keeps_the_history(mesh: DeviceMesh) -> None:
    leaf = _made(mesh).requires_grad_()
    twice = _torch.of_local_part(leaf * 3, lambda part: part * 2)
    twice.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.to_local(), torch.full((3, 2), 6.0))


def test_wait_at_once_lets_functional_collectives_give_lazy_tensors(mesh: DeviceMesh) -> None:
    lazy = funcol.all_reduce(torpor.lazy(torch.ones(2)), "sum", mesh)
    assert torpor.is_pending(lazy)
    assert type(funcol.all_reduce(torch.ones(2), "sum", mesh)) is funcol.AsyncCollectiveTensor
    assert lazy.tolist() == [1.0, 1.0]
