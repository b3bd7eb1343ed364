"""What `_torch.ops` takes from inside torch still is what torpor takes it for."""

import pytest
import torch

from tests.unit.torch_internals.own_ops import OWN, own
from torpor import _torch
from torpor._torch.ops import _FACTORIES

aten = torch.ops.aten


def test_define_ops_gives_ops_without_kernels() -> None:
    schemas = ("one(Tensor a) -> Tensor", "two(Tensor a, int b=2) -> (Tensor, Tensor)")
    one, two = _torch.define_ops("torpor_test_ops", schemas)
    assert str(one) == "torpor_test_ops.one.default"
    assert two._schema.arguments[1].default_value == 2
    assert _torch.define_ops("torpor_test_ops", schemas) == [one, two]
    with pytest.raises(NotImplementedError, match=r"torpor_test_ops::one"):
        one(torch.ones(1))


def test_kernel_object_is_what_a_kernel_calls() -> None:
    kernel = _torch.kernel(aten.relu.default, "AutogradLazy")
    assert _torch.kernel_object(kernel).call_boxed == kernel


def test_tree_map_looks_into_lists_tuples_and_dicts() -> None:
    tree = {"a": [1, (2,)], "b": 3}
    assert _torch.tree_map(lambda n: -n, tree) == {"a": [-1, (-2,)], "b": -3}


def test_tree_leaves_lists_what_is_in_there() -> None:
    assert _torch.tree_leaves(([1, {"a": 2}], 3)) == [1, 2, 3]


def test_take_apart_runs_eagers_own_form() -> None:
    with pytest.raises(RuntimeError, match=r"^Class values must be smaller than num_classes"):
        _torch.take_apart(aten.one_hot.default, torch.tensor([7]), 3)
    assert _torch.take_apart(aten.exp.default, torch.ones(2)) is NotImplemented


def test_kernel_is_what_an_op_runs() -> None:
    keys = torch._C._dispatch_keys(torch.ones(2))
    assert _torch.kernel(aten.neg.default, "CPU")(keys, torch.ones(2)).tolist() == [-1, -1]


def test_opoverload_has_what_a_spec_is_read_from() -> None:
    op = aten.add_.Tensor
    assert isinstance(op, _torch.OpOverload)
    assert (str(op), op.name()) == ("aten.add_.Tensor", "aten::add_.Tensor")
    assert (op.namespace, op._opname, op._schema.name) == ("aten", "add_", "aten::add_")
    assert op._schema.arguments[0].alias_info.is_write
    assert callable(op.decompose)


def test_set_op_attribute_keeps_something_on_an_op() -> None:
    op = aten.mul.Tensor
    _torch.set_op_attribute(op, "_torpor_internals_test", 7)
    assert torch.ops.aten.mul.Tensor._torpor_internals_test == 7
    del op._torpor_internals_test


def test_parse_schema_knows_the_types_of_torch() -> None:
    assert _torch.parse_schema("a::b.c(Tensor x, ScalarType t) -> Tensor").overload_name == "c"
    with pytest.raises(RuntimeError):
        _torch.parse_schema("a::b(Tensr x) -> Tensor")


def test_drop_op_attribute_takes_it_away_again() -> None:
    op = aten.mul.Tensor
    _torch.set_op_attribute(op, "_torpor_internals_test", 7)
    _torch.drop_op_attribute(op, "_torpor_internals_test")
    assert not hasattr(op, "_torpor_internals_test")
    _torch.drop_op_attribute(op, "_torpor_internals_test")


def test_custom_op_overload_is_the_op_behind_a_function() -> None:
    assert _torch.custom_op_overload(own) is OWN
    assert _torch.custom_op_overload(torch.add) is None


def test_opoverloadpacket_lists_its_overloads() -> None:
    assert isinstance(torch.ops.torpor_internals.own, _torch.OpOverloadPacket)
    assert torch.ops.torpor_internals.own.overloads() == ["default"]


def test_ops_in_lists_the_ops_of_a_namespace() -> None:
    assert _torch.ops_in("torpor_internals") == ["torpor_internals::bare", "torpor_internals::own"]
    assert _torch.ops_in("torpor_nowhere") == []


@pytest.mark.parametrize("name", ["name", "__init__", "__dict__", "_dir", "__file__", "f.op"])
def test_is_taken_op_name_tells_what_torch_ops_has_itself(name: str) -> None:
    assert _torch.is_taken_op_name(*name.split("."))


@pytest.mark.parametrize("name", ["relu", "scale", "own", "f.name", "f.out", "f.Tensor", "f.x"])
def test_is_taken_op_name_leaves_all_other_names(name: str) -> None:
    assert not _torch.is_taken_op_name(*name.split("."))


def test_is_composite_tells_ops_that_are_made_of_others() -> None:
    assert _torch.is_composite(aten.dropout.default)
    assert not _torch.is_composite(aten.add.Tensor)


def test_factory_ops_are_all_there() -> None:
    found = {str(op) for op in _torch.factory_ops()}
    assert {"aten.empty.memory_format", "aten.empty_strided.default"} <= found
    missing = [n for n in _FACTORIES if not hasattr(aten, n.partition(".")[0])]
    assert missing == []


def test_composite_ops_with_cpu_kernels_are_composite() -> None:
    found = _torch.composite_ops_with_cpu_kernels()
    assert aten.silu_backward.default in found
    assert all(_torch.is_composite(op) for op in found)


def test_Kernels_are_put_in_place_and_taken_away() -> None:
    kernels = _torch.Kernels("MTIA", {torch.ops.aten.erfinv.default: lambda x: x})

    def there() -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::erfinv", "MTIA")

    assert not there()
    kernels.set(True)
    kernels.set(True)
    assert there()
    kernels.set(False)
    kernels.set(False)
    assert not there()


def test_op_table_has_samples_for_every_entry_by_name() -> None:
    table = {entry.formatted_name: entry for entry in _torch.op_table()}
    assert len(table) > 500
    sample = next(iter(table["add"].sample_inputs("cpu", torch.float32)))
    assert isinstance(sample.input, torch.Tensor)


def test_source_of_op() -> None:
    library = torch.library.Library("tests_internals", "FRAGMENT")
    library.define("defined_here(Tensor x) -> Tensor")
    made = torch.library.custom_op("tests_internals::made_here", _made_here, mutates_args=())
    assert _torch.source_of_op("tests_internals::defined_here") == __file__
    assert _torch.source_of_op(made._qualname) == __file__
    assert _torch.source_of_op("aten::add.Tensor") is None


def _made_here(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_is_size() -> None:
    arguments = {a.name: a.real_type for a in torch.ops.aten.slice.Tensor._schema.arguments}
    found = {name: _torch.is_size(type_) for name, type_ in arguments.items()}
    assert found == {"self": False, "dim": False, "start": True, "end": True, "step": True}
    assert _torch.is_size(torch.ops.aten.view.default._schema.arguments[1].real_type)


def test_on_higher_order_op_is_asked() -> None:
    from torch._ops import HigherOrderOperator

    assert HigherOrderOperator.dispatch.__code__.co_filename.endswith("foreign.py")


def test_torch_decompositions_are_found_by_the_names_of_ops() -> None:
    table = _torch.torch_decompositions()
    x = torch.tensor([-1.0, 2.0])
    assert torch.allclose(table["aten.silu.default"](x), torch.nn.functional.silu(x))
    assert table["prims.convert_element_type.default"](x, torch.int64).dtype is torch.int64
    assert "aten.mul.Tensor" not in table  # a core op is a part of others


def test_is_op_tells_overloads_from_functions() -> None:
    assert _torch.is_op(torch.ops.aten.add.Tensor)
    assert not _torch.is_op(torch.add)
