"""The native recorder stands in front of the Python recorders, if it is there.

Each op is told to it when its recorder is made: both read the op's signature. It records what was
met before; everything else comes to Python as if it did not exist (`native/recorder.cpp`).

It may come late: while it is built, Python records. It is a cache of what Python does, with the
same nodes, storages and keys, so the program may go on with it from any point where no op is being
recorded: at a cut, under the trace's lock.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from torpor import _torch, config, native
from torpor.backend.builder import IrBuilder
from torpor.backend.data import BackendData
from torpor.backend.native_library import NATIVE
from torpor.backend.registry import on_change
from torpor.capture.region import KeptView
from torpor.errors import NativeError
from torpor.execute.storage import TRACE, LazyStorage
from torpor.frontend.hooks import MODULE_CALLS
from torpor.frontend.mode import LazyMode
from torpor.ir.node import LEAF, TABLE, Node, OpKind, PrivateNode, Value
from torpor.ir.types import SymbolicType, TensorType
from torpor.ops.keys import number_key
from torpor.ops.signature import Make
from torpor.ops.spec import OpSpec, spec_of
from torpor.overrides import whole
from torpor.symbols.leaves import SIZES
from torpor.symbols.scalars import promoted_finder
from torpor.trace import dispatch
from torpor.trace.recorder import Recording, make_recorder, snapshot_value
from torpor.trace.tensor import LazyTensor, View
from torpor.trace.values import SCATTERS
from torpor.trace.wrap import wrap_storage

aten = torch.ops.aten

PAUSE = 1.0
"""Seconds between two looks for a library that is being built."""

_LOG = logging.getLogger(__name__)


class NativeRecorder:
    """The native recorder, looked for at the first op and, while it is being built, at cuts."""

    def __init__(self) -> None:
        self.library: Any = None
        self.asked = False
        self._looking = threading.Lock()
        self._since = self._next = 0.0

    def __call__(self, spec: OpSpec, recorder: Any) -> None:
        """Let the native recorder stand in front of `recorder`, if it is there and can."""
        self.look()
        if self.library is not None:
            self.take(spec, recorder)

    def look(self) -> None:
        """Look for the library, if nobody has yet; if it is built meanwhile, look at cuts too."""
        if self.asked:
            return
        self.asked = True
        try:
            path = native.find()
        except NativeError:
            self.asked = False
            raise
        if path is not None:
            self._try(path)
        elif native.may_come():
            self._since = time.monotonic()
            NATIVE.at_cut = self.look_again

    def look_between_ops(self) -> None:
        """The same where no recording follows at once: in eager loops, and for TorchDynamo."""
        self.look()
        if NATIVE.at_cut is not None:
            NATIVE.at_cut()

    def look_again(self) -> None:
        """At a cut: take up what was built since. Asked often, the disk is looked at seldom."""
        now = time.monotonic()
        if now < self._next or not self._looking.acquire(blocking=False):
            return
        try:
            self._next = now + max(PAUSE, (now - self._since) / 20)
            path = native.appeared()
            if path is not None:
                self._try(path)
            elif not native.may_come():
                NATIVE.at_cut = None
        finally:
            self._looking.release()

    def _try(self, path: Any) -> None:
        """Use the library at `path`; if that cannot be, Python goes on, unless the user insists."""
        try:
            self.use(native.open_library(path))
        except Exception as error:
            if config.native == "on":
                self.asked = False
                raise
            NATIVE.at_cut, NATIVE.refused = None, str(error).partition("\n")[0]
            _LOG.info("the native recorder is not used: %s", error)

    def use(self, library: Any) -> None:
        """Put `library` to work, unless it does other things than Python does."""
        try:
            with TRACE.lock:
                self._use(library)
        except BaseException:
            self.library = None
            library.switch(False)
            raise
        NATIVE.load(library)

    def _use(self, library: Any) -> None:
        library.setup(_names() | {"config": {"max_trace_nodes": sys.maxsize}})
        # `torch.tensor` of a list, which may bring the first op, asks no tensor subclass meanwhile
        with _torch.as_on_another_thread(), _torch.python_on():
            check(library)
        library.setup(_names())
        self.library = library
        for op, rule, kernel in above_autograd():
            usual = kernel and _torch.kernel_object(kernel)
            library.decide_above_autograd(op._schema.name, op._schema.overload_name, rule, usual)
        for op, inner in FIRST_RESULTS:
            library.want_first(
                op._schema.name, op._schema.overload_name,
                inner._schema.name, inner._schema.overload_name,
            )  # fmt: skip
        whole.on_parts(library.parts)
        record_module_calls(library)
        for kind in list(TABLE.kinds.values()):  # all ops that were recorded before
            recorder = getattr(kind.target, "_torpor_record", None)
            if recorder is not None:
                self.take(spec_of(kind.target), recorder)
        dispatch.set_dispatch_entry(library.dispatch, library.switch)

    def take(self, spec: OpSpec, recorder: Any) -> None:
        """Tell the native recorder of an op, if it can do what `recorder` does."""
        if not spec.may_fail:  # or else the user's line is noted at every call
            tell(self.library, spec, recorder)


def record_module_calls(library: Any) -> None:
    """Let calls of modules and look-ups of their parts come to `library` first."""
    for *arguments, is_known in MODULE_CALLS:
        if is_known:
            library.call_modules(*arguments)
    known = _torch.module_attributes()
    if known is not None:
        library.find_attributes(*known)


def above_autograd() -> Iterator[tuple[Any, str, Any]]:
    """Ops with a Python kernel above autograd, by what rule it is decided which way a call goes,
    and the kernel of the usual case; None: its result is the first argument."""
    yield aten.linear.default, "linear", whole.WHOLE[aten.linear.default]
    yield aten.matmul.default, "matmul", whole.WHOLE[aten.matmul.default]
    parts = _torch.kernel(aten.to.dtype_layout, "AutogradCPU")
    yield aten.to.dtype_layout, "to", parts
    yield aten.dropout.default, "dropout", None
    yield aten.scaled_dot_product_attention.default, "choice", None


FIRST_RESULTS: Final = (
    (aten.layer_norm.default, aten.native_layer_norm.default),
    (aten.group_norm.default, aten.native_group_norm.default),
)
"""Ops that are the first result of another one, which has more."""


def tell(library: Any, spec: OpSpec, recorder: Any) -> bool:
    """Let `library` stand in front of `recorder` if it is, or ends in, one with a signature."""
    recording = getattr(dispatch.USUAL.get(recorder, recorder), "recording", None)
    if recording is None or recording.signature.spec is not spec or not can_be_native(recording):
        return False
    schema = spec.target._schema
    finder = promoted_finder(spec) if recording.nodes is spec.kind.nodes else None
    return bool(
        library.add(
            schema.name, schema.overload_name, recording, vars(spec.target), recorder, finder
        )
    )  # fmt: skip


def can_be_native(recording: Recording) -> bool:
    """C++ can do what the signature says: no draw, one kind of memory, one list among results."""
    signature = recording.signature
    views = [r for r in signature.results if r.make in (Make.VIEW, Make.ALIAS)]
    lists = [r for r in signature.results if r.is_list and r.make is not Make.ARGUMENT]
    of_tensors = all(signature.kinds[r.argument] == "t" for r in views)
    lengths_known = all(r.argument >= 0 for r in signature.results)
    return (
        not signature.extra.draw
        and lengths_known
        and of_tensors
        and len(lists) <= 1
        and not (views and signature.written)
    )


def _names() -> dict[str, Any]:
    """What the native recorder uses of torpor."""
    return {
        "BackendData": BackendData,
        "Expansion": whole.Expansion,
        "IrBuilder": IrBuilder,
        "KeptView": KeptView,
        "LazyMode": LazyMode,
        "LazyStorage": LazyStorage,
        "LazyTensor": LazyTensor,
        "Node": Node,
        "OpKind": OpKind,
        "SymbolicType": SymbolicType,
        "TensorType": TensorType,
        "Value": Value,
        "View": View,
        "acquire": TRACE.lock.acquire,
        "config": vars(config),
        "detach": torch.ops.aten.detach.default,
        "dispatch": dispatch.dispatch,
        "entered": NATIVE.entered,
        "forget": TRACE.pending.pop,
        "leaf_op": LEAF,
        "leaf_nodes": LEAF.nodes,
        "leaf_storages": TRACE.leaf_storages,
        "leaf_value": TRACE.leaf_value,
        "leaf_values": TRACE.leaf_values,
        "leaves": TRACE.leaves,
        "make_wrapper": _torch.make_wrapper,
        "nan": number_key(float("nan")),
        "negative_zero": number_key(-0.0),
        "pending": TRACE.pending,
        "plain_value": _plain_value,
        "release": TRACE.lock.release,
        "scatters": SCATTERS.young,
        "sizes": SIZES,
        "trace": TRACE,
        "zero": number_key(0.0),
    }


def _plain_value(tensor: torch.Tensor) -> Value:
    """The key of a plain tensor, kept in case that Python has to record the call after all."""
    value: Value = NATIVE.once(tensor, TRACE.epoch, snapshot_value)
    return value


NATIVE_RECORDER = NativeRecorder()
NATIVE.look = NATIVE_RECORDER.look_between_ops
dispatch.on_recorder(NATIVE_RECORDER)
on_change(lambda old, new: NATIVE.forget_choices())


# -- a library that does what Python does ----------------------------------------------------------

_OPS = (
    "fresh(Tensor a, Tensor? b, int[] c, Scalar d=1, *, float e=0., bool f=False, "
    "ScalarType? g=None) -> (Tensor, Tensor)",
    "view(Tensor(a) a, int b) -> Tensor(a)",
    "write_(Tensor(a!) a, Tensor b, str? c=None) -> Tensor(a!)",
    "write_all_(Tensor(a!)[] a, Scalar[] b) -> ()",
    "both(Tensor a, Tensor(b!)? b, *, Device? device=None, Tensor(c!) c) -> (Tensor, Tensor(c!))",
)
"""Ops that nobody else calls, one of each kind."""


def check(library: Any) -> None:
    """Record a few ops by Python and by `library`, which has to do the same; `NativeError` if not.

    Nodes and counters are the check's own: nobody else sees anything of it.
    """
    ops = _torch.define_ops("torpor_native", _OPS)
    cpu, lazy = torch.device("cpu"), torch.device("lazy", 0)
    types = [
        TensorType.contiguous((2, 3), torch.float32, lazy),
        TensorType.of((3, 1), (1, 9), torch.float64, cpu, offset=1),
        TensorType.contiguous((), torch.bool, cpu),
    ]
    with TRACE.lock:
        a, b, c = map(_tensor, types)
        _compare(library, ops[0], types[:2], a, b, [1, 2], 2.5, e=0.5, f=True, g=torch.float16)
        _compare(library, ops[0], types[1:], c, None, [], 3)
        _compare(library, ops[1], types[1:2], b, -1)
        _compare(library, ops[2], types[:1], a, b, "text")
        _compare(library, ops[3], types[:2], [a, b], [1, True])
        _compare(library, ops[4], [types[2], *types[:2]], c, a, device=cpu, c=b)
        _compare(library, ops[4], types[:2], a, None, c=b)


def _tensor(type_: TensorType) -> LazyTensor:
    """A tensor that is all of a storage whose value nobody else knows."""
    node = PrivateNode(_LEAF, (), (), (type_,))
    return wrap_storage(LazyStorage(type_, node.outputs[0], None))


_LEAF = OpKind("torpor_native.leaf")


def _compare(library: Any, op: Any, types: list[TensorType], *args: Any, **kwargs: Any) -> None:
    """Call `op` so that Python records it, and again so that `library` does."""
    spec = spec_of(op)
    nodes: dict[Any, Node] = {}

    def make(key: tuple[Any, ...], raw: tuple[Any, ...]) -> Node:
        return nodes.setdefault(key, Node(spec.kind, key, (), tuple(types)))

    recorder = make_recorder(spec, nodes=nodes, make=make, calls=[0], cut=_nothing)
    _torch.set_op_attribute(op, "_torpor_record", recorder)
    if not tell(library, spec, recorder):
        raise NativeError(f"the native recorder does not take {spec.name}")
    seen = []
    for recorded, call in enumerate((recorder, op)):
        before = library.counts()[0]
        state = _state((args, kwargs))
        result = call(*args, **kwargs)
        seen.append((_facts(result), _facts((args, kwargs))))
        _set_state((args, kwargs), state)
        if library.counts()[0] != before + recorded:
            raise NativeError(f"the native recorder misses what Python has recorded of {spec.name}")
    if seen[0] != seen[1]:
        raise NativeError(f"the native recorder makes {seen[1]} of {spec.name}, Python {seen[0]}")


def _nothing() -> None:
    """In the place of a cut: what is recorded here is not to be run."""


def _storages(args: Any) -> list[LazyStorage]:
    leaves = _torch.tree_leaves(args)
    return [leaf._lazy_storage for leaf in leaves if type(leaf) is LazyTensor]


def _state(args: Any) -> list[Any]:
    return [storage.value for storage in _storages(args)]


def _set_state(args: Any, state: list[Any]) -> None:
    for storage, value in zip(_storages(args), state, strict=True):
        storage.value = value


def _facts(tensors: Any) -> list[Any]:
    """All there is to know of the lazy tensors among `tensors`."""
    return [_fact(leaf) for leaf in _torch.tree_leaves(tensors) if type(leaf) is LazyTensor]


def _fact(tensor: LazyTensor) -> tuple[Any, ...]:
    storage, view = tensor._lazy_storage, tensor._lazy_view
    listed = any(reference() is storage for reference in TRACE.pending)
    return (
        TensorType.of_tensor(tensor), _torch.dispatch_keys(tensor), sorted(vars(tensor)),
        tensor.requires_grad, tensor.is_inference(),
        storage.type, storage.value, storage.data, storage.listed, listed,
        view and (view.parent, view.node, view.index, view.base, view.type, view.value),
    )  # fmt: skip


def try_out(path: str) -> None:
    """Load the library at `path` and put it to work, or die trying: for a process of its own."""
    NATIVE_RECORDER.use(native.open_library(path))
    NATIVE_RECORDER.asked = True
    x = torch.ones(3, device="lazy")
    for _ in range(3):
        y = (x + 1).sum()
        if y.item() != 6.0:
            raise NativeError(f"the native recorder computes {y.item()} in the place of 6")
    if not NATIVE_RECORDER.library.counts()[0]:
        raise NativeError("the native recorder records nothing")
