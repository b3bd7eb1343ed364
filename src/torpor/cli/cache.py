"""``torpor cache``: lists, checks, removes, exports and imports compiled graphs on disk."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torpor import config
from torpor.cache import store as persistent
from torpor.cache.archive import Archive, pack_store
from torpor.cache.store import Damaged, Entry, NotUsable, Store
from torpor.cli import terminal
from torpor.errors import TorporError
from torpor.observe.memory import size_text

NAME = "cache"
HELP = "list, check, remove, export and import compiled graphs on disk"
ERRORS = (TorporError, NotUsable, OSError)

UNTRUSTED = """\
{file} holds {number} compiled graphs. A program that meets one of them runs the code in it.
Import it only if you trust whoever made it, and whatever brought it here, with all you may do:
    torpor cache import --trust {file}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    for name, help_, act in (
        ("ls", "list the entries, least recently used first", _ls),
        ("verify", "check every entry; exits with 1 if one is damaged", _verify),
        ("clear", "remove every entry", _clear),
        ("export", "write all entries to one file", _export),
        ("import", "add the entries of an exported file", _import),
    ):
        action = actions.add_parser(name, help=help_, description=help_)
        action.add_argument(
            "--dir", type=Path, metavar="DIRECTORY", help=f"instead of {persistent.directory()}"
        )
        action.set_defaults(act=act)
        if name in ("ls", "verify"):
            action.add_argument("--json", action="store_true", help="print one JSON object")
        if name in ("export", "import"):
            action.add_argument("file", type=Path, metavar="FILE")
        if name == "verify":
            action.add_argument("--remove", action="store_true", help="remove damaged entries")
        if name == "import":
            action.add_argument(
                "--trust", action="store_true", help="allow the contents of the file to run as code"
            )


def run(arguments: argparse.Namespace) -> int:
    act: Callable[[Store, argparse.Namespace], int] = arguments.act
    where = arguments.dir or persistent.directory()
    if where.exists():
        persistent.check_directory(where)
    return act(Store(where), arguments)


# -- contents --------------------------------------------------------------------------------------


def _ls(store: Store, arguments: argparse.Namespace) -> int:
    entries = store.entries()
    total = sum(entry.nbytes for entry in entries)
    if arguments.json:
        listed = [_facts(store, entry) for entry in entries]
        print(json.dumps({**_place(store), "bytes": total, "entries": listed}, indent=2))
        return 0
    if entries:
        columns = ("key", "backend", "nodes", "size", "compiled in", "made", "last used")
        terminal.table(columns, [_row(store, entry) for entry in entries])
    limit = size_text(config.cache_bytes)
    print(f"{_number(len(entries))}, {size_text(total)} of {limit}, in {store.directory}")
    return 0


def _place(store: Store) -> dict[str, Any]:
    return {"directory": str(store.directory), "limit": config.cache_bytes}


def _facts(store: Store, entry: Entry) -> dict[str, Any]:
    about = store.about(entry)
    return {**about, "key": entry.key, "bytes": entry.nbytes, "used": round(entry.used)}


def _row(store: Store, entry: Entry) -> tuple[str, ...]:
    about = store.about(entry)
    made, seconds = about.get("made"), about.get("compile_seconds")
    return (
        entry.key[:12],
        str(about.get("backend", "?")),
        str(about.get("nodes", "?")),
        size_text(entry.nbytes),
        "?" if seconds is None else f"{seconds:.2f} s",
        "?" if made is None else _day(made),
        _day(entry.used),
    )


def _verify(store: Store, arguments: argparse.Namespace) -> int:
    entries = store.entries()
    wrong: dict[str, str] = {}
    with terminal.progress("verify", len(entries)) as advance:
        for entry in entries:
            reason = _why_wrong(store, entry)
            if reason is not None:
                wrong[entry.key] = reason
            advance(entry.key[:12])
    if arguments.remove:
        for key in wrong:
            store.remove(key)
    if arguments.json:
        print(json.dumps({**_place(store), "good": len(entries) - len(wrong), "damaged": wrong}))
    else:
        _print_damaged(wrong, len(entries), arguments.remove)
    return 1 if wrong else 0


def _why_wrong(store: Store, entry: Entry) -> str | None:
    try:
        store.load(entry.path)
    except FileNotFoundError:
        return None  # removed concurrently
    except (Damaged, NotUsable, OSError) as problem:
        return str(problem)
    return None


def _print_damaged(wrong: dict[str, str], number: int, removed: bool) -> None:
    if not wrong:
        print(f"{_number(number)}, all good")
        return
    terminal.table(("key", "what is wrong"), [(key[:12], why) for key, why in wrong.items()])
    done = "removed" if removed else "--remove removes them; a program that meets one compiles anew"
    print(f"{len(wrong)} of {_number(number)} damaged: {done}")


def _clear(store: Store, arguments: argparse.Namespace) -> int:
    print(f"{_number(store.clear())} removed from {store.directory}")
    return 0


# -- export and import -----------------------------------------------------------------------------


def _export(store: Store, arguments: argparse.Namespace) -> int:
    with terminal.progress("export", len(store.entries())) as advance:
        number = pack_store(store, arguments.file, advance)
    print(f"{_number(number)} in {arguments.file}, {size_text(arguments.file.stat().st_size)}")
    return 0


def _import(store: Store, arguments: argparse.Namespace) -> int:
    with Archive(arguments.file) as archive:
        number = len(archive.entries)
        if not arguments.trust:
            print(UNTRUSTED.format(file=arguments.file, number=number), file=sys.stderr)
            return 2
        with terminal.progress("import", number) as advance:
            archive.unpack(store, advance)
    print(f"{_number(number)} taken into {store.directory}")
    return 0


# -- formatting ------------------------------------------------------------------------------------


def _number(count: int) -> str:
    return "1 graph" if count == 1 else f"{count} graphs"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
