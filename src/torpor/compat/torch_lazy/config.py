"""Switches of `torch._lazy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torpor import _torch, metrics
from torpor._torch import OpOverload
from torpor.inference.infer import NotRecordable
from torpor.ops.spec import spec_of
from torpor.trace.dispatch import recorder_of, recover


class _Switches:
    """The current settings."""

    force_fallback = ""
    reuse_ir = True


def get_force_fallback() -> str:
    """The ops that are forced to fall back."""
    return _Switches.force_fallback


def set_force_fallback(configval: str) -> None:
    """Force an op (`"aten::sin"`, or several, comma-separated) to fall back; `""` forces none.

    All its overloads run eagerly from now on, and are counted as `aten::<op>`.
    """
    forced = list(_overloads(configval))
    for op in _overloads(_Switches.force_fallback):
        recorder_of(op)
    for op in forced:
        _torch.set_op_attribute(op, "_torpor_record", _forced(op))
    _Switches.force_fallback = configval


def _overloads(names: str) -> Iterator[OpOverload]:
    for name in filter(None, (part.strip() for part in names.split(","))):
        namespace, _, op = name.rpartition("::")
        packet = getattr(getattr(torch.ops, namespace or "aten"), op, None)
        if packet is None:
            raise ValueError(f"torch has no op {name!r}; write it like 'aten::sin'")
        yield from (getattr(packet, overload) for overload in packet.overloads())


def _forced(op: OpOverload) -> Callable[..., Any]:
    spec = spec_of(op)
    cell = metrics.op_cell(f"lazy::{op.name().partition('.')[0].removeprefix('aten::')}")

    def run(*args: Any, **kwargs: Any) -> Any:
        cell[0] += 1  # like every recorder; `metrics` subtracts fallbacks
        asked = NotRecordable(f"{spec.name} was asked to fall back", fallback=True)
        return recover(spec, args, kwargs, asked)

    return run


def set_reuse_ir(val: bool) -> None:
    """Accepted for compatibility: in torpor equal nodes are always one node."""
    _Switches.reuse_ir = bool(val)
