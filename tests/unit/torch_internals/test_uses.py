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
