"""``torpor view``: a local web page of what a program recorded, compiled and ran."""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.debug.view.document import Source

NAME = "view"
HELP = "show timeline, graphs and memory of a running program or a record file on a local page"
ERRORS = (RuntimeError, OSError, ValueError, OverflowError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE", nargs="*",
        help="a file written by torpor.record, and those of other ranks of the same run; "
        "default: a program running with TORPOR_VIEW=1",
    )  # fmt: skip
    parser.add_argument(
        "--html", metavar="OUT.html", type=Path, help="write the page as one self-contained file"
    )
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1 (default: a free port)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument(
        "--allow", metavar="NAMESPACE", action="append", default=[], help="also show its ops"
    )
    parser.add_argument("--json", action="store_true", help="print the data of the start page")


def run(arguments: argparse.Namespace) -> int:
    return _of_programs(arguments) if not arguments.files else _of_file(arguments)


def _of_file(arguments: argparse.Namespace) -> int:
    from torpor.debug.view.assets import html_file
    from torpor.debug.view.sources import FileSource

    source = FileSource(arguments.files[0], arguments.allow, arguments.files[1:])
    if arguments.json:
        print(json.dumps(source.summary().to_json(), indent=2))
    if arguments.html is not None:
        arguments.html.write_text(html_file(source), encoding="utf-8")
        print(f"written: {arguments.html}", file=sys.stderr)
    if arguments.json or arguments.html is not None:
        return 0
    return _serve(arguments, source)


def _serve(arguments: argparse.Namespace, source: Source) -> int:
    from torpor.debug.view.server import ViewServer

    with ViewServer(source, arguments.port) as server:
        print(f"{server.address}\nCtrl-C ends it", flush=True)
        _open(arguments, server.address)
        server.wait()
    return 0


def _of_programs(arguments: argparse.Namespace) -> int:
    from torpor.debug.view.live import running

    if arguments.html is not None:
        raise ValueError("--html needs a FILE; torpor.record writes one")
    programs = running()
    if arguments.json:
        print(json.dumps([asdict(program) for program in programs], indent=2))
        return 0
    if not programs:
        raise RuntimeError("no program is running with TORPOR_VIEW=1, and no FILE was given")
    for program in programs:
        print(f"{program.address}  {program.program} (process {program.pid})")
    _open(arguments, programs[0].address)
    return 0


def _open(arguments: argparse.Namespace, address: str) -> None:
    if not arguments.no_browser:
        webbrowser.open(address)
