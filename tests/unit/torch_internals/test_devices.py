"""What `_torch.devices` takes from inside torch still is what torpor takes it for."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import torpor
from torpor import _torch


def test_the_dispatch_keys_of_the_lazy_device_exist() -> None:
    assert torch.device("lazy").type == "lazy"
    for key in ("Lazy", "AutogradLazy", "AutogradCPU", "AutogradCUDA"):
        assert torch._C._dispatch_key_parse(key) is not None


def test_register_device_module_makes_a_namespace_and_keeps_it() -> None:
    module = torch.get_device_module("lazy")
    _torch.register_device_module("lazy", object())
    assert torch.get_device_module("lazy") is module


def test_accept_lazy_autocast_leaves_other_devices_alone() -> None:
    assert torch.is_autocast_enabled("lazy") is False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu") is True


def test_accept_lazy_attention_leaves_other_devices_alone(lazy: torch.Tensor) -> None:
    from torch.nn.modules import activation

    assert activation._check_arg_device(lazy)
    assert activation._check_arg_device(None)
    assert not activation._check_arg_device(torch.ones(1, device="meta"))


def test_accept_lazy_losses_chooses_as_on_the_physical_device(lazy: torch.Tensor) -> None:
    module = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options")
    sizes = (8, 4, 16, torch.bfloat16)
    chosen = module.LinearCrossEntropyOptions()._adjust(*sizes, device=lazy.device)
    expected = module.LinearCrossEntropyOptions()._adjust(*sizes, device=torch.device("cpu"))
    assert chosen == expected
    assert chosen.acc_dtype is torch.float32


def test_attention_switches_follow_sdpa_kernel() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        flash, math, *_ = _torch.attention_switches()
    assert (flash, math) == (False, True)


def test_attention_choice_is_the_number_of_a_kernel() -> None:
    query = torch.zeros(1, 2, 4, 8)
    choice = _torch.attention_choice(query, query, query, 0.0, True, None)
    assert choice == SDPBackend.FLASH_ATTENTION.value
    with sdpa_kernel(SDPBackend.MATH):
        choice = _torch.attention_choice(query, query, query, 0.0, True, 0.5)
    assert choice == SDPBackend.MATH.value


def test_on_default_dtype_is_told_of_changes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_default_dtype", "set_default_tensor_type"):
        monkeypatch.setattr(torch, name, getattr(torch, name))  # put back afterwards
    reported: list[torch.dtype] = []

    def tell() -> None:
        reported.append(torch.get_default_dtype())

    _torch.on_default_dtype(tell, tell)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(before)
        assert reported == []
        torch.set_default_dtype(torch.float64)
        assert reported == [before, torch.float64]
    finally:
        torch.set_default_dtype(before)


def test_cuda_stream_is_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_cuda_getCurrentRawStream"
    if torch.cuda.is_available():
        assert _torch.cuda_stream(0) == torch.cuda.current_stream(0).cuda_stream
    monkeypatch.setattr(torch._C, name, lambda device: 7 + device, raising=False)
    assert _torch.cuda_stream(1) == 8


def test_end_allocating_to_pool_says_so_to_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    names = ("_cuda_endAllocateToPool", "_cuda_releasePool")
    for name in names:
        assert hasattr(torch._C, name)
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: said.append((name, *args)))
    _torch.end_allocating_to_pool(0, (0, 1))
    assert said == [(name, 0, (0, 1)) for name in names]


@pytest.mark.parametrize("started", [False, True])
def test_forget_cublas_workspaces_needs_a_device_that_was_used(
    started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    name = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, name, lambda: said.append(True), raising=False)
    _torch.forget_cublas_workspaces()
    assert said == [True] * started


def test_torch_lazy_system_runs_where_torpor_is_not_loaded(tmp_path: Path) -> None:
    source = Path(torpor.__file__).parent
    (tmp_path / "lazy_system.py").write_text(
        "import torch\n"
        "from torpor._torch import torch_lazy_system\n"
        "mark_step, wait, compiles = torch_lazy_system()\n"
        "x = torch.ones(2).to('lazy') + 1\n"
        "mark_step(); wait()\n"
        "print(compiles(), x.cpu().tolist())\n"
    )
    command = [sys.executable, "-P", str(source / "bench" / "bare.py"), "lazy_system"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1 [2.0, 2.0]\n", done.stderr


def test_finish_gpu_asks_no_gpu_to_start() -> None:
    before = torch.cuda.is_initialized()
    _torch.finish_gpu()
    assert torch.cuda.is_initialized() == before


def test_is_data_worker_only_in_workers() -> None:
    loader = torch.utils.data.DataLoader(_AsksForWorkers(), num_workers=1)
    assert [bool(batch) for batch in loader] == [True]
    assert not _torch.is_data_worker()


class _AsksForWorkers(torch.utils.data.Dataset[bool]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> bool:
        return _torch.is_data_worker()
