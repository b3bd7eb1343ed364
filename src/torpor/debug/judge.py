"""Which of two numbers is wrong: both against the same graph computed in double precision.

One backend is trusted. How far another may be from it is not a matter of taste: the graph is
computed once more in double precision, and once with every intermediate value off by as much as
rounding would make it. By what a value moves then, and by what the trusted backend itself is off,
a right backend may be off as well, and a little more. Between two backends that run eager's kernels
every bit has to agree.
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
from torpor.backends.kernels import arguments_of, as_promised, copies, outputs_of, run_node
from torpor.compiling.compilation import compile_graph, device_of
from torpor.debug.tensors import wide
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.ir.types import ScalarType, TensorType
from torpor.ops.spec import Mode, spec_of
from torpor.overrides.storage_ops import window

_FACTOR: Final = 8.0  # times what rounding does
_ULPS: Final = 16.0  # and units in the last place of the largest number
_BITCASTS: Final = frozenset(
    # what they compute depends on the bits of their operands, not on the numbers
    {"aten.view.dtype", "torpor.storage_scatter.default", "aten.nextafter.default"}
)  # fmt: skip


# -- running one graph -------------------------------------------------------------------------


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`, memory and all: strides, holes and offset stay."""
    size = tensor.untyped_storage().nbytes()
    memory = window(tensor, torch.uint8, (size,), (1,), 0).to(device, copy=True)
    return window(
        memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def run_graph(
    graph: Graph, arguments: Sequence[Any], backend: Backend, name: str = "replayed"
) -> list[torch.Tensor]:
    """What `backend` makes of a graph on tensors and numbers, which it gets copies of."""
    computation = compile_graph(graph, name, backend, device_of(graph, backend))
    return run_compiled(computation, graph, arguments, backend)


def run_compiled(
    computation: Computation, graph: Graph, arguments: Sequence[Any], backend: Backend
) -> list[torch.Tensor]:
    """What a compiled graph makes of tensors and numbers, which it gets copies of."""
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
    """Compute a graph node by node into `env`; what nobody needs any more is dropped."""
    last = {value: i for i, node in enumerate(graph.nodes) for value in node.operands}
    for position, node in enumerate(graph.nodes):
        env.update(zip(node.outputs, step(node, env, device), strict=True))
        for value in (*node.operands, *node.outputs):
            if value not in kept and last.get(value, position) <= position:
                env.pop(value, None)
        yield


def _widened(tensor: Any, type_: Any) -> Any:
    """A floating-point tensor in double precision, laid out as before; anything else as it is."""
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
    """One node in double precision; in its own where its op depends on bits or has no other."""
    if node.op.name not in _BITCASTS:
        with contextlib.suppress(Exception):  # no such kernel: then as it was recorded
            return _in_doubles(node, env, device)
    narrow = {operand: _narrowed(env[operand], operand.type) for operand in node.operands}
    outputs = run_node(node, narrow, device)
    return [_widened(o, v.type) for o, v in zip(outputs, node.outputs, strict=True)]


def _in_doubles(node: Node, env: Mapping[Value, Any], device: BackendDevice) -> list[Any]:
    spec = spec_of(node.op.target)
    args = [_wide_dtype(arg) for arg in arguments_of(node, env, device)]
    for position in spec.mutated:
        args[position] = copies(args[position])
    positional, keywords = spec.call_arguments(args)
    with _torch.kernels():
        result = spec.target(*positional, **keywords)
    outputs = outputs_of(spec, result, args)
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
    """Computes nodes in double precision, each result off by what its own dtype would round."""

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


# -- judging -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """How a value differs from what it should be."""

    off: float  # from double precision
    trusted_off: float  # what the trusted backend is off by
    allowed: float
    place: tuple[int, ...]  # where it is furthest off
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
    """What a value should be, and how far off it may be."""

    trusted: torch.Tensor
    best: torch.Tensor  # in double precision
    noisy: torch.Tensor  # and with rounding made up
    eps: float
    exact: bool  # every bit has to agree

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
        """What a right value may be off by."""
        other, best, noisy = (wide(t).reshape(-1) for t in (self.trusted, self.best, self.noisy))
        return self._allowed(other, best, noisy) if best.numel() else 0.0

    @property
    def trusted_off(self) -> float:
        """What the trusted backend is off by."""
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
        """How far each element is off, and how far it may be."""
        allowed = self._allowed(other, best, noisy)
        if not self.eps:  # integers and truth values: off, unless rounding could have decided them
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
    """Both not a number, or the same infinity."""
    return (one.isnan() & other.isnan()) | (one == other)


def _place(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        place.append(index)
    return tuple(reversed(place))


class Judge:
    """Knows what the values of one graph on given arguments should be."""

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
        """What values should be; to the last bit if `exact`, which also saves the doubles."""
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
