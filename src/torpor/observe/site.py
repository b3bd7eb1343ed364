"""Finds the user's line that records an op."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import torch

from torpor.errors import TorporWarning
from torpor.observe.events import find_lines_with

_SKIPPED = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
_PROGRAMS = tuple(_SKIPPED[0] + name + os.sep for name in ("cli", "bench"))  # use torpor themselves
_known: dict[int, tuple[CodeType, bool]] = {}  # by id: hashing code objects is slow
_texts: dict[tuple[int, int], tuple[CodeType, str]] = {}  # of lines; keeps the code's id valid


class Site:
    """One line of the user's program."""

    __slots__ = ("code", "line")

    def __init__(self, code: CodeType, line: int) -> None:
        self.code = code
        self.line = line

    @property
    def file(self) -> str:
        return self.code.co_filename

    def __str__(self) -> str:
        known = _texts.get((id(self.code), self.line))
        if known is None or known[0] is not self.code:
            text = linecache.getline(self.file, self.line).strip()
            text = f"{os.path.basename(self.file)}:{self.line}   {text}".rstrip()
            if len(_texts) > 10_000:
                _texts.clear()
            known = _texts[id(self.code), self.line] = (self.code, text)
        return known[1]


def _learn(code: CodeType) -> tuple[CodeType, bool]:
    name = code.co_filename
    if len(_known) > 10_000:  # a program that keeps making code objects
        _known.clear()
    ours = name.startswith(_SKIPPED) and not name.startswith(_PROGRAMS)
    known = code, ours or name.startswith("<torpor")
    _known[id(code)] = known  # keeps the code alive, so that its id stays valid
    return known


def is_users(code: CodeType) -> bool:
    """Whether the code is neither torch's nor torpor's."""
    return not (_known.get(id(code)) or _learn(code))[1]


class _Replayed(threading.local):
    """The line of the op that this thread is recording from a captured graph."""

    site: Site | None = None


_replayed = _Replayed()


@contextmanager
def recorded_at(line: Site | None) -> Iterator[None]:
    """Use `line`, if known, for everything recorded in the body, instead of the stack."""
    before, _replayed.site = _replayed.site, line
    try:
        yield
    finally:
        _replayed.site = before


def site() -> Site | None:
    """The innermost line on the stack that is neither torch's nor torpor's."""
    if _replayed.site is not None:
        return _replayed.site
    frame: FrameType | None = sys._getframe(1)
    get = _known.get
    while frame is not None:
        code = frame.f_code
        if not (get(id(code)) or _learn(code))[1]:
            return Site(code, frame.f_lineno)
        frame = frame.f_back
    return None


CALLERS = 5
"""How many call sites distinguish two places: one function may read on behalf of several others."""


def place() -> int:
    """A hash of the innermost call sites outside torpor, on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_SKIPPED[0], "<torpor")):
        frame = frame.f_back
    calls = [threading.get_ident()]
    while frame is not None and len(calls) <= 2 * CALLERS:
        calls += id(frame.f_code), frame.f_lineno
        frame = frame.f_back
    return hash(tuple(calls))


WARNED: set[str] = set()
"""Warnings already issued by `warn_once`; clear it to have them repeated."""


def warn_once(what: str, text: str) -> None:
    """Warn, with the user's line, once per process and `what`."""
    if what in WARNED:
        return
    WARNED.add(what)
    where = site()
    if where is None:
        warnings.warn(text, TorporWarning, stacklevel=2)
    else:
        warnings.warn_explicit(text, TorporWarning, where.file, where.line)


find_lines_with(site, place)
