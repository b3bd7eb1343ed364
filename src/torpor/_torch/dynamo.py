"""TorchDynamo: its backends, and frames in which it meets a lazy tensor.

It reaches the registry of backends, AOTAutograd, `convert_frame` and `VariableBuilder`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import _C

from torpor._torch.import_hooks import after_import
from torpor._torch.uses import Uses


def dynamo_backends() -> list[str]:
    """The names of all of TorchDynamo's backends, those for debugging included."""
    from torch._dynamo.backends.registry import list_backends

    return [name for name in list_backends(exclude_tags=()) if name != "torpor"]


def dynamo_compiler(name: str) -> Callable[..., Any]:
    """The function behind a name of TorchDynamo's backends."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def dynamo_training_backend(
    compile_graph: Callable[[torch.fx.GraphModule, int, bool], Callable[..., Any]],
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """A TorchDynamo backend that compiles forward and backward graphs with `compile_graph`.

    The graphs are functional graphs of ATen ops, but for inputs that are written to in the end, by
    `copy_`; a compiled one takes its inputs as one list. What is cheap, such as a view of a weight,
    is computed again in backward rather than kept for it.
    `compile_graph` is also told how many results are for the user: those after them are kept for
    backward, and may have any strides; and whether it is a forward graph, whose results lie in one
    memory where they do in the graph. Gradients never do: autograd may add to one in place.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_boxed(
        module: torch.fx.GraphModule, shown: int, is_forward: bool
    ) -> Callable[..., Any]:
        compiled = compile_graph(module, shown, is_forward)

        def run(args: list[Any]) -> Any:
            return compiled(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd tells
        return run

    def forward(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = torch._guards.TracingContext.try_get()
        about = None if context is None else context.fw_metadata
        returned = len(module.graph.output_node().args[0])  # type: ignore[arg-type]  # a tuple
        shown = returned if about is None else about.num_forward_returns
        return compile_boxed(module, shown, True)

    def backward(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return compile_boxed(module, len(module.graph.output_node().args[0]), False)  # type: ignore[arg-type]  # a tuple

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        keep_inference_input_mutations=True,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decompositions,
    )


def dynamo_graphs() -> int:
    """How many graphs TorchDynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class MetLazy(BaseException):
    """TorchDynamo has met a lazy tensor; `source` is the expression that leads to it.

    No `Exception`: TorchDynamo turns those into errors of its own.
    """

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


class Capturing(threading.local):
    """Whether this thread captures a frame that meets lazy tensors."""

    on = False


CAPTURING = Capturing()


@dataclass(frozen=True)
class LazyFrames:
    """What becomes of frames in which TorchDynamo meets lazy tensors."""

    is_ours: Callable[[Any], bool]  # a frame of torpor's own code: it runs as it is
    meets_lazy: Callable[[Any], bool]  # asked before a frame is traced
    is_lazy: Callable[[object], bool]
    remember: Callable[[Any, str], None]  # the way to a tensor that was found only while tracing
    may_capture: Callable[[Any], bool]
    backend: Callable[..., Any]  # compiles what is captured
    not_captured: Callable[[Any, str], None]  # a frame, and why
    timed: Callable[[], AbstractContextManager[Any]]  # what a capture takes


def on_dynamo_frame(frames: LazyFrames) -> None:
    """Capture frames in which TorchDynamo meets a lazy tensor, with a backend of our own.

    A frame that cannot be captured runs uncompiled, with all it calls. What was compiled for plain
    tensors stays.
    """

    def watch_frames(module: Any) -> None:
        wrapper = module.CatchErrorsWrapper
        convert = wrapper.__call__

        @functools.wraps(convert)
        def __call__(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            if CAPTURING.on:
                return convert(self, frame, *args, **kwargs)
            if frames.is_ours(frame):
                return _uncompiled()
            if not frames.meets_lazy(frame):
                try:
                    return convert(self, frame, *args, **kwargs)
                except MetLazy as met:
                    frames.remember(frame, met.source)
            if not frames.may_capture(frame):
                return _uncompiled()
            with frames.timed(), _capturing():
                ours = wrapper(module.convert_frame(frames.backend, self.hooks), self.hooks)
                try:
                    return convert(ours, frame, *args, **kwargs)
                except Exception as error:
                    reason = getattr(error, "inner_exception", error)  # of a backend
                    frames.not_captured(frame, str(reason))
                    return _uncompiled()

        wrapper.__call__ = __call__

    def watch_variables(module: Any) -> None:
        builder = module.VariableBuilder
        wrap, subclass = builder._wrap, module.infer_subclass_type

        @functools.wraps(wrap)
        def _wrap(self: Any, value: Any) -> Any:
            if not frames.is_lazy(value):
                return wrap(self, value)
            if CAPTURING.on:
                return self.wrap_tensor(value)
            name = getattr(self.source, "name", "")  # a method before it became a property
            raise MetLazy(str(name() if callable(name) else name))

        builder._wrap = _wrap
        module.infer_subclass_type = lambda value: (
            None if CAPTURING.on and frames.is_lazy(value) else subclass(value)
        )

    after_import("torch._dynamo.convert_frame", watch_frames)
    after_import("torch._dynamo.variables.builder", watch_variables)


@contextmanager
def _capturing() -> Iterator[None]:
    """Capture lazy tensors in the body: sizes and numbers are constants, hooks are guarded.

    Backward is traced without autocast: it runs after the body of autocast, as a rule. Calls of
    numpy stay numpy's, whose bits are not torch's. Nobody has asked for TorchDynamo's advice.
    """
    import torch._dynamo.config
    import torch._functorch.config

    dynamo: Any = torch._dynamo.config
    functorch: Any = torch._functorch.config
    forgets = "invalidate_compile_context_weakrefs"  # or `swap_tensors` refuses parameters
    CAPTURING.on = True
    try:
        with (
            dynamo.patch(
                automatic_dynamic_shapes=False, assume_static_by_default=True,
                skip_nnmodule_hook_guards=False, specialize_float=True, trace_numpy=False,
            ),
            dynamo.patch({forgets: True} if hasattr(dynamo, forgets) else {}),
            functorch.patch(donated_buffer=False, backward_pass_autocast="off"),
            warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            _silence_loggers()
            yield
    finally:
        CAPTURING.on = False


def _silence_loggers() -> None:
    """Let TorchDynamo log no mistakes while it captures; what `TORCH_LOGS` asks for is logged."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith(_TRACERS) and isinstance(logger, logging.Logger):
            logger.addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not (CAPTURING.on and record.levelno >= logging.WARNING)


_TRACERS = ("torch._dynamo", "torch._functorch", "torch._subclasses")


def take_ops_apart_as_eager_does() -> None:
    """While something is captured, composite ops are taken apart by torch's C++, as in eager.

    Python's decompositions, made for symbolic sizes, do other sums: other bits.
    """

    def watch(module: Any) -> None:
        enable = module.enable_python_dispatcher

        @functools.wraps(enable)
        def enable_python_dispatcher() -> Any:
            return nullcontext() if CAPTURING.on else enable()

        module.enable_python_dispatcher = enable_python_dispatcher

    after_import("torch._functorch.aot_autograd", watch)
    after_import("torch._functorch._aot_autograd.graph_capture", watch)


def detach_what_has_no_gradient() -> None:
    """Let backward of what is captured not go on to what made an input that gets no gradient.

    AOTAutograd detaches such inputs where they are no leaves: fakes of lazy tensors always are.
    """

    def watch(module: Any) -> None:
        partition = module._aot_stage2a_partition
        place = [*inspect.signature(partition).parameters].index("fw_metadata")

        @functools.wraps(partition)
        def without_leaves(*args: Any) -> Any:
            about = args[place]
            before = about.input_info
            if CAPTURING.on:
                about.input_info = [replace(info, is_leaf=False) for info in before]
            try:
                return partition(*args)
            finally:
                about.input_info = before

        module._aot_stage2a_partition = without_leaves

    after_import("torch._functorch._aot_autograd.graph_compile", watch)


def keep_lazy_tangents(is_lazy: Callable[[object], bool]) -> None:
    """Let lazy gradients enter the backward of what was captured with lazy tensors as they are."""

    def watch(module: Any) -> None:
        dispatch = module.AOTDispatchAutograd
        process = dispatch.process_runtime_tangent

        @functools.wraps(process)
        def process_runtime_tangent(x: Any, meta: Any, *args: Any, **kwargs: Any) -> Any:
            if x is None and getattr(meta, "_torpor_region", False):
                return None, [None]  # of a result that is not used
            if not (is_lazy(x) and getattr(meta, "_torpor_region", False)):
                return process(x, meta, *args, **kwargs)
            x = module.coerce_to_expected_memory_format(x, meta.memory_format)
            return x, [x]

        dispatch.process_runtime_tangent = staticmethod(process_runtime_tangent)

    after_import("torch._functorch._aot_autograd.runtime_wrappers", watch)


@dataclass(frozen=True)
class Captured:
    """A graph of ATen ops, in functional form, as AOTAutograd calls it."""

    module: torch.fx.GraphModule
    shown: int | None = None  # a forward graph: results after these are kept for the backward graph
    resumes: bool = False  # a backward graph: one argument stands for all that was kept
    uses: Uses | None = None  # a backward graph: those of the graph that it differentiates


@dataclass(frozen=True)
class GraphOps:
    """A graph of torch's functions, as TorchDynamo has captured it, and what was made of it."""

    uses: Uses
    compiled: Callable[..., Any]
    written: Collection[int]  # uses that it writes to
    draws: bool  # random numbers, in a graph with a backward


def region_backend(
    make: Callable[[Captured], Callable[[list[Any]], list[Any]]],
    finish: Callable[[GraphOps], Callable[..., Any]],
) -> Callable[..., Any]:
    """A TorchDynamo backend that has forward and backward graphs called by what `make` gives.

    What `finish` gives is called by TorchDynamo.
    """

    def compile_boxed(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = torch._guards.TracingContext.try_get()
        about = None if context is None else context.fw_metadata
        for meta in () if about is None else about.subclass_tangent_meta or ():
            object.__setattr__(meta, "_torpor_region", True)
        uses = module.meta.get("torpor_uses")
        captured = module.meta.get("torpor_captured") or Captured(module, uses=uses)
        if about is not None:
            about.bw_donated_idxs = []  # nothing was donated; without a list, it is an error
        if about is not None and not captured.resumes:
            _refuse_writes(about.input_info)
            _INPUTS.written = {i for i, one in enumerate(about.input_info) if one.mutates_data}
        called = make(captured)

        def run(args: list[Any]) -> Any:
            return called(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd tells
        return run

    def backend(module: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        given = [_is_of_module(node) for node in module.graph.find_nodes(op="placeholder")]
        uses = Uses(module, inputs, given)
        _INPUTS.of_modules = [given[place] for place in uses.places]
        _INPUTS.again = uses.again
        _INPUTS.written, _INPUTS.draws = (), False
        compile_graph = aot_autograd(
            fw_compiler=compile_boxed,
            bw_compiler=compile_boxed,
            keep_inference_input_mutations=True,
            partition_fn=functools.partial(_partition, uses),
            decompositions={},
        )
        with uses.traced():
            compiled = compile_graph(uses.module, uses.inputs)
        uses.inputs.clear()  # the user's own tensors, which would live as long as the code
        return finish(GraphOps(uses, compiled, _INPUTS.written, _INPUTS.draws))

    return backend


class _Inputs(threading.local):
    """Which inputs of the graph that this thread captures are parts of a module."""

    of_modules: Sequence[bool] = ()
    again: Collection[int] = ()  # which of them are uses of one argument
    written: Collection[int] = ()  # those that the graph writes to
    draws = False  # the graph, random numbers


_INPUTS = _Inputs()


def _is_of_module(node: torch.fx.Node) -> bool:
    source = getattr(node.meta.get("grapharg"), "source", None)
    guarded = getattr(source, "guard_source", None)
    guarded = guarded() if callable(guarded) else guarded  # a method before it was a property
    return guarded is not None and "NN_MODULE" in guarded.name


def _refuse_writes(infos: Any) -> None:
    """Nothing is written but parts of modules: no guard tells which others share memory."""
    alike = len(infos) == len(_INPUTS.of_modules)
    for place, info in enumerate(infos):
        if info.mutates_data and not (alike and _INPUTS.of_modules[place]):
            raise ValueError("it writes to a tensor that is no part of a module")
        if (info.mutates_data or info.mutates_metadata) and place in _INPUTS.again:
            raise ValueError("it writes to a parameter that it uses more than once")


def _refuse_written(kept: list[torch.fx.Node]) -> None:
    """Backward reads nothing that forward has written to: it would read what is there by then."""
    for node in kept:
        while node.target is operator.getitem or getattr(node.target, "is_view", False):
            node = node.all_input_nodes[0]
        writers = (user.target for user in node.users if user.args and user.args[0] is node)
        if node.op == "placeholder" and torch.ops.aten.copy_.default in writers:
            raise ValueError("its backward reads a part of a module that it writes to")


def _partition(
    uses: Uses,
    joint: torch.fx.GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    **options: Any,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward and backward graphs between which AOTAutograd sees one tensor: the first one kept.

    It would keep a tensor for each, and they are many. What it sees is never run: the graphs
    themselves are beside it.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    uses.arrange(joint, num_fwd_outputs)
    for node in joint.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # drawn once
            _INPUTS.draws = True
    forward, backward = min_cut_rematerialization_partition(
        joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
    )
    results = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]  # a tuple
    _refuse_written(results[num_fwd_outputs:])
    kept, given = results[num_fwd_outputs:], list(backward.graph.find_nodes(op="placeholder"))
    alike = [node.name for node in kept] == [node.name for node in given[: len(kept)]]
    computed = [node for node in kept if node.op == "call_function"]
    tensors = all(isinstance(node.meta.get("val"), torch.Tensor) for node in kept)
    if not (alike and tensors and computed):
        backward.meta["torpor_uses"] = uses
        return forward, backward
    place = kept.index(computed[0])
    seen = (
        _only(forward, results[:num_fwd_outputs] + [kept[place]]),
        _resumed(backward, len(kept), place),
    )
    seen[0].meta["torpor_captured"] = Captured(forward, num_fwd_outputs)
    seen[1].meta["torpor_captured"] = Captured(backward, None, resumes=True, uses=uses)
    return seen


def _only(module: torch.fx.GraphModule, results: list[torch.fx.Node]) -> torch.fx.GraphModule:
    """A copy of a graph, with these results."""
    graph, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in module.graph.nodes:
        if node.op == "output":
            made = graph.output(tuple(one if one is None else copies[one] for one in results))
            made.meta = dict(node.meta)
            if "desc" in made.meta:
                made.meta["desc"] = tuple(made.meta["desc"])[: len(results)]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return torch.fx.GraphModule(module, graph)


def _resumed(module: torch.fx.GraphModule, kept: int, place: int) -> torch.fx.GraphModule:
    """A copy of a backward graph whose first arguments, all but one, are made of that one."""
    graph, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    given = list(module.graph.find_nodes(op="placeholder"))
    copies[given[place]] = holder = graph.node_copy(given[place], copies.__getitem__)
    for node in given[kept:]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in given[:kept]:
        if node not in copies:
            copies[node] = graph.call_function(torch.ops.aten.alias.default, (holder,))
            copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return torch.fx.GraphModule(module, graph)


def _uncompiled() -> Any:
    """What tells TorchDynamo to run one frame, and all it calls, as it is; others are compiled."""
    from torch._dynamo import types

    skip = types.FrameAction.SKIP
    strategy = types.FrameExecStrategy(skip, skip)
    count = getattr(_C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is not None:
        count(-1)  # do not count: `fullgraph=True` is an error where no frame was compiled
    return types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)
