"""Runners of programs: how each places a module, ends a step, and waits for all work.

torpor and `torch._lazy` use the same dispatch key, and torpor wraps `nn.Module.__call__`, so each
process has only one runner, which is imported when it is chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torpor.errors import did_you_mean

Function = Callable[..., Tensor]


def _nothing() -> None:
    """No-op, for runners without such an action."""


def _none() -> int:
    return 0


def _same(function: Function) -> Function:
    return function


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


@dataclass(frozen=True)
class Runner:
    """A runner, as a race needs it."""

    place: Callable[[Any], Any]  # moves a module or a tensor to the runner's device
    prepare: Callable[[Function], Function] = _same  # transforms the program's function
    cut: Callable[[], object] = _nothing  # ends a step that does not end automatically
    cuts_by_itself: bool = True  # after an optimizer's step or a module call without gradients
    wait: Callable[[], object] = _nothing  # until nothing runs on another thread
    read: Callable[[Tensor], Tensor] = _plain  # converts a result to a plain tensor
    compiles: Callable[[], int] = _none  # number of compiles so far
    waited: Callable[[], float] = _none  # seconds of runs on the recording thread so far
    memory: Callable[[], int] = _none  # peak GPU bytes not allocated by torch
    unsettled: Callable[[], int] = _none  # grows until steps have reached their steady state


@dataclass(frozen=True)
class Spec:
    """Which runner, on which device, with which backend."""

    name: str
    device: str
    backend: str = ""
    options: tuple[tuple[str, Any], ...] = ()  # of the backend
    said: str = ""  # the backend and its options as the user wrote them

    @property
    def label(self) -> str:
        said = self.said or self.backend
        return self.name if said in ("", "inductor") else f"{self.name} ({said})"

    @property
    def needs_torpor(self) -> bool:
        return self.name.startswith("torpor")

    @property
    def records(self) -> bool:
        """Whether Python's part of a step consists of recording."""
        return self.name in ("torch-lazy", "torpor", "torpor-capture", "torpor-lazy")


def make(spec: Spec) -> Runner:
    """Make the runner, which then takes over this process."""
    return RUNNERS[spec.name](spec)


def eager(spec: Spec) -> Runner:
    """Plain PyTorch."""
    return Runner(_to(spec.device))


def compiled(spec: Spec) -> Runner:
    """torch.compile of the loss function, with an eager optimizer."""
    return _compiled(spec, lambda function: torch.compile(function))


def compiled_reduce_overhead(spec: Spec) -> Runner:
    """The same with CUDA graphs."""
    return _compiled(spec, lambda function: torch.compile(function, mode="reduce-overhead"))


def _compiled(spec: Spec, prepare: Callable[[Function], Function]) -> Runner:
    from torpor._torch import dynamo_graphs

    return Runner(_to(spec.device), prepare, compiles=dynamo_graphs, unsettled=dynamo_graphs)


def torch_lazy(spec: Spec) -> Runner:
    """PyTorch's own lazy tensors, on the TorchScript backend."""
    if spec.device != "cpu":
        raise RuntimeError(f"torch._lazy's TorchScript backend is not measured on {spec.device}")
    from torpor._torch import torch_lazy_system

    mark_step, wait, compiles = torch_lazy_system()
    return Runner(
        _to("lazy"),
        cut=mark_step,
        cuts_by_itself=False,
        wait=wait,
        compiles=compiles,
        unsettled=compiles,
    )


def torpor_concrete(spec: Spec) -> Runner:
    """`torpor.lazy(model)`: lazy on the model's device."""
    import torpor

    move = _to(spec.device)
    return _torpor(spec, lambda thing: torpor.lazy(move(thing)))


def torpor_captured(spec: Spec) -> Runner:
    """The same, with capture of repeated calls."""
    import torpor

    torpor.config.capture = "on"
    return torpor_concrete(spec)


def torpor_virtual(spec: Spec) -> Runner:
    """`model.to("lazy")`."""
    return _torpor(spec, _to("lazy"))


def _torpor(spec: Spec, place: Callable[[Any], Any]) -> Runner:
    import torpor

    chosen = torpor.use(spec.backend, **dict(spec.options))
    if torpor.config.compile_after < 0:  # compile early, as the steady state is timed
        torpor.config.compile_after = chosen.compile_after

    return Runner(
        place,
        cut=torpor.sync,
        wait=torpor.wait,
        read=lambda tensor: torpor.eager(tensor.detach()).cpu(),
        compiles=lambda: counted("UncachedCompile"),
        waited=lambda: torpor.metrics.timers().get("ExecuteHere", {}).get("total", 0.0),
        memory=lambda: int(chosen.metrics().get("peak_bytes_in_use", 0)),
        unsettled=torpor_unsettled,
    )


def counted(*names: str) -> int:
    """The sum of torpor's counters with these names."""
    import torpor

    counters = torpor.metrics.counters()
    return sum(counters.get(name, 0) for name in names)


def torpor_unsettled() -> int:
    """Grows until torpor's steps have reached their steady state."""
    return counted("UncachedCompile", "InterpretedGraph", "ScalarsPromoted", "RegionMisses")


def torpor_compiled(spec: Spec) -> Runner:
    """`torch.compile(function, backend="torpor")`: TorchDynamo captures once, torpor runs it."""
    import torpor.compat.dynamo
    from torpor._torch import dynamo_graphs

    options = {"backend": spec.backend, **dict(spec.options)}

    def prepare(function: Function) -> Function:
        # by function, as the name requires an installed package
        return torch.compile(function, backend=torpor.compat.dynamo.torpor, options=options)

    return Runner(
        _to(spec.device), prepare, wait=torpor.wait, compiles=dynamo_graphs, unsettled=dynamo_graphs
    )


def _to(device: str) -> Callable[[Any], Any]:
    return lambda thing: thing.to(device)


RUNNERS: dict[str, Callable[[Spec], Runner]] = {
    "eager": eager,
    "compile": compiled,
    "compile-reduce-overhead": compiled_reduce_overhead,
    "torch-lazy": torch_lazy,
    "torpor": torpor_concrete,
    "torpor-capture": torpor_captured,
    "torpor-lazy": torpor_virtual,
    "torpor-compile": torpor_compiled,
}
BY_DEVICE = {
    "cpu": ("eager", "compile", "torch-lazy", "torpor", "torpor-lazy"),
    "cuda": (
        "eager",
        "compile",
        "compile-reduce-overhead",
        "torpor",
        "torpor-capture",
        "torpor-compile",
    ),
}


def specs(
    names: list[str], backends: list[str], device: str, options: dict[str, Any]
) -> list[Spec]:
    """A runner per name; for torpor's, one per backend."""
    found: list[Spec] = []
    for name in names:
        _check_name(name)
        if name.startswith("torpor"):
            for said in backends:
                backend, own = with_options(said)
                found.append(Spec(name, device, backend, tuple((options | own).items()), said))
        else:
            found.append(Spec(name, device))
    return found


def with_options(said: str) -> tuple[str, dict[str, Any]]:
    """A backend with its own options: `inductor+equal_subgraphs=false+max_nodes=100`."""
    backend, *options = said.split("+")
    return backend, dict(map(option, options))


def option(said: str) -> tuple[str, Any]:
    """Parse `name=value`, with a value in JSON, or a word."""
    name, equals, value = said.partition("=")
    if not name or not equals:
        raise ValueError(f"an option is name=value, not {said!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _check_name(name: str) -> None:
    if name not in RUNNERS:
        hint = did_you_mean(name, RUNNERS)
        raise ValueError(f"no runner {name!r}: there are {', '.join(RUNNERS)}{hint}")
