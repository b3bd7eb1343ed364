"""What `_torch.inductor` takes from inside torch still is what torpor takes it for."""

import inspect
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit.torch_internals.traced import traced_sine
from torpor import _torch

aten = torch.ops.aten


def test_last_traced_node_is_what_make_fx_added_last() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.last_traced_node().op)
        y = x.sin()
        seen.append(str(_torch.last_traced_node().target))
        return y

    make_fx(function)(torch.ones(2))
    assert seen == ["placeholder", "aten.sin.default"]


def test_inductor_decompositions_take_compound_ops_apart() -> None:
    assert aten.native_layer_norm.default in _torch.inductor_decompositions()


def test_inductor_options_have_dotted_names() -> None:
    assert {"max_autotune", "cpp.simdlen"} <= set(_torch.inductor_options())


@pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates
def test_inductor_compile_gives_a_function_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    given = {}

    def compile_inner(module: Any, inputs: Any, **options: Any) -> Any:
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        given.update(options, visible=output.meta["user_visible_output_idxs"])
        return lambda boxed: module(*boxed)

    parameters = inspect.signature(compile_fx.compile_fx_inner).parameters
    assert list(parameters)[:2] == ["gm", "example_inputs"]
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_inner)
    compiled = _torch.inductor_compile(*traced_sine(), {"cpp.simdlen": 1})
    assert given["visible"] == [0]
    assert given["is_inference"] is True
    assert not given["cudagraphs"]
    x = torch.randn(4, 3)
    assert torch.equal(compiled([x])[0], x.sin() + 1)


@pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates
@pytest.mark.parametrize("transposed", [False, True])
def test_inductor_compile_keeps_strides_where_a_product_is_padded(transposed: bool) -> None:
    """As Inductor does on GPUs, where trials say that it pays."""
    mode = _torch.new_fake_mode()
    with mode:
        inputs = [torch.empty(64, 8), torch.empty(8, 2)]

        def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return ((x @ y).t() if transposed else x @ y, x + 1)

        module = make_fx(function, decomposition_table=_torch.inductor_decompositions())(*inputs)

    def pad(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            with graph.inserting_before(node), mode:
                x, y = node.args
                wide = graph.call_function(aten.constant_pad_nd.default, (y, [0, 2], 0.0))
                product = graph.call_function(aten.mm.default, (x, wide))
                part = graph.call_function(aten.slice.Tensor, (product, 1, 0, 2))
                part.meta["val"] = torch.empty(64, 4)[:, :2]
            node.replace_all_uses_with(part)
            graph.erase_node(node)

    compiled = _torch.inductor_compile(module, inputs, mode, {"joint_custom_post_pass": pad})
    x, y = torch.randn(64, 8), torch.randn(8, 2)
    product, more = compiled([x, y])
    expected = (x @ y).t() if transposed else x @ y
    assert product.stride() == expected.stride()
    assert torch.allclose(product, expected)
    assert torch.equal(more, x + 1)


def test_inductor_settings_change_with_a_setting_and_are_the_same_text_otherwise() -> None:
    from torch._inductor import config

    before = _torch.inductor_settings()
    assert before is not None
    with config.patch({"cpp.simdlen": 1}):
        assert _torch.inductor_settings() not in (None, before)
    assert _torch.inductor_settings() == before


def test_inductor_settings_have_no_text_for_a_pass_of_somebodys_own() -> None:
    from torch._inductor import config

    with config.patch({"post_grad_custom_pre_pass": lambda graph: None}):
        assert _torch.inductor_settings() is None


def test_inductor_module_is_the_source_with_its_kernels(compiled_sine: Any) -> None:
    found = _torch.inductor_module(compiled_sine)
    assert found is not None
    source, names, constants = found
    assert "def call(" in source
    assert callable(names["call"])
    assert constants == {}
    kernels = [name for name, thing in names.items() if name.startswith("cpp_fused")]
    assert kernels
    assert names[kernels[0]].__self__.__file__.endswith(".so")


def test_inductor_module_is_none_for_other_code() -> None:
    assert _torch.inductor_module(lambda inputs: inputs) is None


def test_inductor_pickle_is_none_for_other_code() -> None:
    assert _torch.inductor_pickle(lambda inputs: inputs) is None


def test_inductor_unpickle_gives_the_code_again(compiled_sine: Any) -> None:
    data = _torch.inductor_pickle(compiled_sine)
    assert data is not None
    _, inputs, mode = traced_sine()
    again = _torch.inductor_unpickle(data, inputs, mode)
    x = torch.randn(3, 4).t()
    assert torch.equal(again([x])[0], compiled_sine([x])[0])
    assert again.source_code == compiled_sine.source_code


def test_ops_inductor_refused_are_read_off_its_error() -> None:
    from torch._inductor.exc import LoweringException

    error = LoweringException(ValueError("no"), aten.tan.default, [1], {})
    assert _torch.ops_inductor_refused(error) == {"aten.tan.default"}
    assert _torch.ops_inductor_refused(ValueError("no")) == set()


def test_inductor_prefers_channels_last_where_there_are_convolutions() -> None:
    def trace(function: Any, *sizes: tuple[int, ...]) -> torch.fx.GraphModule:
        return make_fx(function, tracing_mode="fake")(*map(torch.ones, sizes))

    convolution = trace(torch.conv2d, (2, 3, 8, 8), (128, 3, 3, 3))
    assert _torch.inductor_prefers_channels_last(convolution)
    assert not _torch.inductor_prefers_channels_last(trace(torch.sin, (2, 3)))


def test_inductor_has_loops_over_rows_that_share_a_buffer() -> None:
    """What `_mend_local_buffers` changes: `tests/backends/test_sizes.py` holds that it mends."""
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    check: Any = cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
    found = inspect.signature(inspect.unwrap(check)).parameters
    assert list(found) == ["self", "cpp_kernel_proxy_list", "outer_loop_fusion_depth"]
    assert getattr(V.local_buffer_context, "local_buffers", None) is None
    assert cpp.LoopLevel.steps == 1
