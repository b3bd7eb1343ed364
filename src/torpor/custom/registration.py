"""Registration of ops defined outside torch.

An op of `torch.library` with a fake kernel is recorded and run like any other. `register` is for
the rest: a type rule if there is no fake kernel, and a lowering, which decomposes the op into
others before a backend sees it. A lowering is a function on tensors with the op's own arguments; it
writes to those that the op writes to.

    @torch.library.custom_op("acme::scale", mutates_args=())
    def scale(x: Tensor, by: float) -> Tensor: ...

    torpor.ops.register(scale, type_rule=lambda x, by: x, lowering=lambda x, by: x * by)
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from torpor import _torch
from torpor._torch import OpOverload
from torpor.errors import RegistrationError, did_you_mean
from torpor.inference import type_rules
from torpor.inference.strides import like_strides
from torpor.ir.node import Value
from torpor.ir.types import ScalarType, TensorType, Types
from torpor.ops.spec import Mode, OpSpec, Return, ReturnKind, read_spec

TypeRule = Callable[..., Any]
"""Takes the op's arguments, with types in place of tensors; returns the types of its results."""

Lowering = Callable[..., Any]
"""Takes the op's arguments, and does what the op does, using other ops."""


class Whole:
    """Instead of a lowering: the backend gets the node itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "torpor.ops.WHOLE"


WHOLE: Final = Whole()

_RESERVED: Final = ("aten", "prim", "prims", "torpor")


def _nothing() -> None:
    """No fake kernel to remove."""


@dataclass(slots=True)
class Custom:
    """What is registered for one op."""

    target: OpOverload
    type_rule: TypeRule | None = None
    lowerings: dict[str, Lowering | Whole] = field(default_factory=dict)  # by backend; "" means all
    take_fake: Callable[[], None] = _nothing  # removes the fake kernel that torpor registered


_registered: dict[str, Custom] = {}
_before_change: list[Callable[[], None]] = []
_after_change: list[Callable[[], None]] = []


def on_change(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` whenever a registration changes."""
    _before_change.append(before)
    _after_change.append(after)


# -- running user code -------------------------------------------------------------------------

_running: dict[int, str] = {}  # thread id -> what runs there
_watchers: list[Callable[[bool], None]] = []


def on_running(watch: Callable[[bool], None]) -> None:
    """Call `watch(True)` before a type rule or a lowering runs, `watch(False)` after."""
    _watchers.append(watch)


@contextmanager
def running(what: str) -> Iterator[None]:
    """Run a type rule or a lowering, which may use its arguments but no lazy tensors."""
    thread = threading.get_ident()
    outer = _running.get(thread, "")
    _running[thread] = what
    for watch in _watchers:
        watch(True)
    try:
        yield
    finally:
        for watch in _watchers:
            watch(False)
        _running[thread] = outer
        if not outer:
            del _running[thread]


def refuse_inside(what: str) -> None:
    """Raise if called from a type rule or a lowering, which did `what`."""
    who = _running.get(threading.get_ident())
    if who is not None:
        raise RegistrationError(f"{who} {what}; it may use its arguments alone")


# -- registering -------------------------------------------------------------------------------

_backends: list[Callable[[], Iterable[str]]] = []


def on_backends(names: Callable[[], Iterable[str]]) -> None:
    """Register a function that returns the names of all backends."""
    _backends.append(names)


def register(
    op: Any,
    type_rule: TypeRule | None = None,
    lowering: Lowering | Whole | None = None,
    *,
    backend: str | None = None,
    allow_override: bool = False,
) -> OpOverload:
    """Register the types of an op of `torch.library`, or its decomposition, or both.

    `op` is a custom op, an overload, a packet with one overload, or a name: "acme::scale".
    `type_rule` takes the op's arguments with a `TensorType` for each tensor and returns the type of
    the result: one, a list for a list, a tuple of those for several results. Without it, types come
    from the op's fake kernel, or else from its lowering.
    `lowering` takes the op's arguments, does what the op does using other ops, and returns what it
    returns. Every backend runs those ops instead, or only `backend` if given. With `WHOLE` instead
    of a lowering, that backend gets the node itself.
    A second registration for the same backend needs `allow_override`.
    """
    refuse_inside("registers an op")
    target = find(op)
    spec = _registrable(target)
    _check_given(type_rule, lowering, backend)
    known = _registered.get(spec.name)
    if known is None or known.target is not target:  # not registered, or the op was redefined since
        if known is not None:
            known.take_fake()
        known = Custom(target)
    changed = _with(known, type_rule, lowering, backend, allow_override)
    if changed.type_rule is None and "" not in changed.lowerings and not _torch.has_fake(target):
        raise RegistrationError(
            f"nothing tells the types that {spec.name} makes: pass type_rule=, pass lowering= for "
            f"all backends, or give it a fake kernel (torch.library.register_fake)"
        )
    if type_rule is None and lowering is None:
        raise RegistrationError(
            f"there is nothing to register for {spec.name}: pass type_rule= or lowering=; an op "
            f"with a fake kernel needs neither"
        )
    _change(spec.name, target, changed)
    return target


def define(namespace: str, schemas: Iterable[str]) -> Any:
    """Define ops that do not exist yet; they are removed when the returned library is freed."""
    library = torch.library.Library(namespace, "FRAGMENT")
    known = set(_torch.ops_in(namespace))
    for schema in schemas:
        if f"{namespace}::{schema.partition('(')[0]}" not in known:
            library.define(schema)
    return library


def tell_types(
    namespace: str, schemas: Iterable[str], rules: dict[str, TypeRule], where: str
) -> None:
    """Register the type rules of ops; calling an op without one raises an error naming `where`."""
    for schema in schemas:
        name = schema.partition("(")[0]
        target = find(f"{namespace}::{name}")
        if name in rules:
            register(target, type_rule=rules[name], allow_override=True)
        elif str(target) not in _registered and not _torch.has_fake(target):
            register(target, type_rule=_missing_rule(f"{namespace}::{name}", where))


def _missing_rule(name: str, where: str) -> TypeRule:
    def missing(*args: Any, **kwargs: Any) -> Any:
        key = name.partition("::")[2]
        raise RegistrationError(
            f"nothing tells the type of what {name} makes: write its type rule in {where}, as "
            f"TYPE_RULES[{key!r}]"
        )

    return missing


def unregister(op: Any) -> None:
    """Remove all registrations of an op."""
    refuse_inside("unregisters an op")
    target = find(op)
    name = str(target)
    if name not in _registered:
        raise RegistrationError(f"{name} was not registered")
    _change(name, target, None)


def find(op: Any) -> OpOverload:
    """The overload that `op` refers to; raises if it is ambiguous."""
    if isinstance(op, str):
        return _by_name(op)
    if isinstance(op, OpOverload):
        return op
    overload = _torch.custom_op_overload(op)
    if overload is not None:
        return overload
    if isinstance(op, _torch.OpOverloadPacket):
        return _only_overload(op)
    raise TypeError(f"expected an op of torch.library or its name, got {type(op).__name__}: {op!r}")


def _only_overload(packet: Any) -> OpOverload:
    names = packet.overloads()
    if len(names) != 1:
        choices = ", ".join(f"{packet}.{name}" for name in names)
        raise RegistrationError(f"{packet} has several overloads; choose one of {choices}")
    return getattr(packet, names[0])  # type: ignore[no-any-return]  # torch.ops is not annotated


def _by_name(name: str) -> OpOverload:
    namespace, separator, rest = name.replace("::", ".", 1).partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None) if separator and base else None
    if packet is None:
        raise RegistrationError(f"torch has no op {name!r}{_hint(namespace, base)}")
    if not overload:
        return _only_overload(packet)
    if overload not in packet.overloads():
        raise RegistrationError(
            f"{packet} has no overload {overload!r}; it has {', '.join(packet.overloads())}"
        )
    return getattr(packet, overload)  # type: ignore[no-any-return]  # torch.ops is not annotated


def _hint(namespace: str, base: str) -> str:
    if not base:
        return '; an op is named "namespace::name"'
    known = [name.partition("::")[2].partition(".")[0] for name in _torch.ops_in(namespace)]
    return did_you_mean(base, known, f"{namespace}::")


_WHY_NOT: Final = {
    Mode.RANDOM: "it draws random numbers, and is run when it is recorded",
    Mode.EAGER: "its result is no tensor or depends on numbers: it is run when it is met",
    Mode.METADATA: "it changes the size of its argument in place",
}


def _registrable(target: OpOverload) -> OpSpec:
    spec = read_spec(target)
    why = _WHY_NOT.get(spec.mode)
    if target.namespace in _RESERVED:
        why = f"ops of {target.namespace} are known already"
    elif _torch.is_composite(target):
        why = "it is composite: torch takes it apart before a tensor subclass sees it"
    if why is not None:
        raise RegistrationError(f"{spec.name} cannot be registered: {why}")
    return spec


def _with(
    known: Custom,
    type_rule: TypeRule | None,
    lowering: Lowering | Whole | None,
    backend: str | None,
    allow_override: bool,
) -> Custom:
    """`known` with additional registrations."""
    clash = (type_rule is not None and known.type_rule is not None) or (
        lowering is not None and (backend or "") in known.lowerings
    )
    if clash and not allow_override:
        raise RegistrationError(
            f"{known.target} is registered already; pass allow_override=True, or call "
            f"torpor.ops.unregister first"
        )
    lowerings = dict(known.lowerings)
    if lowering is not None:
        lowerings[backend or ""] = lowering
    return Custom(known.target, type_rule or known.type_rule, lowerings, known.take_fake)


def _check_given(type_rule: Any, lowering: Any, backend: str | None) -> None:
    if type_rule is not None and not callable(type_rule):
        raise TypeError(f"a type rule is a function, not {type_rule!r}")
    if isinstance(lowering, Whole):
        if backend is None:
            raise RegistrationError("WHOLE is for one backend: pass backend= too")
    elif lowering is not None and not callable(lowering):
        raise TypeError(f"a lowering is a function, not {lowering!r}")
    if backend is not None and lowering is None:
        raise RegistrationError("backend= chooses where a lowering is used; pass lowering= too")
    if backend is not None:
        _check_backend(backend)


def _check_backend(backend: str) -> None:
    known = sorted({name for names in _backends for name in names()})
    if backend.partition(":")[0] not in {name.partition(":")[0] for name in known}:
        raise RegistrationError(f"no backend {backend!r}: there are {', '.join(known)}")


def _change(name: str, target: OpOverload, custom: Custom | None) -> None:
    """Apply a change, after computing everything recorded under the old registration.

    If that fails, perhaps for the very reason of the change, it stays pending.
    """
    for act in _before_change:
        with suppress(Exception):
            act()
    spec = read_spec(target)
    if custom is None:
        _registered.pop(name).take_fake()
    else:
        _registered[name] = custom
        _give_fake(custom)
        if custom.lowerings:  # a lowering is traced with constant numbers
            spec = replace(spec, promotable=False)
    _set_rule(name, custom)
    _torch.set_op_attribute(target, "_torpor_spec", spec)
    _torch.drop_op_attribute(target, "_torpor_record")
    for act in _after_change:
        act()


# -- lowerings ---------------------------------------------------------------------------------


def lowerings() -> bool:
    """Whether any op with a lowering is registered."""
    return any(custom.lowerings for custom in _registered.values())


def lowering_of(name: str, backend: str) -> Lowering | None:
    """The lowering of an op for `backend`, if any.

    Looked up by the backend's name, by its family ("dynamo" for "dynamo:eager"), and as one for all
    backends.
    """
    custom = _registered.get(name)
    if custom is None:
        return None
    for key in (backend, backend.partition(":")[0], ""):
        if key in custom.lowerings:
            found = custom.lowerings[key]
            return None if isinstance(found, Whole) else found
    return None


# -- types -------------------------------------------------------------------------------------


def _set_rule(name: str, custom: Custom | None) -> None:
    if custom is None or custom.type_rule is None:
        type_rules.CUSTOM.pop(name, None)
    else:
        type_rules.CUSTOM[name] = _by_rule(custom.type_rule)


def _give_fake(custom: Custom) -> None:
    """Register a fake kernel if there is none, as torch's compilers need one."""
    custom.take_fake()
    custom.take_fake = _nothing
    if _torch.has_fake(custom.target):
        return
    spec = read_spec(custom.target)
    lowering = custom.lowerings.get("")
    if custom.type_rule is not None:
        custom.take_fake = _torch.give_fake(custom.target, _fake_by(custom.type_rule, spec))
    elif callable(lowering):
        custom.take_fake = _torch.give_fake(custom.target, _fake_by_lowering(lowering, spec))


def _fake_by_lowering(lowering: Lowering, spec: OpSpec) -> Callable[..., Any]:
    """A fake kernel that infers types by running a lowering."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        try:
            with running(f"the lowering of {spec.name}"):
                result = lowering(*args, **kwargs)
            results = returned_by(spec, result)
        except RegistrationError:
            raise
        except Exception as error:
            raise RegistrationError(lowering_failed(spec, error)) from error
        made = [
            _torch.tree_map(_unshared, item) if r.kind is ReturnKind.FRESH else item
            for item, r in zip(results, spec.returns, strict=True)
        ]
        return tuple(made) if len(made) > 1 else made[0] if made else None

    return fake


ASKS_FOR_NUMBERS: Final = "asks for numbers, which nobody has when a graph is compiled"


def lowering_failed(spec: OpSpec, error: BaseException) -> str:
    """The message for a lowering that raised `error`."""
    asks = isinstance(error, _torch.data_dependent_errors())
    what = ASKS_FOR_NUMBERS if asks else f"failed: {type(error).__name__}"
    return f"the lowering of {spec.name} {what}: {error}"


def returned_by(spec: OpSpec, result: Any) -> list[Any]:
    """The results of a lowering, one item per return of the op; TypeError if they do not match."""
    results = result if len(spec.returns) > 1 else (result,) if spec.returns else ()
    if not isinstance(results, (tuple, list)) or len(results) != len(spec.returns):
        raise TypeError(f"it returned a {type(result).__name__} for {len(spec.returns)} results")
    for place, (item, returned) in enumerate(zip(results, spec.returns, strict=True)):
        if returned.kind is not ReturnKind.ARGUMENT:
            _check_returned(item, returned.is_list, _may_be_none(spec, place))
    return list(results)


def _check_returned(item: Any, is_list: bool, optional: bool) -> None:
    if is_list != isinstance(item, (tuple, list)):
        wanted = "list of tensors" if is_list else "tensor"
        raise TypeError(f"it returned a {type(item).__name__} in the place of a {wanted}")
    for one in item if is_list else (item,):
        if not (isinstance(one, torch.Tensor) or (one is None and optional)):
            raise TypeError(f"it returned a {type(one).__name__} in the place of a tensor")


def _may_be_none(spec: OpSpec, place: int) -> bool:
    return "Optional[" in str(spec.target._schema.returns[place].type)


def _unshared(tensor: Any) -> Any:
    """A tensor like `tensor` in memory of its own."""
    return torch.empty_like(tensor) if isinstance(tensor, torch.Tensor) else tensor


def _fake_by(rule: TypeRule, spec: OpSpec) -> Callable[..., Any]:
    """A fake kernel that infers types by a type rule."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        bound = spec.bind(args, kwargs)
        made = iter(_types_by_rule(spec, rule, [_type_of(arg) for arg in bound]))
        results = [
            bound[r.argument] if r.kind is ReturnKind.ARGUMENT else _blank(next(made), r, bound)
            for r in spec.returns
        ]
        return tuple(results) if len(results) > 1 else results[0] if results else None

    return fake


def _type_of(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return TensorType.of_tensor(arg)
    return [_type_of(item) for item in arg] if isinstance(arg, (list, tuple)) else arg


def _blank(type_: Any, returned: Return, bound: list[Any]) -> Any:
    """An uninitialized tensor of that type."""
    if type_ is None:
        return None
    if returned.is_list:
        single = replace(returned, is_list=False)
        return [_blank(item, single, bound) for item in type_]
    if returned.kind is ReturnKind.VIEW:
        return bound[returned.argument].as_strided(type_.shape, type_.stride, type_.offset)
    size = (type_.shape, type_.stride)
    return torch.empty_strided(*size, dtype=type_.dtype, device=type_.device)


def _by_rule(type_rule: TypeRule) -> type_rules.CustomRule:
    def rule(spec: OpSpec, bound: list[Any], sample: dict[Value, Any], to: Any) -> Types:
        items = _types_by_rule(spec, type_rule, [_typed(arg, sample) for arg in bound])
        return (*_flat(items), *_written(spec, bound))

    return rule


def _types_by_rule(spec: OpSpec, type_rule: TypeRule, bound: list[Any]) -> list[Any]:
    """The types from a type rule, one item per return, checked."""
    positional, keywords = spec.call_arguments(bound)
    try:
        with running(f"the type rule of {spec.name}"):
            result = type_rule(*positional, **keywords)
    except Exception as error:
        if _in_making_a_type(error):
            raise RegistrationError(
                f"the type rule of {spec.name} failed: {error}; a TensorType is made of tuples of "
                "integers, a torch.dtype and a torch.device"
            ) from error
        error._torpor_refusal = True  # type: ignore[attr-defined]  # a mark: do not check with eager
        raise
    return _grouped(spec, result)


def _in_making_a_type(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is TensorType.of.__code__ for frame, _ in frames)


def _typed(arg: Any, sample: dict[Value, Any]) -> Any:
    if type(arg) is Value:
        return sample[arg] if type(arg.type) is ScalarType else arg.type
    return [_typed(item, sample) for item in arg] if type(arg) is tuple else arg


_MADE: Final = (ReturnKind.FRESH, ReturnKind.VIEW)


def _grouped(spec: OpSpec, result: Any) -> list[Any]:
    """The results of a rule, one item per return that is not an argument, checked."""
    made = [place for place, r in enumerate(spec.returns) if r.kind in _MADE]
    results = [result] if len(made) == 1 else result if made else []
    if not isinstance(results, (list, tuple)) or len(results) != len(made):
        raise RegistrationError(
            f"type rule of {spec.name} gave {result!r}, not a tuple of {len(made)} types"
        )
    return [_checked_item(spec, item, place) for item, place in zip(results, made, strict=True)]


def _checked_item(spec: OpSpec, item: Any, place: int) -> Any:
    if not spec.returns[place].is_list:
        return _checked(spec, item, place)
    if not isinstance(item, (list, tuple)):
        raise RegistrationError(f"type rule of {spec.name} gave {item!r}, not a list of types")
    return [_checked(spec, one, place) for one in item]


def _flat(items: list[Any]) -> list[TensorType | None]:
    return [one for item in items for one in (item if isinstance(item, list) else (item,))]


def _checked(spec: OpSpec, type_: Any, place: int) -> TensorType | None:
    if type_ is None and _may_be_none(spec, place):
        return None
    if not isinstance(type_, TensorType):
        raise RegistrationError(
            f"type rule of {spec.name} gave {type_!r} in the place of a TensorType; "
            "TensorType.contiguous(shape, dtype, device) makes one"
        )
    wrong = _wrong_with(type_)
    if wrong:
        raise RegistrationError(
            f"type rule of {spec.name} gave {wrong}: shape {type_.shape!r}, stride "
            f"{type_.stride!r}, offset {type_.offset!r}, {type_.dtype!r}, {type_.device!r}"
        )
    return _in_own_memory(type_) if spec.returns[place].kind is ReturnKind.FRESH else type_


def _wrong_with(type_: TensorType) -> str:
    """Why no tensor can have that type; empty if one can."""
    for what, sizes in (
        ("shape", type_.shape), ("stride", type_.stride), ("offset", (type_.offset,)),
    ):  # fmt: skip
        if not all(type(size) in (int, torch.SymInt) and size >= 0 for size in sizes):
            return f"a {what} that is not made of integers from 0 up"
    if len(type_.shape) != len(type_.stride):
        return f"{len(type_.stride)} strides for {len(type_.shape)} dimensions"
    if not isinstance(type_.dtype, torch.dtype):
        return "a dtype that is none"
    return "" if isinstance(type_.device, torch.device) else "a device that is none"


def _in_own_memory(type_: TensorType) -> TensorType:
    """The type of `torch.empty_like` for a tensor of `type_`."""
    stride = like_strides(type_.shape, type_.stride)
    return TensorType.of(type_.shape, stride, type_.dtype, type_.device)


def _written(spec: OpSpec, bound: list[Any]) -> list[TensorType]:
    """The types of the arguments an op writes to, which do not change."""
    found = []
    for position in spec.mutated:
        arg = bound[position]
        found += [v.type for v in (arg if type(arg) is tuple else (arg,)) if type(v) is Value]
    return found
