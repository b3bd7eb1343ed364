"""TorchDynamo: its backends, and what happens in frames in which it meets a lazy tensor.

Uses the registry of backends, AOTAutograd, `convert_frame` and `VariableBuilder`.
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
    """The names of all TorchDynamo backends, including debugging ones."""
    from torch._dynamo.backends.registry import list_backends

    return [name for name in list_backends(exclude_tags=()) if name != "torpor"]


def dynamo_compiler(name: str) -> Callable[..., Any]:
    """The TorchDynamo backend with that name."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def dynamo_training_backend(
    compile_graph: Callable[[torch.fx.GraphModule, int, bool], Callable[..., Any]],
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """A TorchDynamo backend that compiles forward and backward graphs with `compile_graph`.

    The graphs are functional ATen graphs, except for final `copy_` ops into mutated inputs;
    compiled ones use the boxed calling convention. Cheap values, such as views of weights, are
    recomputed in backward rather than saved. `compile_graph` also gets the number of user-visible
    results (the rest are saved for backward, and may have any strides), and whether it is a forward
    graph, whose results must alias as in the graph. Gradients must not: autograd may accumulate
    into one in place.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_boxed(
        module: torch.fx.GraphModule, shown: int, is_forward: bool
    ) -> Callable[..., Any]:
        compiled = compile_graph(module, shown, is_forward)

        def run(args: list[Any]) -> Any:
            return compiled(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's marker
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

    Not an `Exception`, which TorchDynamo would convert to an error of its own.
    """

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


class Capturing(threading.local):
    """Whether this thread is capturing a frame with lazy tensors."""

    on = False


CAPTURING = Capturing()


@dataclass(frozen=True)
class LazyFrames:
    """How to handle frames in which TorchDynamo meets lazy tensors."""

    is_ours: Callable[[Any], bool]  # a frame of torpor's code, to run uncompiled
    meets_lazy: Callable[[Any], bool]  # called before a frame is traced
    is_lazy: Callable[[object], bool]
    remember: Callable[[Any, str], None]  # the source of a tensor found only during tracing
    may_capture: Callable[[Any], bool]
    backend: Callable[..., Any]  # compiles what is captured
    not_captured: Callable[[Any, str], None]  # called with a frame and the reason
    timed: Callable[[], AbstractContextManager[Any]]  # measures the time of captures


def on_dynamo_frame(frames: LazyFrames) -> None:
    """Capture frames in which TorchDynamo meets a lazy tensor, using our own backend.

    A frame that cannot be captured runs uncompiled, with all it calls. Code that was compiled for
    plain tensors is kept.
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
                    reason = getattr(error, "inner_exception", error)  # raised in a backend
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
            name = getattr(self.source, "name", "")  # a method in older releases
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

    Backward is traced without autocast, as it usually runs outside of it. Calls of NumPy are not
    traced, as torch's results would differ in the last bits. TorchDynamo's advice is suppressed.
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


@contextmanager
def as_if_not_compiled() -> Iterator[None]:
    """TorchDynamo traces code that asks whether it is being compiled as code that is not."""
    from torch._dynamo.variables.torch import tracing_state_functions

    answers: Any = tracing_state_functions()
    names = ("is_compiling", "is_dynamo_compiling")
    before = {asked: answer for asked, answer in answers.items() if asked.__name__ in names}
    answers.update(dict.fromkeys(before, False))
    try:
        yield
    finally:
        answers.update(before)


def _silence_loggers() -> None:
    """Suppress TorchDynamo's warnings during capture, except logs enabled by `TORCH_LOGS`."""
    for name, logger in logging.root.manager.loggerDict.copy().items():
        if name.startswith(_TRACERS) and isinstance(logger, logging.Logger):
            logger.addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not (CAPTURING.on and record.levelno >= logging.WARNING)


_TRACERS = ("torch._dynamo", "torch._functorch", "torch._subclasses")


def take_ops_apart_as_eager_does() -> None:
    """During capture, decompose composite ops in C++ like eager.

    Python's decompositions, made for symbolic sizes, compute differently: other last bits.
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
    """Stop captured backward graphs at inputs that get no gradient.

    AOTAutograd detaches such inputs unless they are leaves; fakes of lazy tensors always are.
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
    """Pass lazy gradients unchanged to the backward of code captured with lazy tensors."""

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
    """A functional ATen graph, as AOTAutograd calls it."""

    module: torch.fx.GraphModule
    shown: int | None = None  # forward graph: how many results are not saved for backward
    resumes: bool = False  # backward graph: one argument stands for all saved tensors
    uses: Uses | None = None  # backward graph: the uses of the graph that it differentiates


@dataclass(frozen=True)
class GraphOps:
    """A graph of torch functions captured by TorchDynamo, and what it was compiled to."""

    uses: Uses
    compiled: Callable[..., Any]
    written: Collection[int]  # uses that it writes to
    draws: bool  # random numbers, in a graph with a backward


def region_backend(
    make: Callable[[Captured], Callable[[list[Any]], list[Any]]],
    finish: Callable[[GraphOps], Callable[..., Any]],
) -> Callable[..., Any]:
    """A TorchDynamo backend whose forward and backward graphs are called by the result of `make`.

    TorchDynamo calls the result of `finish`.
    """

    def compile_boxed(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = torch._guards.TracingContext.try_get()
        about = None if context is None else context.fw_metadata
        for meta in () if about is None else about.subclass_tangent_meta or ():
            object.__setattr__(meta, "_torpor_region", True)
        uses = module.meta.get("torpor_uses")
        captured = module.meta.get("torpor_captured") or Captured(module, uses=uses)
        if about is not None:
            about.bw_donated_idxs = []  # nothing is donated; None would be an error
        if about is not None and not captured.resumes:
            _refuse_writes(about.input_info)
            _INPUTS.written = {i for i, one in enumerate(about.input_info) if one.mutates_data}
            seen = about.mutated_graph_handled_indices_seen_by_autograd
            hidden = _written_by_batch_norm(module)
            about.mutated_graph_handled_indices_seen_by_autograd = [
                place for place in seen if place not in hidden
            ]
        called = make(captured)

        def run(args: list[Any]) -> Any:
            return called(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's marker
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
        uses.inputs.clear()  # user tensors, which the code would keep alive
        return finish(GraphOps(uses, compiled, _INPUTS.written, _INPUTS.draws))

    return backend


class _Inputs(threading.local):
    """Facts about the inputs of the graph that this thread is capturing."""

    of_modules: Sequence[bool] = ()  # which of them belong to modules
    again: Collection[int] = ()  # which of them are uses of one argument
    written: Collection[int] = ()  # which of them the graph writes to
    draws = False  # whether the graph draws random numbers


_INPUTS = _Inputs()


def _is_of_module(node: torch.fx.Node) -> bool:
    source = getattr(node.meta.get("grapharg"), "source", None)
    guarded = getattr(source, "guard_source", None)
    guarded = guarded() if callable(guarded) else guarded  # a method in older releases
    return guarded is not None and "NN_MODULE" in guarded.name


def _refuse_writes(infos: Any) -> None:
    """Allow writes only to parts of modules: no guard checks whether other inputs alias."""
    alike = len(infos) == len(_INPUTS.of_modules)
    for place, info in enumerate(infos):
        if info.mutates_data and not (alike and _INPUTS.of_modules[place]):
            raise ValueError("it writes to a tensor that is no part of a module")
        if (info.mutates_data or info.mutates_metadata) and place in _INPUTS.again:
            raise ValueError("it writes to a parameter that it uses more than once")


def _written_by_batch_norm(module: torch.fx.GraphModule) -> set[int]:
    """Inputs that are written by batch norm alone, whose kernels do not raise their versions."""
    found = set()
    for place, node in enumerate(module.graph.find_nodes(op="placeholder")):
        writers = [user for user in node.users if user.target is torch.ops.aten.copy_.default]
        if any(_is_statistic(writer.args[1]) for writer in writers):
            found.add(place)
    return found


def _is_statistic(node: Any) -> bool:
    """Whether it is what batch norm writes: a result after its own three."""
    if node.target is not operator.getitem:
        return False
    source, place = node.args
    return "batch_norm" in str(source.target) and place >= 3


def _refuse_written(kept: list[torch.fx.Node]) -> None:
    """Reject backward reading an input that forward writes to: it would see the new contents."""
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
    """Forward and backward graphs that save one tensor as far as AOTAutograd sees: the first.

    AOTAutograd has overhead for each saved tensor, and there are many. The graphs it sees are never
    run; the real ones are attached to them.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    uses.arrange(joint, num_fwd_outputs)
    for node in joint.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # must not be drawn twice
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
    """A copy of a graph with these results."""
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
    """A copy of a backward graph whose saved tensors are all derived from a single one."""
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
    """The result that makes TorchDynamo run one frame, and all it calls, uncompiled."""
    from torch._dynamo import types

    skip = types.FrameAction.SKIP
    strategy = types.FrameExecStrategy(skip, skip)
    count = getattr(_C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is not None:
        count(-1)  # no count, as `fullgraph=True` is an error if no frame is compiled
    return types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)
