"""Turns an fx graph into a function that runs its compiled graph, without recording it again."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

import torpor
from torpor import config
from torpor import metrics as core_metrics
from torpor.compat.torch_lazy import computation, metrics, tensor_ids
from torpor.compat.torch_lazy import debug as lazy_debug
from torpor.compat.torch_lazy.tensor_factory_functions import tensor_factory_functions
from torpor.execute.storage import TRACE

debug = os.environ.get("debug_extract_compiled_graph") is not None  # noqa: SIM112  # torch's name
"""Print every extracted graph to standard error."""


@dataclass
class GraphInputMatcher:
    """Assembles the inputs of a graph from the arguments of a call.

    An input with the tensor id of an argument is taken from there; all others are as they were when
    the graph was recorded.
    """

    tensor_id_to_arg_idx: dict[int, int]
    graph_input_tensor_ids: list[int]
    graph_input_ivalues: list[Any]

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        places = map(self.tensor_id_to_arg_idx.get, self.graph_input_tensor_ids)
        return [
            recorded if place is None else args[place]
            for place, recorded in zip(places, self.graph_input_ivalues, strict=True)
        ]


class ReturnValueHandler:
    """Duplicates a tensor to all positions in which it was returned.

    A graph computes each distinct tensor once: for `return c, c` it has one result.
    """

    def __init__(self, lazy_out_list: Sequence[Any]) -> None:
        self.total_count = len(lazy_out_list)
        places: dict[int, list[int]] = {}
        for place, tensor in enumerate(lazy_out_list):
            places.setdefault(id(tensor), []).append(place)
        self.index: list[list[int]] = list(places.values())

    def duplicate_eager_tensors(self, eager_tensor_list: Sequence[Any]) -> list[Any]:
        if len(eager_tensor_list) != len(self.index):
            raise AssertionError(
                f"there are {len(self.index)} different tensors, not {len(eager_tensor_list)}"
            )
        everywhere: list[Any] = [None] * self.total_count
        for tensor, places in zip(eager_tensor_list, self.index, strict=True):
            for place in places:
                everywhere[place] = tensor
        return everywhere


def force_lazy_device(model: fx.GraphModule) -> None:
    """Make an fx graph create all its tensors on the device `lazy`.

    Devices in it are replaced, and factory functions without one are given one. Device indices are
    dropped, as all inputs are moved to one lazy device.
    """
    lazy = torch.device("lazy")

    def replace(arg: Any) -> Any:
        return lazy if isinstance(arg, torch.device) else arg

    for node in model.graph.nodes:
        node.args = map_aggregate(node.args, replace)
        kwargs = dict(map_aggregate(node.kwargs, replace))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = lazy
        if node.target in tensor_factory_functions and lazy not in (*node.args, *kwargs.values()):
            kwargs["device"] = lazy
        node.kwargs = kwargs
    model.recompile()


def get_fallback_ops() -> list[str]:
    """The ops that fell back since counters were reset, as `aten::op=number`."""
    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return [f"{name}={metrics.counter_value(name)}" for name in names]


def extract_compiled_graph(
    model: fx.GraphModule, example_inputs: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Record `model` once, and return a function that runs the compiled graph.

    The function takes tensors like `example_inputs` and returns the list of results. It performs
    the model's writes: to arguments, parameters and buffers, which are read anew at every call. A
    model that a graph cannot represent is rejected with a RuntimeError: one that falls back, draws
    random numbers, or reads data in between. Shapes and types are checked at every call; that
    Python branches take the same path is up to the caller (TorchDynamo's guards).
    """
    lazy_model = copy.deepcopy(model).to(device=torch.device("lazy"))
    force_lazy_device(lazy_model)
    state = _state(model)
    lazy_args = [_moved(arg) for arg in example_inputs]
    lazy_inputs = [*lazy_args, *_state(lazy_model)]
    arg_of = {tensor_ids.id_of(tensor): place for place, tensor in enumerate(lazy_inputs)}
    with _extractable():
        lazy_out = lazy_model(*lazy_args)
    lazy_outs = list(lazy_out) if isinstance(lazy_out, (tuple, list)) else [lazy_out]
    roots = [*lazy_inputs, *filter(torpor.is_lazy, lazy_outs)]
    matcher = GraphInputMatcher(arg_of, *computation.get_tensors_ts_device_data_node(roots))
    handler = ReturnValueHandler(roots)
    graph_hash = computation.get_graph_hash(roots)
    graph = computation.find_graph(graph_hash)
    graph.compiled()
    if debug:
        _show(model, roots, graph_hash, matcher)
    outputs = _Outputs(lazy_inputs, lazy_outs)
    number = len(lazy_args)

    def optimized_mod(*args: torch.Tensor) -> list[Any]:
        if len(args) != number:
            raise TypeError(f"the graph was recorded for {number} arguments, not {len(args)}")
        given = [*args, *state]
        results = handler.duplicate_eager_tensors(graph.run(matcher(given)))
        with torch.no_grad():
            for tensor, new in zip(given, results):
                if new is not tensor:
                    tensor.copy_(new)
        return outputs(given, results[len(given) :])

    return optimized_mod


class _Outputs:
    """Maps results, the call's own arguments and other objects to what a call returns."""

    def __init__(self, lazy_inputs: Sequence[Any], lazy_outs: Sequence[Any]) -> None:
        inputs = {id(tensor): place for place, tensor in enumerate(lazy_inputs)}
        self.inputs = [inputs.get(id(out)) for out in lazy_outs]
        self.constants = [None if torpor.is_lazy(out) else out for out in lazy_outs]
        self.computed = [torpor.is_lazy(out) for out in lazy_outs]

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        rest = iter(results)
        returned = []
        for place, constant, computed in zip(self.inputs, self.constants, self.computed):
            result = next(rest) if computed else constant
            returned.append(result if place is None else given[place])
        return returned


def _moved(arg: Any) -> torch.Tensor:
    if not isinstance(arg, torch.Tensor):
        raise TypeError(f"example inputs are tensors, not {type(arg).__name__}")
    return arg.detach().to(device="lazy", copy=True)


def _state(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@contextmanager
def _extractable() -> Iterator[None]:
    """Check that the body is recorded in one piece, or raise."""
    before, epoch, seed = core_metrics.counters(), TRACE.epoch, torpor.seed_state()
    cut_after_module, config.cut_after_module = config.cut_after_module, False
    try:
        yield
    finally:
        config.cut_after_module = cut_after_module
    ran = [
        f"{name}={value - before.get(name, 0)}"
        for name, value in core_metrics.counters().items()
        if "::" in name and not name.startswith("lazy::") and value > before.get(name, 0)
    ]
    if ran:
        raise RuntimeError(
            f"Fail to extract the compiled graph because of fallback: {','.join(sorted(ran))}"
        )
    if not torch.equal(seed, torpor.seed_state()):
        raise RuntimeError(
            "Fail to extract the compiled graph because of random numbers: torpor draws them when "
            "they are recorded, so every call would get the same; put the model in eval mode"
        )
    if TRACE.epoch != epoch:
        raise RuntimeError(
            "Fail to extract the compiled graph because the trace was cut inside the model: it "
            f"has more than {config.max_trace_nodes} nodes (torpor.config.max_trace_nodes)"
        )


def _show(
    model: fx.GraphModule, roots: Sequence[Any], graph_hash: bytes, matcher: GraphInputMatcher
) -> None:
    sys.stderr.write(
        f"fx code:\n{model.code}\nIR:\n{lazy_debug.dump_ir(roots, 'text')}\n"
        f"graph hash: {graph_hash.hex()}\nargument ids: {list(matcher.tensor_id_to_arg_idx)}\n"
        f"graph input ids: {matcher.graph_input_tensor_ids}\n"
    )
