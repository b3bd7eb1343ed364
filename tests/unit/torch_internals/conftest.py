"""What the tests of torch's private names share."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torpor
from tests.unit.torch_internals.traced import traced_sine
from torpor import _torch


@pytest.fixture
def lazy() -> Iterator[torch.Tensor]:
    yield torch.ones(2, device="lazy")
    torpor.sync(wait=True)


@pytest.fixture(scope="module")
def compiled_sine() -> Any:
    from torpor.backends.inductor import runtime

    reason = runtime.unavailable()
    if reason is not None:
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor imports what torch deprecates
        return _torch.inductor_compile(*traced_sine(), {})
