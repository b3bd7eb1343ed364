"""The text of a program that reproduces a compile failure.

It contains the graph, compiles it on the backend, and exits with status 1 while that fails, 0 once
it succeeds, and 2 if it cannot be tried because a backend or an op is missing.
"""

from __future__ import annotations

import ast
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from torpor import _torch
from torpor.backend import registry
from torpor.backend.failures import CompileFailure
from torpor.backend.interface import Backend
from torpor.backends.provenance import compiler
from torpor.compiling.compilation import device_of
from torpor.custom.registration import lowering_of
from torpor.debug.record import settings, versions
from torpor.debug.reproduction import constant, escaped
from torpor.ir.graph import Graph
from torpor.ir.node import Value
from torpor.ir.types import ScalarType, TensorType
from torpor.text.printer import print_graph

_OF_TORCH: Final = ("aten", "prim", "prims", "quantized", "torpor")
"""Namespaces of ops that torch or torpor defines."""

_LONGEST_TRACEBACK: Final = 60  # lines

_TEMPLATE: Final = '''\
# {title}
#
{story}
#
# Exit status: 1 while it cannot be compiled, 0 once it can, 2 where that cannot be tried.

import importlib
import sys

import torch

import torpor
from torpor.backend import registry
from torpor.compiling.compilation import compile_graph, device_of
from torpor.debug.judge import run_compiled
from torpor.errors import CompileError
from torpor.text.torch_parser import parse

BACKEND = {backend!r}
OPTIONS = {options}
REASON = {reason!r}
MODULES = {modules!r}  # to import
PATHS = {paths!r}  # where they may be
DONATED = {donated!r}  # inputs that results may be written over, by position
GRAPH = """\\
{graph}
"""

random = torch.Generator().manual_seed(0)


def tensor(dtype, shape, stride, offset=0, conj=False, neg=False):
    """A tensor of made-up numbers; of zeros if they may be indices."""
    steps = [(size - 1) * step for size, step in zip(shape, stride)]
    size = offset + sum(steps) + 1 if all(shape) else offset
    if dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex):
        memory = torch.rand(size, generator=random).to(dtype)
    else:
        memory = torch.zeros(size * dtype.itemsize, dtype=torch.uint8).view(dtype)
    made = memory.as_strided(shape, stride, offset)
    made = made.conj() if conj else made
    return torch._neg_view(made) if neg else made


def inputs():
    return [
{inputs}
    ]


def main():
    torpor.config.strict = True
    torch.set_default_dtype(torch.{default_dtype})
    torch.set_float32_matmul_precision({matmul_precision!r})
    torch.use_deterministic_algorithms({deterministic!r})
    try:
        sys.path += PATHS
        for module in MODULES:
            importlib.import_module(module){register}
        backend = registry.make(BACKEND, **OPTIONS)
        graph = parse(GRAPH)
        device = device_of(graph, backend)
    except Exception as error:
        print(f"CANNOT BE TRIED here: {{type(error).__name__}}: {{error}}")
        return 2
    try:
        computation = compile_graph(graph, "reproduction", backend, device, DONATED)
        print("it compiles now")
        run_compiled(computation, graph, inputs(), backend)
    except CompileError as error:
        print(error)
        print("FAILS as before" if REASON in str(error) else f"FAILS, otherwise than: {{REASON}}")
        return 1
    except Exception as error:
        print(f"it fails on made-up numbers, though: {{type(error).__name__}}: {{error}}")
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
'''


def program_of(failure: CompileFailure, graph: Graph) -> str:
    """The program that compiles `graph`: the failure's, at the sizes at which it failed."""
    backend = failure.backend
    needs = _Needs(backend, graph)
    chosen = settings()
    return _TEMPLATE.format(
        title=f"Backend {backend.name!r} could not compile this graph.",
        story="\n".join(map(_comment, _story(failure, graph, needs))),
        backend=backend.name,
        options=_options(backend.options),
        reason=reason_of(failure.reason).splitlines()[0],  # later lines may name other files
        modules=needs.modules,
        paths=_paths() if needs.modules else [],
        register=_registration(backend, needs),
        donated=dict(failure.donated),
        graph=escaped(print_graph(graph)),
        inputs="\n".join(f"        {line}," for line in _inputs(graph.inputs)),
        default_dtype=chosen["default_dtype"],
        matmul_precision=chosen["matmul_precision"],
        deterministic=chosen["deterministic"],
    )


def reason_of(error: BaseException) -> str:
    """An error's type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# -- the comment at the top --------------------------------------------------------------------


def _comment(line: str) -> str:
    """A line as a comment, with unprintable characters escaped."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line.expandtabs())
    return f"# {shown}".rstrip()


def _story(failure: CompileFailure, graph: Graph, needs: _Needs) -> Iterator[str]:
    backend = failure.backend
    yield from reason_of(failure.reason).splitlines()
    yield ""
    facts = {**versions(), "compiler": next(iter(compiler().strip().splitlines()), "none")}
    yield from (f"{name}: {fact}" for name, fact in facts.items())
    yield f"backend: {backend.name}, options {dict(backend.options)!r}"
    yield f"device: {device_of(graph, backend)}"
    if failure.sizes:
        sizes = ", ".join(f"{symbol} = {size}" for symbol, size in failure.sizes.items())
        yield f"sizes: they change from step to step, and were {sizes}; the graph is for these"
    yield from needs.notes
    yield ""
    yield from _traceback(failure.reason)


def _traceback(error: BaseException) -> list[str]:
    lines = "".join(traceback.format_exception(error)).splitlines()
    left_out = len(lines) - _LONGEST_TRACEBACK
    return lines if left_out <= 0 else [f"... {left_out} lines ...", *lines[left_out:]]


# -- the code ----------------------------------------------------------------------------------


def _options(options: Mapping[str, Any]) -> str:
    """Options as Python source; as a comment if they are not literals."""
    lines = []
    for name, option in options.items():
        text = f"    {name!r}: {option!r},"
        lines.append(text if _is_literal(option) else f"    {_comment(text)}  to be filled in")
    return "\n".join(["{", *lines, "}"]) if lines else "{}"


def _is_literal(option: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(option)) == option)
    except (SyntaxError, TypeError, ValueError):
        return False


def _inputs(inputs: Iterable[Value]) -> Iterator[str]:
    for value in inputs:
        type_ = value.type
        if isinstance(type_, ScalarType):
            yield constant(type_.kind(1))
        else:
            yield _tensor(type_)


def _tensor(type_: TensorType) -> str:
    text = f"tensor({type_.dtype}, {type_.shape}, {type_.stride}"
    text += f", offset={type_.offset}" if type_.offset else ""
    return text + ", conj=True" * type_.conj + ", neg=True" * type_.neg + ")"


# -- dependencies ------------------------------------------------------------------------------


class _Needs:
    """The modules, besides torpor's, that define the backend and the ops of the graph."""

    def __init__(self, backend: Backend, graph: Graph) -> None:
        self.modules: list[str] = []
        self.notes: list[str] = []
        self.factory = registry.factory_of(backend.name)
        if self.factory is not None or not _is_installed(backend.name):
            made_in = getattr(self.factory, "__module__", None) or type(backend).__module__
            self._add(f"backend {backend.name!r}", made_in)
        for name in dict.fromkeys(node.op.name for node in graph.nodes):
            namespace, _, rest = name.partition(".")
            if namespace not in _OF_TORCH:
                self._add_op(name, f"{namespace}::{rest.removesuffix('.default')}")
                lowering = lowering_of(name, backend.name)
                if lowering is not None:
                    self._add(f"the lowering of {name}", lowering.__module__)

    def _add_op(self, name: str, qualified: str) -> None:
        file = _torch.source_of_op(qualified)
        named = (m for m, module in sys.modules.copy().items() if _file_of(module) == file)
        module = None if file is None else next(named, None)
        if module is None:
            self.notes.append(f"op {name} is defined by {file or 'a library'}: load it first")
        else:
            self._add(f"op {name}", module)

    def _add(self, what: str, module: str) -> None:
        if module.partition(".")[0] == "torpor":
            return
        file = _file_of(sys.modules.get(module))
        if module == "__main__" or file is None:
            self.notes.append(f"{what} is defined by {file or module}: import what defines it")
            return
        self.notes.append(f"{what} is defined by the module {module}")
        self.modules += [module] if module not in self.modules else []


def _paths() -> list[str]:
    """Where this process imports modules from that are not installed."""
    folders = (os.path.abspath(path) for path in sys.path)
    return [path for path in folders if not path.startswith((sys.prefix, sys.base_prefix))]


def _is_installed(name: str) -> bool:
    """Whether an installed package provides the backend."""
    return any(point.name == name for point in entry_points(group=registry.ENTRY_POINT_GROUP))


def _file_of(module: Any) -> str | None:
    return getattr(module, "__file__", None)


def _registration(backend: Backend, needs: _Needs) -> str:
    """A statement that registers the backend, if nothing else does."""
    kind = type(backend)
    if needs.factory is not None or kind.__module__ not in needs.modules:
        return ""
    if "<locals>" in kind.__qualname__:
        return ""
    made = f"importlib.import_module({kind.__module__!r}).{kind.__qualname__}"
    return f"\n        registry.register(BACKEND, {made})"
