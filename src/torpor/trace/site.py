"""Where in the user's program an op was recorded."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType

import torch

_SKIPPED = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
_is_ours: dict[CodeType, bool] = {}


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
        text = linecache.getline(self.file, self.line).strip()
        return f"{os.path.basename(self.file)}:{self.line}   {text}".rstrip()


def _skipped(code: CodeType) -> bool:
    known = _is_ours.get(code)
    if known is None:
        name = code.co_filename
        known = _is_ours[code] = name.startswith(_SKIPPED) or name.startswith("<torpor")
    return known


def site() -> Site | None:
    """The innermost line on the stack that is neither torch's nor torpor's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _skipped(code):
            return Site(code, frame.f_lineno)
        frame = frame.f_back
    return None
