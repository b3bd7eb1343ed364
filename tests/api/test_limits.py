"""docs/limits.md: what is not eager's. One test for each line, under the name the line gives."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torpor
from torpor.errors import TorporWarning, UnsupportedError
from torpor.observe.site import WARNED

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"


@pytest.fixture(autouse=True)
def fresh(on_the_reference_backend: None) -> Iterator[None]:
    WARNED.clear()
    yield
    torpor.disable()


def lazy(*numbers: float) -> Tensor:
    return torpor.lazy(torch.tensor(numbers))


def test_every_line_of_the_page_has_its_test_and_every_test_its_line() -> None:
    named = re.findall(r"\| `(\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    assert sorted(named) == sorted(
        set(tests) - {"every_line_of_the_page_has_its_test_and_every_test_its_line"}
    )


# -- what a lazy tensor is -------------------------------------------------------------------------


def test_type_is_lazy_tensor() -> None:
    assert type(lazy(1.0)) is not Tensor
    assert isinstance(lazy(1.0), Tensor)
    assert torch.is_tensor(lazy(1.0))


def test_legacy_types() -> None:
    assert isinstance(torch.ones(1), torch.FloatTensor)
    assert not isinstance(lazy(1.0), torch.FloatTensor)


def test_numpy_is_a_read_only_copy() -> None:
    x = lazy(1.0, 2.0)
    array = x.numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 5
    x.add_(1)
    assert array.tolist() == [1.0, 2.0]


def test_addresses_are_good_until_the_next_write() -> None:
    x = lazy(1.0) + 1
    assert torpor.is_pending(x)
    address = x.data_ptr()
    assert not torpor.is_pending(x)
    assert x.data_ptr() == address
    memory = x.untyped_storage()
    x.add_(1)
    assert x.tolist() == [3.0]
    memory.fill_(0)
    assert x.tolist() == [3.0]


def test_sharing_between_processes_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="processes"):
        lazy(1.0).share_memory_()


def test_subclasses_are_plain() -> None:
    class Sub(Tensor):
        pass

    with pytest.warns(TorporWarning, match="as_subclass"):
        made = lazy(1.0).as_subclass(Sub)
    assert type(made) is Sub
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Sub(lazy(2.0)).tolist() == [2.0]


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_and_sparse_are_plain() -> None:
    assert not torpor.is_lazy(torch.quantize_per_tensor(lazy(1.0), 0.1, 0, torch.qint8))
    assert not torpor.is_lazy(lazy(0.0, 1.0).to_sparse())


def test_unbound_methods() -> None:
    assert lazy(1.0).tolist() == [1.0]
    with pytest.raises(RuntimeError, match="subclass"):
        Tensor.tolist(lazy(1.0))


def test_generator_state() -> None:
    state = torpor.lazy(torch.get_rng_state())
    torch.set_rng_state(state)
    with pytest.raises(RuntimeError):
        torch.Generator().set_state(state)


def test_set_takes_contents() -> None:
    x, plain = lazy(0.0, 0.0), torch.tensor([1.0, 2.0])
    try:
        x.set_(plain.untyped_storage(), 0, (2,), (1,))
    except (RuntimeError, UnsupportedError):
        return
    assert x.tolist() == [1.0, 2.0]


# -- where laziness starts -------------------------------------------------------------------------


def test_data_are_plain_under_enable() -> None:
    torpor.enable()
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    assert not torpor.is_lazy(model.weight)
    result = model(x)
    assert [torpor.is_lazy(t) for t in (model.weight, result, x)] == [True, True, False]
    weight = torch.ones(1).requires_grad_()
    torch.optim.SGD([weight], lr=0.1)
    assert torpor.is_lazy(weight)


def test_plain_tensors_are_taken_as_they_are() -> None:
    memory = np.ones(2, np.float32)
    recorded = lazy(1.0, 1.0) + torch.from_numpy(memory)
    memory[:] = 5
    assert recorded.tolist() == [2.0, 2.0]


def test_held_parameters_stay_plain() -> None:
    model = nn.Linear(1, 1, bias=False)
    loss = (model.weight * model.weight).sum()
    torpor.enable()
    model(torch.ones(1, 1))
    assert not torpor.is_lazy(model.weight)
    loss.backward()
    del loss
    for _ in range(4):
        model(torch.ones(1, 1))
    assert torpor.is_lazy(model.weight)


def test_borrowed_memory_stays_plain() -> None:
    with torpor.mode():
        assert torpor.is_lazy(torch.tensor([1.0]))
        assert not torpor.is_lazy(torch.from_numpy(np.ones(2)))
        assert not torpor.is_lazy(torch.empty(0))


def test_moving_leaves_held_memory_behind() -> None:
    layer = nn.Linear(2, 2)
    held = layer.weight.data
    torpor.lazy(layer)
    with torch.no_grad():
        layer.weight.fill_(3)
    assert 3 not in held
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight.data = tied[0].weight.data
    torpor.lazy(tied)
    with torch.no_grad():
        tied[0].weight.fill_(3)
    assert torpor.eager(tied[1].weight.detach()).tolist() == [[3, 3], [3, 3]]


def test_graphs_older_than_a_move() -> None:
    model = nn.Linear(1, 1)
    loss = model(torch.ones(1, 1)).sum()
    try:
        model.to("lazy")
    except RuntimeError as error:
        assert "graph" in str(error)
        return
    with pytest.raises(RuntimeError, match="move"):
        loss.backward()


# -- when things run -------------------------------------------------------------------------------


def test_what_runs_a_graph() -> None:
    def runs(program: object) -> bool:
        x = lazy(1.0, 2.0) * 2
        program(x)  # type: ignore[operator]
        return not torpor.is_pending(x)

    reads = (
        lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool(x.any()), str,
            lambda x: x.numpy(),
        torch.nonzero, lambda x: x[x > 2], torch.unique, lambda x: torpor.sync(),
    )  # fmt: skip
    assert [runs(read) for read in reads] == [True] * len(reads)
    assert not runs(lambda x: x + 1)
    model = torpor.lazy(nn.Linear(2, 1))
    assert torpor.is_pending(model(lazy(1.0, 2.0)))
    with torch.no_grad():
        assert not torpor.is_pending(model(lazy(1.0, 2.0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(lazy(1.0, 2.0)).sum()
    loss.backward()
    optimizer.step()
    assert not torpor.is_pending(loss)


def _bad() -> Tensor:
    return nn.functional.embedding(torpor.lazy(torch.tensor([7])), lazy(1.0, 2.0).view(2, 1))


def test_errors_come_with_the_read() -> None:
    quotient = torpor.lazy(torch.tensor([1])) // 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        quotient.tolist()
    result = _bad()
    with pytest.raises(IndexError, match=r"test_limits\.py"):
        result.tolist()


def test_events_have_no_times() -> None:
    with pytest.raises(UnsupportedError, match="no time"):
        torch.lazy.Event(enable_timing=True)


def test_failures_nobody_asked_about() -> None:
    program = (
        "import torch, torpor; torpor.use('reference')\n"
        "t = torpor.lazy(torch.ones(2, 1))\n"
        "x = torch.nn.functional.embedding(torpor.lazy(torch.tensor([7])), t)\n"
        "torpor.sync()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "out of range" in ended.stderr


# -- sums ------------------------------------------------------------------------------------------


def test_packed_layers_add_up_by_call() -> None:
    def gradients(layer: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        first, second = (nn.utils.rnn.pack_sequence([torch.randn(9, 4)]) for _ in range(2))
        loss = layer(first)[0].data.sin().sum() + layer(second)[0].data.pow(2).sum()
        return list(torch.autograd.grad(loss, list(layer.parameters())))

    torch.manual_seed(0)
    layer = nn.GRU(4, 6)
    eager, ours = gradients(layer), torpor.eager(gradients(torpor.lazy(copy.deepcopy(layer))))
    assert not all(map(torch.equal, ours, eager))
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other)


# -- a step that fails -----------------------------------------------------------------------------


def test_a_failed_step_leaves_what_was_written_before() -> None:
    counter, later = lazy(1.0), lazy(1.0)
    torpor.sync(wait=True)
    counter.add_(1)
    result = _bad()
    later.add_(1)
    torpor.sync()
    with pytest.raises(IndexError):
        result.tolist()
    assert counter.tolist() == [2.0]
    assert later.tolist() == [1.0]


def test_numbers_drawn_stay_drawn() -> None:
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    result = _bad() + torpor.lazy(torch.zeros(1)).uniform_()
    with pytest.raises(IndexError):
        result.tolist()
    assert not torch.equal(torch.rand(1), first)


def test_schedulers_are_not_set_back() -> None:
    weight = torpor.lazy(torch.ones(2, 1)).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss = nn.functional.embedding(torpor.lazy(torch.tensor([7])), weight).sum()
    loss.backward()
    optimizer.step()
    schedule.step()
    with pytest.raises(IndexError):
        loss.item()
    assert weight.tolist() == [[1.0], [1.0]]
    assert schedule.get_last_lr() == [0.1]


# -- compilers -------------------------------------------------------------------------------------


@pytest.mark.skipif(
    torpor.backends()["inductor"] != "available", reason="there is no compiler for inductor"
)
def test_compiled_numbers_are_rounded() -> None:
    x = torch.linspace(0, 3, 1000)
    with torpor.using("inductor"):
        compiled = torpor.eager(torpor.lazy(x).exp())
    assert torpor.metrics.counters()["UncachedCompile"]
    torch.testing.assert_close(compiled, x.exp())


def test_torch_compile_records() -> None:
    function = torch.compile(lambda x: x.sin() + 1, backend="eager")
    for _ in range(3):
        result = function(lazy(1.0))
        assert torpor.is_pending(result)
        assert result.item() == pytest.approx(math.sin(1.0) + 1)
    counters = torpor.metrics.counters()
    assert (counters["RegionMisses"], counters["RegionLookups"]) == (1, 2)


def test_higher_order_ops_run_at_once() -> None:
    with pytest.warns(TorporWarning, match="cond"):
        result = torch.cond(lazy(1.0).sum() > 0, lambda x: x + 1, lambda x: x - 1, (lazy(1.0),))
    assert torpor.is_lazy(result)
    assert result.tolist() == [2.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_export_gets_plain_tensors() -> None:
    model = torpor.lazy(nn.Linear(2, 1))
    with pytest.warns(TorporWarning, match="trace"):
        traced = torch.jit.trace(model, lazy(1.0, 2.0))
    assert not any(torpor.is_lazy(p) for p in traced.parameters())
    assert torpor.is_lazy(model.weight)
