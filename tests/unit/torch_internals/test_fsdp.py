"""What `_torch.fsdp` takes from inside torch still is what torpor takes it for."""

import importlib
import inspect
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torpor
from torpor import _torch
from torpor._torch import fsdp
from torpor.trace.tensor import LazyTensor

_COLLECTIVES = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
_PARAM = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
_GROUP = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")


@pytest.fixture
def group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", fsdp._WITH_BUFFERS)
def test_on_fully_shard_functions_that_make_buffers_are_ours_everywhere(
    name: str,
) -> None:
    assert getattr(_COLLECTIVES, name) is getattr(_GROUP, name)
    assert getattr(_COLLECTIVES, name).__module__.startswith("torpor.")


@pytest.mark.parametrize("name", fsdp._WITH_MEMORY)
def test_functions_that_change_memory_are_ours(name: str) -> None:
    assert getattr(_PARAM, name).__module__.startswith("torpor.")


def test_memory_of_plain_tensors_is_freed_and_allocated_still() -> None:
    tensor = torch.ones(3)
    _PARAM.free_storage(tensor)
    assert tensor.untyped_storage().size() == 0
    _PARAM.alloc_storage(tensor)
    assert tensor.untyped_storage().size() == 12


def test_has_lazy_shard_looks_where_shards_are(group: None) -> None:
    for is_lazy in (False, True):
        module = torch.nn.Linear(2, 2)
        module = torpor.lazy(module) if is_lazy else module
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        state = (
            inspect.getattr_static(module, "_get_fsdp_state", None) or type(module)._get_fsdp_state
        )
        params = state(module)._fsdp_param_group.fsdp_params
        assert _torch.has_lazy_shard((None, params), LazyTensor) == is_lazy
    assert not _torch.has_lazy_shard((None, []), LazyTensor)
