"""Every generated recorder builds the key that the generic walk over its arguments builds.

All samples of `op_db` run as they do in the sweep. Before an op is recorded, its generated recorder
and `generic_key` are asked for its key; equal keys of one op are one node.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.ops.sweep import check_entry, entries
from torpor import _torch
from torpor.execute.storage import TRACE
from torpor.ir.node import LEAF, Value
from torpor.ops.recorders import FAMILIES, PACKAGE, kept_arguments
from torpor.ops.spec import Mode, OpSpec, spec_of
from torpor.trace import dispatch
from torpor.trace.recorder import generic_key, make_recorder
from torpor.trace.tensor import LazyTensor

SLICE = 23
"""One entry of so many is looked at in every run; all of them in the slow one."""


class Asked(Exception):
    """A recorder has built its key and asks the table."""


class _Table:
    """Stands for an op's part of the intern table, and lets nobody pass."""

    def get(self, key: tuple[Any, ...]) -> Any:
        raise Asked(key)


class Comparison:
    """Asks both ways for the key of every op that is about to be recorded."""

    def __init__(self) -> None:
        self.recorders: dict[Any, Callable[..., Any]] = {}
        self.compared: Counter[str] = Counter()
        self.differences: list[str] = []

    def look(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        spec = spec_of(op)
        if spec.mode not in (Mode.RECORD, Mode.VIEW) or spec.name in dispatch.SPECIAL:
            return
        if op not in self.recorders:
            self.recorders[op] = recorder = make_recorder(spec, nodes=_Table())
            generated_for = spec.target.namespace == "aten" and not _torch.is_composite(op)
            assert ("_generated" in recorder.__code__.co_filename) >= generated_for
        misses = TRACE.misses
        generated = _outcome(lambda: self.recorders[op](*args, **kwargs))
        generic = _outcome(lambda: _generic(spec, args, kwargs))
        TRACE.misses = misses
        self.compared[spec.name] += 1
        if not _same(generated, generic):
            self.differences.append(f"{spec.name}: {generated} and {generic}")


def _generic(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with TRACE.lock:
        raise Asked(generic_key(spec, spec.bind(args, kwargs), kept_arguments(spec)))


def _outcome(ask: Callable[[], object]) -> tuple[Any, ...]:
    """The key, or the kind of the exception that stands in its place."""
    try:
        ask()
    except Asked as asked:
        return asked.args
    except Exception as error:
        return (type(error).__name__,)
    raise AssertionError("the recorder did not ask the table")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is Value and type(other) is Value:
        copied = one.node.op is LEAF and other.node.op is LEAF  # a plain tensor: copied each time
        return one is other or (copied and one.type is other.type)
    return type(one) is type(other) and (one is other or bool(one == other))


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    for family in FAMILIES:
        importlib.import_module(f"{PACKAGE}.{family}")
    found = Comparison()

    def watch(cls: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found.look(op, args, kwargs or {})
        return dispatch.dispatch(cls, op, types, args, kwargs)

    monkeypatch.setattr(LazyTensor, "__torch_dispatch__", classmethod(watch))
    return found


@pytest.mark.parametrize("entry", list(entries())[::SLICE])
def test_generated_and_generic_keys_are_equal(entry: str, comparison: Comparison) -> None:
    result = check_entry(entries()[entry], "lazy")
    assert comparison.differences == []
    assert result.failures == []  # asking changed nothing


@pytest.mark.slow
def test_generated_and_generic_keys_are_equal_for_all_of_op_db(comparison: Comparison) -> None:
    for entry in entries().values():
        check_entry(entry, "lazy")
    assert comparison.differences == []
    assert len(comparison.compared) > 700
