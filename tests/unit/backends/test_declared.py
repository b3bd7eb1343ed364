"""Declared ops: which method a node goes to, and what is said where a type rule is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

import torpor
from torpor.backend import register
from torpor.backends.declared import DeclaredBackend, DeclaredLowering, copy_name
from torpor.custom import registration
from torpor.errors import RegistrationError


class Copies(DeclaredLowering):
    METHODS: ClassVar[Mapping[str, str]] = {
        "aten.view_copy.default": "lower_view_copy",
        "aten.expand_copy.default": "lower_expand_copy",
    }

    def lower_view_copy(self, node: Any, x: Any, size: Any) -> Any:
        return lambda x, size: x.reshape(size)

    def lower_expand_copy(self, node: Any, x: Any, size: Any, implicit: Any) -> Any:
        return lambda x, size, implicit: x.expand(size).clone()


class Declared(DeclaredBackend):
    lowering = Copies


register("tests-declared-copies", Declared)


def test_views_go_to_the_methods_of_their_copies() -> None:
    with torpor.using("tests-declared-copies"):
        torpor.metrics.reset()
        x = torch.arange(4.0).to("lazy")
        assert (x.view(2, 2).expand(3, 2, 2) + 1).sum().item() == 30.0
        fallbacks = {n for n in torpor.metrics.counters() if n.startswith("fallback::")}
    assert fallbacks == {"fallback::aten.add.Tensor", "fallback::aten.sum.default"}


def test_the_copy_of_a_view_has_its_overload() -> None:
    assert copy_name("aten.slice.Tensor") == "aten.slice_copy.Tensor"


def test_an_op_without_a_type_rule_names_the_file_to_write() -> None:
    schemas = ("bare(Tensor x) -> Tensor", "ruled(Tensor x) -> Tensor")
    library = registration.define("torpor_tests_declared", schemas)
    rules = {"ruled": lambda x: x}
    registration.tell_types("torpor_tests_declared", schemas, rules, "torpor_acme/type_rules.py")
    x = torch.ones(2).to("lazy")
    assert torch.ops.torpor_tests_declared.ruled(x).shape == (2,)
    with pytest.raises(RegistrationError, match=r"in torpor_acme/type_rules.py, as TYPE_RULES"):
        torch.ops.torpor_tests_declared.bare(x)
    for name in ("bare", "ruled"):
        registration.unregister(f"torpor_tests_declared::{name}")
    del library
