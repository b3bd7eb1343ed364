"""What `_torch.translation_units` takes from Inductor: sources of kernels, their bindings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torpor import _torch
from torpor._torch import translation_units
from torpor._torch.translation_units import (
    UnitKernel,
    can_share_a_unit,
    compile_units,
    text_of,
)

TYPES = ["const float*", "float*", "const int64_t"]

pytestmark = pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates


def source(expression: str) -> str:
    """A kernel as Inductor writes it."""
    return f"""
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{{
    #pragma GCC ivdep
    for (int64_t x0 = 0; x0 < ks0; ++x0) {{ out_ptr0[x0] = {expression}; }}
}}
"""


@pytest.fixture
def compiler() -> None:
    from torpor.backends.inductor import runtime

    reason = runtime.unavailable()
    if reason is not None:
        pytest.skip(reason)


def kernels(*expressions: str) -> list[UnitKernel]:
    return [UnitKernel(TYPES, source(expression)) for expression in expressions]


def run(kernel: UnitKernel) -> list[float]:
    out = torch.zeros(3)
    kernel.result()(torch.arange(3.0), out, 3)
    return out.tolist()


def libraries(found: list[UnitKernel]) -> set[str]:
    return {Path(kernel.result().__self__.__file__).name for kernel in found}


def test_can_share_a_unit_what_is_one_function(compiled_sine: Any) -> None:
    found = _torch.inductor_module(compiled_sine)
    assert found is not None
    [written] = re.findall(r"cpp_pybinding\(.*?r'''(.*?)'''\)", found[0], re.DOTALL)
    assert can_share_a_unit(written)
    assert can_share_a_unit(source("1.0f"))


@pytest.mark.parametrize(
    "more",
    [
        "template <typename T> inline T twice(T x) { return x + x; }",
        "#include <ATen/native/Math.h>",
        "#define TWICE(x) ((x) + (x))",
        "static int64_t calls = 0;",
        'extern "C" void other() {}',
    ],
)
def test_can_share_a_unit_refuses_what_could_clash(more: str) -> None:
    written = source("1.0f")
    header, _, kernel = written.partition("extern")
    assert not can_share_a_unit(f"{header}{more}\nextern{kernel}")


def test_text_of_a_unit_has_a_function_and_a_module_for_each_kernel() -> None:
    text = text_of(kernels("1.0f", "2.0f"))
    assert "PyInit_kernel_0" in text
    assert "PyInit_kernel_1" in text
    assert text.count("#undef kernel") == 2


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("threads", [1, 2])
def test_compile_units_makes_one_library(threads: int) -> None:
    from torch._inductor import config as settings

    made = kernels(f"in_ptr0[x0] * {threads}.0f", "in_ptr0[x0] + 0.5f", "-in_ptr0[x0]")
    with settings.patch(compile_threads=threads):
        compile_units(made)
    results = [run(kernel) for kernel in made]
    assert results == [[0.0, threads, 2.0 * threads], [0.5, 1.5, 2.5], [-0.0, -1.0, -2.0]]
    assert len(libraries(made)) == 1


@pytest.mark.usefixtures("compiler")
def test_compile_units_bounds_the_size_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = kernels("in_ptr0[x0] * 5", "in_ptr0[x0] * 6", "in_ptr0[x0] * 7")
    monkeypatch.setattr(translation_units, "_LARGEST_UNIT", 2 * len(made[0].source))
    compile_units(made)
    assert len(libraries(made)) == 2
    assert run(made[2]) == [0.0, 7.0, 14.0]


@pytest.mark.usefixtures("compiler")
def test_compile_units_blames_the_kernel_that_does_not_compile() -> None:
    good, bad = kernels("in_ptr0[x0] * 8", "no_such_name[x0]")
    compile_units([good, bad])
    assert run(good) == [0.0, 8.0, 16.0]
    with pytest.raises(Exception, match="no_such_name"):
        bad.result()


def test_unitkernel_has_a_result_once_it_was_submitted() -> None:
    [kernel] = kernels("1.0f")
    with pytest.raises(AssertionError, match="submitted"):
        kernel.result()
    kernel.load = lambda: "the function"
    assert kernel.result() == "the function"


def test_load_kernel_loads_a_library_that_inductor_made(compiled_sine: Any, tmp_path: Path) -> None:
    found = _torch.inductor_module(compiled_sine)
    assert found is not None
    kernel = next(thing for name, thing in found[1].items() if name.startswith("cpp_fused"))
    copied = tmp_path / "copied.so"
    copied.write_bytes(Path(kernel.__self__.__file__).read_bytes())
    inductors = kernel.__self__.__name__
    module = _torch.load_kernel(inductors, str(copied))
    assert callable(module.kernel)
    assert module.kernel is not kernel
    assert sys.modules[inductors] is kernel.__self__  # Inductor finds its own
    assert module not in sys.modules.values()


def test_load_kernel_refuses_what_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no library")
    with pytest.raises(ImportError):
        _torch.load_kernel("some.kernel", str(tmp_path / "text.txt"))
