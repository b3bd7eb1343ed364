"""``torpor info``: versions, backends, devices and settings, for people and bug reports."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from importlib import metadata
from typing import Any

import torch

import torpor
from torpor import native
from torpor.cli import op_info, terminal

NAME = "info"
HELP = "show versions, backends, devices and settings, or how an op is recorded"
ERRORS = (ValueError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--op", metavar="NAME", help="how an op is recorded: aten.add.Tensor")


def run(arguments: argparse.Namespace) -> int:
    facts = collect() if arguments.op is None else op_info.collect(arguments.op)
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    source = facts.pop("source", None)
    for title, section in facts.items():
        terminal.heading(title)
        terminal.table(("name", "value"), [(name, str(value)) for name, value in section.items()])
    if source is not None:
        terminal.heading("the code that records it in Python")
        print(source)
    return 0


def collect() -> dict[str, Any]:
    return {
        "versions": _versions(),
        "backends": _backends(),
        "devices": _devices(),
        "config": settings(torpor.config),
    }


def _versions() -> dict[str, str]:
    try:
        own = metadata.version("torpor")
    except metadata.PackageNotFoundError:
        own = "not installed (run from source)"
    return {
        "torpor": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "C++ compiler": native.build.compiler() or "none",
        "recorder": native.status(),
    }


def _backends() -> dict[str, str]:
    """Name -> "available", or why the backend is missing."""
    return {name: str(state or "available") for name, state in torpor.backends().items()}


def _devices() -> dict[str, str]:
    devices = {"cpu": f"{torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        devices[f"cuda:{i}"] = torch.cuda.get_device_name(i)
    return devices


def settings(config: object) -> dict[str, Any]:
    """The public flags of ``torpor.config`` as JSON values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        flags = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    else:
        names = (name for name in dir(config) if not name.startswith("_"))
        flags = {name: getattr(config, name) for name in names}
    return {name: value for name, value in flags.items() if _is_setting(value)}


def _is_setting(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
