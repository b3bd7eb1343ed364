"""Decides whether a result is wrong, by comparison with the same graph in double precision.

One backend is trusted. The tolerance for another is derived, not chosen: the graph is computed in
double precision, and again with every intermediate value perturbed by as much as rounding would.
A correct backend may be off by the larger of the resulting change and the trusted backend's own
error, times a margin. Two backends that run eager's kernels must agree bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from torpor import _torch
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.backends.equality import same_bits
from torpor.backends.kernels import arguments_of, as_promised, call_on_copies, run_node
from torpor.compiling.compilation import compile_graph, device_of
from torpor.debug.tensors import wide
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.ir.types import ScalarType, TensorType
from torpor.ops.spec import Mode, spec_of
from torpor.overrides.storage_ops import window

_FACTOR: Final = 8.0  # margin on the effect of rounding
_ULPS: Final = 16.0  # plus units in the last place of the largest magnitude
_BITCASTS: Final = frozenset(
    # ops whose result depends on the bits of operands
    {"aten.view.dtype", "torpor.storage_scatter.default", "aten.nextafter.default"}
)  # fmt: skip


# -- running one graph -------------------------------------------------------------------------


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` of a tensor's whole memory: preserves strides, holes and offset."""
    size = tensor.untyped_storage().nbytes()
    memory = window(tensor, torch.uint8, (size,), (1,), 0).to(device, copy=True)
    return window(
        memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def run_graph(
    graph: Graph, arguments: Sequence[Any], backend: Backend, name: str = "replayed"
) -> list[torch.Tensor]:
    """Compile and run a graph by `backend`, on copies of tensors and numbers."""
    computation = compile_graph(graph, name, backend, device_of(graph, backend))
    return run_compiled(computation, graph, arguments, backend)


def run_compiled(
    computation: Computation, graph: Graph, arguments: Sequence[Any], backend: Backend
) -> list[torch.Tensor]:
    """Run a compiled graph on copies of tensors and numbers."""
    device = device_of(graph, backend)
    data = [
        _data(argument, value.type, backend, device)
        for argument, value in zip(arguments, graph.inputs, strict=True)
    ]
    with _torch.without_modes():
        results = backend.execute(computation, data, device)
    return [_tensor(result, backend) for result in results]


def _data(argument: Any, type_: Any, backend: Backend, device: BackendDevice) -> Any:
    if isinstance(type_, ScalarType):
        return backend.data_from_scalar(argument, device) if backend.scalars_as_data else argument
    return backend.data_from_tensor(placed(argument, device.torch_device), type_, device)


def _tensor(result: BackendData, backend: Backend) -> torch.Tensor:
    if result.error is not None:
        raise result.error
    return backend.tensor_from_data(result)


# -- the graph in double precision -------------------------------------------------------------

Env = dict[Value, Any]
Compute = Callable[[Node, Mapping[Value, Any], BackendDevice], list[Any]]


def walk(
    graph: Graph, env: Env, device: BackendDevice, step: Compute, kept: set[Value]
) -> Iterator[None]:
    """Compute a graph node by node into `env`, dropping dead values."""
    last = {value: i for i, node in enumerate(graph.nodes) for value in node.operands}
    for position, node in enumerate(graph.nodes):
        env.update(zip(node.outputs, step(node, env, device), strict=True))
        for value in (*node.operands, *node.outputs):
            if value not in kept and last.get(value, position) <= position:
                env.pop(value, None)
        yield


def _widened(tensor: Any, type_: Any) -> Any:
    """A floating-point tensor in double precision, same layout; anything else unchanged."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.is_complex() or tensor.is_floating_point():
        target = torch.complex128 if tensor.is_complex() else torch.float64
        tensor = tensor.resolve_conj().resolve_neg().to(target)
    return as_promised(tensor, type_)


def _narrowed(tensor: Any, type_: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or not isinstance(type_, TensorType):
        return tensor
    return as_promised(tensor.to(type_.dtype), type_)


def wide_node(node: Node, env: Mapping[Value, Any], device: BackendDevice) -> list[Any]:
    """A node in double precision; in its own dtype if it depends on bits or has no other kernel."""
    if node.op.name not in _BITCASTS:
        with contextlib.suppress(Exception):  # no such kernel: fall back to the recorded dtype
            return _in_doubles(node, env, device)
    narrow = {operand: _narrowed(env[operand], operand.type) for operand in node.operands}
    outputs = run_node(node, narrow, device)
    return [_widened(o, v.type) for o, v in zip(outputs, node.outputs, strict=True)]


def _in_doubles(node: Node, env: Mapping[Value, Any], device: BackendDevice) -> list[Any]:
    args = [_wide_dtype(arg) for arg in arguments_of(node, env, device)]
    outputs = call_on_copies(spec_of(node.op.target), args)
    for output, value in zip(outputs, node.outputs, strict=True):
        if isinstance(value.type, TensorType) and tuple(output.shape) != value.type.shape:
            raise TypeError(f"{node.op.name} has another shape in double precision")
    return [_widened(o, v.type) for o, v in zip(outputs, node.outputs, strict=True)]


def _wide_dtype(arg: Any) -> Any:
    if not isinstance(arg, torch.dtype):
        return arg
    if arg.is_complex:
        return torch.complex128
    return torch.float64 if arg.is_floating_point else arg


class _Noise:
    """Computes nodes in double precision, perturbing results by their own dtype's rounding."""

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, node: Node, env: Mapping[Value, Any], device: BackendDevice) -> list[Any]:
        outputs = wide_node(node, env, device)
        if spec_of(node.op.target).mode is Mode.VIEW:
            return outputs
        return [self._off(o, v.type) for o, v in zip(outputs, node.outputs, strict=True)]

    def _off(self, tensor: Any, type_: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not (
            tensor.is_floating_point() or tensor.is_complex()
        ):
            return tensor
        generator = self.generators.get(tensor.device)
        if generator is None:
            generator = self.generators[tensor.device] = torch.Generator(tensor.device)
            generator.manual_seed(0)
        shape, where = tensor.shape, tensor.device
        random = torch.rand(shape, generator=generator, device=where, dtype=torch.float64)
        return as_promised(tensor * (1 + _eps(type_.dtype) * (2 * random - 1)), type_)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


# -- comparing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """How a value differs from the expected one."""

    off: float  # distance from double precision
    trusted_off: float  # the same for the trusted backend
    allowed: float
    place: tuple[int, ...]  # the index with the largest error
    got: Any
    expected: Any

    def __str__(self) -> str:
        where = f" at {list(self.place)}" if self.place else ""
        return (
            f"{self.got:.8g} in the place of {self.expected:.8g}{where}: off by {self.off:.3g}, "
            f"{self.allowed:.3g} allowed (the trusted backend is off by {self.trusted_off:.3g})"
        )


@dataclass(slots=True)
class Expected:
    """The expected value, and the tolerance."""

    trusted: torch.Tensor
    best: torch.Tensor  # in double precision
    noisy: torch.Tensor  # and with simulated rounding
    eps: float
    exact: bool  # must be bit-identical

    def gap(self, got: torch.Tensor) -> Gap | None:
        """How `got` differs; None if it is right."""
        if self.exact and same_bits(got, self.trusted):
            return None
        if not got.numel():
            return None
        values = [wide(t).reshape(-1) for t in (got, self.trusted, self.best, self.noisy)]
        off, allowed = self._off(*values)
        worst = int(torch.argmax(off).item())
        furthest = float(off[worst].item())
        if not self.exact and furthest <= allowed:
            return None
        one, other, best, _ = values
        trusted_off = float(_distance(other, best)[worst].item())
        place = _place(worst, tuple(got.shape))
        shown = one[worst].item(), other[worst].item()
        return Gap(furthest, trusted_off, 0.0 if self.exact else allowed, place, *shown)

    @property
    def allowed(self) -> float:
        """The largest error of a correct value."""
        other, best, noisy = (wide(t).reshape(-1) for t in (self.trusted, self.best, self.noisy))
        return self._allowed(other, best, noisy) if best.numel() else 0.0

    @property
    def trusted_off(self) -> float:
        """The error of the trusted backend."""
        distance = _distance(wide(self.trusted), wide(self.best))
        return float(_finite(distance).max().item()) if distance.numel() else 0.0

    def _allowed(self, other: torch.Tensor, best: torch.Tensor, noisy: torch.Tensor) -> float:
        if not self.eps:
            return 0.0
        moves = _finite(_distance(noisy, best)).max().item()
        errs = _finite(_distance(other, best)).max().item()
        scale = _finite(best.abs()).max().item()
        return float(_FACTOR * max(moves, errs) + _ULPS * self.eps * scale)

    def _off(
        self, got: torch.Tensor, other: torch.Tensor, best: torch.Tensor, noisy: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """The error of each element, and the tolerance."""
        allowed = self._allowed(other, best, noisy)
        if not self.eps:  # integers and booleans: wrong, unless rounding could have decided them
            settled = (other == best) & (other == noisy)
            return torch.where(settled, (got - best).abs(), 0.0), 0.0
        odd = ~(got.isfinite() & best.isfinite())
        off = torch.where(odd, 0.0, _finite(_distance(got, best)))
        same = _same_odd(got, other) | _same_odd(got, best) | _same_odd(got, noisy)
        return torch.where(odd & ~same, float("inf"), off), allowed


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one - other).abs()


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def _same_odd(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether both are NaN, or the same infinity."""
    return (one.isnan() & other.isnan()) | (one == other)


def _place(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        place.append(index)
    return tuple(reversed(place))


class Judge:
    """Computes the expected values of one graph on given arguments."""

    def __init__(self, graph: Graph, arguments: Sequence[Any], trusted: Backend) -> None:
        self.graph = graph
        self.trusted = trusted
        self.device = device_of(graph, trusted)
        where = self.device.torch_device
        self.arguments = [placed(a, where) if isinstance(a, torch.Tensor) else a for a in arguments]

    def values(self, wanted: Sequence[Value]) -> dict[Value, Any]:
        """What the trusted backend computes for values anywhere in the graph."""
        if not self.trusted.exact:
            found = run_graph(self._until(wanted), self.arguments, self.trusted)
            return dict(zip(wanted, found, strict=True))
        return self._evaluate(run_node, self._env(), wanted)

    def expected(self, wanted: Sequence[Value], exact: bool) -> dict[Value, Expected]:
        """The expected values; if `exact`, to the last bit, which needs no double precision."""
        trusted = self.values(wanted)
        if exact:
            return {v: Expected(t, t, t, 0.0, True) for v, t in trusted.items()}
        best = self._evaluate(wide_node, self._wide_env(), wanted)
        noisy = self._evaluate(_Noise(), self._wide_env(), wanted)
        return {
            v: Expected(trusted[v], best[v], noisy[v], _eps(v.type.dtype), False) for v in wanted
        }

    def _until(self, wanted: Sequence[Value]) -> Graph:
        places = {node: i for i, node in enumerate(self.graph.nodes)}
        last = max((places.get(value.node, -1) for value in wanted), default=-1)
        return Graph(self.graph.inputs, self.graph.nodes[: last + 1], wanted)

    def _env(self) -> Env:
        return dict(zip(self.graph.inputs, self.arguments, strict=True))

    def _wide_env(self) -> Env:
        return {value: _widened(a, value.type) for value, a in self._env().items()}

    def _evaluate(self, step: Compute, env: Env, wanted: Sequence[Value]) -> dict[Value, Any]:
        with _torch.without_modes():
            for _ in walk(self._until(wanted), env, self.device, step, set(wanted)):
                pass
        return {value: env[value] for value in wanted}
