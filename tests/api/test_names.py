"""The names of DESIGN §2 are there, and say what they take."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import torpor

FUNCTIONS = {
    "at_step_end": ["fn", "args", "run_async"],
    "backends": [],
    "check": ["backend", "on_difference"],
    "disable": [],
    "enable": [],
    "explain": [],
    "graph": ["format"],
    "is_lazy": [],
    "is_pending": [],
    "lazy": [],
    "manual_seed": [],
    "memory": ["device"],
    "mode": [],
    "no_sync": [],
    "record": ["path", "data"],
    "replay": ["path", "backend"],
    "seed_state": [],
    "sync": ["tensors", "wait", "device"],
    "use": [],
    "using": [],
    "wait": ["device"],
}
MEMBERS = {
    "metrics": ["counters", "report", "reset", "timers"],
    "config": ["max_trace_nodes", "on_recompile", "strict"],
    "errors": [
        "DifferenceError",
        "HiddenSync",
        "RecompileError",
        "RecordFileError",
        "TorporError",
    ],
    "backend": [
        "Backend",
        "BackendData",
        "BackendDevice",
        "BackendDeviceType",
        "Computation",
        "IrBuilder",
        "LoweringContext",
        "MemoryInfo",
        "register",
    ],
    "ir": ["Graph", "Node", "OpKind", "TensorType", "Value"],
    "ops": ["WHOLE", "register", "unregister"],
}
LATER: set[str] = set()
"""Built by later issues: they may be missing now, but nothing else may take their names."""


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - LATER))
def test_a_function_of_the_design_is_exported(name: str) -> None:
    function = getattr(torpor, name)
    assert callable(function)
    assert inspect.getdoc(function)
    parameters = inspect.signature(function).parameters
    for wanted in FUNCTIONS[name]:
        assert wanted in parameters


@pytest.mark.parametrize("module", MEMBERS)
def test_a_module_of_the_design_has_its_names(module: str) -> None:
    missing = [name for name in MEMBERS[module] if not hasattr(getattr(torpor, module), name)]
    assert missing == []


def test_no_name_hides_a_module_of_its_package() -> None:
    """`import a.b.c; a.b.c.x` fails where `a.b` has a function named `c`."""
    inside = pkgutil.walk_packages(torpor.__path__, "torpor.")
    packages = [torpor, *(importlib.import_module(m.name) for m in inside if m.ispkg)]
    hidden = [
        f"{package.__name__}.{module.name}"
        for package in packages
        for module in pkgutil.iter_modules(package.__path__)
        if not isinstance(getattr(package, module.name, package), ModuleType)
    ]
    assert hidden == []


def test_all_is_sorted_and_true() -> None:
    assert list(torpor.__all__) == sorted(torpor.__all__)
    assert all(hasattr(torpor, name) for name in torpor.__all__)
    assert set(FUNCTIONS) - LATER <= set(torpor.__all__)
    assert set(MEMBERS) <= set(torpor.__all__)


def test_the_compatibility_names_are_importable() -> None:
    from torpor.compat import torch_lazy

    for name in (
        "mark_step",
        "wait_device_ops",
        "sync_multi",
        "add_step_closure",
        "save",
        "to_cpu",
    ):
        assert callable(getattr(torch_lazy, name))


def test_importing_torpor_imports_only_torch_and_the_standard_library() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import torpor;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(m for m in new - set(sys.stdlib_module_names) - {'torpor', 'torch'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "[]"


def test_importing_torpor_changes_no_plain_program() -> None:
    script = (
        "import torch, torpor; x = torch.ones(2, requires_grad=True);"
        "(x * 2).sum().backward(); print(type(x.grad) is torch.Tensor, x.grad.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "True [2.0, 2.0]"


def test_the_device_type_is_known_to_torch() -> None:
    assert torch.device("lazy").type == "lazy"
    assert torch.ones(1, device="lazy").device.index == 0
