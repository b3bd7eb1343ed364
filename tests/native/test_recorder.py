"""The native recorder records what the Python recorders record: the very same nodes."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torpor
from tests.native.recording import Program, assert_same, run
from torpor import _torch, metrics
from torpor.backend.native_library import NATIVE
from torpor.execute.storage import TRACE
from torpor.ir.node import TABLE
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import value_of

aten = torch.ops.aten


def inputs(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    plain = [torch.randn(4, 6), torch.randn(4, 6), torch.randn(6, 6), torch.arange(24).view(4, 6)]
    if device == "lazy":
        return [tensor.to("lazy") for tensor in plain]
    return [torpor.lazy(tensor) for tensor in plain]


def elementwise(x: Any, y: Any, w: Any, n: Any) -> Any:
    return (
        x + y,
        x * y - x,
        (x / y).exp(),
        torch.where(x > y, x, y),
        n + n,
        n == n.t().reshape(4, 6),
    )


def numbers(x: Any, y: Any, w: Any, n: Any) -> Any:
    return [
        x + 2, x + 2.0, x + True, n + 2, n + 2.5, 2 - x, 2.0 * x, x + 0.0, x + -0.0,
        x * float("nan"), x * float("inf"), x.add(y, alpha=2), x.add(y, alpha=2.0), x.clamp(0, 1),
        x.clamp(0.0, 1.0),
        x.clamp(min=0.5), torch.full_like(x, 3), x**2, x**2.0, x.pow(-0.0), n // 2, x.mul(1j),
    ]  # fmt: skip


def dtypes_and_flags(x: Any, y: Any, w: Any, n: Any) -> Any:
    return [
        x.sum(), x.sum(0), x.sum((0, 1), keepdim=True), x.sum(dtype=torch.float64), x.double(),
        x.to(torch.int32), torch.zeros_like(x), torch.ones_like(x, dtype=torch.int64), x.clone(),
        x.clone(memory_format=torch.preserve_format), x.contiguous(), x.t().contiguous(),
        x.argmax(), x.argmax(1, keepdim=True), F.gelu(x), F.gelu(x, approximate="tanh"),
        x.softmax(1), x.log_softmax(-1), torch.div(x, y, rounding_mode="floor"), x.mean(1), x.std(),
    ]  # fmt: skip


def views(x: Any, y: Any, w: Any, n: Any) -> Any:
    z = x + y
    return [
        z.t(), z.t().detach(), z[1:], z[:, 2], z.view(2, 12), z.view(-1)[3:], z.unsqueeze(0),
        z.expand(2, 4, 6), z.permute(1, 0), z.detach(), z.reshape(24), x.t(), x[0], x.detach(),
        z.as_strided((2, 2), (1, 2), 3), z.squeeze(), z.diagonal(), z[:1].t(), z[:, :1],
        x[2:3], x.view(4, 1, 6).transpose(0, 1)[:, 1:2],
    ]  # fmt: skip


def lists(x: Any, y: Any, w: Any, n: Any) -> Any:
    return [
        torch.cat([x, y]), torch.stack([x, y, x], 1), x.split(2), x.split([1, 5], 1), x.unbind(),
        x.chunk(3, 1), torch.cat([x, x]), torch.meshgrid(x[0], y[0], indexing="ij"),
    ]  # fmt: skip


def several(x: Any, y: Any, w: Any, n: Any) -> Any:
    return [
        x.max(1), x.sort(1), x.topk(2), torch.var_mean(x, 1), F.layer_norm(x, (6,)),
        torch.linalg.qr(w), F.max_pool2d(x[None, None], 2, return_indices=True), x.aminmax(),
    ]  # fmt: skip


def writes(x: Any, y: Any, w: Any, n: Any) -> Any:
    z = x + y
    z.add_(1)
    z.mul_(z)
    z += y
    x.sub_(y)
    v = z[1:]
    v.add_(2)
    z.relu_()
    after = v * 2
    z.t().mul_(0.5)
    z.zero_()
    w.fill_(3)
    x.copy_(y)
    return z, v, after, x.t()


def overlapping(x: Any, y: Any, w: Any, n: Any) -> Any:
    x[:2].add_(x[2:])
    x.add_(x.t().reshape(4, 6))
    return x.add_(x[0])


def overlapping_wrongly(x: Any, y: Any, w: Any, n: Any) -> Any:
    return x[1:].add_(x[:-1])


def lists_written(x: Any, y: Any, w: Any, n: Any) -> Any:
    torch._foreach_add_([x, y], 1)
    torch._foreach_mul_([x, y], [2.0, 0.5])
    torch._foreach_add_([x, y], [y, x], alpha=2)
    torch._foreach_addcdiv_([x], [y], [y], 0.5)
    roots = torch._foreach_sqrt([x * x, y * y])
    torch._foreach_mul_([x[0], y], 3)
    return roots


def lists_that_share(x: Any, y: Any, w: Any, n: Any) -> Any:
    torch._foreach_add_([x, x], 1)
    return x


def whole(x: Any, y: Any, w: Any, n: Any) -> Any:
    a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
    bias = y[0].detach().requires_grad_()
    with torch.no_grad():
        quiet = F.linear(a, b)
    z = F.linear(a, b, bias) @ b.t()
    z.sum().backward()
    return z, quiet, F.linear(x, w), x @ w, a.grad, b.grad, bias.grad


def gradients(x: Any, y: Any, w: Any, n: Any) -> Any:
    a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
    z = F.layer_norm((a * b).tanh() + a.t().reshape(4, 6)[:, :6], (6,)).softmax(-1)
    (z * z).sum().backward()
    a.grad.mul_(2)
    return z, a.grad, b.grad, z.detach(), torch.autograd.grad((a.exp() * b).sum(), [a, b])


def plain_among_lazy(x: Any, y: Any, w: Any, n: Any) -> Any:
    return (
        x + y,
        x + torch.ones(6, device="cpu").to(x.device),
        x * torch.tensor(2.0),
        torch.tensor(3) + n,
    )


def plain_beside_lazy(x: Any, y: Any, w: Any, n: Any) -> Any:
    data = torch.full((4, 6), 0.5)
    first = x * data, torch.where(data > 0, x, data), x + data.t().contiguous().t()
    data.fill_(2.0)  # what was recorded has read it
    once = data.to_sparse()
    return *first, x * data, torch.cat([data, x, data]), data @ w, once.to_dense() + x


def plain_is_written(x: Any, y: Any, w: Any, n: Any) -> Any:
    data = torch.ones(4, 6)
    return data.add_(x), data


def written_out(x: Any, y: Any, w: Any, n: Any) -> Any:
    out = torch.empty_like(x)
    torch.add(x, y, out=out)
    torch.mul(out, 2, out=x)
    return out


def inference(x: Any, y: Any, w: Any, n: Any) -> Any:
    with torch.inference_mode():
        z = x + y
        return z, z.t(), x.t(), x.detach(), z.split(2), x.max(1), F.linear(x, w)


def bits(x: Any, y: Any, w: Any, n: Any) -> Any:
    c = torch.complex(x, y)
    return c.conj(), c.conj() + c, c.imag, c.conj().t() * 2, c.conj().clone().t()


def indices(x: Any, y: Any, w: Any, n: Any) -> Any:
    return x[n[0] % 4], x[x > 0].shape, x.gather(1, n % 6), F.embedding(n % 4, x)


def rebuilt(x: Any, y: Any, w: Any, n: Any) -> Any:
    z = x.t()
    x.add_(1)
    first = z * 2
    torpor.sync()
    second = z * 2
    x.add_(1)
    return first, second, z + 0, z.detach()


def in_mode(x: Any, y: Any, w: Any, n: Any) -> Any:
    with torpor.mode():
        return x + y, (x * 2).t(), torch.ones(3) * 2, F.relu(x)


def casts(x: Any, y: Any, w: Any, n: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        product = x @ w
    image = torch.stack([x, y])[None]
    return [
        product, x.to(torch.bfloat16), x.to(n), n.to(x), x.to(x.device), x.half().float(),
        x.to(torch.float64, non_blocking=True), x.to("cpu").shape, x.to("meta").shape,
        image.to(memory_format=torch.channels_last), x.t().to(torch.int32), x.type_as(n),
        torch.zeros_like(x, device=x.device), x.new_ones(3), x.new_full((2,), 1.5, device="cpu"),
        torch.rand_like(x).shape, x.to(x.dtype),
    ]  # fmt: skip


def normalised(x: Any, y: Any, w: Any, n: Any) -> Any:
    mean, variance = x[0].clone(), y[1].exp()
    quiet = F.batch_norm(x, mean, variance)
    return (
        quiet, F.batch_norm(x, mean, variance, training=True), mean, variance,
        F.batch_norm(y, mean, variance, w[0], w[1], training=True, momentum=0.5),
        F.batch_norm(x, None, None, training=True),
        F.batch_norm(x, w[0], w[1], training=True), F.instance_norm(x[None], w[0, :4], w[1, :4]),
    )  # fmt: skip


def undropped(x: Any, y: Any, w: Any, n: Any) -> Any:
    a = x.detach().requires_grad_()
    (F.dropout(a, 0.5, training=False) * F.dropout(y, 0.0)).sum().backward()
    return F.dropout(x, 0.5, training=False), a.grad, F.dropout(x, 1.0).sum()


def dropped_wrongly(x: Any, y: Any, w: Any, n: Any) -> Any:
    return torch.dropout(x, 1.5, False)


def several_written(x: Any, y: Any, w: Any, n: Any) -> Any:
    values, places = torch.empty(4), torch.empty(4, dtype=torch.int64)
    values, places = values.to(x.device), places.to(x.device)
    torch.max(x, 1, out=(values, places))
    inverse, found = torch.ones((), device=x.device) * 0.5, torch.zeros(1, device=x.device)
    torch._amp_foreach_non_finite_check_and_unscale_([x, y], found, inverse)
    torch.add(x, y, out=w[:4])
    return values, places, found


def attended(x: Any, y: Any, w: Any, n: Any) -> Any:
    q, k, v = (t.view(1, 2, 2, 6) for t in (x, y, x * y))
    a = q.detach().requires_grad_()
    z = F.scaled_dot_product_attention(a, k, v)
    z.sum().backward()
    with torch.inference_mode():
        quiet = F.scaled_dot_product_attention(q * 1, k, v)
    return [
        z, a.grad, quiet, F.scaled_dot_product_attention(q, k, v, is_causal=True),
        F.scaled_dot_product_attention(q, k, v, scale=0.5),
        F.scaled_dot_product_attention(q, k, v, attn_mask=(n[:2, :2] > 1)),
    ]  # fmt: skip


def in_parts(x: Any, y: Any, w: Any, n: Any) -> Any:
    a, bias = w.detach().requires_grad_(), y[0].detach().requires_grad_()
    z = F.linear(x, a, bias) + x @ a
    one = a[None] @ torch.stack([x.t(), y.t()])
    (z.sum() + one.sum()).backward()
    return z, one, a.grad, bias.grad


def kept_for_backward(x: Any, y: Any, w: Any, n: Any) -> Any:
    a = x.detach().requires_grad_()
    z = a.relu().sigmoid().tanh().exp()
    first = torch.autograd.grad(z.sum(), a, retain_graph=True)
    return z, first, torch.autograd.grad(z.sum(), a, create_graph=True)


def wrong_sizes(x: Any, y: Any, w: Any, n: Any) -> Any:
    return x + w


def wrong_view(x: Any, y: Any, w: Any, n: Any) -> Any:
    return x.view(5, 5)


def warned_of_and_wrong(x: Any, y: Any, w: Any, n: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x.masked_scatter((n > 3).to(torch.uint8), y)


def flat(x: Any, y: Any, w: Any, n: Any) -> Any:
    memory = x.new_zeros(60)
    parts = [memory.as_strided((4, 6), (6, 1), 24 * i) for i in range(2)]
    parts.append(memory[48:].view(3, 4))
    parts[0].copy_(x)
    parts[1].mul_(2).add_(y)
    torch.mul(x, 3, out=parts[0])
    parts[2].fill_(1)
    parts[2].t().add_(1)
    parts[0][1].copy_(parts[1][2])
    return [*parts, memory.sum(), memory[20:30], memory.as_strided((3,), (2,), 40)]


PROGRAMS = [
    elementwise, numbers, dtypes_and_flags, views, lists, several, writes, overlapping,
    overlapping_wrongly, lists_written, lists_that_share, whole, gradients, plain_among_lazy,
    plain_beside_lazy, plain_is_written, written_out, inference, bits, indices, rebuilt, in_mode,
    casts, normalised, undropped, several_written, attended, in_parts, kept_for_backward,
    wrong_sizes, wrong_view, warned_of_and_wrong, dropped_wrongly, flat,
]  # fmt: skip


QUIET = (
    plain_beside_lazy,
    plain_is_written,
    wrong_sizes,
    wrong_view,
    lists_that_share,
    warned_of_and_wrong,
    dropped_wrongly,
)


@pytest.mark.parametrize("device", ["lazy", "concrete"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_nodes_counters_results_and_errors(
    program: Program, device: str, library: Any
) -> None:
    library.switch(False)
    for _ in range(3):  # numbers that change are inputs by then
        expected = run(program, inputs(device))
    library.switch(True)
    before = library.counts()[0]
    found = run(program, inputs(device))
    if program not in QUIET:
        assert library.counts()[0] > before, "nothing was recorded natively"
    assert_same(expected, found)


def test_a_hit_makes_no_node_and_enters_no_python(library: Any) -> None:
    x = torch.ones(3, device="lazy")
    y = x + x
    value = value_of(y)
    nodes, (hits, passed) = len(TABLE), library.counts()
    again = x + x
    assert value_of(again) is value
    assert len(TABLE) == nodes
    assert library.counts() == (hits + 1, passed)


def test_a_plain_tensor_is_read_once_whoever_records_the_call(library: Any) -> None:
    torch.logaddexp(torpor.lazy(torch.ones(2)), torch.ones(2))  # an op that is known
    torpor.sync()
    x, data = torpor.lazy(torch.ones(3)), torch.tensor([1.0, 2.0, 3.0])
    for number in range(3):  # the first call is recorded by Python, which uses what was read
        before, (hits, passed) = metrics.counted("BytesIn"), library.counts()
        y = torch.logaddexp(x, data)
        data += 1.0
        assert metrics.counted("BytesIn") - before == 12
        assert not NATIVE.entered
        assert library.counts() == ((hits, passed + 1) if number == 0 else (hits + 1, passed))
        assert torch.equal(torpor.eager(y), torch.logaddexp(torch.ones(3), data - 1.0))
        torpor.sync()


def test_a_plain_tensor_that_is_copied_in_takes_no_slot(library: Any) -> None:
    x = torch.zeros(3, device="lazy")
    x.copy_(torch.arange(3.0))
    y = torch.arange(3.0).to("lazy")
    assert not TRACE.leaves
    assert not NATIVE.entered
    assert (x + y).tolist() == [0.0, 2.0, 4.0]


def test_a_cut_between_reading_and_recording_reads_again(library: Any, monkeypatch: Any) -> None:
    x, data = torpor.lazy(torch.ones(3)), torch.ones(3)
    monkeypatch.setattr(torpor.config, "max_trace_nodes", 8)
    y = x
    for number in range(40):
        data.fill_(number)
        y = y + data
    assert torpor.eager(y).tolist() == [1.0 + sum(range(40))] * 3


def test_writes_through_views_and_reads_of_stale_ones_enter_no_python(library: Any) -> None:
    x, memory = torch.ones(2, 4, device="lazy"), torch.zeros(32, device="lazy")
    views = [memory.as_strided((2, 4), (4, 1), 8 * i) for i in range(3)]
    views.append(memory[24:].view(2, 4))

    def step() -> None:
        for view in views:
            view.copy_(x)
            view.mul_(2)
            torch.mul(x, 3, out=view)
        views[0] + memory.as_strided((2, 4), (1, 2), 4)

    assert counted(library, step)[1][1] == 0


def test_a_recorder_that_is_replaced_is_asked(library: Any, monkeypatch: Any) -> None:
    x = torch.ones(3, device="lazy")
    x + x  # met before
    asked = []
    recorder = aten.add.Tensor._torpor_record

    def other(*arguments: Any, **keywords: Any) -> Any:
        asked.append(arguments)
        return recorder(*arguments, **keywords)

    monkeypatch.setattr(aten.add.Tensor, "_torpor_record", other)
    x + x  # only its recorder matters
    assert len(asked) == 1


def test_a_mode_of_others_sees_every_op(library: Any) -> None:
    seen = []

    class Spy(_torch.DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, device="lazy")
    x + x  # met before
    with Spy():
        y = x + x
    assert aten.add.Tensor in seen
    assert y.tolist() == [2.0] * 3


def test_another_subclass_among_the_arguments_has_its_turn(library: Any) -> None:
    seen = []

    class Other(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(tuple(types))
            return args[0]

    x = torch.ones(3, device="lazy")
    other = torch.Tensor._make_wrapper_subclass(Other, (3,), device="lazy:0")
    assert aten.add.Tensor(x, other) is x
    assert seen == [(LazyTensor, Other)] or seen == [(Other, LazyTensor)]


def train(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(5, 6).to("lazy")
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_training_gives_the_same_bits(library: Any) -> None:
    library.switch(False)
    expected = train(6)
    library.switch(True)
    before = library.counts()[0]
    found = train(6)
    assert library.counts()[0] > before + 100
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_eight_threads(library: Any) -> None:
    outcomes: list[Any] = [None] * 8

    def work(number: int) -> None:
        x = torch.full((4, 4), float(number)).to("lazy")
        total = torch.zeros(4, 4, device="lazy")
        for step in range(300):
            y = (x * 2 + 1).t().relu().t()
            total = total + y.view(16).view(4, 4)
            total.add_(x)
            if step % 50 == 49:
                torpor.sync()
        outcomes[number] = total.cpu()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, total in enumerate(outcomes):
        assert torch.equal(total, torch.full((4, 4), 300.0 * (3 * number + 1)))


def test_backward_on_autograds_own_threads(library: Any) -> None:
    weights = [torch.ones(3, device="lazy", requires_grad=True) for _ in range(2)]

    def work(weight: torch.Tensor) -> None:
        for _ in range(50):
            weight.grad = None
            (weight * weight).sum().backward()

    threads = [threading.Thread(target=work, args=(w,)) for w in weights]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(w.grad is not None and w.grad.tolist() == [2.0] * 3 for w in weights)


def native_result(library: Any) -> Any:
    """A tensor that the native recorder made."""
    x = torch.ones(3, device="lazy")
    x + x  # met before
    before = library.counts()[0]
    y = x + x
    assert library.counts()[0] == before + 1
    return y


def test_swap_tensors(library: Any) -> None:
    one, other = native_result(library), torch.zeros(2, device="lazy")
    torch.utils.swap_tensors(one, other)
    assert one.tolist() == [0.0, 0.0]
    assert other.tolist() == [2.0] * 3


def test_deepcopy_and_weak_references(library: Any) -> None:
    one = native_result(library)
    twin = copy.deepcopy(one)
    one.add_(1)
    assert twin.tolist() == [2.0] * 3
    assert one.tolist() == [3.0] * 3
    reference = weakref.ref(one)
    assert reference() is one
    del one
    assert reference() is None


def test_a_tensor_that_only_c_plus_plus_holds_keeps_its_python_side(library: Any) -> None:
    x = torch.ones(3, device="lazy", requires_grad=True)
    for _ in range(2):
        y = (x * 2).exp()  # exp keeps its result for backward
        z = y.sum()
        del y
        gc.collect()
        (grad,) = torch.autograd.grad(z, x)
    assert grad.tolist() == pytest.approx([2 * 7.38905609893065] * 3)


def test_parameters_and_requires_grad(library: Any) -> None:
    made = native_result(library)
    parameter = nn.Parameter(made.detach())
    assert isinstance(parameter, LazyTensor)
    made.requires_grad_()
    (made * parameter).sum().backward()
    assert made.grad.tolist() == parameter.grad.tolist() == [2.0] * 3


def test_nothing_leaks_in_ten_thousand_steps(library: Any) -> None:
    x, y = torch.ones(3, device="lazy"), torch.ones(3, device="lazy")

    def step() -> None:
        z, w = x + y, x * y
        z.t().detach().split(1)
        w.mul_(z)
        torch._foreach_add_([z, w], [x, y])

    for _ in range(100):
        step()
    torpor.sync(wait=True)
    gc.collect()
    gc.disable()
    try:
        kinds = [LazyTensor, type(value_of(x)), None, True, 0]
        before = [sys.getrefcount(kind) for kind in kinds], len(gc.get_objects())
        hits = library.counts()[0]
        for _ in range(10_000):
            step()
        assert library.counts()[0] >= hits + 40_000
        torpor.sync(wait=True)
        after = [sys.getrefcount(kind) for kind in kinds], len(gc.get_objects())
        assert len(TRACE.pending) < 10
    finally:
        gc.enable()
    assert after[1] - before[1] < 500
    assert all(abs(b - a) < 500 for a, b in zip(before[0], after[0], strict=True))


def test_a_trace_that_gets_too_long_is_cut(library: Any, monkeypatch: Any) -> None:
    x = torch.ones(3, device="lazy")
    x + 1  # met before
    torpor.sync(wait=True)
    epoch = TRACE.epoch
    monkeypatch.setattr(torpor.config, "max_trace_nodes", 20)
    kept = [x + 1 for _ in range(50)]
    assert TRACE.epoch > epoch
    assert [tensor.tolist() for tensor in kept] == [[2.0] * 3] * 50


def test_a_node_that_is_forgotten_is_missed(library: Any) -> None:
    x = torch.ones(3, device="lazy")
    first = value_of(x + 1).node
    TABLE.clear()
    torpor.sync(wait=True)
    again = x + 1
    assert value_of(again).node is not first
    assert again.tolist() == [2.0] * 3


# -- ops that once were for Python alone -----------------------------------------------------------


def counted(library: Any, call: Any) -> tuple[Any, tuple[int, int]]:
    """What `call` gives when it is met again; calls recorded natively, and handed to Python."""
    for _ in range(2):
        call()
        torpor.sync(wait=True)  # what was written is a leaf again
    before = library.counts()
    result = call()
    return result, tuple(b - a for a, b in zip(before, library.counts(), strict=True))


def torpors_functions(call: Any) -> list[str]:
    """Python functions of torpor that `call` enters."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "torpor" in frame.f_globals.get("__name__", ""):
            entered.append(frame.f_code.co_qualname)

    call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in entered if "<lambda>" not in name]


@pytest.mark.parametrize("device", ["lazy", "concrete"])
def test_a_tensor_that_stays_on_its_device_is_converted(device: str, library: Any) -> None:
    x = inputs(device)[0]
    calls = [
        lambda: x.to(torch.bfloat16),
        lambda: x.to(x.device, torch.float16),
        lambda: x.to(torch.float64, copy=True),
        lambda: aten._to_copy.default(x, dtype=torch.int32, layout=torch.strided, device=x.device),
        lambda: x.new_zeros((2, 3), device=x.device),
        lambda: torch.empty_like(x, device=x.device),
    ]
    for call in calls:
        result, (native, passed) = counted(library, call)
        assert isinstance(result, LazyTensor)
        assert (native, passed) == (1, 0)
        assert torpors_functions(call) == []
    result, (native, passed) = counted(library, lambda: x.to("meta"))
    assert result.is_meta
    assert (native, passed) == (0, 1)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_and_its_statistics(momentum: float | None, library: Any) -> None:
    def train(device: str) -> tuple[Any, ...]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(6, momentum=momentum).to(device)
        x = torch.randn(5, 6).to(device).requires_grad_()
        for _ in range(4):
            norm(x).square().sum().backward()
        return x.grad, *norm.buffers(), norm.weight.grad

    found, (native, passed) = counted(library, lambda: train("lazy"))
    assert native > 4 * 4
    if momentum is not None:  # or else it is another number in each step
        assert passed == 6, "what comes from the CPU: parameters, buffers, the input"
    for one, other in zip(train("cpu"), found, strict=True):
        assert torch.equal(one, torpor.eager(other))


def statistics_of(x: Any, *running: Any) -> Any:
    return aten.native_batch_norm.default(x, None, None, *running, True, 0.1, 1e-5)


def test_statistics_that_python_has_to_look_at(library: Any) -> None:
    x = torch.randn(4, 6).to("lazy")
    mean, both = torch.zeros(6, device="lazy"), torch.zeros(2, 6, device="lazy")
    assert counted(library, lambda: statistics_of(x, None, None))[1] == (1, 0)
    library.switch(False)
    expected = run(lambda *a: statistics_of(*a), [x, *both])
    library.switch(True)
    both.zero_()
    before = library.counts()
    assert_same_numbers(expected, run(lambda *a: statistics_of(*a), [x, *both]))
    assert library.counts()[1] > before[1], "one memory is written twice: that is Python's"
    assert counted(library, lambda: statistics_of(x, mean, mean))[1] == (0, 1)


def assert_same_numbers(expected: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    for one, other in zip(expected[2], found[2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_result_that_is_resized_is_pythons(library: Any) -> None:
    x = torch.ones(4, device="lazy")
    kept = torch.zeros(4, device="lazy")
    result, (native, passed) = counted(library, lambda: torch.add(x, x, out=kept))
    assert result is kept
    assert (native, passed) == (1, 0)

    def resized() -> torch.Tensor:
        return torch.add(x, x, out=torch.empty(0, device="lazy"))

    result, (_, passed) = counted(library, resized)
    assert result.tolist() == [2.0] * 4
    assert passed
    assert torch.add(x, 1, out=x).tolist() == [2.0] * 4


@pytest.mark.parametrize("device", ["lazy", "concrete"])
def test_dropout_that_drops_nothing_is_its_input(device: str, library: Any) -> None:
    x = inputs(device)[0].requires_grad_()
    for p, train in [(0.5, False), (1.0, False), (0.0, True), (0.0, False)]:
        assert torch.dropout(x, p, train) is x
        assert torpors_functions(lambda p=p, train=train: torch.dropout(x, p, train)) == []
    assert not torch.dropout(x, 1.0, True).any()
    assert (torch.dropout(x, 0.5, True) == 0).any()
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(RuntimeError, match="between 0 and 1") if p == p else nullcontext():
            torch.dropout(x, p, False)


def test_backward_of_a_linear_layer_without_bias(library: Any) -> None:
    x, w = torch.ones(2, 3, device="lazy"), torch.ones(4, 3, device="lazy")
    grad = torch.ones(2, 4, device="lazy")
    mask = [True, True, False]
    call = lambda: aten.linear_backward.default(x, grad, w, mask)  # noqa: E731
    (of_input, of_weight, of_bias), counts = counted(library, call)
    assert counts == (1, 0)
    assert of_bias is None
    assert of_input.tolist() == [[4.0] * 3] * 2
    assert of_weight.tolist() == [[2.0] * 3] * 4


def test_training_under_autocast_stays_native(library: Any) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        place = torpor.lazy if device == "lazy" else (lambda thing: thing)
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.0)
        model = place(nn.Sequential(*layers, nn.Linear(144, 2, bias=False)))
        images = place(torch.randn(2, 3, 8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(images).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [torpor.eager(t.detach()) for t in model.state_dict().values()]

    found, (native, passed) = counted(library, lambda: train("lazy"))
    assert native > 100
    assert passed < native // 20
    for one, other in zip(train("cpu"), found, strict=True):
        assert torch.equal(one, other)
