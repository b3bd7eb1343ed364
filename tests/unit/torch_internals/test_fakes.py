"""What `_torch.fakes` takes from inside torch still is what torpor takes it for."""

import logging
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor

from tests.unit.torch_internals.own_ops import BARE, OWN
from torpor import _torch
from torpor.trace.tensor import LazyTensor

aten = torch.ops.aten


def test_fake_mode_infers_types_with_no_numbers() -> None:
    with _torch.fake_mode():
        result = torch.empty(2, 3) @ torch.empty(3, 4)
    assert result.shape == (2, 4)
    assert _torch.fake_mode() is _torch.fake_mode()


def test_quiet_fakes_silences_the_logger_of_fake_tensors_and_no_longer() -> None:
    from torch._subclasses import fake_tensor

    assert fake_tensor.log.name == "torch._subclasses.fake_tensor"
    with _torch.quiet_fakes():
        assert logging.getLogger(fake_tensor.log.name).disabled
    assert not logging.getLogger(fake_tensor.log.name).disabled


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.nonzero])
def test_data_dependent_errors_are_what_fakes_raise_for_numbers(read: Any) -> None:
    with _torch.quiet_fakes(), _torch.fake_mode():
        tensor = torch.empty(1)
        with pytest.raises(_torch.data_dependent_errors()):
            read(tensor)


def test_unsupported_errors_are_what_fakes_raise_for_an_op_without_a_rule() -> None:
    library = torch.library.Library("torpor_internals", "FRAGMENT")
    library.define("no_rule(Tensor x) -> Tensor")
    library.impl("no_rule", lambda x: x.clone(), "CPU")
    with _torch.quiet_fakes(), _torch.fake_mode():
        tensor = torch.empty(1)
        with pytest.raises(_torch.unsupported_errors()):
            torch.ops.torpor_internals.no_rule(tensor)


def test_has_fake_tells_ops_that_fake_tensors_know() -> None:
    assert _torch.has_fake(aten.add.Tensor)
    assert not _torch.has_fake(OWN)
    assert not _torch.has_fake(BARE)


@pytest.mark.parametrize("op", [OWN, BARE], ids=["own", "bare"])
def test_give_fake_lets_fake_tensors_know_an_op_and_is_undone(op: Any) -> None:
    take = _torch.give_fake(op, lambda x: x.new_empty((7,)))
    assert _torch.has_fake(op)
    with _torch.new_fake_mode():
        assert op(torch.ones(2)).shape == (7,)
    take()
    assert not _torch.has_fake(op)


def test_new_fake_mode_is_a_new_one_and_refuses_real_tensors() -> None:
    mode = _torch.new_fake_mode()
    assert mode is not _torch.new_fake_mode()
    with mode:
        fake = torch.empty(2)
        with pytest.raises(Exception, match="FakeTensor"):
            fake + real_two()
    assert type(fake).__name__ == "FakeTensor"


def real_two() -> torch.Tensor:
    with _torch.without_modes():
        return torch.ones(2)


def test_tracing_with_tells_compilers_the_fake_mode() -> None:
    from torch._guards import TracingContext

    mode = _torch.new_fake_mode()
    with _torch.tracing_with(mode):
        assert TracingContext.get().fake_mode is mode


def test_type_source_tells_who_knows_the_result() -> None:
    aten = torch.ops.aten
    assert _torch.type_source(aten.add.Tensor) == "meta"
    assert _torch.type_source(aten.linear.default) == "parts"
    assert _torch.type_source(aten.nonzero.default) == "fake"
    assert _torch.type_source(aten._foobar.default) == ""


def test_fakes_by_decomposition() -> None:
    aten = torch.ops.aten
    assert _torch.fakes_by_decomposition(aten.upsample_bilinear2d.default)
    assert not _torch.fakes_by_decomposition(aten.mm.default)
    assert not _torch.fakes_by_decomposition(aten.convolution.default)


def test_make_fakes_with_a_type_and_the_device() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor = torch.ones(2, 3, device="lazy").t()
    fake = FakeTensorMode().from_tensor(tensor)
    assert (fake.shape, fake.stride(), fake.device) == ((3, 2), (1, 3), tensor.device)
    assert not isinstance(fake, LazyTensor)


class _Stranger(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _torch.among_fakes(cls, func, args, kwargs or {})


def test_among_fakes() -> None:
    stranger = torch.ones(2).as_subclass(_Stranger)
    tolerant = FakeTensorMode(allow_non_fake_inputs=True)
    with tolerant:
        fake = torch.empty(2)
    add = torch.ops.aten.add.Tensor
    made = _torch.among_fakes(_Stranger, add, (fake, stranger), {})
    assert (type(made), made.shape) == (FakeTensor, (2,))
    assert _torch.among_fakes(_Stranger, add, (stranger, stranger), {}) is NotImplemented
    with _torch.new_fake_mode():
        strict = torch.empty(2)
    assert _torch.among_fakes(_Stranger, add, (strict, stranger), {}) is NotImplemented


def test_make_fx_takes_a_class_for_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_tensor, "HANDLED_TYPES", proxy_tensor.HANDLED_TYPES)
    _torch.make_fx_takes(_Stranger)
    assert _Stranger in proxy_tensor.HANDLED_TYPES
