"""What `_torch.inductor_kernels` takes from inside torch still is what torpor takes it for."""

import threading
from typing import Any

import pytest

from torpor import _torch
from torpor._torch import inductor_kernels
from torpor._torch.inductor_kernels import _patched_compiler


def test_forget_inductor_threads_lets_the_next_compile_make_them_anew() -> None:
    from torch._inductor import config as settings
    from torch._inductor.async_compile import AsyncCompile

    with settings.patch(compile_threads=2):
        before = AsyncCompile.pool()
        _torch.forget_inductor_threads()
        after = AsyncCompile.pool()
    assert before is not after
    _torch.forget_inductor_threads()
    before.shutdown()
    after.shutdown()


@pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates
def test_kernels_in_background_are_waited_for_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    waited: list[Any] = []
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", AsyncCompile.cpp_pybinding)  # to undo
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: waited.append(scope))
    monkeypatch.setattr(inductor_kernels, "_patched_compiler", _patched_compiler.__wrapped__)
    compiler = AsyncCompile()
    with _torch.kernels_in_background() as finish:
        compiler.wait({"kernel": 1})
        assert waited == []
        other = threading.Thread(target=compiler.wait, args=({"kernel of another thread": 2},))
        other.start()
        other.join()
        assert waited == [{"kernel of another thread": 2}]
    finish()
    assert waited[1:] == [{"kernel": 1}]
    compiler.wait({"kernel": 3})
    assert waited[2:] == [{"kernel": 3}]


@pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates
@pytest.mark.parametrize(("works", "tried"), [(True, ["wide"]), (False, ["wide"])])
def test_best_vectors_work_tries_the_widest_alone(
    works: bool, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpu_vec_isa

    asked: list[str] = []

    class Vectors(str):
        def __bool__(self) -> bool:
            asked.append(self)
            return works

    assert bool(cpu_vec_isa.supported_vec_isa_list)
    known = [Vectors("matrix wide"), Vectors("wide"), Vectors("narrow")]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", known)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["narrow", "wide"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    ask_again = _torch.try_best_vectors.__wrapped__
    monkeypatch.setattr(inductor_kernels, "try_best_vectors", ask_again)
    assert _torch.best_vectors_work() is works
    assert asked == tried
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert not _torch.best_vectors_work()


@pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates
def test_try_best_vectors_asks_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    class Vectors(str):
        def __bool__(self) -> bool:
            return threading.current_thread() is not threading.main_thread()

    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Vectors("wide")])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["wide"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    assert _torch.try_best_vectors.__wrapped__().result() is True


def test_start_inductor_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    asked: list[bool] = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: asked.append(True))
    _torch.start_inductor_workers.cache_clear()
    _torch.start_inductor_workers()
    _torch.start_inductor_workers()
    _torch.start_inductor_workers.cache_clear()
    assert asked == [True]
