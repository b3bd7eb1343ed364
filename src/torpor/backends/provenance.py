"""What compiled code depends on besides its graph: versions, the machine, torpor's own sources.

Part of the keys of the disk cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_SOURCES = (
    "__init__.py", "_torch", "ir", "ops", "passes", "backend", "backends",
    "custom", "inference", "overrides", "symbols", "text",
)  # fmt: skip
_COMPILERS = ("g++", "clang++", "c++", "cl")


def software() -> str:
    """Versions of Python, torch and torpor."""
    python = f"{platform.python_implementation()} {sys.version}"
    built = getattr(torch.version, "git_version", "")
    return f"{python} torch {torch.__version__} {built} torpor {_sources()}"


@functools.cache
def _sources() -> str:
    """A digest of the source files of torpor that affect how a graph is compiled."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(root)).encode() + b"\0")
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def settings_of_torch() -> str:
    """Global settings of torch that affect compiled code."""
    return repr((
        torch.get_default_dtype(),
        torch.get_num_threads(),
        _precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # set at run time
        torch.backends.cudnn.deterministic,
        torch.backends.mkldnn.enabled,
    ))  # fmt: skip


def _precision() -> tuple[str, ...]:
    """The float32 matmul precision settings, of each kind of device."""
    backends: Any = torch.backends
    own = (backends, backends.cuda.matmul, backends.cudnn, backends.mkldnn, backends.mkldnn.matmul)
    try:
        for_all = torch.get_float32_matmul_precision()
    except RuntimeError:  # set per kind of device
        for_all = ""
    return (for_all, *(str(backend.fp32_precision) for backend in own))


@functools.cache
def processor() -> str:
    """The CPU: code is compiled for the features of this one."""
    answer = torch.backends.cpu.get_cpu_capability()
    return f"{platform.system()} {platform.machine()} {answer} {_features()}"


def _features() -> str:
    """Model and features of the first CPU, where the system reports them."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(65536).partition("\n\n")[0]
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in first.splitlines())
    return "; ".join(value.strip() for name, _, value in lines if name.strip() in wanted)


@functools.cache
def graphics() -> str:
    """Every GPU, and the versions of its compilers."""
    if not torch.cuda.is_available():
        return "no GPU"
    cards = [
        f"{torch.cuda.get_device_name(i)} {torch.cuda.get_device_capability(i)}"
        for i in range(torch.cuda.device_count())
    ]
    driver = torch.version.cuda or getattr(torch.version, "hip", "")
    return f"{cards} CUDA {driver} Triton {_version_of('triton', 'pytorch-triton')}"


def _version_of(*packages: str) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"


@functools.cache
def compiler() -> str:
    """The version text of the C++ compiler."""
    chosen = os.environ.get("CXX", "")
    for name in (chosen, *_COMPILERS):
        found = shutil.which(name) if name else None
        if found is not None:
            answer = subprocess.run([found, "--version"], capture_output=True, text=True)
            return f"{chosen} {answer.stdout or answer.stderr}"
    return f"{chosen} none"
