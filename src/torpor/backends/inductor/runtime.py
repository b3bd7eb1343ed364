"""Whether Inductor can run on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

_CXX = ("g++", "clang++", "cl")


def unavailable() -> str | None:
    """Why Inductor cannot be used here; None if it can."""
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            return "no Triton, with which graphs for the GPU are compiled: pip install triton"
        return None
    compilers = (os.environ.get("CXX"), *_CXX)
    if not any(compiler and shutil.which(compiler) for compiler in compilers):
        return f"no C++ compiler ({', '.join(_CXX)}): install one, or name one in CXX"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "no Python.h, which compiled code includes: install Python's headers (python3-dev)"
    return None
