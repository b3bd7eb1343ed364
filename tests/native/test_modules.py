"""Module calls that come to the native library, where somebody looks at how modules are called."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


def layers() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Identity(), nn.ReLU()))


def called(frame: Any) -> str | None:
    """The class of the module whose call a frame is."""
    is_call = frame.f_code is nn.Module.__call__.__code__
    return type(frame.f_locals["self"]).__name__ if is_call else None


def test_who_watches_frames_sees_module_calls(library: Any) -> None:
    seen: list[str | None] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.append(called(frame))

    model = layers()
    for watch in (sys.setprofile, sys.settrace):
        seen.clear()
        watch(note)
        try:
            model(torch.ones(1))
        finally:
            watch(None)
        assert [name for name in seen if name] == ["Sequential", "Sequential", "Identity", "ReLU"]


def test_the_profiler_of_torch_sees_modules(library: Any) -> None:
    model = layers()
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    with profile(
        activities=[ProfilerActivity.CPU], with_stack=True, experimental_config=verbose,
        acc_events=True,
    ) as found:  # fmt: skip
        model(torch.ones(1))
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    names = [event.name() for event in found.profiler.kineto_results.events()]
    modules = sorted(name.partition(": ")[2] for name in names if name.startswith("nn.Module"))
    if not modules:
        pytest.skip("this torch shows no modules here")  # the outermost one is always called by it
    assert modules == ["Identity_0", "ReLU_0", "Sequential_0", "Sequential_1"]


@pytest.mark.parametrize("native", [True, False])
def test_hooks_of_all_modules_in_a_new_table_are_called(
    native: bool, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    note = lambda module, *_: names.append(type(module).__name__)  # noqa: E731  # used twice
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict({0: note}))
    monkeypatch.setattr(nn.modules.module, "_global_forward_pre_hooks", OrderedDict({1: note}))
    if native:
        layers()(torch.ones(1))
    else:
        sys.setprofile(lambda *_: None)
        try:
            layers()(torch.ones(1))
        finally:
            sys.setprofile(None)
    assert sorted(names) == sorted(["Identity", "ReLU", "Sequential", "Sequential"] * 2)


def test_calls_that_end_in_another_order_than_they_began(library: Any) -> None:
    """Stacks of calls that take turns on one thread, as those of greenlets do."""
    greenlet = pytest.importorskip("greenlet")
    main = greenlet.getcurrent()

    class Waits(nn.Module):
        def forward(self) -> None:
            main.switch()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Waits()

        def forward(self) -> None:
            self.inner()

    one, other = (greenlet.greenlet(lambda: Around()()) for _ in range(2))
    one.switch()
    first = library.modules()
    other.switch()
    second = library.modules()[: len(first)]
    one.switch()  # it is over, and its modules are gone
    assert library.modules() == second
    other.switch()
    assert library.modules() == []
    assert [type(module) for module in first] == [Waits, Around]
