"""A backend whose buffers are no torch tensors passes the kit, in under 60 lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from tests.backends import own_buffers
from torpor.backend import BackendData, BackendDeviceType, register
from torpor.backends import kernels
from torpor.errors import BackendError
from torpor.ir.types import TensorType
from torpor.testing.run import run_kit

NAME = "tests.backends.own_buffers:OwnBuffers"
OPERATORS = "^(add|mul|mm|sum|softmax|cat|sort|conj|index_select|as_strided|nn_functional_gelu)$"


def test_it_is_small() -> None:
    assert own_buffers.__file__ is not None
    assert len(Path(own_buffers.__file__).read_text().splitlines()) < 60


@pytest.mark.parametrize("section", ["contract", "buffers", "laziness", "errors", "models"])
def test_it_passes_a_section_of_the_kit(section: str) -> None:
    outcome = run_kit(NAME, f"test_{section}")
    assert outcome.held, outcome.output


def test_its_operators_are_right() -> None:
    outcome = run_kit(NAME, "test_operators", options=["--ops", OPERATORS])
    assert outcome.held, outcome.output


class OnTwoDevices(own_buffers.OwnBuffers):  # type: ignore[misc]  # it has no types
    """Two devices of a kind of its own; a program runs on both."""

    host_devices = 2

    def __init__(self) -> None:
        super().__init__()
        self.default_device_type = BackendDeviceType("acme", "cpu")

    def compilation_devices(self, device: str, devices: list[str]) -> list[str]:
        return list(devices) or [device]


register("tests-two-devices", OnTwoDevices)
register("tests-own-buffers", own_buffers.OwnBuffers)


def test_devices_of_its_own_pass_the_kit() -> None:
    outcome = run_kit("tests-two-devices", "test_buffers")
    assert outcome.held, outcome.output
    assert not [point for point in outcome.card.points if point.outcome != "held"], outcome.output


def test_devices_have_its_own_name_and_the_memory_of_torchs() -> None:
    with torpor.using("tests-two-devices") as backend:
        x = torch.ones(2, device="lazy:1") + 1
        assert x.tolist() == [2.0, 2.0]
        data = x._lazy_storage.data  # type: ignore[attr-defined]  # it is lazy
        assert (str(data.device), data.device.torch_device) == ("acme:1", torch.device("cpu"))
        with pytest.raises(RuntimeError, match="are acme:0, acme:1"):
            torch.ones(2, device="lazy:2")
        assert str(backend.backend_device(torch.device("cpu"))) == "acme:0"


def test_load_without_the_backend_says_what_is_missing() -> None:
    with torpor.using("tests-own-buffers"):
        x = torch.ones(2).to("lazy")
        with pytest.raises(BackendError, match="pass the backend"):
            kernels.load([x._lazy_storage.data])  # type: ignore[attr-defined]  # it is lazy


class NoPlaceholders(own_buffers.OwnBuffers):  # type: ignore[misc]  # it has no types
    """Returns handles of its own, where what waits for them are torpor's."""

    def placeholder(self, device: Any, type_: Any, array: Any = None) -> BackendData:
        if array is None:
            return BackendData(device, type_)
        made: BackendData = super().placeholder(device, type_, array)
        return made


register("tests-no-placeholders", NoPlaceholders)


def test_handles_that_cannot_hold_a_result_are_named() -> None:
    with torpor.using("tests-no-placeholders"):
        y = torch.ones(2).to("lazy") + 1
        with pytest.raises(BackendError, match=r"a Array, .* a BackendData, which holds nothing"):
            y.tolist()


def test_a_tensor_of_another_size_than_promised_is_an_error_that_says_so() -> None:
    promised = TensorType.of_tensor(torch.ones(3))
    with pytest.raises(BackendError, match=r"shape \(1,\), not float32\[3\]"):
        kernels.as_promised(torch.ones(1), promised)
