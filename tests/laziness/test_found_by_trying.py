"""Mistakes that were found by trying, each as small as it gets."""

from __future__ import annotations

import torch
from torch import nn

import torpor
from torpor.execute.storage import TRACE


def _compiles() -> int:
    return torpor.metrics.counters().get("UncachedCompile", 0)


def test_a_kernel_that_makes_a_conjugate_inside_runs_right_when_run_at_once() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 3, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
    expected = torch.linalg.lstsq(a, b, driver="gels").residuals
    actual = torch.linalg.lstsq(a.to("lazy"), b.to("lazy"), driver="gels").residuals
    assert torch.equal(actual.cpu(), expected)


def test_the_default_dtype_decides_anew_after_it_changes() -> None:
    assert torch.ones(2, device="lazy").dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.ones(2, device="lazy").dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.ones(2, device="lazy").dtype is torch.float32


def test_a_graph_waits_for_what_another_devices_queue_is_computing() -> None:
    a = torch.randn(600, 600, generator=torch.Generator().manual_seed(0)).to("lazy")
    expected = a.cpu()
    for _ in range(3):
        a, expected = (a @ a) / 100, (expected @ expected) / 100
    torpor.sync()
    assert torch.equal((a.to("lazy:1") + 1).cpu(), expected + 1)


def test_a_program_that_only_reads_compiles_once_and_keeps_nothing() -> None:
    before = _compiles()
    for number in range(20):
        x = torch.full((3,), float(number)).to("lazy")
        assert (x * 2).sum().item() == 6.0 * number
    assert _compiles() - before == 1
    assert not TRACE.leaves


def test_two_tensors_on_one_buffer_are_one_leaf() -> None:
    a = torch.ones(3, device="lazy") * 2
    b = torch.zeros(3, device="lazy")
    b.copy_(a)
    torpor.sync()
    assert (a + 1)._lazy_storage.value is (b + 1)._lazy_storage.value


def test_an_empty_list_entry_in_cat_stays_lazy() -> None:
    cache = torch.tensor([], device="lazy")
    keys = torch.ones(1, 2, 3, 4, device="lazy")
    assert torpor.is_pending(torch.cat([cache, keys], dim=-2))


def test_detach_of_a_written_view_looks_where_the_view_looks() -> None:
    base = torch.arange(8.0).view(4, 2).to("lazy")
    view = base[1]
    view.copy_(torch.ones_like(view))
    assert view.detach().storage_offset() == 2
    assert view.detach().tolist() == [1.0, 1.0]


def test_a_sequence_of_changing_numbers_settles() -> None:
    x = torch.ones(3, device="lazy")
    compiles = []
    for step in range(1, 7):
        y = ((x * (0.1 * step)) + 0.2 * step) / (0.3 * step)
        torpor.sync(y, wait=True)
        compiles.append(_compiles())
    assert compiles[2] == compiles[-1]


def test_moving_a_module_keeps_tied_weights_and_strides() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.to("lazy")
    assert model[1].weight is model[0].weight
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert image.to("lazy").stride() == image.stride()
