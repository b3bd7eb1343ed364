"""The command line: ``torpor <command>``, or ``python -m torpor <command>``.

Each command is a module with ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(arguments)``.
``ERRORS`` lists the exceptions that are reported to the user without a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from torpor.cli import (
    bench,
    cache,
    codegen,
    conformance,
    demo,
    graph,
    info,
    native,
    new_backend,
    replay,
    view,
)
from torpor.debug.plain_text import printable

__all__ = ["main"]


class Command(Protocol):
    """What a module of this package must define to be a command."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


COMMANDS: tuple[Command, ...] = (
    info, demo, bench, cache, native, graph, replay, view, codegen, conformance, new_backend,
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torpor", description="PyTorch, recorded lazily and run by a compiler backend."
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in COMMANDS:
        sub = subparsers.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, errors=getattr(command, "ERRORS", ()))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 on success."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `torpor info | head`: the reader has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the remaining output
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except arguments.errors as error:
        print(printable(f"torpor {arguments.command}: {error}"), file=sys.stderr)
        return 2
    return status
