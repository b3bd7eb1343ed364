"""Where an op was recorded: the innermost line that is the user's own."""

import os
from collections.abc import Iterator

import pytest
import torch

import torpor
from tests.comparison import line_below
from torpor.cli.char_gpt import CharGPT, Shape
from torpor.ir.node import TABLE, Node
from torpor.observe.site import Site, site
from torpor.trace.tensor import LazyTensor


@pytest.fixture
def fresh_table() -> Iterator[None]:
    """A node keeps the line that met it first, so none may be known before."""
    TABLE.clear()
    yield
    torpor.sync(wait=True)
    TABLE.clear()


def node_of(tensor: torch.Tensor) -> Node:
    assert isinstance(tensor, LazyTensor)
    assert tensor._lazy_storage.value is not None
    return tensor._lazy_storage.value.node


def test_a_site_is_the_line_of_its_caller() -> None:
    expected = line_below()
    found = site()
    assert str(found) == f"{expected}   found = site()"
    assert found is not None
    assert os.path.samefile(found.file, __file__)


def test_lines_of_torch_and_of_torpor_are_skipped(fresh_table: None) -> None:
    module = torch.nn.Sequential(torch.nn.ReLU()).to("lazy")
    x = torch.ones(3, device="lazy")
    expected = line_below()
    y = module(x)
    assert str(node_of(y).site) == f"{expected}   y = module(x)"


def test_generated_code_is_skipped() -> None:
    names = {"site": site}
    exec(compile("def record():\n    return site()\n", "<torpor recorder x>", "exec"), names)
    expected = line_below()
    found = names["record"]()
    assert str(found).startswith(expected)


def test_a_line_without_source_is_a_file_and_a_number() -> None:
    code = compile("pass", "nowhere.py", "exec")
    assert str(Site(code, 12)) == "nowhere.py:12"


def test_a_node_met_again_keeps_its_first_line(fresh_table: None) -> None:
    x = torch.ones(3, device="lazy")
    expected = line_below()
    first = x.exp()
    second = x.exp()
    assert node_of(second) is node_of(first)
    assert str(node_of(second).site).startswith(expected)


def test_lines_of_the_programs_that_come_with_torpor_are_lines_of_a_user(
    fresh_table: None,
) -> None:
    model = CharGPT(Shape(5, layers=1, heads=1, width=4, length=4)).to("lazy")
    scores = model(torch.zeros(1, 4, dtype=torch.int64, device="lazy"))
    assert str(node_of(scores).site).startswith("char_gpt.py:")
