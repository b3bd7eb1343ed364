"""The fixture of the kit's tests: the backend under test, and copies to and from it."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import torpor
from torpor.backend import Backend, BackendData, Computation, get_backend, registry
from torpor.compiling.compilation import compile_graph
from torpor.ir.graph import Graph
from torpor.ir.types import TensorType
from torpor.testing.comparison import difference, type_difference
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import value_of

PLACES = ("lazy", "concrete")
_by_path: set[str] = set()


@dataclass
class BackendCall:
    """One call of a backend method, with its result or error."""

    name: str
    args: tuple[Any, ...]
    result: Any = None
    error: BaseException | None = None


@dataclass
class Calls:
    """The calls that the core made while a test was watching."""

    made: list[BackendCall] = field(default_factory=list)

    def of(self, name: str) -> list[BackendCall]:
        return [call for call in self.made if call.name == name]

    def count(self, name: str) -> int:
        return len(self.of(name))


def register_by_path(name: str) -> None:
    """Register a backend named by its path, `package.module:factory`."""
    module, separator, factory = name.partition(":")
    if separator and name not in _by_path and f"{module}:NAME" not in registry.backends():
        registry.register(name, getattr(importlib.import_module(module), factory))
        _by_path.add(name)


class Kit:
    """The backend under test, fresh for each test, and tensors on it.

    `put` copies a plain tensor or module to the backend, `plain` converts back, `eager` makes the
    copy for the eager baseline. With place `lazy`, tensors are on the virtual device; with
    `concrete`, they are lazy on their own device.
    """

    def __init__(self, name: str, place: str = "lazy", exact: bool = False) -> None:
        register_by_path(name)
        self.name = name
        self.place = place
        self.exact = exact
        self.backend: Backend = torpor.use(name)
        self.physical = self.backend.backend_device(torch.device("lazy")).torch_device
        torch.manual_seed(0)

    def close(self) -> None:
        """Finish all work, and activate the reference backend."""
        self.settle()
        torpor.use("reference")

    def settle(self) -> None:
        """Finish all work, ignoring errors, which concern only the test that caused them."""
        for finish in (torpor.sync, torpor.wait):
            with suppress(Exception):
                finish()

    def renew(self) -> Backend:
        """Make a second backend of the same name, with nothing compiled yet."""
        self.backend = torpor.use(self.name)
        return self.backend

    # -- tensors -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that the user sees."""
        return torch.device("lazy", 0) if self.place == "lazy" else self.physical

    def put(self, thing: Any) -> Any:
        """A copy of a plain tensor or module on the backend under test."""
        if isinstance(thing, nn.Module):
            module = copy.deepcopy(thing).to(self.physical)
            return module.to("lazy") if self.place == "lazy" else torpor.lazy(module)
        if not isinstance(thing, torch.Tensor):
            return thing
        own = thing.detach().to(self.physical, copy=True)
        lazy = own.to("lazy") if self.place == "lazy" else torpor.lazy(own)
        return lazy.requires_grad_(thing.requires_grad)

    def eager(self, thing: Any) -> Any:
        """A plain copy on the physical device, for the eager baseline."""
        if isinstance(thing, nn.Module):
            return copy.deepcopy(thing).to(self.physical)
        if not isinstance(thing, torch.Tensor):
            return thing
        own = thing.detach().to(self.physical, copy=True)
        return own.requires_grad_(thing.requires_grad)

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The contents of a tensor as a plain one."""
        if not torpor.is_lazy(tensor):
            return tensor
        own = tensor.detach()
        read = own.cpu() if own.device.type == "lazy" else torpor.eager(own)
        return read.requires_grad_(tensor.requires_grad)

    def check(self, got: Any, expected: Any, where: str = "result") -> None:
        """Assert that `got`, computed by the backend, equals eager's result."""
        if isinstance(expected, list | tuple):
            assert len(got) == len(expected), f"{where}: {len(got)} items, not {len(expected)}"
            for index, (one, other) in enumerate(zip(got, expected, strict=True)):
                self.check(one, other, f"{where}[{index}]")
            return
        if isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
            wrong = type_difference(got, expected) or self.broken_promise(got)
            assert wrong is None, f"{where}: {wrong}"
            got = self.plain(got)
        wrong = difference(got, expected, self.exact)
        assert wrong is None, f"{where}: {wrong}"

    def broken_promise(self, tensor: torch.Tensor) -> str | None:
        """How a tensor's buffer differs from its metadata; None if it does not."""
        if not isinstance(tensor, LazyTensor) or tensor._lazy_view is not None:
            return None
        torpor.sync(tensor, wait=True)
        data = tensor._lazy_storage.data
        real = None if data is None else self.read(data)
        if real is None or real.shape != tensor.shape or not real.numel():
            return None
        if (real.stride(), real.dtype) == (tensor.stride(), tensor.dtype):
            return None
        return f"{real.dtype} with strides {real.stride()} behind {TensorType.of_tensor(tensor)!r}"

    def agree(self, program: Callable[..., Any], *inputs: Any) -> Any:
        """Run `program` eagerly and on the backend, and compare; returns the backend's results."""
        torch.manual_seed(0)
        expected = program(*[self.eager(one) for one in inputs])
        torch.manual_seed(0)
        got = program(*[self.put(one) for one in inputs])
        self.check(got, expected)
        return got

    # -- graphs and calls ----------------------------------------------------------------------

    def graph(self, *tensors: torch.Tensor) -> Graph:
        """The graph that computes `tensors`, as recorded so far."""
        return Graph.of([value_of(tensor) for tensor in tensors])  # type: ignore[arg-type]  # lazy

    def compiled(self, *tensors: torch.Tensor) -> Computation:
        """The computation of `tensors`: lowered and compiled, not run."""
        device = self.backend.backend_device(self.device)
        return compile_graph(self.graph(*tensors), "kit", self.backend, device)

    def data(self, tensor: torch.Tensor) -> BackendData:
        """Backend data with the contents of a plain tensor."""
        device = self.backend.backend_device(self.device)
        type_ = TensorType.of_tensor(tensor, self.device)
        return self.backend.data_from_tensor(tensor.to(self.physical), type_, device)

    def datas(self, *tensors: torch.Tensor) -> list[BackendData]:
        """Backend data with copies of plain tensors."""
        return [self.data(tensor.clone()) for tensor in tensors]

    def execute(self, computation: Computation, arguments: Sequence[Any]) -> list[BackendData]:
        """Run a computation, bypassing the core."""
        return self.backend.execute(computation, list(arguments), computation.device)

    def read(self, data: BackendData) -> torch.Tensor:
        """The contents of data, as the core would read them."""
        return self.backend.tensor_from_data(data.wait())

    @contextmanager
    def watched(self, *names: str) -> Iterator[Calls]:
        """Record every call of these methods on the active backend."""
        backend, calls = get_backend(), Calls()
        before = {name: vars(backend).get(name) for name in names}
        for name in names:
            setattr(backend, name, _watching(name, getattr(backend, name), calls))
        try:
            yield calls
        finally:
            with suppress(Exception):
                torpor.wait()
            for name, old in before.items():
                if old is None:
                    delattr(backend, name)
                else:
                    setattr(backend, name, old)


def _watching(name: str, method: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    def watch(*args: Any, **kwargs: Any) -> Any:
        call = BackendCall(name, (*args, *kwargs.values()))
        calls.made.append(call)
        try:
            call.result = method(*args, **kwargs)
        except BaseException as error:
            call.error = error
            raise
        return call.result

    return watch


def raised_by(call: Callable[[], Any]) -> BaseException:
    """The exception that `call` raises; it must raise one."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def message_of(error: BaseException) -> str:
    """The full text of an error, with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])
