"""One call, recorded in every way there is: by `record`, and by the op itself through Python and
through the native recorder."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.property.drawn_calls import (
    CPU,
    LAZY,
    OMITTED,
    Call,
    Facts,
    Look,
    Looks,
    World,
    autograd_facts,
    mode,
)
from torpor import _torch
from torpor.execute.storage import TRACE
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.native.attach import tell
from torpor.ops.signature import Make, Signature
from torpor.ops.spec import spec_of
from torpor.trace import dispatch
from torpor.trace.recorder import Recording, make_recorder, numbered, record, recording_of
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import value_of


class Noting:
    """An op's part of the intern table, which notes the keys that it is asked for."""

    def __init__(self, nodes: dict[Any, Any]) -> None:
        self.nodes = nodes
        self.keys: list[Any] = []

    def get(self, key: Any) -> Any:
        self.keys.append(key)
        return self.nodes.get(key)


@dataclass
class Outcome:
    """What a call came to."""

    error: type[Exception] | None
    said: str
    keys: list[Any]
    form: str  # of the result: a tuple, a list, a tensor
    facts: Any  # of arguments and results
    noted: Any  # by autograd
    changed: bool  # something is not as it was before the call
    counts: tuple[int, int]  # recorded natively, and handed to Python
    arguments_are_pythons: bool  # one of them is not the native recorder's to look at
    targets: list[Any]  # types of tensors that are written to
    recovers: bool  # what cannot be recorded was run, or refused in eager's words


def recording_of_op(op: Any) -> Recording | None:
    """How calls of an op are recorded; None if that is not by its signature."""
    recorder = dispatch.recorder_of(op)
    recording: Recording | None = getattr(dispatch.USUAL.get(recorder, recorder), "recording", None)
    return recording if recording and recording.signature.spec is spec_of(op) else None


def _nothing() -> None:
    """In the place of a cut: what is recorded here is not to be run."""


class Bench:
    """Where calls of one op are recorded, one way after the other."""

    def __init__(self, recording: Recording, library: Any, invents: bool) -> None:
        self.usual, self.library, self.invents = recording, library, invents
        self.signature: Signature = recording.signature
        self.spec = self.signature.spec
        self.op = self.spec.target
        self.nodes: dict[Any, Any] = {} if invents else recording.nodes
        self.numbers: tuple[int, ...] = ()
        self.noting = Noting(self.nodes)
        options = self._options()
        self.recording = recording_of(self.spec, nodes=self.noting, **options)
        self.ours = make_recorder(self.spec, nodes=self.nodes, **options)
        self.theirs = vars(self.op)["_torpor_record"]
        self.is_native = bool(library) and self._tell(self.theirs)

    def _options(self) -> dict[str, Any]:
        lengths = [r.argument for r in self.signature.results if r.make is Make.LENGTH]
        return {
            "extra": self.signature.extra, "lengths": lengths, "calls": [0], "cut": _nothing,
            "may_leave": self.usual.numbered is not numbered,
            "make": self._make if self.invents else self.usual.make,
        }  # fmt: skip

    # -- invented nodes: results of any type, for arguments of which the op makes no sense --

    def _make(self, key: Any, raw: tuple[Any, ...]) -> Node:
        found = self.nodes.get(key)
        if found is None:
            types = tuple(self._types(raw))
            found = self.nodes[key] = Node(self.spec.kind, key, (), types)
        return found

    def _types(self, raw: tuple[Any, ...]) -> Iterator[TensorType | None]:
        numbers = itertools.cycle(self.numbers)
        several = len(self.signature.results) > 1
        for result in self.signature.results:
            if result.make < Make.ARGUMENT:
                for _ in range(next(numbers) % 4 if result.is_list else 1):
                    may_lack = several and result.make is Make.FRESH and not result.is_list
                    yield _invented(next(numbers), may_lack, result.make is not Make.FRESH)
        for written in self.signature.written:
            tensors = raw[written.argument] if written.is_list else [raw[written.argument]]
            for tensor in tensors:
                if tensor is not None:
                    type_ = value_of(tensor).type
                    resized = written.is_out and next(numbers) % 5 == 0
                    yield _resized(type_) if resized else type_

    # -- ways --

    def by_record(self, world: World) -> Any:
        return record(self.recording, *world.arguments())

    def by_op(self, world: World) -> Any:
        for place, kind in enumerate(self.signature.kinds):
            if kind == "t" and isinstance(world.bound[place], (int, float, complex)):
                world.bound[place] = _torch.wrapped_number(world.bound[place])
        positional, keywords = world.arguments()
        return self.op(*positional, **keywords)

    def attempt(self, call: Call, way: Callable[[World], Any], native: bool = False) -> Outcome:
        """Make a call in one way, from a trace that is empty."""
        self._switch(False)
        forget_everything()
        self.numbers = call.invented
        world = World(call)
        before = world.state()
        self.noting.keys = keys = []
        error, said, result = None, "", None
        pythons = is_pythons(self.signature, world)
        targets = types_written(self.signature, world)
        with self._installed(native), mode(call.mode), _level(call):
            counts = self._counts()
            try:
                result = way(world)
            except Exception as raised:
                error, said = type(raised), str(raised)
            counts = tuple(b - a for a, b in zip(counts, self._counts(), strict=True))
            changed = before != world.state()
            read = [] if error else _read(world)
        self._switch(False)
        facts = Facts()
        made = facts.of([world.tensors(), _torch.tree_leaves(result), read])
        noted = autograd_facts([world.tensors(), result]) if call.from_the_top else None
        return Outcome(
            error, said, keys, facts_of_form(result), made, noted, changed, counts,
            pythons, targets, way == self.by_op and not self.invents,
        )  # fmt: skip

    def is_usual(self) -> bool:
        """`record` is all there is to a call; else a recorder written by hand is before it."""
        return self.invents or not (self.signature.assigns or self.signature.is_window)

    def must_hit(self, truth: Outcome) -> bool:
        """The native recorder has to record a call that came to `truth`."""
        known = self.library is not None and self.is_native and not truth.error
        if not known or truth.arguments_are_pythons or not self.is_usual():
            return False
        if not truth.keys:  # a copy between equal types: no node is looked for
            return True
        if truth.keys[-1] not in self.nodes:  # a number in it is an input of the graph
            return False
        outputs = [v for v in self.nodes[truth.keys[-1]].outputs if type(v) is Value]
        types = [value.type for value in outputs[len(outputs) - len(truth.targets) :]]
        views = any(r.make in (Make.VIEW, Make.ALIAS) for r in self.signature.results)
        with_bits = views and any(value.type.conj or value.type.neg for value in outputs)
        return not with_bits and all(map(operator.is_, types, truth.targets))

    def _counts(self) -> tuple[int, int]:
        counts: tuple[int, int] = self.library.counts() if self.library else (0, 0)
        return counts

    def _switch(self, on: bool) -> None:
        if self.library:
            self.library.switch(on)

    @contextmanager
    def _installed(self, native: bool) -> Iterator[None]:
        """Let the op be recorded here."""
        if self.invents:
            self._tell(self.ours)
        self._switch(native)
        try:
            yield
        finally:
            if self.invents:
                self._tell(self.theirs)

    def _tell(self, recorder: Any) -> bool:
        """Let `recorder` be the op's; whether the native recorder stands in front of it."""
        _torch.set_op_attribute(self.op, "_torpor_record", recorder)
        known = self.library is not None and not self.spec.may_fail
        return known and tell(self.library, self.spec, recorder)


def _read(world: World) -> list[Any]:
    """What every lazy tensor holds after a call: views of what was written are looked at anew."""
    found: list[Any] = []
    with _torch.kernels():
        for tensor in world.tensors():
            if type(tensor) is LazyTensor:
                try:
                    found.append(torch.ops.aten.clone.default(tensor))
                except Exception as error:  # of a view of what is not what it was
                    found.append(str(type(error)))
    return found


@contextmanager
def _level(call: Call) -> Iterator[None]:
    """Where torch hands ops to us, or where the user calls them."""
    if call.from_the_top:
        yield
        return
    with _torch.kernels(), torch.set_grad_enabled(call.mode == "grad"):
        yield


def facts_of_form(result: Any) -> str:
    """What a result is made of, but for whether several are a list or a tuple."""
    if isinstance(result, (list, tuple)):
        return f"({', '.join(map(facts_of_form, result))})"
    return type(result).__name__


_SHAPES = ((2, 3), (), (4,), (0, 2), (3, 1, 2))
_KINDS = (torch.float32, torch.int64, torch.bool, torch.complex64)


def _invented(number: int, may_lack: bool, is_view: bool) -> TensorType | None:
    """The type of a result, told by a number below 100."""
    if may_lack and number % 7 == 0:
        return None
    device = (LAZY, CPU)[number % 2]
    shape, dtype = _SHAPES[number % 5], _KINDS[number // 5 % 4]
    if number % 3:
        return TensorType.contiguous(shape, dtype, device)
    stride = tuple(range(1, len(shape) + 1))
    conj = is_view and dtype.is_complex
    return TensorType.of(shape, stride, dtype, device, number % 4, conj, False)


def _resized(type_: TensorType) -> TensorType:
    """A type of fewer elements: memory that has to grow is looked for all over the program."""
    return TensorType.contiguous((type_.numel // 2,), type_.dtype, type_.device)


def forget_everything() -> None:
    """Begin a trace. Nobody holds anything of the last one, and nothing of it is run."""
    with TRACE.lock:
        TRACE.reset()


# -- what the native recorder leaves to Python -----------------------------------------------------


def is_pythons(signature: Signature, world: World) -> bool:
    """Something about the arguments is not the native recorder's to record."""
    lazy = [(i, t) for i, t in _operands(world) if type(t) is LazyTensor]
    return (
        not lazy
        or any(map(_is_odd, world.call.op._schema.arguments, world.bound))
        or any(type(t) is not LazyTensor for _, t in _operands(world))
        or _is_no_view_of_all(signature, world)
        or _names_other_device(signature, world)
        or any(not isinstance(world.bound[i], torch.Tensor) for i in signature.extra.requires_grad)
        or _writes_where_it_may_not(signature, world, lazy)
    )


def _operands(world: World) -> list[tuple[int, torch.Tensor]]:
    found = []
    for place, (recipe, bound) in enumerate(zip(world.call.arguments, world.bound, strict=True)):
        if isinstance(recipe, Look):
            found.append((place, bound))
        elif isinstance(recipe, Looks):
            found += [(place, item) for item in bound if item is not None]
    return found


def _is_odd(argument: Any, bound: Any) -> bool:
    """An argument that is never part of a native key."""
    text = str(argument.real_type)
    items = bound if isinstance(bound, (list, tuple)) else [bound]
    return any(isinstance(item, (complex, torch.Generator)) for item in items) or (
        text == "List[Optional[Tensor]]" and bound is not OMITTED
    )


def types_written(signature: Signature, world: World) -> list[Any]:
    """The types of what is written to: a view, or all that is in a storage."""
    written = {w.argument for w in signature.written}
    tensors = [t for i, t in _operands(world) if i in written and type(t) is LazyTensor]
    return [_type_held(tensor) for tensor in tensors]


def _type_held(tensor: LazyTensor) -> TensorType:
    storage, view = tensor._lazy_storage, tensor._lazy_view
    if view is not None:
        return view.type
    return storage.type if storage.value is None else storage.value.type


def _is_no_view_of_all(signature: Signature, world: World) -> bool:
    """It is a window onto the memory of a part of it, or of an unknown place."""
    if not signature.is_window:
        return False
    offset = world.bound[3]
    return type(offset) is not int or world.bound[0]._lazy_view is not None


def _names_other_device(signature: Signature, world: World) -> bool:
    named = world.bound[signature.device] if signature.device >= 0 else None
    if not isinstance(named, torch.device):
        return False
    first = world.bound[0]
    return not isinstance(first, torch.Tensor) or first.device != named


def _writes_where_it_may_not(
    signature: Signature, world: World, lazy: list[tuple[int, LazyTensor]]
) -> bool:
    """It writes to memory that stands twice among the arguments."""
    written = {w.argument: w for w in signature.written}
    targets = [(i, t) for i, t in lazy if i in written]
    for place, target in targets:
        storage = target._lazy_storage
        sharing = [(i, t) for i, t in lazy if t._lazy_storage is storage]
        if len(sharing) == 1:
            continue
        itself = all(t is target and signature.kinds[i] == "t" for i, t in sharing)
        if len(targets) > 1 or not itself or not written[place].may_repeat:
            return True
    return False
