"""Inductor: compiles fx graphs; its settings; serialization of compiled code.

Uses the tracer of `make_fx`, `compile_fx_inner`, and Inductor's cache of compiled graphs.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torpor._torch.fakes import tracing_with


def last_traced_node() -> torch.fx.Node:
    """The node that `make_fx` added last to the graph it is tracing on this thread."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None, "called while make_fx traces"
    graph = mode.tracer.graph
    return next(iter(reversed(graph.nodes)), graph._root)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions, to be applied while tracing."""
    import torch._inductor.lowering  # noqa: F401  # some decompositions require it
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_options() -> list[str]:
    """Every setting of Inductor, by dotted name."""
    from torch._inductor import list_options

    return list(list_options())


_CUSTOM_PASSES = (
    "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass",
    "joint_custom_post_pass", "pre_grad_custom_pass", "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass", "custom_partitioner_fn",
)  # fmt: skip


def inductor_settings() -> str | None:
    """The settings of Inductor that affect its output; None if some cannot be expressed as text."""
    from torch._inductor import config as settings

    changes: Any = settings  # a module whose methods are made at run time
    return _inductor_settings(changes.get_hash())


@functools.lru_cache(maxsize=16)
def _inductor_settings(hashed: bytes) -> str | None:
    from torch._inductor import config as settings

    changes: Any = settings
    if any(getattr(settings, name, None) for name in _CUSTOM_PASSES):
        return None
    text = repr(sorted(changes.save_config_portable(ignore_private_configs=False).items()))
    return None if " at 0x" in text else text


def inductor_compile(
    module: torch.fx.GraphModule,
    inputs: list[torch.Tensor],
    mode: Any,
    options: dict[str, Any],
) -> Any:
    """Compile a functional ATen graph for fake inputs; the result takes a list of tensors.

    `mode` is the inputs' fake-tensor mode. Results have the strides they have in the graph.
    """
    from torch._inductor import config as settings
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    _mend_local_buffers()
    with settings.patch(options), tracing_with(mode), torch.no_grad():
        promised = [node.meta["val"].stride() for node in _returned(module)]
        known = set(module.graph.nodes)
        with mode, V.set_fake_mode(mode):
            module = _recursive_joint_graph_passes(module) or module
            _update_values(module, known)
            _keep_strides(module, promised)
        output = module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(promised)))
        return compile_fx_inner(
            module,
            inputs,
            cudagraphs=BoxedBool(False),
            is_inference=True,
        )


def _returned(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]  # a tuple of nodes


def _update_values(module: torch.fx.GraphModule, known: set[torch.fx.Node]) -> None:
    """Recompute fake values of nodes that depend on nodes which are not in `known`."""
    changed: set[torch.fx.Node] = set()
    for node in module.graph.nodes:
        if node not in known:
            changed.add(node)
        elif node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
            args, keywords = torch.fx.map_arg((node.args, node.kwargs), _fake_value)
            value = node.target(*args, **keywords)
            if _strides(value) != _strides(node.meta["val"]):
                changed.add(node)
                node.meta["val"] = value


def _fake_value(node: torch.fx.Node) -> Any:
    return node.meta["val"]


def _strides(value: Any) -> list[tuple[int, ...]]:
    leaves = pytree.tree_leaves(value)
    return [leaf.stride() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _keep_strides(module: torch.fx.GraphModule, promised: list[tuple[int, ...]]) -> None:
    """Add copies for results whose strides a pass over the joint graph has changed.

    On a GPU a matrix product may become a slice of a padded one, if benchmarks favour it; Inductor
    takes the required strides of results from the graph after these passes.
    """
    output = module.graph.output_node()
    results = _returned(module)
    for place, strides in enumerate(promised):
        if results[place].meta["val"].stride() != strides:
            with module.graph.inserting_before(output):
                results[place] = _copied(module.graph, results[place], strides)
    if results != _returned(module):
        output.args = (tuple(results),)
        module.recompile()


def _copied(graph: torch.fx.Graph, node: torch.fx.Node, strides: tuple[int, ...]) -> torch.fx.Node:
    """Nodes that copy a tensor into dense memory, preserving its order of dimensions."""
    aten = torch.ops.aten
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.permute.default, ([order.index(dim) for dim in range(len(order))],), {}),
    ]
    for op, args, keywords in calls:
        value = op(node.meta["val"], *args, **keywords)
        node = graph.call_function(op, (node, *args), keywords)
        node.meta["val"] = value
    return node


@functools.cache
def _mend_local_buffers() -> None:
    """Fix a bug in Inductor's fusion of row loops through a one-row buffer (torch 2.11 to 2.13).

    Its C++ also vectorizes over sixteen rows at a time, which then overwrite each other in the
    buffer. Such loops are compiled without the buffer, like those that do not qualify for it.
    """
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    fused: Any = cpp.OuterLoopFusedSchedulerNode
    may_fuse = fused.check_outer_fusion_loop_level_attr

    @functools.wraps(may_fuse)
    def check(self: Any, kernels: Any, depth: int) -> bool:
        if getattr(V.local_buffer_context, "local_buffers", None):
            loops = [loop for kernel in kernels for loop in kernel.loop_nest.loops[:depth]]
            if any(loop.steps != 1 for loop in loops):
                return False
        return bool(may_fuse(self, kernels, depth))

    fused.check_outer_fusion_loop_level_attr = check


def inductor_prefers_channels_last(module: torch.fx.GraphModule) -> bool:
    """Whether Inductor prefers channels-last layout.

    It decides that for graphs with convolutions only, not for those with only their derivatives.
    """
    op = torch.ops.aten.convolution.default
    if not module.graph.find_nodes(op="call_function", target=op):
        return False
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


_REFUSED_OP = re.compile(r"^\s*target: ([\w.]+)", re.MULTILINE)


def ops_inductor_refused(error: BaseException) -> set[str]:
    """The ATen ops that Inductor could not lower, parsed from its error."""
    return set(_REFUSED_OP.findall(str(error)))


_BEYOND_SOURCE = (
    # what code may need besides its source and constants
    "inputs_to_check", "torchbind_constants", "opaque_value_type_classes", "frozen_param_names",
    "_wrap_compiled_regions",
)  # fmt: skip


def inductor_module(code: Any) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]] | None:
    """The Python source that Inductor generated, the globals of that module, and its constants.

    None if `code` needs more than that: it is for a GPU, or not made by Inductor.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(code, CompiledFxGraph):
        return None
    on_gpu = not set(code.device_types) <= {"cpu", "meta"}
    if on_gpu or any(getattr(code, name, None) for name in _BEYOND_SOURCE):
        return None
    for module in reversed(PyCodeCache.modules):
        if getattr(module, "key", None) == code.cache_key:
            return code.source_code, vars(module), dict(code.constants or {})
    return None


def inductor_pickle(code: Any) -> bytes | None:
    """Serialize the result of `inductor_compile` like Inductor's cache; None if impossible."""
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(code, CompiledFxGraph):
        return None
    kept = copy.copy(code)
    kept.prepare_for_serialization()
    return pickle.dumps(kept)


def inductor_unpickle(data: bytes, inputs: list[torch.Tensor], mode: Any) -> Any:
    """Restore code from `inductor_pickle`. Unpickling executes `data`, so it must be trusted.

    `inputs` are fake tensors of `mode` like those it was compiled for.
    """
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    constants = CompiledFxGraphConstants()
    code, _ = FxGraphCache.cache_hit_post_compile(pickle.loads(data), {}, constants)
    if code is None:
        raise RuntimeError("Inductor could not restore the code")
    options: Any = {**code.fx_kwargs, "cudagraphs": BoxedBool(False), "is_backward": False}
    with tracing_with(mode), torch.no_grad():
        code.post_compile(inputs, constants, options)
    return code
