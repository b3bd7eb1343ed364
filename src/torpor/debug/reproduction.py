"""Writes a standalone Python program that reproduces a wrong node, without record file or model.

The expected result is computed by plain torch calls, the actual one through torpor. The program
exits with status 1 while the backend is wrong, 0 once it is right, 2 if the backend is not found.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backends.kernels import arguments_of, as_promised, call_on_copies
from torpor.compiling.compilation import device_of
from torpor.debug.bisect import Fault, FaultyPart
from torpor.debug.judge import Judge
from torpor.debug.tensors import layout, to_bytes
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.ops.spec import OpSpec, ReturnKind, spec_of
from torpor.text.printer import print_graph

LARGEST_INSIDE: Final = 4 << 20
"""Bytes of data to embed in the program; more goes to a file next to it."""

_TEMPLATE: Final = '''\
"""{title}

{story}

Exit status: 1 while {suspect} is wrong, 0 once it is right, 2 if it cannot be run.
"""

import base64
import hashlib
import importlib
import pathlib
import sys
import zlib

import torch

SUSPECT = {suspect!r}
MODULES = {modules!r}  # imported first: they define the backend, or ops
ALLOWED = {allowed!r}  # how far from the right numbers rounding may lead
GRAPH = """\\
{graph}
"""
{data}

def tensor(start, length, dtype, shape, stride, offset, conj=False, neg=False):
    raw = bytearray(DATA[start : start + length])
    memory = torch.frombuffer(raw, dtype=torch.uint8).clone() if raw else torch.empty(0)
    made = torch.empty(0, dtype=dtype)
    made.set_(memory.untyped_storage(), offset, shape, stride)
    made = made.conj() if conj else made
    return torch._neg_view(made) if neg else made


def copy_of(tensor):
    """Memory of its own with the same strides, for an op that writes."""
    if isinstance(tensor, (list, tuple)):
        return [copy_of(item) for item in tensor]
    return laid_out(tensor, tensor.stride())


def laid_out(tensor, stride):
    """The same numbers with other strides."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    source, target = tensor, made
    for dim, (size, step) in enumerate(zip(tensor.shape, stride)):
        if step == 0 and size > 1:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)
    return made


INPUTS = [
{inputs}
]


{right}

def distances(got, want):
    apart = torch.where((got == want) | (got.isnan() & want.isnan()), 0.0, (got - want).abs())
    return apart.nan_to_num(float("inf"))


def load():
    """Import the modules, and find the backends, before anything runs."""
    for module in MODULES:
        importlib.import_module(module)
    from torpor.debug.replay import backend_named

    for name in {backends!r}:
        backend_named(name)


def main():
    try:
        load()
    except Exception as error:  # whatever a module raises: the backend is not found, not wrong
        print(f"cannot be run: {{type(error).__name__}}: {{error}}", file=sys.stderr)
        return 2
    from torpor.debug.replay import run_text

    pair = run_text(GRAPH, INPUTS, SUSPECT)[0], right(*INPUTS)
    wide = torch.complex128 if pair[1].is_complex() else torch.float64
    got, want = (t.cpu().resolve_conj().resolve_neg().to(wide).flatten() for t in pair)
    worst = int(distances(got, want).argmax())
    apart = distances(got, want)[worst].item()
    print(f"element {{worst}} is {{got[worst].item()!r}}, should be {{want[worst].item()!r}}")
    wrong = apart > ALLOWED
    verdict = "WRONG" if wrong else "right"
    print(f"{{verdict}}: {{SUSPECT}} is off by {{apart:.3g}}, {{ALLOWED:.3g}} allowed")
    return int(wrong)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
'''


def write_reproduction(fault: Fault, path: Path, modules: Sequence[str] = ()) -> bool:
    """Write a program that reproduces a fault; False if no part of the graph does on its own.

    The program imports `modules` first: those that define the backend or ops.
    """
    if fault.part is None:
        return False
    path.write_text(_program(fault, fault.part, path, modules), encoding="utf-8")
    return True


def _program(fault: Fault, part: FaultyPart, path: Path, modules: Sequence[str]) -> str:
    contents = b"".join(_contents(part.arguments))
    trusted = fault.trusted
    right = _plain_torch(part, trusted) if trusted.exact else _through_torpor(trusted.name)
    return _TEMPLATE.format(
        title=f"{fault.op} computed wrong by {fault.suspect.name}.",
        story="\n".join(escaped(line) for line in str(fault).splitlines()),
        suspect=fault.suspect.name,
        modules=list(modules),
        backends=[fault.suspect.name] if trusted.exact else [fault.suspect.name, trusted.name],
        allowed=0.0 if fault.exact else part.expected.allowed,
        graph=escaped(print_graph(part.graph)),
        data=_data(contents, path),
        inputs="\n".join(f"    {line}," for line in _inputs(part.arguments)),
        right=right,
    )


def escaped(text: str) -> str:
    """Text escaped for triple quotes."""
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


# -- data --------------------------------------------------------------------------------------


def _contents(arguments: list[Any]) -> Iterator[bytes]:
    return (to_bytes(a) for a in arguments if isinstance(a, torch.Tensor))


def _inputs(arguments: list[Any]) -> Iterator[str]:
    start = 0
    for argument in arguments:
        if not isinstance(argument, torch.Tensor):
            yield constant(argument)
            continue
        entry = layout(argument)
        length = len(to_bytes(argument))
        bits = "".join(f", {bit}=True" for bit in ("conj", "neg") if entry[bit])
        shape, stride = tuple(entry["shape"]), tuple(entry["stride"])
        yield (
            f"tensor({start}, {length}, torch.{entry['dtype']}, {shape}, {stride}, "
            f"{entry['offset']}{bits})"
        )
        start += length


def _data(contents: bytes, path: Path) -> str:
    if len(contents) > LARGEST_INSIDE:
        data_path = path.with_suffix(".data")
        data_path.write_bytes(contents)
        return (
            f"DATA = (pathlib.Path(__file__).parent / {data_path.name!r}).read_bytes()\n"
            f"assert hashlib.sha256(DATA).hexdigest() == {hashlib.sha256(contents).hexdigest()!r}\n"
        )
    text = base64.b64encode(zlib.compress(contents, 9)).decode()
    lines = [f'    "{text[i : i + 88]}"' for i in range(0, len(text), 88)] or ['    ""']
    return "DATA = zlib.decompress(base64.b64decode(\n" + "\n".join(lines) + "\n))\n"


# -- the expected result -----------------------------------------------------------------------


def _through_torpor(trusted: str) -> str:
    return (
        "def right(*inputs):\n"
        "    from torpor.debug.replay import run_text\n\n"
        f"    return run_text(GRAPH, inputs, {trusted!r})[0]\n"
    )


def _plain_torch(part: FaultyPart, trusted: Backend) -> str:
    """A function of plain torch calls, one line per node."""
    graph = part.graph
    names = {value: f"x{i}" for i, value in enumerate(graph.inputs)}
    lines = [f"def right({', '.join(names.values())}):"]
    device = device_of(graph, trusted)
    env = dict(zip(graph.inputs, Judge(graph, part.arguments, trusted).arguments, strict=True))
    for node in graph.nodes:
        spec = spec_of(node.op.target)
        for value in node.outputs:
            names[value] = f"v{len(names)}"
        outputs = call_on_copies(spec, arguments_of(node, env, device))
        lines += [f"    {line}" for line in _node_lines(node, spec, names, device)]
        lines += [f"    {line}" for line in _strides(node, outputs, names)]
        env.update(zip(node.outputs, _with_layout(node, outputs), strict=True))
    lines.append(f"    return {names[graph.outputs[0]]}")
    return "\n".join(lines) + "\n"


def _with_layout(node: Node, outputs: list[Any]) -> list[Any]:
    return [as_promised(o, v.type) for o, v in zip(outputs, node.outputs, strict=True)]


def _strides(node: Node, outputs: list[Any], names: dict[Value, str]) -> Iterator[str]:
    """Lines that give outputs the recorded strides, where eager's differ."""
    for value, output in zip(node.outputs, outputs, strict=True):
        type_ = value.type
        if not isinstance(type_, TensorType) or output.numel() < 2:
            continue
        if output.stride() != type_.stride:
            yield f"{names[value]} = laid_out({names[value]}, {type_.stride})"


def _node_lines(
    node: Node, spec: OpSpec, names: dict[Value, str], device: BackendDevice
) -> Iterator[str]:
    """One call, and assignments of its results and of what it writes."""
    args = [_argument(arg, names, device) for arg in node.args]
    written = [p for p in spec.mutated if node.args[p] is not None]
    for place in written:
        yield f"w{place} = copy_of({args[place]})"
        args[place] = f"w{place}"
    values = iter(node.outputs)
    call = f"torch.ops.{node.op.name}({_call(spec, node, args)})"
    returned, kept = _targets(spec, node, values, names)
    yield f"{returned} = {call}" if kept else call
    for place in written:
        if isinstance(node.args[place], tuple):
            yield f"{_unpacked([names[next(values)] for _ in node.args[place]])} = w{place}"
        else:
            yield f"{names[next(values)]} = w{place}"


def _call(spec: OpSpec, node: Node, args: list[str]) -> str:
    given: list[str] = []
    for argument, value, text in zip(spec.arguments, node.args, args, strict=True):
        if not argument.keyword_only:
            given.append(text)
        elif not (argument.has_default and value is argument.default):
            given.append(f"{argument.name}={text}")
    return ", ".join(given)


def _targets(
    spec: OpSpec, node: Node, values: Iterator[Value], names: dict[Value, str]
) -> tuple[str, bool]:
    """The targets of the assignment of a call, and whether any of them is used."""
    fresh = [r.kind in (ReturnKind.FRESH, ReturnKind.VIEW) for r in spec.returns]
    if not any(fresh):
        return "_", False
    lists = [r for r, is_fresh in zip(spec.returns, fresh, strict=True) if is_fresh and r.is_list]
    written = sum(_count(node.args[p]) for p in spec.mutated)
    in_list = len(node.outputs) - written - (sum(fresh) - len(lists))
    targets = []
    for returned, is_fresh in zip(spec.returns, fresh, strict=True):
        if not is_fresh:
            targets.append("_")
        elif returned.is_list:
            targets.append(_unpacked([names[next(values)] for _ in range(in_list)]))
        else:
            targets.append(names[next(values)])
    return targets[0] if len(targets) == 1 else ", ".join(f"({t})" for t in targets), True


def _count(arg: Any) -> int:
    return 0 if arg is None else len(arg) if isinstance(arg, tuple) else 1


def _unpacked(targets: list[str]) -> str:
    return f"[{', '.join(targets)}]"


def _argument(arg: Any, names: dict[Value, str], device: BackendDevice) -> str:
    if type(arg) is Value:
        return names[arg]
    if type(arg) is tuple:
        return f"[{', '.join(_argument(item, names, device) for item in arg)}]"
    if type(arg) is torch.device:
        return f"torch.device({str(device.torch_device if arg.type == 'lazy' else arg)!r})"
    return constant(arg)


def constant(arg: Any) -> str:
    if isinstance(arg, float):
        return repr(arg) if arg == arg and abs(arg) != float("inf") else f"float({str(arg)!r})"
    if isinstance(arg, complex):
        return f"complex({constant(arg.real)}, {constant(arg.imag)})"
    return repr(arg)
