"""How the behaviour tests compare torpor with eager: the same program, twice, bit for bit.

`put` moves things onto a lazy place: the virtual device (`lazy`) or their own device (`concrete`).
`agree` runs one program eagerly and lazily and compares whatever it returns.
"""

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torpor
from tests.backend_under_test import DEFAULTS, NAME
from torpor.testing.comparison import difference

PLACES = ("lazy", "concrete")

loads_jit_decompositions = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
"""Forward-mode AD imports torch's own scripted decompositions, in eager mode too."""


class Put:
    """Copies tensors and modules onto a lazy place; the copy shares nothing with the original."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("lazy" if name == "lazy" else "cpu")

    def __call__(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return self.tensor(thing)
        if isinstance(thing, nn.Module):
            return self.module(copy.deepcopy(thing))
        return thing

    def tensor(self, eager: Tensor) -> Tensor:
        original = eager.detach().clone()
        lazy = original.to("lazy") if self.name == "lazy" else torpor.lazy(original)
        return lazy.requires_grad_(eager.requires_grad)

    def module(self, module: nn.Module) -> nn.Module:
        return module.to("lazy") if self.name == "lazy" else torpor.lazy(module)

    def __repr__(self) -> str:
        return self.name


@pytest.fixture(params=PLACES)
def put(request: pytest.FixtureRequest) -> Put:
    return Put(request.param)


@pytest.fixture
def virtual() -> Put:
    return Put("lazy")


@pytest.fixture
def concrete() -> Put:
    return Put("concrete")


@pytest.fixture(autouse=True)
def on_the_reference_backend() -> Iterator[None]:
    """Every test starts with an empty trace on the judge, and leaves nothing running.

    With `TORPOR_TEST_DEFAULTS`, on the default backend: what it runs for the first time, eager's
    kernels run too.
    """
    torpor.use(NAME if DEFAULTS else "reference")
    torch.manual_seed(0)
    yield
    torpor.disable()
    torch.set_default_device(None)
    forget_pending_work()


def forget_pending_work() -> None:
    """Ends the trace. What a test about errors left failing is not the next one's."""
    for finish in (torpor.sync, torpor.wait):
        try:
            finish()
        except Exception:
            continue


def plain(tensor: Tensor) -> Tensor:
    """The values as an ordinary eager tensor. Strides may differ: compare those on the original."""
    tensor = tensor.detach()
    if not torpor.is_lazy(tensor) or type(tensor) is Tensor:
        return tensor.resolve_conj().resolve_neg()
    if tensor.device.type == "lazy":
        return tensor.cpu().resolve_conj().resolve_neg()
    tensor = tensor.resolve_conj().resolve_neg()
    return torpor.eager(tensor)


def assert_same(got: Any, expected: Any, where: str = "result") -> None:
    """`got`, computed lazily, is what eager gave: values, types, shapes and strides."""
    if isinstance(expected, Tensor):
        _assert_same_tensor(got, expected, where)
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected), f"{where}: other keys"
        for key in expected:
            assert_same(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected), f"{where}: {type(got)} instead of {type(expected)}"
        assert len(got) == len(expected), f"{where}: {len(got)} items instead of {len(expected)}"
        for index, (one, other) in enumerate(zip(got, expected)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, float):
        fault = difference(got, expected, exact=not DEFAULTS)
        assert fault is None, f"{where}: {fault}"
    else:
        assert type(got) is type(expected), f"{where}: {got!r} instead of {expected!r}"
        assert got == expected, f"{where}: {got!r} instead of {expected!r}"


def _assert_same_tensor(got: Tensor, expected: Tensor, where: str) -> None:
    assert isinstance(got, Tensor), f"{where}: {got!r} is no tensor"
    for name in ("shape", "dtype", "layout", "requires_grad", "is_leaf"):
        one, other = getattr(got, name), getattr(expected, name)
        assert one == other, f"{where}: {name} is {one}, eager's is {other}"
    if expected.numel() > 0:
        assert got.stride() == expected.stride(), (
            f"{where}: strides {got.stride()}, eager's are {expected.stride()}"
        )
    values, reference = plain(got), plain(expected)
    fault = difference(values, reference, exact=not DEFAULTS)  # compiled in the end: rounded
    assert fault is None, f"{where}: {fault}\n{values}\ninstead of eager's\n{reference}"


def agree(put: Put, program: Callable[..., Any], *inputs: Any, seed: int = 0) -> Any:
    """Runs `program` on copies of `inputs`, eagerly and lazily, compares, returns the lazy results.

    The random number generator must also end in the state eager leaves it in.
    """
    torch.manual_seed(seed)
    expected = program(*[_eager_copy(one) for one in inputs])
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    got = program(*[put(one) for one in inputs])
    assert_same(got, expected)
    torpor.sync(wait=True)
    assert torch.equal(torch.get_rng_state(), state), "the generator is not where eager leaves it"
    return got


def _eager_copy(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return thing.detach().clone().requires_grad_(thing.requires_grad)
    return copy.deepcopy(thing)


def raised_by(call: Callable[[], Any]) -> BaseException:
    """The exception `call` ends in; it must end in one."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no exception was raised")


def line_below() -> str:
    """`file.py:LINE` of the line after the caller's: what a message about it must contain."""
    frame = inspect.currentframe().f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno + 1}"


def message(error: BaseException) -> str:
    """All an error tells its reader: its text and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])
