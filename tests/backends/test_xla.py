"""The XLA backend: numbers, dtypes, memory, errors. The kit asks what all backends are asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torpor
from torpor.compiling.compilation import compile_graph
from torpor.ir.graph import Graph
from torpor.ir.types import TensorType
from torpor.trace.values import value_of

jax = pytest.importorskip("jax", reason="jax is not installed (pip install 'torpor[xla]')")

from torpor.backends.xla import XlaBackend  # noqa: E402  # needs jax
from torpor.backends.xla.lowerings import TABLE  # noqa: E402  # needs jax

STEPS = 4


@pytest.fixture(autouse=True)
def on_xla(back_to_the_reference: None, monkeypatch: pytest.MonkeyPatch) -> XlaBackend:
    monkeypatch.setattr(torpor.config, "strict", True)
    backend = torpor.use("xla")
    assert isinstance(backend, XlaBackend)
    torpor.metrics.reset()
    return backend


def counted(prefix: str) -> dict[str, int]:
    return {k: n for k, n in torpor.metrics.counters().items() if k.startswith(prefix)}


def losses(make: Callable[[], nn.Module], data: list[Any], device: str) -> list[float]:
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


class Reader(nn.Module):
    """Words, attention and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True)
        self.out = nn.Linear(8, 13)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.words(words)).mean(1))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.ConvTranspose2d(6, 4, 3, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


WORDS = [(torch.randint(13, (4, 6)), torch.randint(13, (4,))) for _ in range(STEPS)]
PICTURES = [(torch.randn(4, 3, 8, 8), torch.randint(5, (4,))) for _ in range(STEPS)]


@pytest.mark.parametrize(("make", "data"), [(Reader, WORDS), (conv_net, PICTURES)])
def test_training_agrees_with_eager_and_nothing_falls_back(
    make: Callable[[], nn.Module], data: list[Any]
) -> None:
    expected = losses(make, data, "cpu")
    assert losses(make, data, "lazy") == pytest.approx(expected, rel=1e-4)
    assert counted("fallback::") == {}


def test_gradients_that_die_are_no_results_where_that_is_asked_for(on_xla: XlaBackend) -> None:
    def results(model: nn.Module) -> list[int]:
        x = torch.linspace(-1, 1, 12).view(3, 4).to("lazy")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made: list[int] = []
        execute = on_xla.execute

        def counting(computation: Any, *rest: Any) -> Any:
            made.append(len(computation.graph.outputs))
            return execute(computation, *rest)

        on_xla.execute = counting  # type: ignore[method-assign]  # to look at what it is given
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        loss.item()
        on_xla.execute = execute  # type: ignore[method-assign]  # as it was
        return made

    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)]
    assert results(nn.Sequential(*layers).to("lazy")) == [13, 13, 13]
    on_xla.cuts_at_zero_grad = True
    assert results(nn.Sequential(*layers).to("lazy")) == [7, 7, 7]


def test_a_step_that_eagers_kernels_run_is_counted() -> None:
    rows = torch.arange(6.0).view(3, 2).to("lazy")
    with pytest.raises(IndexError):
        rows[torch.tensor([3]).to("lazy")].tolist()
    assert torpor.metrics.counters()["StepsByEager"] == 1


def test_attention_of_a_row_that_sees_nothing_is_zero_as_in_eager() -> None:
    def attend(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        query = torch.randn(1, 2, 4, 8).to(device).requires_grad_()
        mask = torch.zeros(4, 4)
        mask[1] = -torch.inf
        made = nn.functional.scaled_dot_product_attention(query, query, query, mask.to(device))
        made.sum().backward()
        return [made.detach().cpu(), query.grad.cpu()]

    torch.testing.assert_close(attend("lazy"), attend("cpu"))
    assert counted("fallback::") == {}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_of_gpus_and_its_gradients_are_right(kind: str, causal: bool) -> None:
    query, key, value, grad = (torch.randn(2, 3, 50, 16) for _ in range(4))
    given = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected = nn.functional.scaled_dot_product_attention(*given, is_causal=causal)
    expected.backward(grad.double())
    wanted = [expected.detach(), *(tensor.grad for tensor in given)]
    lazy = [tensor.to("lazy") for tensor in (query, key, value)]
    forward, backward = (getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{end}")
                         for end in ("", "_backward"))  # fmt: skip
    bias = () if kind == "flash" else (None, True)
    out, sums, *rest = forward(*lazy, *bias, 0.0, causal)
    turn = rest[-2:] if kind == "efficient" else rest[4:6]
    after: dict[str, tuple[Any, ...]] = {
        "flash": (None, None, 50, 50, 0.0, causal, *turn),
        "efficient": (*turn, 0.0, [True, True, True, False], causal),
        "cudnn": (*turn, None, None, None, 50, 50, 0.0, causal),
    }
    unbiased = (None,) if kind == "efficient" else ()
    grads = backward(grad.to("lazy"), *lazy, *unbiased, out, sums, *after[kind])[:3]
    for got, right in zip([out, *grads], wanted, strict=True):
        torch.testing.assert_close(got.cpu().double(), right, rtol=1e-4, atol=1e-5)
    assert counted("fallback::") == counted("decomposed::") == {}


def test_long_numbers_are_kept_and_jax_is_left_as_it_was() -> None:
    large = torch.tensor([2**40 + 1, -(2**50)]).to("lazy")
    fine = torch.tensor([1e-300, 1 + 2**-40], dtype=torch.float64).to("lazy")
    assert (large * 3).tolist() == [3 * (2**40 + 1), -3 * 2**50]
    assert (fine + 0).tolist() == [1e-300, 1 + 2**-40]
    assert not jax.config.jax_enable_x64
    assert jax.numpy.arange(3).dtype == jax.numpy.int32


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_numbers_that_xla_has_not_stay_tensors() -> None:
    x = torch.tensor([1 + 2j, -3j]).to(torch.complex32).to("lazy")
    torpor.sync()
    assert torch.equal(x.cpu().to(torch.complex64), torch.tensor([1 + 2j, -3j]))


def test_results_have_the_strides_that_were_promised() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = (x.to("lazy") + 1).relu()
    assert y.stride() == x.stride()
    assert y.cpu().stride() == x.stride()
    assert torch.equal(y.cpu(), (x + 1).relu())


def test_new_full_has_the_number_not_the_size() -> None:
    x = torch.ones(2).to("lazy")
    assert x.new_full((3,), 7.0).tolist() == [7.0, 7.0, 7.0]
    assert counted("fallback::") == {}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("values", [torch.tensor(9.0), torch.arange(3.0), torch.ones(3, 1)])
def test_values_are_put_under_a_mask(values: torch.Tensor, accumulate: bool) -> None:
    mask = torch.tensor([True, False, True, True])
    for x, index in (
        (torch.randn(4, 3, 3), [mask]),
        (torch.randn(2, 4, 3), [None, mask]),
        (torch.randn(2, 2, 3), [mask.view(2, 2)]),
    ):
        expected = torch.ops.aten.index_put(x, index, values, accumulate)
        lazy = [None if i is None else i.to("lazy") for i in index]
        got = torch.ops.aten.index_put(x.to("lazy"), lazy, values.to("lazy"), accumulate)
        assert torch.equal(got.cpu(), expected)
    assert counted("fallback::") == {}


def test_a_mask_with_more_places_than_values_is_eagers_error() -> None:
    x, mask = torch.zeros(4).to("lazy"), torch.tensor([True, True, True, False]).to("lazy")
    two, three = torch.ones(2).to("lazy"), torch.arange(3.0).to("lazy")
    assert torch.ops.aten.index_put(x, [mask], three).tolist() == [0.0, 1.0, 2.0, 0.0]
    with pytest.raises(RuntimeError, match="shape mismatch"):
        torch.ops.aten.index_put(x, [mask], two).tolist()


def test_a_histogram_counts_what_lies_on_an_edge_where_eager_does() -> None:
    x = torch.cat([torch.linspace(0, 1, 101), torch.randn(1000), torch.tensor([torch.nan])])
    for bins, low, high in ((10, 0.0, 1.0), (7, -0.3, 0.7), (8, 0, 7), (3, 0.1, 0.4)):
        expected = torch.histc(x, bins, low, high)
        assert torch.equal(torch.histc(x.to("lazy"), bins, low, high).cpu(), expected)
    assert counted("fallback::") == {}


def test_a_window_on_memory_shows_what_eager_shows() -> None:
    x = torch.arange(12.0).view(3, 4).t().contiguous().t()
    lazy = x.to("lazy")
    assert torch.equal(lazy.as_strided((2, 5), (2, 1), 1).cpu(), x.as_strided((2, 5), (2, 1), 1))
    assert counted("fallback::") == {}


@pytest.mark.parametrize("bad", [13, -1])
def test_an_index_out_of_range_is_eagers_error_and_the_step_writes_nothing(bad: int) -> None:
    torch.manual_seed(0)
    model = Reader().to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().cpu() for p in model.parameters()]
    words = torch.tensor([[1, 2, bad]]).to("lazy")
    with pytest.raises(IndexError, match="index out of range"):
        model(words).sum().backward()
        optimizer.step()
        torpor.sync(wait=True)
    after = [p.detach().cpu() for p in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_an_index_that_the_step_computes_is_checked_too() -> None:
    x = torch.tensor([0.5, 2.5]).to("lazy")
    rows = torch.arange(6.0).view(3, 2).to("lazy")
    assert rows[(x * 0.9).long()].tolist() == [[0.0, 1.0], [4.0, 5.0]]
    with pytest.raises(IndexError, match="out of bounds"):
        rows[(x * 2).long()].tolist()


def test_an_op_without_a_lowering_runs_in_the_middle_of_a_graph() -> None:
    x = torch.randn(4, 3)
    lazy = torch.geqrf(x.to("lazy") * 2)[0] + 1
    torch.testing.assert_close(lazy.cpu(), torch.geqrf(x * 2)[0] + 1)
    assert counted("fallback::") == {"fallback::aten.geqrf.default": 1}


@pytest.mark.parametrize("donated", [{}, {0: 0}])
def test_donated_arrays_are_written_over(on_xla: XlaBackend, donated: dict[int, int]) -> None:
    device = on_xla.backend_device(torch.device("lazy"))
    graph = Graph.of([value_of(torch.ones(64).to("lazy") * 2)])
    computation = compile_graph(graph, "twice", on_xla, device, donated)
    data = on_xla.data_from_tensor(torch.ones(64), graph.inputs[0].type, device)
    (result,) = on_xla.execute(computation, [data], device)
    assert data.array.is_deleted() == bool(donated)
    assert torch.equal(on_xla.tensor_from_data(result), torch.full((64,), 2.0))


def test_data_are_copied_before_their_tensor_is_written_again(on_xla: XlaBackend) -> None:
    device = on_xla.backend_device(torch.device("lazy"))
    for _ in range(5):
        tensor = torch.ones(5_000_000)  # jax copies what is large on a thread of its own
        type_ = TensorType.of_tensor(tensor, torch.device("lazy"))
        data = on_xla.data_from_tensor(tensor, type_, device)
        tensor.zero_()
        assert bool(on_xla.tensor_from_data(data).all())


def test_xla_draws_itself_if_asked_to() -> None:
    def drawn() -> torch.Tensor:
        torch.manual_seed(7)
        x = torch.ones(1000).to("lazy")
        return torch.cat([nn.functional.dropout(x, 0.25), torch.rand_like(x), x]).cpu()

    expected = drawn()
    torpor.use("xla", rng="fast")
    first, again = drawn(), drawn()
    dropped, uniform, _ = first.split(1000)
    assert counted("fallback::") == {}
    assert torch.equal(first, again)
    assert not torch.equal(first, expected)
    assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert 200 < (dropped == 0).sum() < 300
    assert 0.45 < uniform.mean() < 0.55
    assert uniform.min() >= 0
    assert uniform.max() < 1


def test_the_backends_text_is_hlo() -> None:
    x = torch.ones(3).to("lazy")
    text = torpor.graph(x * 2 + 1, format="backend")
    assert "HloModule" in text
    assert "f32[3]" in text


def test_memory_is_counted(on_xla: XlaBackend) -> None:
    device = on_xla.backend_device(torch.device("lazy"))
    before = on_xla.memory_info(device).used
    x = torch.zeros(1000, 1000).to("lazy")
    torpor.sync(wait=True)
    after = on_xla.memory_info(device).used
    assert before is not None
    assert after is not None
    assert after - before >= x.numel() * 4


def test_every_lowering_is_of_an_op_that_torch_has() -> None:
    missing = [name for name in TABLE if not _exists(name)]
    assert not missing


def _exists(name: str) -> bool:
    packet, overload = name.removeprefix("aten.").rsplit(".", 1)
    return overload in getattr(torch.ops.aten, packet).overloads()


def test_importing_torpor_does_not_import_jax() -> None:
    code = "import sys, torpor; torpor.backends(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
