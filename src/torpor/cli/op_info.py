"""``torpor info --op NAME``: which code records an op, and how."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torpor import _torch, native
from torpor.errors import GraphError
from torpor.native.attach import can_be_native
from torpor.ops.signature import Signature
from torpor.ops.spec import OpSpec, spec_of
from torpor.text.torch_parser import find_op
from torpor.trace.dispatch import SPECIAL, USUAL, recorder_of
from torpor.trace.recorder import record

KINDS = {
    "t": "its value", "T": "their values", "p": "itself", "P": "a tuple", "n": "a number",
    "N": "numbers", "o": "must be None",
}  # fmt: skip
"""How an argument of each kind in a signature enters the key."""


def collect(name: str) -> dict[str, Any]:
    """Facts about the op `name`, such as `aten.add.Tensor`; `ValueError` if torch has none."""
    spec = _spec(name)
    recorder = recorder_of(spec.target)
    recording = getattr(USUAL.get(recorder, recorder), "recording", None)
    facts: dict[str, Any] = {
        "schema": str(spec.target._schema),
        "mode": spec.mode.value,
        "recorded by": _recorded_by(spec, recorder),
    }
    if recording is None:
        return {"op": facts}
    takes = can_be_native(recording) and not spec.may_fail
    facts["native"] = f"{'calls met before' if takes else 'no'} ({native.status()})"
    return {
        "op": facts,
        "key": _key(recording.signature),
        "results": _results(recording.signature),
        "source": inspect.getsource(record),
    }


def _spec(name: str) -> OpSpec:
    """The op that `name` refers to; `ValueError`, with suggestions, if that is not one op."""
    try:
        return spec_of(find_op(name))
    except GraphError as error:
        overloads = _overloads(name)
        computing = [each for each in overloads if not each.endswith((".out", "_out"))]
        if len(computing) == 1 and len(_parts(name)) < 3:  # no overload was asked for
            return spec_of(find_op(computing[0]))
        raise ValueError(f"{error}{_suggestion(overloads or _near(name))}") from None


def _parts(name: str) -> list[str]:
    """Namespace, op, and overload if given, of a name as in the IR or in a program.

    `add`, `torch.add`, `torch.Tensor.add` and `torch.ops.aten.add` are all in the namespace `aten`.
    """
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    return ["aten", parts[-1]] if parts[0] == "torch" or len(parts) == 1 else parts


def _overloads(name: str) -> list[str]:
    """The names of all overloads of the op that `name` refers to."""
    namespace, base = _parts(name)[:2]
    return [each for each in _names_in(namespace) if each.split(".")[1] == base]


def _near(name: str) -> list[str]:
    """The names of ops whose names are similar."""
    parts = _parts(name)
    return difflib.get_close_matches(".".join(parts), _names_in(parts[0]), 3)


def _names_in(namespace: str) -> list[str]:
    """The names in the IR of all ops in a namespace: `acme.scale.default`."""
    names = [op.replace("::", ".") for op in _torch.ops_in(namespace)]
    return [op if op.count(".") == 2 else f"{op}.default" for op in names]


def _suggestion(names: Sequence[str]) -> str:
    return f"; do you mean {', '.join(names[:8])}?" if names else ""


def _recorded_by(spec: OpSpec, recorder: Any) -> str:
    if hasattr(recorder, "recording"):
        return "trace/recorder.py: record, from its signature (ops/signature.py)"
    code = inspect.unwrap(recorder).__code__
    path = Path(code.co_filename)
    whose = "by hand" if spec.name in SPECIAL else f"as all ops of mode {spec.mode.value} are"
    return f"{path.parent.name}/{path.name}:{code.co_firstlineno}, {whose}"


def _key(signature: Signature) -> dict[str, str]:
    arguments = signature.spec.arguments
    parts = {a.name: KINDS[kind] for a, kind in zip(arguments, signature.kinds, strict=True)}
    if signature.extra:
        parts["extra"] = str(signature.extra)
    return parts


def _results(signature: Signature) -> dict[str, str]:
    names = [a.name for a in signature.spec.arguments]
    made = {}
    for place, result in enumerate(signature.results):
        of = "" if result.make.name == "FRESH" else f" of {names[result.argument]}"
        made[f"result {place}"] = result.make.name.lower() + of + " (a list)" * result.is_list
    for written in signature.written:
        made[f"writes {names[written.argument]}"] = "out=" if written.is_out else "in place"
    return made
