"""Steps of torch's optimizers, recorded once: `config.capture`.

A step is a function of the tensors it reads and of a few numbers: rates, corrections of bias. The
values of the tensors are a key, as those of a region are, and under it stand the values that it
writes. The numbers come from the optimizer's own code: it makes the same step on stand-ins, plain
tensors of one element, one for all parameters that have made as many steps. Which functions it
calls then, and with which numbers, is compared with what the recorded step did: numbers that were
promoted (`symbols/scalars.py`) enter as run-time inputs, and all others must be the same. Whatever
is different is recorded op by op, as all steps are without this.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from torpor import _torch, config, metrics
from torpor.backend.native_library import NATIVE
from torpor.backend.registry import get_backend
from torpor.capture.modules import REFUSALS
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.node import LEAF, SCALAR, SIZE, TABLE, Node, Value
from torpor.ir.types import SymbolicType
from torpor.observe.site import site
from torpor.ops.keys import number_key
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import root_value, value_of

KINDS: Final = frozenset({
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.SGD, torch.optim.ASGD,
})  # fmt: skip
"""Optimizers that do the same to all parameters of a group, whatever their sizes."""

MOST_STEPS: Final = 8
"""Different steps of one optimizer that are remembered, and how often each is recorded again."""

MOST_STANDINS: Final = 8
"""Different numbers of steps among the parameters of one group."""

MOST_AHEAD: Final = 32
"""Steps whose numbers are told at once."""

WORTH: Final = 0.5
"""Seconds that an optimizer's steps take to record before they are found by a look-up."""

_FLAGS = (bool, type(None), str)
_SETTINGS = frozenset({float, int, *_FLAGS})


class NotRepeatable(Exception):
    """A step that has to be recorded op by op."""


class _Read(NamedTuple):
    """All that a step reads."""

    tensors: list[LazyTensor]  # parameters and what is kept for them
    gradients: list[LazyTensor]
    counters: list[list[torch.Tensor]]  # of steps, on the CPU; of each group
    structure: tuple[Any, ...]
    counts: list[list[float]]  # steps that the parameters of each group have made, each number once
    values: tuple[Value, ...]  # of tensors, then of gradients
    storages: list[LazyStorage] | None  # of tensors; None: the native library has not read them


class _StepCalls(NamedTuple):
    """The functions that a step calls, as `ForeachCalls` has noted them."""

    calls: list[Any]
    numbers: list[Any]


class _Ahead(NamedTuple):
    """The calls of a step and of those that follow, of one run on stand-ins."""

    settings: Any
    counts: list[list[float]]  # for the first of them
    steps: list[_StepCalls]

    def place(self, settings: Any, counts: list[list[float]]) -> int | None:
        """Which step of them this is; `len(steps)` if it is the one after them."""
        if settings != self.settings:
            return None
        if counts == self.counts:
            return 0
        if any(len(own) > 1 for own in (*counts, *self.counts)):
            return None
        made = {now[0] - first[0] for now, first in zip(counts, self.counts, strict=True) if now}
        place = made.pop()
        return int(place) if not made and place in range(len(self.steps) + 1) else None


class _Step(NamedTuple):
    """What a step has done."""

    calls: list[Any]
    numbers: list[Any]  # keys of those that are the same in each such step; None: it is an input
    inputs: list[list[int]]  # for each run-time input, which of the numbers it stands for
    written: list[tuple[int, Value]]
    versions: list[list[int]]  # which tensors get a new version, again and again


class _Optimizer:
    """What is known of one optimizer."""

    def __init__(self) -> None:
        self.steps: OrderedDict[Any, _Step | None] = OrderedDict()  # None: met once
        self.recorded: dict[Any, int] = {}
        self.generation = TABLE.generation
        self.standins: dict[Any, Any] = {}
        self.ahead = _Ahead(None, [], [])
        self.looks_ahead = True
        self.misses = 0  # since a step was repeated
        self.seconds = 0.0  # of steps that were recorded op by op
        self.reasons: set[str] = set()

    def is_due(self) -> bool:
        """Whether steps are looked up; if they are not met again, only now and then."""
        if config.capture == "auto" and self.seconds < WORTH:
            return False
        self.misses += 1
        return self.misses < REFUSALS or self.misses % REFUSALS < 4

    def find(self, key: Any) -> _Step | None:
        if self.generation != TABLE.generation:
            self.steps.clear()
            self.recorded.clear()
            self.generation = TABLE.generation
        return self.steps.get(key)

    def keep(self, key: Any, step: _Step | None) -> None:
        self.steps[key] = step
        while len(self.steps) > MOST_STEPS:
            self.recorded.pop(self.steps.popitem(last=False)[0], None)

    def refuse(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.add(reason)
            metrics.count_line("NotCaptured", f"{site()}: optimizer.step(): {reason}")


_known: WeakKeyDictionary[Any, _Optimizer] = WeakKeyDictionary()


def take_up(optimizer: torch.optim.Optimizer) -> None:
    """From the next one on, steps of optimizers like this one go through here."""
    if config.capture != "off" and type(optimizer) in KINDS:
        _torch.replace_step(type(optimizer), _step)


def _step(step: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if config.capture == "off" or type(optimizer) not in KINDS or not _is_lazy(optimizer):
        return step(optimizer, *args, **kwargs)
    known = _known.get(optimizer)
    if known is None:
        known = _known[optimizer] = _Optimizer()
    start = time.perf_counter()
    try:
        if known.is_due() and _take(known, step, optimizer, [*args, *kwargs.values()]):
            return None
    except NotRepeatable as refused:
        known.refuse(str(refused))
    result = step(optimizer, *args, **kwargs)
    known.seconds += time.perf_counter() - start
    return result


def _is_lazy(optimizer: Any) -> bool:
    """As far as one look tells."""
    first = next((group["params"][0] for group in optimizer.param_groups if group["params"]), None)
    return type(first) is LazyTensor and TRACE.is_open()


def _take(
    known: _Optimizer, step: Callable[..., Any], optimizer: Any, arguments: list[Any]
) -> bool:
    """Repeat a step that was met before, or record one that was met; False: nothing is done."""
    if any(arguments):
        raise NotRepeatable("it has a closure")
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise NotRepeatable("it scales gradients itself")
    if _torch.modes() or _torch.has_function_modes():
        raise NotRepeatable("a mode is active")
    with TRACE.lock:
        read = _read(optimizer)
        epoch, slots = TRACE.epoch, len(TRACE.scalars)
        key = (*read.values, read.structure, _ages(read), slots, get_backend())
        found = known.find(key)
        if found is None and key not in known.steps:
            known.keep(key, None)
            return False
    calls = _calls(known, step, optimizer, read)
    inputs = None if found is None else _inputs(found, calls)
    if found is not None and inputs is not None:
        known.misses = 0
        return _repeat(found, read, inputs, epoch, slots)
    if known.recorded.get(key, 0) >= MOST_STEPS:
        return False
    known.recorded[key] = known.recorded.get(key, 0) + 1
    _record(known, key, epoch, slots, step, optimizer, read, calls)
    return True


# -- what a step reads -----------------------------------------------------------------------------


def _read(optimizer: Any) -> _Read:
    """Under the trace's lock."""
    groups = optimizer.param_groups
    for group in groups:
        _check_settings(group, optimizer.defaults)
    found = None
    if NATIVE.library is not None:
        found = NATIVE.library.read_step(groups, optimizer.state)
    if found is None:
        found = _read_groups(optimizer)
    tensors, gradients, counters, shapes, counts, values, storages = found
    flags = [tuple([one for one in group.values() if type(one) in _FLAGS]) for group in groups]
    structure = tuple([(own, *shape) for own, shape in zip(flags, shapes, strict=True)])
    return _Read(tensors, gradients, counters, structure, counts, values, storages)


def _ages(read: _Read) -> tuple[Any, ...]:
    """Which of the numbers of steps each parameter has made, in groups where these differ."""
    pairs = zip(read.counts, read.counters, strict=True)
    return tuple([
        tuple([own.index(counter.item()) for counter in counters]) if len(own) > 1 else None
        for own, counters in pairs
    ])  # fmt: skip


def _check_settings(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    if group.get("foreach") is False:
        raise NotRepeatable("foreach=False")
    for name in ("fused", "capturable", "differentiable"):
        if group.get(name):
            raise NotRepeatable(f"{name}=True")
    if any(isinstance(value, torch.Tensor) for value in group.values()):
        raise NotRepeatable("a rate is a tensor")
    for name in defaults:
        value: Any = group.get(name)
        for one in value if type(value) in (list, tuple) else (value,):
            if type(one) not in _SETTINGS and not isinstance(one, float):
                raise NotRepeatable(f"{name} is a {type(one).__name__}")


def _read_groups(optimizer: Any) -> tuple[Any, ...]:
    """What the native library's `read_step` gives, or the reason why there is no such thing."""
    tensors: list[Any] = []
    gradients: list[Any] = []
    counters: list[list[torch.Tensor]] = []
    shapes: list[Any] = []
    for group in optimizer.param_groups:
        counters.append([])
        first, before = len(tensors), len(gradients)
        keys = _read_group(group["params"], optimizer.state, tensors, gradients, counters[-1])
        dtypes = {tensor.dtype for tensor in (*tensors[first:], *gradients[before:])}
        if len(dtypes) > 1:
            raise NotRepeatable("parameters, gradients and state are of several types")
        shapes.append((len(gradients) - before, keys, *dtypes))
    _check(tensors, gradients)
    counts = [list(dict.fromkeys([one.item() for one in of_group])) for of_group in counters]
    values = tuple([value_of(tensor) for tensor in (*tensors, *gradients)])
    return tensors, gradients, counters, shapes, counts, values, None


def _check(tensors: list[Any], gradients: list[Any]) -> None:
    """What is written is all of its memory, and nothing else that is read is on that."""
    if any(type(one) is not LazyTensor for one in (*tensors, *gradients)):
        raise NotRepeatable("a parameter, gradient or state is not lazy")
    storages = {tensor._lazy_storage for tensor in tensors}
    if len(storages) < len(tensors) or any(one._lazy_view is not None for one in tensors):
        raise NotRepeatable("parameters or state share memory")
    if any(gradient._lazy_storage in storages for gradient in gradients):
        raise NotRepeatable("a gradient shares memory with what is updated")


def _read_group(
    params: list[Any],
    state: Any,
    tensors: list[Any],
    gradients: list[Any],
    counters: list[torch.Tensor],
) -> Any:
    """Collect tensors, gradients, and tensors that count steps; what is kept for each parameter."""
    keys: Any = None
    for param in params:
        gradient = param.grad
        if gradient is None:
            continue
        kept = state.get(param) or {}
        names = tuple([name for name, one in kept.items() if one is not None])
        if keys is not None and names != keys:
            raise NotRepeatable("not all parameters have the same state")
        keys = names
        tensors.append(param)
        gradients.append(gradient)
        for name in names:
            if name == "step" and type(kept[name]) is torch.Tensor:
                counters.append(kept[name])
            else:
                tensors.append(kept[name])
    return keys


# -- the numbers of a step -------------------------------------------------------------------------


def _calls(known: _Optimizer, step: Callable[..., Any], optimizer: Any, read: _Read) -> _StepCalls:
    """The calls and numbers of a step of `optimizer`, which itself makes none.

    Stand-ins that have made one step more each tell those of several steps at once: what such a
    run takes, coming steps do not take again.
    """
    if any(len(own) > MOST_STANDINS for own in read.counts):
        raise NotRepeatable("too many parameters have started at different steps")
    groups = optimizer.param_groups
    settings = read.structure, tuple([tuple(map(_exactly, group.items())) for group in groups])
    ahead = known.ahead
    place = ahead.place(settings, read.counts)
    if place is not None and place < len(ahead.steps):
        return ahead.steps[place]
    now = _on_standins(known, step, optimizer, read, read.counts)
    steps = [now]
    if place is not None and known.looks_ahead:
        number = min(2 * len(ahead.steps), MOST_AHEAD)
        counts = [[own[0] + i for i in range(number) if own] for own in read.counts]
        coming = _on_standins(known, step, optimizer, read, counts)
        steps = _one_by_one(coming, number)
        if steps[:1] != [now]:
            known.looks_ahead, steps = False, [now]
    known.ahead = _Ahead(settings, read.counts, steps)
    return now


def _exactly(item: tuple[str, Any]) -> Any:
    """A setting of a group, which equals no other one."""
    name, value = item
    if name == "params":
        return name
    if type(value) in (list, tuple):
        return name, tuple([_exactly((name, one)) for one in value])
    if isinstance(value, float):
        value = float(value)  # NumPy's are floats too
    return name, number_key(value) if type(value) in _SETTINGS else object()


def _one_by_one(coming: _StepCalls, number: int) -> list[_StepCalls]:
    """The calls of each of several steps, of a run on a stand-in for each; none: it cannot say."""
    counts = [count for _, *counts in coming.calls for count in counts if count is not None]
    if any(count not in (0, number) for count in counts):
        return []
    alike = [(name, *[count and 1 for count in counts]) for name, *counts in coming.calls]
    steps: list[_StepCalls] = [_StepCalls(alike, []) for _ in range(number)]
    place = 0
    for count in counts:
        for i, one in enumerate(steps):
            one.numbers.append(coming.numbers[place + (i if count else 0)])
        place += count or 1
    return steps


def _on_standins(
    known: _Optimizer, step: Callable[..., Any], optimizer: Any, read: _Read, counts: Any
) -> _StepCalls:
    """What a step of `optimizer` calls where parameters have made so many steps."""
    kind = read.structure, tuple(map(len, counts))
    if kind not in known.standins:
        if len(known.standins) >= MOST_STANDINS:
            known.standins.clear()
        known.standins[kind] = _standin(optimizer, read, counts)
    standin = known.standins[kind]
    for group, own, of_group in zip(
        optimizer.param_groups, standin.param_groups, counts, strict=True
    ):
        own.update({name: value for name, value in group.items() if name != "params"})
        own["foreach"] = True
        for param, count in zip(own["params"], of_group, strict=False):
            standin.state[param]["step"].fill_(count)
    noted = _torch.ForeachCalls()
    with noted:
        step(standin)
    return _StepCalls(noted.calls, noted.numbers)


def _standin(optimizer: Any, read: _Read, counts: Any) -> Any:
    """An optimizer like this one, of tensors of one element."""
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.param_groups, made.state = [], defaultdict(dict)
    for group, (_, size, keys, *dtypes), of_group in zip(
        optimizer.param_groups, read.structure, counts, strict=True
    ):
        params = [_one(*dtypes) for _ in range(len(of_group) or bool(size))]
        for param in params:
            param.grad = _one(*dtypes)
            made.state[param] = {name: _one(*dtypes) for name in keys}
            if "step" in keys:
                made.state[param]["step"] = _one(torch.get_default_dtype())
        made.param_groups.append({**group, "params": params})
    return made


def _one(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype, device="cpu")


def _inputs(found: _Step, noted: _StepCalls) -> list[Any] | None:
    """The run-time inputs of a step like `found`; None: it does something else now."""
    if noted.calls != found.calls:
        return None
    numbers = noted.numbers
    for number, expected in zip(numbers, found.numbers, strict=True):
        if expected is not None and number_key(number) != expected:
            return None
    inputs = [numbers[places[0]] for places in found.inputs]
    for number, places in zip(inputs, found.inputs, strict=True):
        if not math.isfinite(number) or any(numbers[place] != number for place in places):
            return None
    return inputs


# -- steps that are repeated, and recorded ---------------------------------------------------------


def _repeat(found: _Step, read: _Read, inputs: list[Any], epoch: int, slots: int) -> bool:
    """Write what the step has written; False if another thread has been in the trace since.

    `slots`: run-time inputs of the trace when the step was looked up.
    """
    with TRACE.lock:
        if not _is_as_read(read, epoch, slots):
            return False
        metrics.count("RegionLookups")
        for number in inputs:
            TRACE.scalar_value(number)
        if NATIVE.library is not None and read.storages is not None:
            NATIVE.library.write_step(
                read.tensors, read.storages, found.written, found.versions, read.counters
            )
            return True
        for place, value in found.written:
            storage = read.tensors[place]._lazy_storage
            TRACE.enlist(storage)
            storage.data = None
            storage.value = value
    for places in found.versions:
        torch.autograd.graph.increment_version([read.tensors[place] for place in places])
    with torch.no_grad():
        for counters in read.counters:
            if counters:
                _torch.count_a_step(counters)
    return True


def _is_as_read(read: _Read, epoch: int, slots: int) -> bool:
    """No other thread has ended the trace, taken its next input, or written to what was read."""
    if TRACE.epoch != epoch or len(TRACE.scalars) != slots:
        return False
    tensors = [*read.tensors, *read.gradients]
    values = NATIVE.library.region_values(tensors) if NATIVE.library is not None else None
    return (values or tuple(map(value_of, tensors))) == read.values


def _record(
    known: _Optimizer,
    key: Any,
    epoch: int,
    base: int,
    step: Callable[..., Any],
    optimizer: Any,
    read: _Read,
    noted: _StepCalls,
) -> None:
    """Make a step op by op, and remember what it did.

    `epoch`, `base`: the trace when the step was looked up, and how many run-time inputs it had.
    """
    metrics.count("RegionMisses")
    witness = _Witness(read)
    before = read.values
    with TRACE.lock:
        is_as_read = _is_as_read(read, epoch, base)
    versions = [tensor._version for tensor in read.tensors]
    counted = [[counter.item() for counter in counters] for counters in read.counters]
    with _torch.ForeachCalls(witness.see) as real:
        step(optimizer)
    if witness.reason or not _are_alike(noted, real, counted, read.counts):
        known.refuse(witness.reason or "parameters are not updated alike")
        known.recorded[key] = MOST_STEPS
        return
    with TRACE.lock:
        is_one_trace = is_as_read and TRACE.epoch == epoch
        if not is_one_trace or not _is_the_same(read, _read(optimizer), counted):
            return
        inputs = _places_of(noted, witness, TRACE.scalars[base:])
        after = [root_value(tensor._lazy_storage) for tensor in read.tensors]
        written = [(i, one) for i, one in enumerate(after) if one is not before[i]]
        slots = range(base, base + len(TRACE.scalars[base:]))
        if list(before[len(after) :]) != [value_of(gradient) for gradient in read.gradients]:
            return
        if inputs is None or not _depends_on([v for _, v in written], {*before}, slots):
            return
        numbers = [number_key(number) for number in noted.numbers]
        for place in [place for places in inputs for place in places]:
            numbers[place] = None
        deltas = [tensor._version - versions[i] for i, tensor in enumerate(read.tensors)]
        again = [[i for i, d in enumerate(deltas) if d > turn] for turn in range(max(deltas))]
        known.keep(key, _Step(noted.calls, numbers, inputs, written, again))


class _Witness:
    """Sees the calls of a step: which are on plain tensors, and why it cannot be repeated."""

    def __init__(self, read: _Read) -> None:
        self.counters = {id(one) for several in read.counters for one in several}
        self.reason = ""
        self.plain: list[bool] = []  # of each foreach call: it counts steps
        self.calls: list[int] = []  # of each run-time input: the call that it entered in
        self.inputs = len(TRACE.scalars)

    def see(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if not name.startswith("_foreach_"):
            if name != "__get__" and type(result) is LazyTensor:
                self.reason = self.reason or f"it calls {name}"
            return
        tensors = [one for arg in args if type(arg) in (list, tuple) for one in arg]
        is_lazy = all(type(one) is LazyTensor or type(one) in (int, float) for one in tensors)
        counts = name == "_foreach_add_" and {id(one) for one in args[0]} <= self.counters
        others = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        if not counts and (not is_lazy or others):
            self.reason = self.reason or f"it calls {name} with tensors that are not lazy"
        self.calls += [len(self.plain)] * (len(TRACE.scalars) - self.inputs)
        self.inputs = len(TRACE.scalars)
        self.plain.append(counts)


def _are_alike(
    noted: _StepCalls, real: _torch.ForeachCalls, counted: list[list[float]], counts: Any
) -> bool:
    """The calls of a step are those that were made with stand-ins, with the same numbers."""
    shown, expected = iter(noted.numbers), iter(real.numbers)
    standins = [[[*known].index(count) for count in own] for own, known in zip(counted, counts)]
    for (name, *of_standin), (other, *of_real) in zip(noted.calls, real.calls):
        if name != other or len(of_standin) != len(of_real):
            return False
        for few, many in zip(of_standin, of_real, strict=True):
            if (few is None) != (many is None) or bool(few) != bool(many):
                return False
            if few is None:
                continue
            some = [number_key(next(shown)) for _ in range(few or 1)]
            all_ = [number_key(next(expected)) for _ in range(many or 1)]
            matching = [standin for standin in standins if len({*standin}) == few]
            if (
                some * len(all_) != all_ * len(some)
                if len(some) == 1
                else not any([some[place] for place in standin] == all_ for standin in matching)
            ):
                return False
    return len(noted.calls) == len(real.calls)


def _is_the_same(read: _Read, now: _Read, before: list[list[float]]) -> bool:
    """A step has left the same tensors, and its counters count one step more."""
    counted = [[counter.item() - 1 for counter in counters] for counters in now.counters]
    tensors = [*map(id, (*read.tensors, *read.gradients))]
    same = [*map(id, (*now.tensors, *now.gradients))] == tensors
    return same and now.structure == read.structure and counted == before


def _places_of(noted: _StepCalls, witness: _Witness, scalars: list[Any]) -> list[list[int]] | None:
    """Which numbers the run-time inputs of a step are; None if that cannot be said this time.

    No step makes the same call twice with the same tensors, which would share its inputs.
    """
    owners: list[tuple[int, int] | None] = []  # the argument that a number stands in
    for call, (_, *counts) in enumerate(noted.calls):
        for place, count in enumerate(counts):
            if count is not None:
                owners += [None if witness.plain[call] else (call, place)] * (count or 1)
    found = []
    keys = [number_key(number) for number in noted.numbers]
    if len(scalars) != len(witness.calls):
        return None
    for scalar, call in zip(scalars, witness.calls, strict=True):
        own = number_key(scalar)
        places = [i for i, owner in enumerate(owners) if owner and owner[0] == call]
        places = [i for i in places if keys[i] == own]
        if len({owners[place] for place in places}) != 1:
            return None
        found.append(places)
    return found


def _depends_on(values: list[Value], known: set[Value], slots: range) -> bool:
    """All values are made of those that are known, of these run-time inputs, and of constants."""
    todo, seen = list(values), set[Node]()
    while todo:
        value = todo.pop()
        if type(value.type) is SymbolicType:
            return False
        node = value.node
        if value in known or node in seen or (node.op is SCALAR and node.args[0] in slots):
            continue
        if node.op in (LEAF, SCALAR, SIZE) or node.conditions:
            return False
        seen.add(node)
        todo += node.operands
    return True
