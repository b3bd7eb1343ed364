"""Every way to record a call comes to the same: keys, nodes, results and errors.

Calls are drawn by the signatures of all overloads of ATen that are recorded by them. Each is made
several times, from an equal starting state each time: by `record`, which is the truth, by the op
itself in Python, and by the op itself with the native recorder in front, where there is one
(`TORPOR_NATIVE=on`).

`TORPOR_SIGNATURE_CALLS=50` draws that many calls of each overload, and others than usual.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import torpor
from tests.property.drawn_calls import Author, Call, Source, can_be_drawn
from tests.property.record_paths import (
    Bench,
    Outcome,
    forget_everything,
    recording_of_op,
)
from torpor import _torch
from torpor.ir.node import LEAF, Value
from torpor.native.attach import NATIVE_RECORDER
from torpor.ops.spec import Mode, spec_of
from torpor.trace import dispatch, overlap, recorder
from torpor.trace.recorder import make_recorder

pytestmark = pytest.mark.filterwarnings("ignore")

CALLS = int(os.environ.get("TORPOR_SIGNATURE_CALLS", "0"))
PARTS = 8


@functools.cache
def overloads() -> list[Any]:
    """Every overload of ATen that is recorded by its signature."""
    found = []
    for name in _torch.ops_in("aten"):
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is None or not can_be_drawn(op):
            continue
        if spec_of(op).mode in (Mode.RECORD, Mode.VIEW, Mode.RANDOM) and recording_of_op(op):
            found.append(op)
    return found


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The native recorder, if the run has one."""
    monkeypatch.setattr(torpor.config, "dynamic", "off")
    if torpor.config.native == "on":
        NATIVE_RECORDER.look()
    yield NATIVE_RECORDER.library
    forget_everything()
    if NATIVE_RECORDER.library is not None:
        NATIVE_RECORDER.library.switch(True)


@pytest.fixture
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be recorded is an error, and whether memory may overlap is known by decree."""

    def refuse(func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        raise error

    def judge(spec: Any, args: tuple[Any, ...]) -> None:
        if Judge.refuses:
            raise Overlaps

    monkeypatch.setattr(dispatch, "_failed", refuse)
    monkeypatch.setattr(overlap, "check_overlap", judge)


class Overlaps(Exception):
    """Memory is written to that is read."""


class Judge:
    refuses = False


def compare(bench: Bench, call: Call, turn: int) -> Outcome:
    """Make a call in every way, in an order that `turn` tells; what it came to."""
    paths = [(bench.by_record, False), (bench.by_op, False)]
    if bench.library is not None:
        paths.append((bench.by_op, True))
    if call.from_the_top or not bench.is_usual():
        paths = paths[1:]
    turn %= len(paths)
    found = [bench.attempt(call, way, native) for way, native in paths[turn:] + paths[:turn]]
    outcomes = found[len(paths) - turn :] + found[: len(paths) - turn]
    for one, other in itertools.pairwise(outcomes):
        if not one.error or one.recovers == other.recovers:
            _assert_same(one, other, call)
    if bench.is_native:
        _assert_met_again(bench, call, outcomes)
    return outcomes[0]


def _assert_refused_again(bench: Bench, call: Call, truth: Outcome) -> None:
    """What is refused for where its memory is, is refused also if its key was met elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        for check in ("check_kept", "check_written"):
            patch.setattr(recorder, check, lambda signature, bound: None)
        bench.attempt(call, bench.by_record)
    for way, native in ((bench.by_record, False), (bench.by_op, True)):
        again = bench.attempt(call, way, native)
        assert again.error is truth.error, f"recorded, although it is refused: {call}"
        assert not again.changed, call


def _assert_met_again(bench: Bench, call: Call, before: list[Outcome]) -> None:
    """What Python has recorded, the native recorder finds, but for what is Python's."""
    again = bench.attempt(call, bench.by_op, True)
    _assert_same(before[-1], again, call)
    if not call.from_the_top and bench.must_hit(before[0]):
        assert again.counts == (1, 0), f"handed over: {call}"


def _assert_same(truth: Outcome, other: Outcome, call: Call) -> None:
    assert other.error == truth.error, call
    assert other.changed == truth.changed, call
    if truth.error:  # what was read for nothing may have entered the trace
        assert other.said.partition("\n")[0] == truth.said.partition("\n")[0], call
        assert truth.recovers or not truth.changed, call
        return
    if truth.keys and other.keys:
        assert _same_key(tuple(truth.keys), tuple(other.keys)), call
    assert other.form == truth.form, call
    assert other.facts == truth.facts, call
    if call.from_the_top:
        assert other.noted == truth.noted, call


def _same_key(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_key, one, other))
    if type(one) is Value and type(other) is Value:
        return one is other or (one.node.op is LEAF and one.type is other.type)
    return type(one) is type(other) and (one is other or bool(one == other))


@functools.cache
def public_overloads() -> list[Any]:
    """Those whose kernels look at what they are given before they use it."""
    return [op for op in overloads() if _is_public(op)]


def _is_public(op: Any) -> bool:
    signature, name = recording_of_op(op).signature, op._opname
    if any(w.is_list and w.is_out for w in signature.written):
        return False  # torch writes to items that are not there
    is_method = torch.Tag.core in op.tags and hasattr(torch.Tensor, name)
    checks = is_method or torch.Tag.pointwise in op.tags or name.startswith("_foreach_")
    return checks or signature.spec.mode is Mode.VIEW or bool(signature.extra)


@functools.cache
def _bench(op: Any, library: Any) -> Bench:
    return Bench(recording_of_op(op), library, invents=False)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Call, int]:
    """A call, and which way it is made first."""
    op = draw(st.sampled_from(public_overloads()))
    source = Source(lambda number: draw(st.integers(0, number - 1)))
    recording = recording_of_op(op)
    return Author(source, recording.signature, invents=False).call(), source.below(4)


@settings(
    max_examples=CALLS * 100 or 500,
    derandomize=not CALLS,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(drawn=calls())
def test_a_call_as_the_user_makes_it_is_recorded_alike(library: Any, drawn: Any) -> None:
    """Nodes are real ones, and what cannot be recorded runs; autograd comes first, or not."""
    call, turn = drawn
    compare(_bench(call.op, library), call, turn)


@pytest.mark.parametrize("part", range(PARTS))
def test_calls_of_every_overload_are_recorded_alike(
    part: int, library: Any, nothing_is_run: None
) -> None:
    """Nodes have results of any type, so that arguments need not make sense to the op."""
    found = natively = 0
    for op in overloads()[part::PARTS]:
        bench = Bench(recording_of_op(op), library, invents=True)
        for number in range(CALLS or 2):
            draw = random.Random(f"{op} {number} {CALLS}")
            call = Author(Source(draw.randrange), bench.signature, invents=True).call()
            bench.nodes.clear()
            Judge.refuses = draw.random() < 0.5
            truth = compare(bench, call, draw.randrange(4))
            if truth.error is not None:
                _assert_refused_again(bench, call, truth)
            found += 1
            natively += bench.must_hit(truth)
    assert found > 400, "most overloads of ATen are recorded by their signatures"
    assert library is None or natively > found // 3


def test_the_native_recorder_is_one_of_the_ways(library: Any) -> None:
    if library is None:
        pytest.skip("Python records alone: TORPOR_NATIVE=on, and a C++ compiler, bring the rest")
    x = torch.ones(2, device="lazy")
    x + x  # met before
    before = library.counts()[0]
    x + x
    assert library.counts()[0] == before + 1


# -- what calls were found by ----------------------------------------------------------------------


def test_a_device_may_be_a_positional_argument() -> None:
    spec = spec_of(torch.ops.aten.to.device)
    keys: list[Any] = []
    code = make_recorder(spec, nodes={}, make=lambda key, raw: keys.append(key), calls=[0])
    x = torch.ones(2).to("lazy")
    with contextlib.suppress(AttributeError):  # there is no node
        code(x, torch.device("lazy"), torch.float64)
    assert keys[0][1] == x.device


def test_an_alias_of_a_view_looks_as_the_view_does() -> None:
    x = torch.ones(2, 3).to("lazy").t()
    alias = make_recorder(spec_of(torch.ops.aten.detach.default))(x)
    assert alias._lazy_view is x._lazy_view
    assert alias._lazy_storage is x._lazy_storage
