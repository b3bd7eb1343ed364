"""``torpor info --op NAME``: which code records an op, and how."""

from __future__ import annotations

import difflib
import inspect
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
    try:
        spec = spec_of(find_op(name))
    except GraphError as error:
        raise ValueError(f"{error}{_near(name)}") from None
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


def _near(name: str) -> str:
    """Suggestions of similar ops."""
    namespace, _, rest = name.partition(".") if "." in name else ("aten", "", name)
    base = rest.partition(".")[0]
    names = [op.replace("::", ".") for op in _torch.ops_in(namespace)]
    names = [op if op.count(".") == 2 else f"{op}.default" for op in names]
    overloads = [each for each in names if each.split(".")[1] == base]
    near = overloads or difflib.get_close_matches(f"{namespace}.{rest}", names, 3)
    return f"; do you mean {', '.join(near[:8])}?" if near else ""


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
