"""Every op of torch's that draws, or makes a tensor, from tensors: eager's numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import torpor
from tests.comparison import Put, assert_same
from torpor.ops.spec import ArgKind, spec_of

aten = torch.ops.aten


def _overloads() -> Iterator[Any]:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        if space == "aten" and hasattr(aten, op):
            yield getattr(getattr(aten, op), overload or "default")


def _takes_tensors(op: Any) -> bool:
    return any(a.kind in (ArgKind.TENSOR, ArgKind.TENSORS) for a in spec_of(op).arguments)


OF_OTHER_DEVICES = (
    "cudnn", "miopen", "mps", "flash", "efficient", "triton", "mem_eff", "_fused_dropout",
    "overrideable", "nested",
)  # fmt: skip
DRAWS = {
    str(op): op
    for op in _overloads()
    if torch.Tag.nondeterministic_seeded in op.tags
    and _takes_tensors(op)
    and not any(word in str(op) for word in OF_OTHER_DEVICES)
}

FACTORIES = {
    str(op): op
    for op in _overloads()
    if op._opname in ("linspace", "logspace", "arange", "range", "full", "full_like", "eye",
                      "new_full", "scalar_tensor", "zeros_like", "ones_like",
                      "fill", "fill_", "one_hot", "tril_indices", "vander")
    and _takes_tensors(op)
}  # fmt: skip

PROBABILITIES = torch.linspace(0.05, 0.95, 12).view(3, 4)
TENSORS = {"count": PROBABILITIES * 20, "high": torch.tensor(9), "std": PROBABILITIES.flip(0)}
SCALARS = {"p": 0.4, "dropout_p": 0.3, "high": 9, "low": 2, "to": 9, "from": 2, "num_samples": 3}


def _recurrent(op: Any) -> tuple[Any, ...]:
    """Arguments of two layers of a recurrent network that drops out between them."""
    gates = {"lstm": 4, "gru": 3}.get(op._opname, 1)
    params = []
    for _ in range(2):
        params += [torch.randn(gates * 4, 4), torch.randn(gates * 4, 4)]
    state = torch.randn(2, 3, 4)
    hx = [state, state + 1] if op._opname == "lstm" else state
    if op._overloadname == "data":
        return (torch.randn(6, 4), torch.tensor([3, 3]), hx, params, False, 2, 0.5, True, False)
    return (torch.randn(2, 3, 4), hx, params, False, 2, 0.5, True, False, False)


def _attention(op: Any) -> tuple[Any, ...]:
    return tuple(torch.randn(1, 2, 3, 4) for _ in range(3)) + (None, 0.3)


def _arguments(op: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that eager takes, by the names and types of the schema."""
    torch.manual_seed(1)
    if op._opname in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return _recurrent(op), {}
    if "attention" in op._opname or "sdp" in op._opname:
        return _attention(op), {}
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument in op._schema.arguments:
        value = _argument(op, argument)
        if value is _DEFAULT:
            continue
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return tuple(positional), keywords


_DEFAULT = object()
_TRUE = ("train", "training", "replacement")


def _argument(op: Any, argument: Any) -> Any:
    kind, name = str(argument.type), argument.name
    if kind == "Tensor" and argument.is_out:
        return _out(op, name)
    if kind == "Tensor":
        return _tensor(op, name)
    if kind == "Generator" or (kind == "Optional[Generator]" and not argument.has_default_value()):
        return torch.Generator().manual_seed(5)
    if name in _TRUE:
        return True
    if name in SCALARS and kind != "Tensor":
        return SCALARS[name] if kind in ("float", "number") else int(SCALARS[name])
    if argument.has_default_value() or kind.startswith("Optional"):
        return _DEFAULT if argument.has_default_value() else None
    return {"int": 5, "SymInt": 5, "float": 0.5, "number": 2.5, "bool": True}.get(kind, (3, 4))


def _tensor(op: Any, name: str) -> torch.Tensor:
    if name in ("start", "end", "fill_value", "value"):
        return torch.tensor({"start": 1.5, "end": 7.5}.get(name, 3.25))
    if op._opname == "one_hot":
        return torch.tensor([0, 2, 1])
    if op._opname.startswith("feature"):
        return PROBABILITIES.view(1, 3, 2, 2)
    return TENSORS.get(name, PROBABILITIES).clone()


def _out(op: Any, name: str) -> torch.Tensor:
    if name == "out1" or op._opname == "randperm":
        return torch.empty(0, dtype=torch.bool if name == "out1" else torch.int64)
    return torch.empty(0, dtype=torch.int64 if op._opname == "multinomial" else torch.float32)


def _moved(value: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return put(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, put) for item in value)
    return value


def _called(op: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Its results and what it left in its arguments, twice, and what is drawn next."""
    args, kwargs = _arguments(op)
    args = _moved(args, put)
    kwargs = {name: _moved(value, put) for name, value in kwargs.items()}
    torch.manual_seed(7)
    noted: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            noted += [op(*args, **kwargs), *(a for a in args if isinstance(a, torch.Tensor))]
    return [*noted, torch.rand(3)]


def _agrees(put: Put, op: Any) -> None:
    try:
        expected = _called(op, torch.clone)
    except Exception as refusal:
        with pytest.raises(type(refusal)):
            _called(op, put.tensor)
        return
    fill = torch.full((4096,), 0.5)  # what freed memory holds
    del fill
    assert_same(_called(op, put.tensor), expected)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_from_tensors_is_eagers(put: Put, name: str) -> None:
    _agrees(put, DRAWS[name])


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_reads_its_tensors(put: Put, name: str) -> None:
    _agrees(put, FACTORIES[name])


def test_nearly_all_draws_are_called() -> None:
    """The arguments made up here fit: what eager refuses is looked at by nobody."""
    refused = []
    for name, op in DRAWS.items():
        try:
            _called(op, torch.clone)
        except Exception as error:
            refused.append(f"{name}: {error}")
    assert len(DRAWS) > 90
    assert len(refused) <= 4, refused


@pytest.mark.parametrize("call", [torch.linspace, torch.logspace])
def test_ends_that_are_lazy_give_a_plain_tensor_on_the_default_device(
    virtual: Put, call: Callable[..., torch.Tensor]
) -> None:
    start, end = torch.tensor(0.5), torch.tensor(2.0)
    lazily = call(virtual(start), virtual(end) * 1, 7)
    assert not torpor.is_lazy(lazily)
    assert torch.equal(lazily, call(start, end, 7))
    assert torch.equal(call(virtual(start), 2.0, 7), call(start, 2.0, 7))


def test_a_random_tensor_like_a_lazy_one_is_plain_where_it_is_asked_for(virtual: Put) -> None:
    x = virtual(PROBABILITIES)
    for call in (torch.rand_like, torch.randn_like, partial(torch.randint_like, high=9)):
        torch.manual_seed(3)
        expected = call(PROBABILITIES, device="cpu")
        torch.manual_seed(3)
        lazily = call(x, device="cpu")
        assert not torpor.is_lazy(lazily)
        assert torch.equal(lazily, expected)
