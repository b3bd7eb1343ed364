"""Backward passes that a region cannot give: op by op, from its arguments once more.

AOTAutograd traces one backward pass, without autocast, that is not to be differentiated itself.
Where another one is asked for, a hook of its node records forward and backward op by op; later
calls of that graph are recorded op by op from the start, so that sums are added as eager does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from torpor import _torch, metrics
from torpor.backend.native_library import NATIVE
from torpor.capture.region import storages_of, versions_of
from torpor.execute.storage import TRACE
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import root_value
from torpor.trace.wrap import wrap_storage

Gradients = Sequence[torch.Tensor | None]
RandomStates = list[tuple[torch.Generator, torch.Tensor]]


class Differentiable:
    """A captured graph, whose results have all the derivatives that eager's have."""

    def __init__(self, graph: _torch.GraphOps) -> None:
        self.graph = graph
        self.autocast = _torch.autocast_states()  # TorchDynamo guards it
        self.attention = _torch.attention_switches()
        self.is_captured = True

    def __call__(self, *given: Any) -> Any:
        """Call it; where gradients may be asked for, hook into its backward.

        Hooks of saved tensors are to see all that eager saves, as `checkpoint` expects.
        """
        args = [given[place] for place in self.graph.uses.places]
        if not self._holds_for(args):
            return self.graph.uses.module(*args)
        if not torch.is_grad_enabled():
            return self.graph.compiled(*args)
        if _has_no_versions(args) or _have_hooks(args) or not self._take_copies(args):
            return self.graph.uses.module(*args)
        states = _random_states(args) if self.graph.draws else []
        before = list(args)  # of the call, should it run again
        for use in self.graph.written:
            before[use] = _as_it_is(args[use])
        results = self.graph.compiled(*args)
        node = _torch.compiled_node(results)
        if node is not None:
            node.set_materialize_grads(False)  # zeros are no gradients
            node.register_hook(_OtherGradients(self, before, node, results, states))
        return results

    def _holds_for(self, args: Sequence[Any]) -> bool:
        """Whether the graph does what eager does now; TorchDynamo guards nothing of this."""
        return (
            self.is_captured
            and not _torch.has_saved_tensors_hooks()
            and not _torch.is_differentiating_forward()
            and _torch.attention_switches() == self.attention
            and not _shares_memory(args, self.graph.written)
        )

    def _take_copies(self, args: list[Any]) -> bool:
        """Put autocast's copies in the place of parameters; False if others than those are leaves.

        Autocast keeps copies of leaves.
        """
        uses = self.graph.uses
        if any(args[use].is_leaf for use in uses.casts):
            return False
        copies = _copies([args[use] for use in uses.copies])
        if copies is None:
            return False
        for use, copy in zip(uses.copies, copies, strict=True):
            args[use] = copy
        return True

    def give_up(self, reason: str) -> None:
        """Record all calls from now on op by op."""
        if self.is_captured:
            self.is_captured = False
            metrics.count_line("NotCaptured", reason)


class _OtherGradients:
    """A hook of a call's node: other gradients, where those of the region will not do."""

    def __init__(
        self, owner: Differentiable, args: Any, node: Any, results: Any, states: RandomStates
    ) -> None:
        self.owner, self.states = owner, states
        self.args: Any = args
        self.versions = versions_of(args)
        self.places = {
            result.output_nr: place
            for place, result in enumerate(results)
            if getattr(result, "grad_fn", None) is node
        }

    def __call__(self, inputs: Gradients, outputs: Gradients) -> Gradients | None:
        """Other gradients of the inputs, or None; called by autograd."""
        reason, found = _reason(), None
        if not reason and self.owner.graph.uses.is_refused and any(one is None for one in outputs):
            reason = "a result that is not used"
        if reason:
            self.owner.give_up(reason)
            found = self._gradients(reason, inputs, outputs)
        if not _torch.backward_keeps_graph():
            self.args = ()
        return found

    def _gradients(self, reason: str, inputs: Gradients, outputs: Gradients) -> Gradients:
        args = [_apart(arg) for arg in self.args]
        tensors = _tensors(args)
        given = {place: one for place, one in enumerate(outputs) if one is not None}
        wanted = [place for place, one in enumerate(inputs) if one is not None]
        self._check(reason, len(inputs), given)
        results = torch.compiler.disable(self._run)(args)  # a decorator would import TorchDynamo
        found = torch.autograd.grad(
            [results[self.places[place]] for place in given],
            [tensors[place] for place in wanted],
            list(given.values()),
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        by_place = dict(zip(wanted, found, strict=True))
        return tuple(by_place.get(place) for place in range(len(inputs)))

    def _check(self, reason: str, inputs: int, given: dict[int, Any]) -> None:
        """It can run again, and gives the same."""
        tensors = _tensors(self.args)
        if len(tensors) != inputs or not given.keys() <= {*self.places}:
            raise RuntimeError(
                f"{reason}, through a captured function whose results share memory. "
                "It is recorded op by op from now on: call it once more."
            )
        if versions_of(self.args) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation, before {reason} through a captured function"
            )

    def _run(self, args: list[Any]) -> Any:
        with torch.enable_grad(), _in_autocast(self.owner.autocast), _drawing_from(self.states):
            return self.owner.graph.uses.module(*args)


def _reason() -> str:
    """Why the gradients of a region will not do for the backward pass that runs now."""
    if torch.is_grad_enabled():
        return "double backward"
    return "backward under autocast" if any(on for _, _, on in _torch.autocast_states()) else ""


def _copies(parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """The copies that autocast keeps of parameters; None if it keeps none of one of these."""
    if not parameters:
        return []
    if NATIVE.library is not None:
        return NATIVE.library.autocast_copies(parameters)  # type: ignore[no-any-return]  # C++
    if not all(one.is_leaf and one.requires_grad and one._base is None for one in parameters):
        return None
    return [_torch.autocast_copy(one) for one in parameters]


def _shares_memory(args: Sequence[Any], written: Collection[int]) -> bool:
    """Whether an argument that is written to is on the memory of another: in the graph none is."""
    if not written:
        return False
    own = {_memory(args[use]) for use in written}
    return sum(_memory(arg) in own for arg in _tensors(args)) > len(own)


def _memory(tensor: torch.Tensor) -> Any:
    if type(tensor) is LazyTensor:
        return tensor._lazy_storage
    return _torch.memory_of(tensor)


def _has_no_versions(args: Sequence[Any]) -> bool:
    """Whether there are inference tensors among what may be kept for gradients."""
    tensors = _tensors(args)
    return any(one.is_inference() for one in tensors) and any(one.requires_grad for one in tensors)


def _have_hooks(args: Sequence[Any]) -> bool:
    """Whether several of them have hooks: eager calls these as gradients come, a region at once."""
    hooked = [one for one in _tensors(args) if _torch.has_gradient_hooks(one)]
    return bool(hooked) and any(one is not hooked[0] for one in hooked)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the values that this one has now."""
    if type(tensor) is LazyTensor and tensor._lazy_view is None:
        with TRACE.lock:
            [storage] = storages_of((root_value(tensor._lazy_storage),))
            return wrap_storage(storage)
    return tensor.detach().clone()


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def _apart(arg: Any) -> Any:
    """A use of a tensor, which has a gradient of its own."""
    if not (isinstance(arg, torch.Tensor) and arg.requires_grad):
        return arg
    with torch.enable_grad():
        return arg.view_as(arg)


# -- the state in which a function was called ------------------------------------------------------


@contextmanager
def _in_autocast(states: Sequence[tuple[str, torch.dtype, bool]]) -> Iterator[None]:
    now = _torch.autocast_states()
    with ExitStack() as stack:
        for state in states:
            if state not in now:
                stack.enter_context(torch.autocast(*state))
        yield


def _random_states(args: Sequence[Any]) -> RandomStates:
    """The generators that a call may draw from, as they are now."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        indices = {tensor.device.index for tensor in _tensors(args) if tensor.is_cuda}
        indices |= {torch.cuda.current_device()}
        generators += [torch.cuda.default_generators[index] for index in indices]
    return [(generator, generator.get_state()) for generator in generators]


@contextmanager
def _drawing_from(states: RandomStates) -> Iterator[None]:
    """Draw from generators as they were, which then go on as if nothing had been drawn."""
    now = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in now:
            generator.set_state(state)
