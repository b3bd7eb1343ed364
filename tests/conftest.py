"""What all tests share."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Iterator

import pytest

import torpor
from tests.backend_under_test import COMPILE_AFTER, DEFAULTS
from tests.known_differences import KNOWN
from torpor.overrides import whole
from torpor.symbols.leaves import SIZES

# Nothing is chosen by timing, in its processes neither: tests of the bound bring a clock.
os.environ.setdefault("TORPOR_BOUND", "off")
torpor.config.bound = os.environ["TORPOR_BOUND"]

# No core is idle while tests run.
torpor.config.background_priority = os.environ.setdefault("TORPOR_BACKGROUND_PRIORITY", "normal")

if not DEFAULTS:
    # Python records, whatever is built here, unless somebody says otherwise; `tests/native` does.
    torpor.config.native = os.environ.setdefault("TORPOR_NATIVE", "off")

    # Eager's kernels, and so its bits, unless a test asks for another backend; its processes too.
    os.environ.setdefault("TORPOR_BACKEND", "reference")

    # Nothing from the disk and nothing to it: tests count compiles, and the cache is the user's.
    os.environ["TORPOR_CACHE"] = "0"
    torpor.config.cache = False


# torch tells this logger everything it compiles; shown below a failed test, it hides the failure.
logging.getLogger("torch.__trace").propagate = False

# A shell's background job ignores interrupts, which tests and the processes they start send.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's operator table cannot be imported without expecttest; the other tests need neither.
OF_THE_OPERATOR_TABLE = ["ops", "native/test_op_db.py"]
HAS_OPERATOR_TABLE = importlib.util.find_spec("expecttest") is not None
collect_ignore = [] if HAS_OPERATOR_TABLE else OF_THE_OPERATOR_TABLE


def pytest_report_header() -> str | None:
    if HAS_OPERATOR_TABLE:
        return None
    return f"not collected, since expecttest is missing: {', '.join(OF_THE_OPERATOR_TABLE)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = KNOWN.get(item.name)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(strict=True, reason=reason))


@pytest.fixture(autouse=True, scope="session")
def failures_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What cannot be compiled is not written to the user's directory."""
    where = str(tmp_path_factory.mktemp("failures"))
    os.environ["TORPOR_FAILURES_DIR"] = torpor.config.failures_dir = where


@pytest.fixture(autouse=True)
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend under test runs its own graphs from the first time on, but for `DEFAULTS`."""
    monkeypatch.setattr(torpor.config, "compile_after", COMPILE_AFTER if DEFAULTS else 0)


@pytest.fixture(autouse=True)
def sizes_as_new() -> None:
    """No size has become a symbol in a test before."""
    SIZES.clear()


@pytest.fixture
def whole_ops() -> Iterator[None]:
    """As if nothing in this process had needed the parts of `linear` and `matmul`."""
    before = whole._parts.inside
    while whole._parts.inside:
        whole._parts.__exit__()
    yield
    while whole._parts.inside < before:
        whole._parts.__enter__()
