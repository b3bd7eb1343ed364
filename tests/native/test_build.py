"""Building and finding the native recorder; what happens where it cannot be built or used."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import torpor
from torpor import cli, native
from torpor.backend.native_library import NATIVE
from torpor.cache.store import NotUsable
from torpor.compiling import processes
from torpor.errors import NativeError
from torpor.native import attach as attach
from torpor.native import build


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own, compiled things kept there, and no library loaded by other tests."""
    monkeypatch.setattr(NATIVE, "library", None)
    monkeypatch.setattr(torpor.config, "cache_dir", str(tmp_path / "cache"))
    monkeypatch.setattr(torpor.config, "cache", True)
    return tmp_path / "cache"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that refuses everything."""
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", "echo 'no such header' >&2; exit 1"))


def built(cache: Path, text: bytes = b"") -> Path:
    """A file where the library belongs."""
    path = build.library()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(text)
    path.chmod(0o700)
    return path


def test_a_failed_build_says_what_the_compiler_said(broken: None, cache: Path) -> None:
    with pytest.raises(NativeError, match=r"could not be compiled(.|\n)*no such header"):
        build.build()
    assert [path.suffix for path in (cache / "native").iterdir() if path.suffix != ".lock"] == [
        ".failed"
    ]
    assert "no such header" in str(build.failure(build.library()))


def test_on_is_an_error_where_it_cannot_be_built(
    broken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "native", "on")
    with pytest.raises(NativeError, match=r"could not be compiled"):
        native.find()
    with pytest.raises(NativeError, match=r"could not be compiled"):
        attach.NativeRecorder()(None, None)  # type: ignore[arg-type]  # is not looked at


def test_no_compiler_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(NativeError, match=r"needs a C\+\+ compiler"):
        build.build()
    monkeypatch.setattr(torpor.config, "native", "auto")
    assert native.find() is None


def test_auto_builds_for_the_next_process_and_only_once(
    broken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(build, "start", lambda: started.append(1))
    monkeypatch.setattr(torpor.config, "native", "auto")
    with build.alone(build.library()):
        assert native.find() is None
    assert started == []
    assert native.find() is None
    assert started == [1]
    with pytest.raises(NativeError):
        build.build()  # as that process does
    assert native.find() is None
    assert started == [1]


@pytest.mark.parametrize("setting", ["off", "auto without a cache"])
def test_nothing_is_looked_up_nor_built(
    setting: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "native", setting.split()[0])
    monkeypatch.setattr(torpor.config, "cache", setting == "off")
    monkeypatch.setattr(build, "library", None)
    assert native.find() is None
    assert not cache.exists()


def test_what_is_built_is_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = built(cache)
    for setting in ("auto", "on"):
        monkeypatch.setattr(torpor.config, "native", setting)
        assert native.find() == path


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_library_that_others_can_write_to_is_not_used(
    mode: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = built(cache)
    path.chmod(mode)
    assert not build.is_built(path)
    path.parent.chmod(mode)
    with pytest.raises(NotUsable, match=r"others can write"):
        build.is_built(path)
    monkeypatch.setattr(torpor.config, "native", "auto")
    assert native.find() is None
    assert "others can write" in native.status()


def test_a_damaged_library_is_left_alone_and_told_of(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(cache, b"not a library")
    monkeypatch.setattr(torpor.config, "native", "auto")
    unused = attach.NativeRecorder()
    monkeypatch.setattr(NATIVE, "library", None)
    monkeypatch.setattr(NATIVE, "refused", "")
    unused(None, None)  # type: ignore[arg-type]  # is not looked at
    assert unused.library is None
    assert "cannot be loaded" in native.status()
    monkeypatch.setattr(torpor.config, "native", "on")
    with pytest.raises(NativeError, match=r"cannot be loaded"):
        attach.NativeRecorder()(None, None)  # type: ignore[arg-type]  # is not looked at


class Lying:
    """A library whose counter does not move, or that says it takes nothing."""

    def __init__(self, library: Any, takes: bool) -> None:
        self.library, self.takes = library, takes

    def counts(self) -> tuple[int, int]:
        return 0, 0

    def add(self, *arguments: Any) -> bool:
        return self.takes and bool(self.library.add(*arguments))


@pytest.mark.parametrize(("takes", "words"), [(True, "misses"), (False, "does not take")])
def test_a_library_that_does_other_things_than_python_is_refused(
    takes: bool, words: str, library: Any
) -> None:
    with pytest.raises(NativeError, match=words):
        attach.check(Lying(library, takes))
    attach.check(library)


def test_the_check_leaves_nothing_behind(library: Any) -> None:
    torpor.sync(wait=True)
    before = torpor.metrics.counters(), torpor.metrics.new_nodes()
    pending, nodes = len(attach.TRACE.pending), len(torpor.ir.node.TABLE)
    attach.check(library)
    assert (len(attach.TRACE.pending), len(torpor.ir.node.TABLE)) == (pending, nodes)
    assert (torpor.metrics.counters(), torpor.metrics.new_nodes()) == before


def test_the_key_tells_sources_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.key()
    for path in build.sources():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCE", tmp_path / "recorder.cpp")
    assert build.key() == before
    for path in build.sources():
        before = build.key()
        path.write_bytes(path.read_bytes() + b"//")
        assert build.key() != before


def test_what_one_compiler_cannot_build_another_may(
    broken: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NativeError):
        build.build()
    assert build.failure(build.library()) is not None
    monkeypatch.setenv("CXX", script(tmp_path / "another", "exit 1"))
    assert build.failure(build.library()) is None


def test_libraries_that_nobody_uses_go(cache: Path) -> None:
    folder = build.library().parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    old, used = folder / "old.so", folder / "used.so"
    for path in (old, used):
        path.touch()
        os.utime(path, (0, 0))
    build.used(used)
    build._prune(folder)
    assert (old.exists(), used.exists()) == (False, True)


def test_only_one_process_builds_at_a_time(cache: Path) -> None:
    path = build.library()
    with build.alone(path) as first, build.alone(path) as second:
        assert (first, second) == (True, False)
        assert build.is_being_built(path)
    assert not build.is_being_built(path)


def test_programs_start_no_second_build_while_one_waits_for_its_turn(
    tmp_path: Path, cache: Path
) -> None:
    path, log, end = build.library(), tmp_path / "log", tmp_path / "end"
    code = (
        "import os, pathlib, sys, time; log, end = map(pathlib.Path, sys.argv[1:])\n"
        "with log.open('a') as file: file.write('started ')\n"
        "if os.fork(): os._exit(0)\n"
        "while not end.exists(): time.sleep(0.01)"
    )
    reported = [sys.executable, "-c", code, str(log), str(end)]
    for _ in range(3):
        build._start(path, reported, {})
    assert log.read_text() == "started "
    end.touch()
    deadline = time.monotonic() + 20
    while log.read_text() == "started " and time.monotonic() < deadline:
        build._start(path, reported, {})
    assert log.read_text() == "started started "


def test_a_killed_build_leaves_nothing_that_matters(tmp_path: Path, cache: Path) -> None:
    path = build.library()
    program = (
        "import os; from torpor.native import build\n"
        "build._run = lambda *told: os.kill(os.getpid(), 9)\n"
        "build._build = lambda path: (path.with_suffix('.unfinished-1.so').touch(), build._run())\n"
        "build.build()"
    )
    environment = os.environ | {"TORPOR_CACHE_DIR": str(cache), "TORPOR_NATIVE": "off"}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == -9
    assert path.with_suffix(".unfinished-1.so").exists()
    assert not build.is_being_built(path)
    with build.alone(path) as alone:
        assert alone
    assert not path.with_suffix(".unfinished-1.so").exists()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Builds that were begun in the background."""
    calls: list[int] = []
    monkeypatch.setattr(build, "start", lambda: calls.append(1))
    monkeypatch.setattr(torpor.config, "native", "auto")
    monkeypatch.setattr(NATIVE, "library", None)
    monkeypatch.setattr(NATIVE, "refused", "")
    return calls


def test_workers_do_not_build(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native.multiprocessing, "parent_process", lambda: "a parent")
        assert native.find() is None
    assert (started, native.may_come()) == ([], True)
    assert native.find() is None
    assert started == [1]


@pytest.mark.parametrize("full", [True, False])
def test_a_disk_that_keeps_nothing_is_not_built_for(
    full: bool, started: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if full:
        monkeypatch.setattr(build.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    else:
        monkeypatch.setattr(build.os, "access", lambda path, mode: mode != os.W_OK)
    assert native.find() is None
    assert (started, native.may_come()) == ([], False)
    assert "full, or cannot be written to" in native.status()


def test_a_disk_that_can_only_be_read_is_an_error_where_it_has_to_be_built(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.joinpath("cache").write_text("no directory")
    monkeypatch.setattr(torpor.config, "native", "on")
    with pytest.raises((NativeError, NotUsable)):
        native.find()


def test_the_status_says_which_recorder_works_and_why(
    broken: None, started: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.status().startswith("Python: not built")
    path = build.library()
    with build.alone(path):
        assert native.status().startswith("Python: building")
    with pytest.raises(NativeError):
        build.build()
    assert native.status().startswith("Python: failed: no such header")
    built(cache)
    assert native.status().startswith("C++: built")
    path.unlink()
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert native.status().startswith("Python: no C++ compiler")
    monkeypatch.setattr(torpor.config, "cache", False)
    assert "cache" in native.status()
    monkeypatch.setattr(torpor.config, "native", "off")
    assert native.status() == "Python: off (config.native)"
    monkeypatch.setattr(NATIVE, "library", object())
    assert native.status() == "C++"


def test_another_program_is_not_started_in_the_place_of_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert processes.interpreter() == sys.executable
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    assert processes.interpreter() is None


def test_status_and_build_on_the_command_line(
    broken: None, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["native"]) == 0
    assert "built" in capsys.readouterr().out
    assert cli.main(["native", "build"]) == 1
    assert "no such header" in capsys.readouterr().err
    assert cli.main(["native", "status"]) == 0
    assert "no such header" in capsys.readouterr().out


def test_a_process_with_the_setting_on_records_natively(library_path: Path) -> None:
    program = (
        "import torch, torpor\n"
        "x = torch.ones(3, device='lazy')\n"
        "y = [x + x for _ in range(3)][-1]\n"
        "from torpor.native.attach import NATIVE_RECORDER\n"
        "print(y.tolist(), NATIVE_RECORDER.library.counts()[0] >= 2)\n"
    )
    cache = str(library_path.parent.parent)
    environment = {**os.environ, "TORPOR_NATIVE": "on", "TORPOR_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("[2.0, 2.0, 2.0] True\n", 0), done.stderr
