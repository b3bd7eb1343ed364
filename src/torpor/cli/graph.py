"""``torpor graph FILE``: prints a graph, as recorded or after a pass of a backend."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torpor.cli import terminal
from torpor.cli.terminal import add_import_argument, import_modules
from torpor.debug.plain_text import printable
from torpor.errors import did_you_mean

if TYPE_CHECKING:
    from torpor.backend.interface import Backend
    from torpor.ir.graph import Graph
    from torpor.passes import Pass

NAME = "graph"
HELP = "show a graph as text: as recorded, or after a compiler pass"
ERRORS = (RuntimeError, IndexError, ValueError, ImportError, OSError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?",
        help="a graph as text (torpor.graph), a torpor.record file, or - for standard input",
    )  # fmt: skip
    parser.add_argument("--after", metavar="PASS", help="run the passes up to this one")
    parser.add_argument(
        "--backend", metavar="NAME", help="use its passes (default: TORPOR_BACKEND, or the default)"
    )
    parser.add_argument("--list", action="store_true", help="list the passes in order")
    parser.add_argument("--graph", metavar="N", type=int, help="only the N-th graph of the file")
    add_import_argument(parser)
    parser.add_argument("--json", action="store_true", help="with --list: print JSON")


def run(arguments: argparse.Namespace) -> int:
    import_modules(arguments)
    if arguments.list:
        _list(arguments)
    elif arguments.file is None:
        raise ValueError("name a file, or ask for --list")
    else:
        _show(arguments)
    return 0


def _list(arguments: argparse.Namespace) -> None:
    from torpor.compiling.compilation import passes_of

    backend = _backend(arguments)
    passes = passes_of(backend, backend.devices()[0])
    if arguments.json:
        print(json.dumps([{"name": p.name, "description": p.description} for p in passes]))
    else:
        terminal.heading(f"passes of {backend.name}")
        terminal.table(("pass", "what it does"), [(p.name, p.description) for p in passes])


def _show(arguments: argparse.Namespace) -> None:
    from torpor.compiling.compilation import device_of, passes_of
    from torpor.passes import run_passes
    from torpor.text.printer import print_graph
    from torpor.text.verify import verify

    graphs = _graphs(arguments.file)
    if arguments.graph is not None:
        if not 0 <= arguments.graph < len(graphs):
            raise IndexError(f"no graph {arguments.graph}: there are {len(graphs)}, from 0 on")
        graphs = [graphs[arguments.graph]]
    for number, graph in enumerate(graphs):
        verify(graph)
        if arguments.after is not None:
            backend = _backend(arguments)
            passes = passes_of(backend, device_of(graph, backend))
            graph = run_passes(_until(arguments.after, passes, backend), graph)
        if number:
            print()
        print(printable(print_graph(graph)))


def _backend(arguments: argparse.Namespace) -> Backend:
    from torpor.backend.registry import get_backend, make

    return get_backend() if arguments.backend is None else make(arguments.backend)


def _until(name: str, passes: Sequence[Pass], backend: Backend) -> Sequence[Pass]:
    """The passes up to and including the one with that name."""
    names = [one.name for one in passes]
    if name not in names:
        hint = did_you_mean(name, names) or f": there are {', '.join(names)}"
        raise ValueError(f"backend {backend.name!r} has no pass {name!r}{hint}")
    return passes[: names.index(name) + 1]


def _graphs(file: str) -> list[Graph]:
    from torpor.debug.file_format import MAGIC
    from torpor.debug.load import open_record
    from torpor.ops.keys import private_node
    from torpor.text.torch_parser import parse

    if file == "-":
        return [parse(sys.stdin.read(), private_node)]
    contents = Path(file).read_bytes()
    if contents.startswith(MAGIC):
        with open_record(file) as record:
            return record.graphs()
    try:
        text = contents.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is neither a graph as text nor a record") from None
    return [parse(text, private_node)]
