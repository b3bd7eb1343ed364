"""``torpor native``: shows the status of the native recorder, and builds it."""

from __future__ import annotations

import argparse
import sys
import time

from torpor import config, native
from torpor.cache.store import NotUsable
from torpor.cli import terminal
from torpor.compiling import processes
from torpor.errors import NativeError
from torpor.native import build

NAME = "native"
HELP = "show the state of the native recorder, or build it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("status", "build"), default="status")
    parser.add_argument(
        "--quiet", action="store_true", help="do nothing if it is built or being built"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.action == "status":
            return _status()
        return _build_in_background() if arguments.quiet else _build()
    except (NativeError, NotUsable, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _status() -> int:
    path = build.library()
    rows = [
        ("setting", config.native),
        ("recorder", native.status()),
        ("compiler", build.compiler() or "none"),
        ("library", str(path)),
        ("built", "yes" if build.is_built(path) else "no"),
    ]
    terminal.table(("name", "value"), rows)
    failure = build.failure(path)
    if failure is not None:
        print(f"\nthe last build: {failure}")
    return 0


def _build() -> int:
    print("building the native recorder (a minute)")
    start = time.perf_counter()
    path = build.build()
    print(f"built in {time.perf_counter() - start:.0f} s: {path}")
    return 0


def _build_in_background() -> int:
    processes.step_back()
    build.build_unless_another_does()
    return 0
