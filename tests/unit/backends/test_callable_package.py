"""`torpor.backends` is a package and a public function at once, and hides neither."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pickle
import pydoc
import subprocess
import sys
from types import ModuleType

import pytest

import torpor
import torpor.backends.kernels
from torpor.backend import registry

IMPORT_ORDERS = {
    "the package first": "import torpor.backends; import torpor",
    "torpor first": "import torpor; import torpor.backends",
    "a module inside first": "import torpor.backends.kernels as k; import torpor",
    "torpor, then a module": "import torpor; import torpor.backends.kernels as k",
    "a backend first": "import torpor.backends.reference; import torpor",
    "from torpor": "from torpor import backends; import torpor",
    "a name of a module": "from torpor.backends.kernels import run_node; import torpor",
    "everything": "from torpor import *; import torpor",
    "by name": "import importlib; importlib.import_module('torpor.backends'); import torpor",
}
BOTH_WORK = """
import torpor.backends.kernels
import torpor.backends.kernels as kernels
from torpor import backends
assert torpor.backends is backends
assert torpor.backends.kernels is kernels is backends.kernels
assert backends()["reference"] == "available"
"""


def python(program: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_calling_the_package_lists_what_the_registry_knows() -> None:
    assert torpor.backends() == registry.backends()
    assert torpor.backends()["reference"] == "available"
    assert list(torpor.backends()) == sorted(torpor.backends())


def test_its_modules_are_its_attributes() -> None:
    assert isinstance(torpor.backends, ModuleType)
    assert torpor.backends is sys.modules["torpor.backends"]
    assert torpor.backends.kernels is sys.modules["torpor.backends.kernels"]


@pytest.mark.parametrize("order", IMPORT_ORDERS)
def test_the_order_of_imports_does_not_matter(order: str) -> None:
    python(IMPORT_ORDERS[order] + BOTH_WORK)


def test_it_has_the_signature_of_the_function() -> None:
    assert inspect.signature(torpor.backends) == inspect.signature(registry.backends)
    with pytest.raises(TypeError, match="argument"):
        torpor.backends("reference")  # type: ignore[call-arg]


def test_help_tells_how_to_call_it_and_what_is_inside() -> None:
    text = pydoc.plain(pydoc.render_doc(torpor.backends))
    assert "torpor.backends() -> dict[str, str]" in text
    assert "kernels" in text
    assert inspect.getdoc(torpor.backends.__call__) == inspect.getdoc(registry.backends)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_is_pickled_by_name_like_a_function(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(torpor.backends, protocol)) is torpor.backends


def test_a_copy_of_it_is_the_package_itself() -> None:
    assert copy.copy(torpor.backends) is torpor.backends
    assert copy.deepcopy({"list": torpor.backends})["list"] is torpor.backends


def test_it_is_still_callable_after_a_reload() -> None:
    importlib.reload(torpor.backends)
    assert torpor.backends() == registry.backends()


def test_importing_torpor_imports_no_backend() -> None:
    loaded = json.loads(
        python(
            "import json, sys, torpor; "
            "print(json.dumps(sorted(m for m in sys.modules if m.startswith('torpor.backends'))))"
        )
    )
    assert loaded == ["torpor.backends", "torpor.backends.builtin"]
