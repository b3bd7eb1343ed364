"""Every specialised recorder builds the key that `record` builds.

All samples of `op_db` run as they do in the sweep. Before an op is recorded, both are asked for its
key; equal keys of one op are one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.ops.sweep import check_entry, entries
from torpor.execute.storage import TRACE
from torpor.ir.node import LEAF, Value
from torpor.ops.spec import Mode, spec_of
from torpor.specialize.recorders import specialised
from torpor.trace import dispatch
from torpor.trace.recorder import Recording, record, recording_of
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
        self.recorders: dict[Any, tuple[Recording, Callable[..., Any]]] = {}
        self.compared: Counter[str] = Counter()
        self.differences: list[str] = []

    def look(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        spec = spec_of(op)
        if spec.mode not in (Mode.RECORD, Mode.VIEW) or spec.name in dispatch.SPECIAL:
            return
        if op not in self.recorders:
            recording = recording_of(spec, nodes=_Table())  # type: ignore[arg-type]  # as far as it is used
            self.recorders[op] = recording, specialised(spec, nodes=_Table())
        recording, recorder = self.recorders[op]
        misses = TRACE.misses
        special = _outcome(lambda: recorder(*args, **kwargs))
        generic = _outcome(lambda: record(recording, args, kwargs))
        TRACE.misses = misses
        self.compared[spec.name] += 1
        if not _same(special, generic):
            self.differences.append(f"{spec.name}: {special} and {generic}")


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
    found = Comparison()

    def watch(cls: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found.look(op, args, kwargs or {})
        return dispatch.dispatch(cls, op, types, args, kwargs)

    monkeypatch.setattr(LazyTensor, "__torch_dispatch__", classmethod(watch))
    return found


@pytest.mark.parametrize("entry", list(entries())[::SLICE])
def test_specialised_and_generic_keys_are_equal(entry: str, comparison: Comparison) -> None:
    result = check_entry(entries()[entry], "lazy")
    assert comparison.differences == []
    assert result.failures == []  # asking changed nothing


@pytest.mark.slow
def test_specialised_and_generic_keys_are_equal_for_all_of_op_db(comparison: Comparison) -> None:
    for entry in entries().values():
        check_entry(entry, "lazy")
    assert comparison.differences == []
    assert len(comparison.compared) > 700
