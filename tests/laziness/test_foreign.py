"""Other parts of torch that meet lazy tensors: they work, or get plain ones with one warning."""

from __future__ import annotations

import importlib.util
import io
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_over
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import data, dlpack
from torch.utils.flop_counter import FlopCounterMode

import torpor
from tests.laziness.foreign import plain, same, warnings_caught
from torpor.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.:DeprecationWarning",
    "ignore:flex_attention called without torch.compile:UserWarning",
)

Put = Callable[[Any], Any]


@pytest.fixture(params=["reference", "inductor"])
def exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether results are eager's bits; both backends, each as it is used."""
    monkeypatch.setattr(torpor.config, "compile_after", -1)
    with torpor.using(request.param):
        yield request.param == "reference"


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torpor.sync(wait=True)


def linear(put: Put) -> Any:
    torch.manual_seed(0)
    return put(nn.Linear(4, 3))


def x(put: Put, requires_grad: bool = False) -> Any:
    return put(torch.linspace(0.5, 2, 8).view(2, 4).requires_grad_(requires_grad))


def check(program: Callable[[Put], Any], put: Put, exact: bool, warnings: int = 1) -> None:
    """A program gives eager's numbers, and tells so many things."""
    expected = program(plain)
    with warnings_caught() as texts:
        result = program(put)
    same(result, expected, exact)
    assert len(texts) == warnings, texts


# -- higher-order ops ------------------------------------------------------------------------------


def cond(put: Put) -> Any:
    tensor = x(put, True)
    result = torch.cond(tensor.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (tensor,))
    result.sum().backward()
    return result, tensor.grad


def cond_over_parameters(put: Put) -> Any:
    model, tensor = linear(put), x(put)
    result = torch.cond(tensor.sum() > 0, lambda a: model(a), lambda a: a[:, :3] * 2, (tensor,))
    result.sum().backward()
    return result, model.weight.grad


def cond_on_plain_operands(put: Put) -> Any:
    return torch.cond(put(torch.tensor(True)), lambda a: a + 1, lambda a: a - 1, (x(plain),))


def cond_as_an_op(put: Put) -> Any:
    op = torch.ops.higher_order.cond
    return op(torch.tensor(False), lambda a: a + 1, lambda a: a - 1, (x(put),))


def a_while_loop(put: Put) -> Any:
    start = (put(torch.tensor(0)), x(put))
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), start)


def a_scan(put: Put) -> Any:
    tensor = x(put, True)
    carry, result = scan(lambda c, v: (c + v, c * v), put(torch.ones(4)), tensor)
    (carry.sum() + result.sum()).backward()
    return carry, result, tensor.grad


def an_associative_scan(put: Put) -> Any:
    tensor = x(put, True)
    result = associative_scan(torch.mul, tensor, dim=0, combine_mode="generic")
    result.sum().backward()
    return result, tensor.grad


def a_map(put: Put) -> Any:
    tensor, weight = x(put, True), put(torch.ones(4, requires_grad=True))
    result = map_over(lambda a, b: a * b * 2, tensor, weight)
    result.sum().backward()
    return result, tensor.grad, weight.grad


def flex(put: Put) -> Any:
    query = put(torch.arange(128 * 4.0).view(1, 1, 128, 4) / 100)
    bias = put(torch.arange(128.0) / 100)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + bias[j]

    return flex_attention(query, query, query, score_mod=score, block_mask=mask)


HIGHER_ORDER = (
    cond, cond_over_parameters, cond_on_plain_operands, cond_as_an_op, a_while_loop, a_scan,
    an_associative_scan, a_map, flex,
)  # fmt: skip


@pytest.mark.parametrize("program", HIGHER_ORDER, ids=lambda p: p.__name__)
def test_higher_order_ops_get_plain_tensors_and_give_lazy_ones(
    program: Any, put: Put, exact: bool
) -> None:
    check(program, put, exact)
    with warnings_caught():
        results = torch.utils._pytree.tree_leaves(program(put))
    assert all(map(torpor.is_lazy, results))


def test_higher_order_ops_run_inside_the_mode() -> None:
    def program(put: Put) -> Any:
        tensor = torch.linspace(0, 1, 4).requires_grad_()
        result = torch.cond(tensor.sum() > 0, torch.sin, torch.cos, (tensor,))
        result.sum().backward()
        return result, tensor.grad

    expected = program(plain)
    with warnings_caught(), torpor.mode():
        result = program(plain)
    same(result, expected, True)
    assert torpor.is_lazy(result[0])


def test_higher_order_ops_are_compiled_and_exported_with_plain_tensors() -> None:
    class Model(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return torch.cond(a.sum() > 0, torch.sin, torch.cos, (a,))

    compiled = torch.compile(Model(), backend="eager", fullgraph=True)
    same(compiled(x(plain)), x(plain).sin(), True)
    for strict in (False, True):
        exported = torch.export.export(Model(), (x(plain),), strict=strict)
        same(exported.module()(x(plain)), x(plain).sin(), True)


# -- tracers that make something -------------------------------------------------------------------


def export(put: Put) -> Any:
    program = torch.export.export(linear(put), (x(put),))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return program.module()(x(plain)), torch.export.load(file).module()(x(plain))


def strict_export(put: Put) -> Any:
    sizes = ({0: torch.export.Dim("batch", min=2, max=9)},)
    model = linear(put)
    program = torch.export.export(model, (x(put),), dynamic_shapes=sizes, strict=True)
    return program.module()(torch.ones(5, 4)), list(program.state_dict.values()), model(x(put))


def traced(put: Put) -> Any:
    return torch.jit.trace(linear(put), x(put))(x(plain))


def traced_as_tensorboard_does(put: Put) -> Any:
    return len(list(torch.jit.trace(linear(put), x(put), strict=False).inlined_graph.nodes()))


def traced_module(put: Put) -> Any:
    return torch.jit.trace_module(linear(put), {"forward": x(put)})(x(plain))


def traced_closure(put: Put) -> Any:
    weight = put(torch.full((4,), 3.0))
    return torch.jit.trace(lambda a: a * weight, (x(put),))(x(plain))


TRACERS = (export, strict_export, traced, traced_as_tensorboard_does, traced_module, traced_closure)


@pytest.mark.parametrize("program", TRACERS, ids=lambda p: p.__name__)
def test_tracers_take_plain_copies(program: Any, put: Put, exact: bool) -> None:
    check(program, put, exact)


def test_a_module_is_lazy_again_after_an_export_that_fails(put: Put) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, a: Tensor) -> Tensor:
            raise ValueError("mine")

    model = put(Model())
    weight = model.weight
    with warnings_caught(), pytest.raises(ValueError, match="mine"):
        torch.export.export(model, (x(put),))
    assert model.weight is weight
    assert torpor.is_lazy(weight)


@pytest.mark.skipif(
    importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxscript") is None,
    reason="torch.onnx.export needs onnx and onnxscript, which are not installed",
)
def test_onnx_takes_plain_copies(put: Put, tmp_path: Path) -> None:
    with warnings_caught() as texts:
        torch.onnx.export(linear(put), (x(put),), tmp_path / "model.onnx")
    assert len(texts) == 1


# -- TorchScript -----------------------------------------------------------------------------------


def doubled(a: Tensor, times: int) -> Tensor:
    for _ in range(times):
        a = a * 2
    return a


def scripted_function(put: Put) -> Any:
    tensor = x(put, True)
    result = torch.jit.script(doubled)(tensor, 3)
    result.sum().backward()
    return result, tensor.grad


def scripted_training(put: Put) -> Any:
    model = torch.jit.script(linear(put))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):  # the executor fuses after two
        optimizer.zero_grad()
        loss = model(x(put)).pow(2).sum()
        loss.backward()
        optimizer.step()
    return loss, list(model.parameters())


def scripted_and_saved(put: Put) -> Any:
    model = torch.jit.script(linear(put).eval())
    results = []
    for one in (model, torch.jit.freeze(model)):
        file = io.BytesIO()
        torch.jit.save(one, file)
        file.seek(0)
        results.append(torch.jit.load(file)(x(plain)))
    return results, model(x(put))


@pytest.mark.parametrize(
    "program", [scripted_function, scripted_training, scripted_and_saved], ids=lambda p: p.__name__
)
def test_scripted_code_is_recorded_and_saved(program: Any, put: Put, exact: bool) -> None:
    check(program, put, exact, warnings=0)


def loaded(put: Put) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(linear(plain)), file)
    file.seek(0)
    model, tensor = torch.jit.load(file), x(put, True)
    result = model(tensor)
    result.sum().backward()
    return result, tensor.grad, model.weight.grad


def frozen(put: Put) -> Any:
    return torch.jit.freeze(torch.jit.script(linear(plain).eval()))(x(put))


def constants_in_a_function(put: Put) -> Any:
    weight = torch.full((4,), 3.0)
    function = torch.jit.trace(lambda a: a * weight, (x(plain),))
    return function(x(put))


@pytest.mark.parametrize(
    "program", [loaded, frozen, constants_in_a_function], ids=lambda p: p.__name__
)
def test_scripts_with_plain_tensors_inside_get_plain_ones(
    program: Any, put: Put, exact: bool
) -> None:
    check(program, put, exact)


def test_scripts_get_plain_tensors_after_an_export(virtual: Put) -> None:
    torch.export.export(linear(plain), (x(plain),))
    check(frozen, virtual, True)


def test_a_scripted_module_cannot_become_lazy() -> None:
    model = torch.jit.script(linear(plain))
    with pytest.raises(UnsupportedError, match="script the module after it was made lazy"):
        torpor.lazy(model)
    with pytest.raises(UnsupportedError, match="script the module after it was made lazy"):
        model.to("lazy")
    same(model(x(plain)), linear(plain)(x(plain)), True)


def test_scripted_modules_are_saved_and_loaded_inside_the_mode() -> None:
    with warnings_caught(), torpor.mode():
        result = loaded(plain)
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(linear(plain)), file)
        file.seek(0)
        again = torch.jit.load(file)(x(plain))
    same(again, linear(plain)(x(plain)), True)
    same(result[0], again, True)


# -- tensor subclasses -----------------------------------------------------------------------------


class Sub(Tensor):
    pass


class Image(Tensor):
    """As torchvision's `tv_tensors` are made: ops give plain tensors, a few keep the class."""

    def __new__(cls, given: Any) -> Image:
        return torch.as_tensor(given).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if func in (Tensor.clone, Tensor.to):
            return out.as_subclass(cls)
        return out.as_subclass(Tensor) if isinstance(out, cls) else out


def as_subclass(put: Put) -> Any:
    tensor = x(put, True)
    made = tensor.as_subclass(Sub) * 2
    made.sum().backward()
    return type(made).__name__, made.as_subclass(Tensor), tensor.grad


def made_subclass(put: Put) -> Any:
    made = Tensor._make_subclass(Sub, x(put))
    return type(made).__name__, (made + 1).as_subclass(Tensor)


def constructed(put: Put) -> Any:
    made = Sub(x(put))
    return type(made + 1).__name__, (made + 1).as_subclass(Tensor)


def image(put: Put) -> Any:
    made = Image(x(put))
    return type(made).__name__, type(made.clone()).__name__, made.flip(-1)


@pytest.mark.parametrize(
    "program", [as_subclass, made_subclass, constructed, image], ids=lambda p: p.__name__
)
def test_tensor_subclasses_hold_plain_tensors(program: Any, put: Put, exact: bool) -> None:
    check(program, put, exact)


@pytest.mark.parametrize("make", [Sub, lambda t: t.as_subclass(Sub), Image])
def test_tensor_subclasses_of_plain_tensors_are_made_inside_the_mode(make: Any) -> None:
    tensor = x(plain)
    with warnings_caught() as texts, torpor.mode():
        made = make(tensor)
    assert isinstance(made, (Sub, Image))
    assert texts == []


def test_a_plain_subclass_meets_lazy_tensors(concrete: Put) -> None:
    def program(put: Put) -> Any:
        made = Sub([1.0, 2.0]) + put(torch.ones(2))
        return type(made).__name__, made.as_subclass(Tensor)

    check(program, concrete, True)


def test_tensors_of_a_subclass_stay_plain() -> None:
    given = {"weight": nn.Parameter(torch.ones(3).as_subclass(Sub)), "bias": torch.ones(3)}
    with warnings_caught() as texts:
        made = torpor.lazy(given)
    assert made["weight"] is given["weight"]
    assert torpor.is_lazy(made["bias"])
    assert len(texts) == 1
    assert "Sub stays plain" in texts[0]


def test_a_lazy_tensor_is_one_of_its_bases_already(put: Put) -> None:
    tensor = x(put)
    with warnings_caught() as texts:
        made = tensor.as_subclass(Tensor)
    assert torpor.is_lazy(made)
    assert texts == []


# -- tensors of other layouts ----------------------------------------------------------------------


def quantized(put: Put) -> Any:
    made = torch.quantize_per_tensor(x(put), 0.1, 0, torch.qint8)
    scales, zeros = put(torch.tensor([0.1, 0.2])), put(torch.zeros(2, dtype=torch.long))
    other = torch.quantize_per_channel(x(put), scales, zeros, 0, torch.qint8)
    return made.is_quantized, made.dequantize(), other.dequantize()


def sparse(put: Put) -> Any:
    tensor = x(put, True)
    torch.sparse.sum(tensor.to_sparse()).backward()
    return tensor.to_sparse().to_dense(), tensor.to_sparse_csr().to_dense(), tensor.grad


def nested(put: Put) -> Any:
    tensors = [put(torch.arange(4.0)), put(torch.ones(2))]
    jagged = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    return jagged.sin().to_padded_tensor(0.0)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize("program", [quantized, sparse, nested], ids=lambda p: p.__name__)
def test_other_layouts_are_plain(program: Any, put: Put, exact: bool) -> None:
    check(program, put, exact, warnings=0)


# -- whoever looks at memory -----------------------------------------------------------------------


def test_memory_is_read(put: Put) -> None:
    tensor = x(put) + 1
    assert torch.equal(dlpack.from_dlpack(dlpack.to_dlpack(tensor)), x(plain) + 1)
    assert torch.equal(dlpack.from_dlpack(tensor), x(plain) + 1)
    assert [row.tolist() for row in tensor] == (x(plain) + 1).tolist()


def test_batches_are_collated(put: Put) -> None:
    batch = data.default_collate([{"x": x(put), "y": 1}, {"x": x(put), "y": 2}])
    same(batch["x"], torch.stack([x(plain)] * 2), True)
    assert batch["y"].tolist() == [1, 2]


def test_other_processes_get_plain_tensors(put: Put) -> None:
    sent = pickle.loads(bytes(ForkingPickler.dumps(x(put) + 1)))
    assert type(sent) is Tensor
    assert torch.equal(sent, x(plain) + 1)
    with pytest.raises(UnsupportedError, match="cannot be shared between processes"):
        x(put).share_memory_()


def test_flops_are_counted(put: Put) -> None:
    def flops(put: Put) -> int:
        with FlopCounterMode(display=False) as counter:
            (linear(put)(x(put, True)) @ x(put, True)[:1].mT[:3]).sum().backward()
        return int(counter.get_total_flops())

    assert flops(put) == flops(plain)


def test_gradients_are_checked(put: Put) -> None:
    tensor = put(torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_())
    for fast in (False, True):
        assert torch.autograd.gradcheck(lambda a: a.sin() * a, (tensor,), fast_mode=fast)


def test_kernels_of_triton_are_refused(put: Put) -> None:
    names: dict[str, Any] = {"__name__": "triton.runtime.jit"}
    exec("def launch(tensor):\n    return tensor.data_ptr()", names)
    with pytest.raises(UnsupportedError, match="Triton kernel"):
        names["launch"](x(put))


def test_a_fallback_is_counted_with_its_line(put: Put) -> None:
    torpor.metrics.reset()
    with warnings_caught():
        cond(put)
        cond(put)
    assert torpor.metrics.counters()["Sync::cond"] == 2
