"""Mistakes that were found by trying, each as small as it gets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torpor
from tests.comparison import Put, agree, assert_same, line_below, message, raised_by
from tests.instrumented_ops import gated, open_gate
from torpor.execute.storage import TRACE


def _compiles() -> int:
    return torpor.metrics.counters().get("UncachedCompile", 0)


def test_a_kernel_that_makes_a_conjugate_inside_runs_right_when_run_at_once() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 3, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
    expected = torch.linalg.lstsq(a, b, driver="gels").residuals
    actual = torch.linalg.lstsq(a.to("lazy"), b.to("lazy"), driver="gels").residuals
    assert torch.equal(actual.cpu(), expected)


def test_the_default_dtype_decides_anew_after_it_changes() -> None:
    assert torch.ones(2, device="lazy").dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.ones(2, device="lazy").dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.ones(2, device="lazy").dtype is torch.float32


def test_a_graph_waits_for_what_another_devices_queue_is_computing() -> None:
    a = torch.randn(600, 600, generator=torch.Generator().manual_seed(0)).to("lazy")
    expected = a.cpu()
    for _ in range(3):
        a, expected = (a @ a) / 100, (expected @ expected) / 100
    torpor.sync()
    assert torch.equal((a.to("lazy:1") + 1).cpu(), expected + 1)


def test_a_program_that_only_reads_compiles_once_and_keeps_nothing() -> None:
    before = _compiles()
    for number in range(20):
        x = torch.full((3,), float(number)).to("lazy")
        assert (x * 2).sum().item() == 6.0 * number
    assert _compiles() - before == 1
    assert not TRACE.leaves


def test_two_tensors_on_one_buffer_are_one_leaf() -> None:
    a = torch.ones(3, device="lazy") * 2
    b = torch.zeros(3, device="lazy")
    b.copy_(a)
    torpor.sync()
    assert (a + 1)._lazy_storage.value is (b + 1)._lazy_storage.value


def test_an_empty_list_entry_in_cat_stays_lazy() -> None:
    cache = torch.tensor([], device="lazy")
    keys = torch.ones(1, 2, 3, 4, device="lazy")
    assert torpor.is_pending(torch.cat([cache, keys], dim=-2))


def test_detach_of_a_written_view_looks_where_the_view_looks() -> None:
    base = torch.arange(8.0).view(4, 2).to("lazy")
    view = base[1]
    view.copy_(torch.ones_like(view))
    assert view.detach().storage_offset() == 2
    assert view.detach().tolist() == [1.0, 1.0]


def test_a_sequence_of_changing_numbers_settles() -> None:
    x = torch.ones(3, device="lazy")
    compiles = []
    for step in range(1, 7):
        y = ((x * (0.1 * step)) + 0.2 * step) / (0.3 * step)
        torpor.sync(y, wait=True)
        compiles.append(_compiles())
    assert compiles[2] == compiles[-1]


def test_moving_a_module_keeps_tied_weights_and_strides() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.to("lazy")
    assert model[1].weight is model[0].weight
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert image.to("lazy").stride() == image.stride()


def test_one_hot_stays_lazy_where_the_number_of_classes_is_given(put: Put) -> None:
    classes = put(torch.tensor([[0, 2], [1, 1]]))
    assert torpor.is_pending(F.one_hot(classes, 3))
    agree(put, lambda c: (F.one_hot(c, 3), F.one_hot(c), F.one_hot(c.t(), 4)), torch.eye(2).long())


def test_plain_tensors_are_taken_apart_as_without_torpor() -> None:
    with pytest.raises(RuntimeError, match=r"^Class values must be smaller than num_classes\.$"):
        F.one_hot(torch.tensor([7]), 3)


def test_torch_tensor_reads_lazy_numbers_of_every_dtype(put: Put) -> None:
    for dtype in (torch.float16, torch.int32, torch.bool, torch.complex64):
        numbers = torch.arange(1, 4).to(dtype)
        made, expected = (
            torch.tensor([[x[0], x[1]], [x[1], x[2]]]) for x in (put(numbers), numbers)
        )
        assert made.dtype is expected.dtype is dtype
        assert made.tolist() == expected.tolist()


def test_moving_to_the_own_device_in_inference_mode_gives_the_same_tensor() -> None:
    with torch.inference_mode():
        x = torch.ones(2).to("lazy")
        assert x.to("lazy") is x


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_prod_has_eagers_gradient_whatever_the_numbers(put: Put, zeros: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    x.view(-1)[:zeros] = 0
    x.requires_grad_()

    def program(x: torch.Tensor) -> object:
        (whole,) = torch.autograd.grad(x.prod(), x)
        (rows,) = torch.autograd.grad(x.prod(1).sum(), x)
        return whole, rows

    agree(put, program, x)


def test_prod_can_be_differentiated_twice(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        (first,) = torch.autograd.grad(x.prod(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)

    agree(put, program, torch.tensor([1.0, 2.0, 3.0], requires_grad=True))


def test_masked_fill_does_not_need_what_it_filled(put: Put) -> None:
    def program(x: torch.Tensor, value: torch.Tensor) -> object:
        kept = x * 1
        filled = kept.masked_fill(kept > 0, value)
        kept.zero_()
        return torch.autograd.grad(filled.exp().sum(), (x, value))

    x = torch.linspace(-1, 1, 33, requires_grad=True)
    agree(put, program, x, torch.tensor(0.3, requires_grad=True))


def test_the_gradient_of_a_sparse_result_is_lazy(put: Put) -> None:
    x = put(torch.eye(3)).requires_grad_()
    torch.sparse.sum(x.to_sparse()).backward()
    assert torpor.is_lazy(x.grad)
    assert x.grad.device == x.device


def test_solving_from_the_right_gives_a_conjugate_view(put: Put) -> None:
    def program(lu: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor) -> object:
        x = torch.linalg.lu_solve(lu, pivots, b, left=False)
        return x, x.is_conj(), x.conj(), x * 2

    lu, pivots = torch.linalg.lu_factor(torch.randn(3, 3, dtype=torch.complex64))
    agree(put, program, lu, pivots, torch.randn(2, 3, dtype=torch.complex64))


def test_an_in_place_op_that_would_have_to_grow_is_refused_when_recorded(put: Put) -> None:
    with pytest.raises(RuntimeError, match="2D tensor expected"):
        put(torch.tensor(1.0)).addr_(put(torch.ones(2)), put(torch.ones(3)))


def test_a_tensor_keeps_its_size_when_a_view_makes_the_storage_grow(put: Put) -> None:
    base = put(torch.arange(4.0))
    alias, view = base.detach(), base[1:]
    view.resize_(20)
    base.add_(1)
    assert base.tolist() == alias.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert view[:3].tolist() == [2.0, 3.0, 4.0]
    assert (base * 2).shape == (4,)


def test_a_running_graph_keeps_its_lines_when_others_record_its_ops(put: Put) -> None:
    table = put(torch.ones(3, 13))
    line = line_below()
    failing = F.embedding(gated(put(torch.tensor([7]))), table)
    torpor.sync()
    other = F.embedding(gated(put(torch.tensor([1]))), table)
    torpor.sync()
    open_gate()
    assert line in message(raised_by(failing.tolist))
    assert other.tolist() == [[1.0] * 13]


def test_matmul_of_a_batch_of_one_is_recorded_as_eager_computes_it(put: Put) -> None:
    x, y = put(torch.ones(4, 5, 5)), put(torch.ones(1, 5, 5))
    assert "aten.bmm.default" in torpor.graph(torch.matmul(x, y))


def test_matmul_of_a_batch_of_one_into_a_tensor_has_eagers_bits(put: Put) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> object:
        buffer = torch.zeros(4, 5, 10, device=x.device)
        torch.matmul(x, y, out=buffer[..., ::2])
        return buffer

    x = torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(0))
    agree(put, program, x, x[:1].clone())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)])
def test_a_norm_in_mixed_precision_keeps_its_statistics_in_full(put: Put, norm: nn.Module) -> None:
    def program(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> object:
        both = {"weight": weight, "bias": bias}
        y = torch.func.functional_call(copy.deepcopy(norm).to(x.device), both, (x,))
        return y, torch.autograd.grad(y.float().sin().sum(), (x, weight, bias))

    x = torch.linspace(-1, 2, 20).view(5, 4).bfloat16().requires_grad_()
    agree(put, program, x, torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True))


def test_a_frozen_layer_does_not_need_its_input(put: Put) -> None:
    def program(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> object:
        h = x * 1
        h += F.linear(h, weight, bias)
        h += h @ weight
        return torch.autograd.grad(h.sin().sum(), (x, bias))

    x = torch.rand(2, 3, requires_grad=True)
    agree(put, program, x, torch.rand(3, 3), torch.rand(3, requires_grad=True))


def test_a_bias_trained_alone_does_not_need_the_input(put: Put) -> None:
    def program(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> object:
        h = x * 1
        y = F.linear(h, weight, bias)
        h.zero_()
        return torch.autograd.grad(y.sin().sum(), bias)

    agree(put, program, torch.rand(2, 3), torch.rand(3, 3), torch.rand(3, requires_grad=True))


def test_what_is_pending_is_computed_with_the_default_dtype_it_was_recorded_with(put: Put) -> None:
    x = put(torch.tensor([1, 2]))
    torch.set_default_dtype(torch.float64)
    try:
        third = x / 3
    finally:
        torch.set_default_dtype(torch.float32)
    assert third.dtype is torch.float64
    assert third.tolist() == [1 / 3, 2 / 3]


def test_attention_sees_who_needs_a_gradient_in_no_grad_too(put: Put) -> None:
    def program(q: torch.Tensor, mask: torch.Tensor) -> object:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    agree(put, program, q, torch.rand(5, 5, requires_grad=True))


def test_groups_keep_the_memory_format_of_their_input(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        y = F.group_norm(x, 2)
        return y, y.stride()

    agree(put, program, torch.rand(2, 4, 3, 3).to(memory_format=torch.channels_last))


def test_a_recurrent_network_shares_the_casts_of_its_weights_under_autocast(concrete: Put) -> None:
    def program(x: torch.Tensor, *weights: torch.Tensor) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            state = torch.zeros(1, 3, 5, device=x.device)
            y, _ = torch.gru(x, state, weights, True, 1, 0.0, True, False, False)
        return y, torch.autograd.grad(y.float().sum(), weights)

    torch.manual_seed(0)
    weights = [p.detach().requires_grad_() for p in nn.GRU(6, 5).parameters()]
    agree(concrete, program, torch.randn(4, 3, 6), *weights)


def test_a_fused_layer_casts_inside_under_autocast(concrete: Put) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)
        actual = torpor.lazy(copy.deepcopy(layer))(concrete(x))
    assert actual.dtype is expected.dtype is torch.bfloat16
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_may_make_nested_tensors(concrete: Put) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        lazily = torpor.lazy(copy.deepcopy(encoder))
        actual = lazily(concrete(x), src_key_padding_mask=concrete(padding))
    assert torch.equal(actual.cpu(), expected)


def test_packed_sequences_are_padded_in_the_mode() -> None:
    with torpor.mode():
        packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
        padded, lengths = nn.utils.rnn.pad_packed_sequence(packed)
    assert padded.sum().item() == 9
    assert lengths.tolist() == [2, 1]


@pytest.mark.parametrize("name", ["_foreach_maximum_", "_foreach_minimum_", "_foreach_add_"])
def test_lists_written_to_do_not_grow(put: Put, name: str) -> None:
    small = put(torch.ones(3))
    with pytest.raises(RuntimeError):
        getattr(torch, name)([small], [put(torch.ones(2, 3))])
    assert_same(small, torch.ones(3))


def test_a_gradient_of_another_dtype_meets_a_threshold(put: Put) -> None:
    agree(
        put,
        lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0.5),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([0.0, 1.0]),
    )


def test_what_was_recorded_outside_autocast_is_not_run_in_it(
    monkeypatch: pytest.MonkeyPatch, put: Put
) -> None:
    monkeypatch.setattr(torpor.config, "async_queue", False)
    torch.manual_seed(0)
    plain = torch.randn(8, 8)
    lazy = put(plain)
    product = lazy @ lazy
    with torch.autocast("cpu", torch.bfloat16):
        torpor.sync()
    assert_same(product, plain @ plain)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_a_step_that_ends_inside_a_transform_is_run_outside(
    monkeypatch: pytest.MonkeyPatch, put: Put, transform: Callable[..., Any]
) -> None:
    monkeypatch.setattr(torpor.config, "async_queue", False)
    pending = put(torch.ones(3)) * 2 + 1

    def total(x: torch.Tensor) -> torch.Tensor:
        torpor.sync()
        return x.sum()

    transform(total)(torch.ones(3, 3))
    assert_same(pending, torch.full((3,), 3.0))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_parts_of_inference_tensors_are_written_to(
    monkeypatch: pytest.MonkeyPatch, put: Put, backend: str, asynchronous: bool
) -> None:
    monkeypatch.setattr(torpor.config, "async_queue", asynchronous)
    monkeypatch.setattr(torpor.config, "compile_after", 0)
    used = torpor.backend.get_backend().name
    torpor.use(backend)
    try:
        with torch.inference_mode():
            cache, plain = put(torch.zeros(6)), torch.zeros(6)
            for place in range(4):
                cache[place : place + 1] = place
                plain[place : place + 1] = place
                torpor.sync()
            assert_same(cache, plain)
    finally:
        torpor.use(used)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_recurrent_layers_round_as_eager_does_without_gradients(
    put: Put, without: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(8, 16, 2), torch.randn(5, 3, 8)
    recorded = copy.deepcopy(lstm)
    for parameter in recorded.parameters():
        parameter.data = put(parameter.data)
    with without():
        assert torch.equal(torpor.eager(recorded(put(x))[0].detach()), lstm(x)[0])


def test_a_plain_gradient_reaches_a_linear_layer() -> None:
    """What was written into a plain tensor has a plain gradient, and the bias's is a sum of it."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        outputs = torch.zeros(2, 3)
        outputs[:, :] = model(torch.ones(2, 4))
        outputs.pow(2).sum().backward()
        return [p.grad for p in model.parameters()]

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    expected = gradients(copy.deepcopy(model))
    assert_same(gradients(torpor.lazy(model)), expected)


def test_a_plain_tensor_of_an_op_with_parts_is_one_leaf() -> None:
    weight = torpor.lazy(nn.Linear(4, 3)).weight
    _ = weight + 1
    known = len(TRACE.leaves)
    _ = F.linear(torch.ones(2, 4), weight)
    assert len(TRACE.leaves) == known + 1


# -- as people write it -------------------------------------------------------------------------


def test_a_copied_parameter_has_contents_only_as_in_eager(put: Put) -> None:
    """Gradients in a copied model would be added to the copy's own."""
    layer = nn.Linear(2, 1)
    layer.weight = nn.Parameter(put(torch.arange(6.0)[::3].view(1, 2)))
    layer.bias = nn.Parameter(put(torch.zeros(1)))
    layer.weight.sum().backward()
    copied = copy.deepcopy(layer)
    assert [p.grad for p in copied.parameters()] == [None, None]
    assert isinstance(copied.weight, nn.Parameter)
    assert copied.weight.is_leaf
    assert copied.weight.requires_grad
    assert copied.weight.stride() == copy.deepcopy(nn.Linear(2, 1)).weight.stride()
    assert copied.weight.tolist() == [[0.0, 3.0]]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_anomaly_mode_finds_nan_in_a_linear_layer() -> None:
    model = torpor.lazy(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
    x = torch.arange(12.0).view(4, 3) / 12
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
        (model(x) - model(x)).sqrt().sum().backward()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("is_lazy", [False, True])
def test_linearize_traces_what_depends_on_its_input(is_lazy: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x, tangent = torch.ones(4, 3) / 3, torch.arange(12.0).view(4, 3)
    expected = torch.func.linearize(model, x)[1](tangent)
    model = torpor.lazy(model)
    if is_lazy:
        x, tangent = torpor.lazy(x), torpor.lazy(tangent)
    assert_same(torch.func.linearize(model, x)[1](tangent), expected)


def test_fake_tensors_meet_lazy_parameters() -> None:
    from torch._subclasses import FakeTensorMode

    model = torpor.lazy(nn.Linear(3, 2))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = model(torch.ones(4, 3))
    assert result.shape == (4, 2)
    assert result.fake_mode is mode


def test_a_parametrization_is_removed_while_a_graph_holds_the_weight() -> None:
    layer = nn.utils.parametrizations.spectral_norm(torpor.lazy(nn.Linear(4, 4)))
    loss = layer(torch.ones(2, 4)).sum()
    layer.eval()
    expected = layer.weight.detach().clone()
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert_same(layer.weight.detach(), expected)
    del loss


def test_lengths_of_ctc_loss_may_be_on_the_cpu() -> None:
    scores = torch.randn(5, 2, 4).log_softmax(2)
    rest = torch.tensor([[1, 2], [3, 1]]), torch.tensor([5, 4]), torch.tensor([2, 1])
    actual = F.ctc_loss(scores.to("lazy"), rest[0].to("lazy"), *rest[1:])
    assert_same(actual, F.ctc_loss(scores, *rest))


def test_plain_tensors_are_copied_deeply_in_the_mode() -> None:
    step = torch.tensor(3.0)
    with torpor.mode():
        copied = copy.deepcopy(step)
        parts = torch.arange(4.0).tensor_split(torch.tensor([1, 3]))
    assert copied.item() == 3.0
    assert [part.tolist() for part in parts] == [[0.0], [1.0, 2.0], [3.0]]


def test_a_conjugate_has_no_array_of_its_own_as_in_eager(put: Put) -> None:
    conjugate = put(torch.tensor([1 + 2j])).conj()
    with pytest.raises(RuntimeError, match="conjugate bit"):
        conjugate.detach().numpy()
    assert conjugate.resolve_conj().numpy().tolist() == [1 - 2j]
    assert conjugate.numpy(force=True).tolist() == [1 - 2j]


def test_data_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match="has to be a tensor"):
        torpor.lazy(torch.ones(1)).data = 3
