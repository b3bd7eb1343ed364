"""What `_torch.storages` takes from inside torch still is what torpor takes it for."""

import weakref

import pytest
import torch
from torch import nn

from torpor import _torch


def test_rebuild_tensor_and_typed_storage_are_two_halves_of_a_saved_tensor() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    storage = _torch.typed_storage(tensor)
    made = _torch.rebuild_tensor(storage, 0, (2, 3), (3, 1), False, {})
    assert torch.equal(made, tensor)


def test_rebuild_parameter_makes_a_parameter() -> None:
    made = _torch.rebuild_parameter(torch.ones(2), True, {})
    assert type(made) is nn.Parameter
    assert made.requires_grad


def test_typed_storage_is_what_torch_save_writes() -> None:
    assert _torch.typed_storage(torch.ones(2))._is_shared() is False
    assert _torch.typed_storage(torch.ones(2)).dtype is torch.float32


def test_shares_memory_notices_views_and_storages() -> None:
    tensor = torch.ones(3)
    assert not _torch.shares_memory(tensor)
    for look in (lambda t: t[1:], torch.Tensor.detach, torch.Tensor.untyped_storage):
        other = look(tensor)
        assert _torch.shares_memory(tensor)
        del other
        assert not _torch.shares_memory(tensor)


def test_memory_of_names_what_views_share() -> None:
    tensor = torch.ones(3)
    assert _torch.memory_of(tensor) == _torch.memory_of(tensor[1:])
    assert _torch.memory_of(tensor) != _torch.memory_of(tensor.clone())


def test_users_of_counts_tensors_on_a_memory() -> None:
    tensor = torch.ones(3)
    memory = _torch.memory_of(tensor)
    alone = _torch.users_of(memory)
    other = tensor.detach()
    assert _torch.users_of(memory) == alone + 1
    del other
    assert _torch.users_of(memory) == alone


def test_a_storage_alone_has_one_user() -> None:
    storage = torch.ones(3).untyped_storage()
    assert _torch.users_of(storage._cdata) == 1
    tensor = torch.empty(0).set_(storage)
    assert _torch.users_of(storage._cdata) == 2
    assert tensor.shape == (3,)


def test_untyped_gives_the_memory_of_both_forms_of_storages() -> None:
    tensor = torch.ones(3)
    memory = tensor.untyped_storage()
    assert _torch.untyped(memory) is memory
    assert _torch.untyped(_torch.typed_storage(tensor))._cdata == memory._cdata


def test_weak_memories() -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    tensors.append(tensors[0][1:])
    one, two, three = names = [memory.cdata for memory in _torch.weak_memories(tensors)]
    assert names == list(map(_torch.memory_of, tensors))
    assert one == three != two
    memories = _torch.weak_memories(tensors)
    tensors.clear()
    others = [torch.ones(3) for _ in range(100)]
    assert all(memory.expired() for memory in memories)
    assert {memory.cdata for memory in memories}.isdisjoint(map(_torch.memory_of, others))


def test_window_on() -> None:
    class Kept:
        pass

    owner, kept = torch.arange(12.0), Kept()
    part = owner[2:8].view(2, 3).t()
    window, alive = _torch.window_on(part, kept), weakref.ref(kept)
    assert torch.equal(window, part)
    assert (window.stride(), window.storage_offset()) == (part.stride(), part.storage_offset())
    owner.fill_(7)
    assert window.tolist() == [[7, 7]] * 3
    memory = _torch.memory_of(window)
    assert memory != _torch.memory_of(owner)
    users = _torch.users_of(memory)
    view = window[1:]
    assert _torch.users_of(memory) == users + 1
    del kept, window
    assert alive() is not None
    del view
    assert alive() is None
    nothing = torch.empty(0)
    assert _torch.window_on(nothing, None) is nothing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_window_on_a_gpu() -> None:
    owner = torch.arange(12.0, device="cuda")
    window = _torch.window_on(owner.view(3, 4).t(), None)
    owner.fill_(7)
    assert window.tolist() == [[7, 7, 7]] * 4
    assert window.dtype is torch.float32


def test_has_other_users_sees_tensors_and_storages_on_the_same_memory() -> None:
    x = torch.ones(4)
    half = x[:2]
    assert _torch.has_other_users([x])
    assert not _torch.has_other_users([x, half])
    del half
    assert not _torch.has_other_users([x])
    memory = x.untyped_storage()
    assert _torch.has_other_users([x])
    del memory
    assert not _torch.has_other_users([x])
