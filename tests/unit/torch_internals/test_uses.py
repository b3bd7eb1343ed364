"""What `torpor._torch.uses` takes from torch: autocast's cache, gradients while tracing."""

import torch

from torpor import _torch
from torpor._torch.uses import note_gradient


def test_autocast_copy_is_the_tensor_that_autocast_keeps() -> None:
    weights = [torch.ones(shape, requires_grad=True) for shape in ((3,), (2, 3), (2, 3, 1, 1))]
    with torch.autocast("cpu", torch.bfloat16):
        copies = [_torch.autocast_copy(weight) for weight in weights]
        again = [_torch.autocast_copy(weight) for weight in weights]
        product = torch.mm(weights[1], torch.ones(3, 2))
    assert [copy.dtype for copy in copies] == [torch.bfloat16] * 3
    assert all(one is other for one, other in zip(copies, again, strict=True))
    assert product.grad_fn is not None
    assert product.grad_fn.next_functions[0][0] is copies[1].grad_fn


def test_note_gradient_is_silent_where_nothing_is_traced() -> None:
    tensor = torch.ones(1, requires_grad=True)
    note_gradient(tensor, 0)
    assert tensor._backward_hooks is None


def _backward() -> torch.fx.GraphModule:
    """Gradients of a tensor used by two results, as AOTAutograd writes them."""
    graph = torch.fx.Graph()
    kept, first, second = map(graph.placeholder, ("kept", "tangents_1", "tangents_2"))
    one = graph.call_function(torch.ops.aten.mul.Tensor, (first, kept))
    other = graph.call_function(torch.ops.aten.div.Tensor, (second, kept))
    both = graph.call_function(torch.ops.aten.add.Tensor, (one, other))
    both.meta["is_gradient_acc"] = True
    graph.output((both, other))
    return torch.fx.GraphModule({}, graph)


def test_gradients_of_results_are_the_tangents() -> None:
    names = [node.name for node in _torch.gradients_of_results(_backward().graph)]
    assert names == ["tangents_1", "tangents_2"]


def test_without_results_adds_nothing_of_gradients_that_are_not_there() -> None:
    left = _torch.without_results(_backward(), [1])
    assert left is not None
    kept = torch.tensor([0.0, 2.0])  # a gradient of zeros would be NaN at 0
    sum_, other = left(kept, torch.tensor([3.0, 3.0]))
    assert other is None
    assert torch.equal(sum_, torch.tensor([0.0, 6.0]))


def test_without_results_gives_up_where_an_op_takes_several_gradients() -> None:
    backward = _backward()
    [sum_] = backward.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    del sum_.meta["is_gradient_acc"]
    assert _torch.without_results(backward, [1]) is None
