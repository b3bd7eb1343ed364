"""C++ kernels of one Inductor module, compiled as one translation unit; loading kernels.

Inductor compiles each kernel of a module by itself. Parsing the headers takes a second of CPU time
(0.2 s if they are precompiled, which takes four), a typical kernel 0.06 s. Uses `AsyncCompile`,
`CppPythonBindingsCodeCache` and its template of Python bindings.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch import _C

_LARGEST_UNIT: Final = 1 << 17
"""Characters of source in one unit: beyond this, parallelism gains more than parsing costs."""

_HEADER: Final = "#include <torch/csrc/inductor/cpp_prefix.h>"
_HEADERS: Final = f"""{_HEADER}
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sstream>
#include <cstdlib>
#include <cerrno>
"""
_KERNEL: Final = re.compile(r'extern "C"\s+void\s+kernel\(')
_DEFINES_MORE: Final = re.compile(
    r"^\s*#(?!include\s+<torch/csrc/inductor/cpp_prefix\.h>|pragma\b)|"
    r"^(template|namespace|static|inline|struct|class|using|typedef)\b",
    re.MULTILINE,
)


class UnitKernel:
    """One kernel of a module: its source, and how to get the compiled function."""

    def __init__(self, argument_types: Sequence[str], source: str) -> None:
        self.argument_types = argument_types
        self.source = source
        self.load: Callable[[], Any] | None = None  # once it is being compiled

    def result(self) -> Any:
        """The compiled function; waits for it."""
        assert self.load is not None, "its unit has been submitted"
        return self.load()


def can_share_a_unit(source: str) -> bool:
    """Whether the source consists of the usual header and one function named `kernel`."""
    return (
        source.count(_HEADER) == 1
        and len(_KERNEL.findall(source)) == source.count('extern "C"') == 1
        and not _DEFINES_MORE.search(source)
    )


def compile_units(kernels: Sequence[UnitKernel]) -> None:
    """Start compiling kernels, with Inductor's current settings.

    If a unit does not compile, its kernels are compiled one by one when they are needed, so that
    the error is about the kernel that causes it.
    """
    from torch._inductor import config as settings
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    for unit in _units(kernels):
        if len(unit) == 1:
            [kernel] = unit
            kernel.load = CppPythonBindingsCodeCache.load_pybinding_async(
                kernel.argument_types, kernel.source, submit_fn=_submit()
            )
            continue
        with settings.patch(cpp_cache_precompile_headers=False):
            load = _unit_class().load_async(text_of(unit), "cpu", submit_fn=_submit())
        for place, kernel in enumerate(unit):
            kernel.load = functools.partial(_loaded, load, place, kernel)


def _units(kernels: Sequence[UnitKernel]) -> Iterator[list[UnitKernel]]:
    unit: list[UnitKernel] = []
    for kernel in kernels:
        if unit and sum(len(one.source) for one in (*unit, kernel)) > _LARGEST_UNIT:
            yield unit
            unit = []
        unit.append(kernel)
    if unit:
        yield unit


def _submit() -> Callable[[Callable[[], Any]], Any] | None:
    """What runs a compiler on another thread; None if Inductor is to use one thread."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    return AsyncCompile.submit if get_compile_threads() > 1 else None


def _name(place: int) -> str:
    return f"kernel_{place}"


@functools.cache
def _unit_class() -> Any:
    """Inductor's cache of C++ modules, for libraries whose first kernel has another name."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    own = {"cache": {}, "entry_function": _name(0)}
    return type("Unit", (CppPythonBindingsCodeCache,), own)


def _loaded(load: Callable[[], Any], place: int, kernel: UnitKernel) -> Any:
    try:
        first = load()
    except Exception:
        return _compiled_alone(kernel)
    name = _name(place)
    return getattr(load_kernel(f"unit.{name}", first.__file__), name)


def _compiled_alone(kernel: UnitKernel) -> Any:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_pybinding(kernel.argument_types, kernel.source)


def text_of(unit: Sequence[UnitKernel]) -> str:
    """The source of a unit. Kernel number n is `kernel_n`, and the module of that name has it."""
    return _HEADERS + "".join(_part(place, kernel) for place, kernel in enumerate(unit))


def _part(place: int, kernel: UnitKernel) -> str:
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    name = _name(place)
    arguments = ", ".join(
        f"parse_arg<{type_.replace('const ', '')}>(args, {number})"
        for number, type_ in enumerate(kernel.argument_types)
    )
    bindings = Bindings.suffix_template.format(
        arg_len=len(kernel.argument_types),
        call_entry_func=Bindings.call_entry_function.format(arguments),
        entry_func=name,
        extra_parse_arg="",
    )
    return (
        f"#define kernel {name}\n{kernel.source}\n"
        f"namespace bindings_{place} {{\n{bindings}\n}}\n#undef kernel\n"
    )


_loads = itertools.count()


def load_kernel(name: str, path: str) -> Any:
    """Load the module `name` from a shared library that Inductor compiled.

    Uses a unique name: Inductor would mistake a module under the original name for its own.
    """
    pointer = _C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]  # not in the stubs
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(pointer)
    own = f"torpor_kernel_{next(_loads)}.{name.rpartition('.')[2]}"
    spec = importlib.util.spec_from_file_location(own, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no shared library")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop(own, None)
    return module
