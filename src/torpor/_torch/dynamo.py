"""TorchDynamo: its backends, and frames in which it meets a lazy tensor.

It reaches the registry of backends, AOTAutograd, `convert_frame` and `VariableBuilder`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _C

from torpor._torch.import_hooks import after_import


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


def on_dynamo_frame(
    meets_lazy: Callable[[Any], bool],
    is_lazy: Callable[[object], bool],
    remember: Callable[[Any, str], None],
) -> None:
    """Let a frame run uncompiled, with all it calls, where TorchDynamo would meet a lazy tensor.

    `meets_lazy` is asked before a frame is traced; what it does not find is found when TorchDynamo
    makes a variable of it, and `remember` is called with the frame and the way to the tensor. What
    was compiled for plain tensors stays.
    """

    def watch_frames(module: Any) -> None:
        wrapper = module.CatchErrorsWrapper
        convert = wrapper.__call__

        @functools.wraps(convert)
        def __call__(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            if meets_lazy(frame):
                return _uncompiled()
            try:
                return convert(self, frame, *args, **kwargs)
            except MetLazy as met:
                remember(frame, met.source)
                return _uncompiled()

        wrapper.__call__ = __call__

    def watch_variables(module: Any) -> None:
        builder = module.VariableBuilder
        wrap = builder.wrap_tensor

        @functools.wraps(wrap)
        def wrap_tensor(self: Any, value: Any) -> Any:
            if is_lazy(value):
                name = getattr(self.source, "name", "")  # a method before it became a property
                raise MetLazy(str(name() if callable(name) else name))
            return wrap(self, value)

        builder.wrap_tensor = wrap_tensor

    after_import("torch._dynamo.convert_frame", watch_frames)
    after_import("torch._dynamo.variables.builder", watch_variables)


def _uncompiled() -> Any:
    """What tells TorchDynamo to run one frame, and all it calls, as it is; others are compiled."""
    from torch._dynamo import types

    skip = types.FrameAction.SKIP
    strategy = types.FrameExecStrategy(skip, skip)
    count = getattr(_C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is not None:
        count(-1)  # do not count: `fullgraph=True` is an error where no frame was compiled
    return types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)
