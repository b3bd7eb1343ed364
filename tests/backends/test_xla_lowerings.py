"""Lowerings of the XLA backend that are more than a call of jax: numbers and gradients of eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torpor

pytest.importorskip("jax", reason="jax is not installed (pip install 'torpor[xla]')")


@pytest.fixture(autouse=True)
def on_xla(back_to_the_reference: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "strict", True)
    torpor.use("xla")
    torpor.metrics.reset()
    torch.manual_seed(0)


def agree(program: Callable[..., Any], *tensors: torch.Tensor, **tolerance: float) -> None:
    """`program` gives what it gives in eager, and no op of it falls back."""
    got, expected = program(*[t.to("lazy") for t in tensors]), program(*tensors)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, equal_nan=True, **tolerance)
    found = torpor.metrics.counters()
    assert not [name for name in found if name.startswith(("fallback::", "CompileFailed"))]


SPACES = {2: (5, 7), 3: (3, 4, 5)}
PLACES = {2: (4, 6, 2), 3: (2, 3, 4, 3)}


@pytest.mark.parametrize(
    ("rank", "mode", "padding", "align"),
    [
        (2, "bilinear", "zeros", False), (2, "bilinear", "border", True),
        (2, "bilinear", "reflection", False), (2, "bilinear", "reflection", True),
        (2, "nearest", "border", False), (2, "bicubic", "reflection", False),
        (3, "bilinear", "zeros", True),
    ],
)  # fmt: skip
def test_samples_of_a_picture_and_their_gradients(
    rank: int, mode: str, padding: str, align: bool
) -> None:
    x, grid = torch.randn(2, 3, *SPACES[rank]), torch.randn(2, *PLACES[rank]) * 1.2

    def program(x: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        x, grid = x.detach().requires_grad_(), grid.detach().requires_grad_()
        made = F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=align)
        made.square().sum().backward()
        assert x.grad is not None
        assert grid.grad is not None
        return [made.detach(), x.grad, grid.grad]

    agree(program, x, grid, rtol=1e-4, atol=1e-4)


def test_a_picture_is_sampled_where_only_it_needs_a_gradient() -> None:
    x, grid = torch.randn(1, 2, 4, 4), torch.rand(1, 3, 3, 2) * 2 - 1

    def program(x: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        F.grid_sample(x, grid, align_corners=False).square().sum().backward()
        assert x.grad is not None
        return [x.grad]

    agree(program, x, grid, rtol=1e-4, atol=1e-5)


POLYNOMIALS = [
    *(f"{s}chebyshev_polynomial_{k}" for s in ("", "shifted_") for k in "tuvw"),
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
]


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials_of_all_degrees_at_their_ends_inside_and_outside(name: str) -> None:
    x = torch.tensor([-2.5, -1.0, -0.7, -0.1, 0.0, 0.3, 0.5, 0.9, 1.0, 1.8], dtype=torch.float64)
    degrees = torch.tensor([-1.0, 0, 1, 2, 3, 6, 7, 8, 9, 12], dtype=torch.float64)[:, None]
    function = getattr(torch.special, name)
    agree(lambda x, n: [function(x, n), function(x, 4), function(0.25, n)], x, degrees)


@pytest.mark.parametrize("order", range(6))
def test_polygamma_of_negative_numbers_and_at_poles(order: int) -> None:
    x = torch.tensor(
        [0.3, 1.0, 4.5, 9.0, 30.0, 1e4, -0.5, -2.25, -13.7, torch.inf, torch.nan],
        dtype=torch.float64,
    )
    poles = torch.tensor([0.0, -1.0, -5.0], dtype=torch.float64)
    agree(lambda x: [torch.polygamma(order, x)], x, rtol=1e-6, atol=1e-9)
    if order > 1:
        agree(lambda x: [torch.polygamma(order, x)], poles)


def test_the_spherical_bessel_function() -> None:
    x = torch.tensor([0.0, 1e-3, -0.4, 0.5, 3.0, -40.0, torch.inf, torch.nan], dtype=torch.float64)
    agree(lambda x: [torch.special.spherical_bessel_j0(x)], x)


def test_a_search_through_a_sorter() -> None:
    edges = torch.randn(3, 8)
    sorter = edges.argsort(-1)
    x = torch.cat([torch.randn(3, 5), edges[:, :2]], 1)
    for right, int32 in itertools.product([False, True], repeat=2):
        agree(
            lambda e, x, s: [torch.searchsorted(e, x, sorter=s, right=right, out_int32=int32)],  # noqa: B023  # called here
            edges, x, sorter,
        )  # fmt: skip


def test_a_sorter_that_names_no_edge_is_eagers_error() -> None:
    edges, x = torch.arange(4.0).to("lazy"), torch.tensor([1.5]).to("lazy")
    with pytest.raises(RuntimeError, match="sorter index out of range"):
        torch.searchsorted(edges, x, sorter=torch.tensor([0, 1, 2, 4]).to("lazy")).tolist()


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(3, 4), (12, 9), (6, 20)])
def test_antialiased_resampling_and_its_gradient(mode: str, size: tuple[int, int]) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        made = F.interpolate(x, size=size, mode=mode, antialias=True)
        made.square().sum().backward()
        assert x.grad is not None
        return [made.detach(), x.grad]

    agree(program, torch.randn(2, 3, 7, 11), rtol=1e-4, atol=1e-5)


def test_products_of_groups_and_their_gradients() -> None:
    ends = torch.tensor([2, 2, 5, 9], dtype=torch.int32)

    def program(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        made = F.grouped_mm(a, b, offs=ends)
        made.square().sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        return [made.detach(), a.grad, b.grad]

    agree(program, torch.randn(9, 8), torch.randn(4, 8, 16), ends, rtol=1e-4, atol=1e-4)
    ends = torch.tensor([4, 4, 8, 12], dtype=torch.int32)
    agree(program, torch.randn(4, 16, 8), torch.randn(8, 12), ends, rtol=1e-4, atol=1e-4)


def test_a_histogram_of_whole_numbers() -> None:
    x = torch.tensor([0, 3, 1, 1, -2, 7, 2], dtype=torch.int32)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        if not torpor.is_lazy(x):  # of whole numbers eager has none
            return [made.int() for made in histograms(x.double())]
        return histograms(x)

    def histograms(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.histc(x, 4, 0, 3), torch.histc(x, 3, 0, 7), torch.histc(x, 2, -2, 3)]

    agree(program, x)
    wide = torch.cat([torch.randn(500), torch.linspace(-1, 1, 41)]).double()
    agree(lambda x: [torch.histc(x, 10, -1, 1), torch.histc(x, 7, -0.3, 0.7)], wide)
