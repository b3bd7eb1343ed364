"""What the parser refuses, and what it says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ir.graphs import MATRIX
from tests.unit.text.test_printer import SMALL
from torpor.errors import GraphError
from torpor.ir.node import TABLE, Node, intern
from torpor.text.parser import Types, parse_graph
from torpor.text.torch_parser import parse

NEGATE = "%1 = aten.neg.default(%0) : float32[4,8] @lazy:0"


def refusal(text: str) -> str:
    """What the parser has against `text`; just "line " if nothing."""
    TABLE.clear()  # a graph of its own: no types known from elsewhere
    try:
        parse(text)
    except GraphError as error:
        return str(error)
    return "line "


def body(line: str) -> str:
    return f"graph(%0 = leaf 0 : float32[4,8] @lazy:0) {{\n  {line}\n  return\n}}"


REFUSED = {
    "": "line 1: expected 'graph', found the end of the text",
    "graf()": "line 1: expected 'graph', found 'graf()'",
    "graph {": "line 1: expected '(', found '{'",
    "graph(%0) {": "line 1: expected '=', found ') {'",
    "graph(\n  x = leaf 0) {": "line 2: expected an input or ')', found 'x = leaf 0) {'",
    "graph(%0 = loaf 0 : float32[] @cpu) {": "expected 'leaf', 'scalar' or 'computed', found 'lo",
    "graph(%0 = leaf : float32[] @cpu) {": "expected a number, found ': float32[] @cpu) {'",
    "graph(%0 = leaf 0 : flout32[] @cpu) {": "expected a dtype, found 'flout32'",
    "graph(%0 = leaf 0 : strided[] @cpu) {": "expected a dtype, found 'strided'",
    "graph(%0 = leaf 0 : float32[] @kettle) {": "torch knows no device 'kettle'",
    "graph(%0 = leaf 0 : float32[4]) {": "expected a type such as float32[4,8] @cpu, found 'flo",
    "graph(%0 = leaf 0 : float32[4,,8] @cpu) {": "expected integers with commas between them",
    "graph(%0 = leaf 0 : float32[4] stride [1,1] @cpu) {": "2 strides for 1 sizes",
    "graph(%0 = leaf 0 : float32[-4] @cpu) {": "expected a type such as",
    "graph(%0 = scalar 0 : string) {": "expected bool, int, float or complex, found 'string'",
    "graph(%0 = scalar 0 : int, %0 = scalar 1 : int) {": "%0 is defined a second time",
    "graph(%0 = scalar 0 : int, %1 = scalar 0 : int) {": "this input was given before",
    "graph() {\n  return\n} graph": "line 3: expected the end of the text, found 'graph'",
    "graph() {\n  return\n": "line 3: expected '}', found the end of the text",
    "graph() {\n  return %3\n}": "line 2: %3 is used before it is defined",
    "graph() {\n}": "line 2: expected a node or 'return', found '}'",
    body(NEGATE.replace("%0)", "%7)")): "line 2: %7 is used before it is defined",
    body(NEGATE.replace("%1", "%0")): "line 2: %0 is defined a second time",
    body(NEGATE.replace("(%0)", "(%0")): "line 2: expected ')', found ': float32[4,8] @lazy:0'",
    body("%1 = aten.neg.default(%0"): "line 2: expected ')', found the end of the line",
    body("%1 = aten.neg.default(%0) :"): "expected a type such as float32[4,8] @cpu, found the end",
    body(NEGATE.replace("neg", "negg")): "line 2: torch has no op aten.negg.default",
    body(NEGATE.replace("default", "reset")): "line 2: torch has no op aten.neg.reset",
    body(NEGATE.replace("aten.neg.default", "aten.neg")): "line 2: torch has no op aten.neg",
    body(NEGATE.replace("aten.neg.default", "load_library.x.y")): "torch has no op load_library",
    body(NEGATE.replace("aten.neg.default", "neg")): "expected an op such as aten.add.Tensor",
    body(NEGATE.replace("(%0)", "()")): "argument 'self' of aten.neg.default is missing",
    body(NEGATE.replace("(%0)", "(%0, %0)")): "aten.neg.default takes 1 arguments, not 2",
    body(NEGATE.replace("(%0)", "(%0, self=%0)")): "argument 'self' of aten.neg.default is given",
    body(NEGATE.replace("(%0)", "(self=%0, self=%0)")): "argument 'self' is given twice",
    body(NEGATE.replace("(%0)", "(me=%0)")): "aten.neg.default has no argument 'me'; it has self",
    body(NEGATE.replace("(%0)", "(self=%0, 1)")): "an argument without a name follows one with",
    body(NEGATE.replace("(%0)", "([%0])")): "argument 'self' of aten.neg.default must be no list",
    body("%1 = aten.cat.default(%0) : none"): "'tensors' of aten.cat.default must be a list",
    body("%1 = aten.rand.generator([], generator=1) : none"): "cannot be part of a graph",
    body("%1, %2 = aten.neg.default(%0) : none"): "2 names for 1 outputs",
    body("aten.neg.default(%0) : none"): "0 names for 1 outputs",
    body("%1 = aten.mul.Scalar(%0, ) : none"): "argument 'other' of aten.mul.Scalar is missing",
    body("%1 = aten.mul.Scalar(%0, 1.2.3) : none"): "expected an argument, found '1.2.3) : none'",
    body("%1 = aten.mul.Scalar(%0, __import__) : none"): "expected an argument, found '__import__'",
    body("%1 = aten.mul.Scalar(%0, torch.ops) : none"): "expected an argument, found 'torch.ops'",
    body("%1 = aten.mul.Scalar(%0, <Generator>) : none"): "expected an argument, found '<Gen",
    body("%1 = aten.mul.Scalar(%0, complex(1)) : none"): "expected ',', found ')) : none'",
    body('%1 = aten.mul.Scalar(%0, "x) : none'): "expected a closing \", found '\"x) : none'",
    body('%1 = aten.mul.Scalar(%0, "\\q") : none'): "this string has an unknown escape",
    body("%1 = aten.mul.Scalar(%0, " + "9" * 5000 + ") : none"): "this integer is too long",
    body("%1 = aten.cat.default(" + "[" * 50_000): "lists are nested more than 8 deep",
    body(f"compiled 0:\n{NEGATE}\nleave %1\n{NEGATE}"): "line 5: expected a block or 'return'",
    body(f"{NEGATE}\ncompiled 0:"): "line 3: expected a node or 'return', found 'compiled 0:'",
    body(f"compiled:\n{NEGATE}"): "line 2: expected a node or 'return', found 'compiled:'",
    body(f"lazy 0:\n{NEGATE}"): "line 2: expected a node or 'return', found 'lazy 0:'",
    body(f"eager 0:\n{NEGATE}\nleave %2"): "line 4: %2 is used before it is defined",
    body(f"eager 0:\n{NEGATE}\nleave %1 over 0"): "expected the name of a value, such as %0",
    body(f"{NEGATE} items 0 of 2 op 0"): "expected positions, such as [0, 1], found '0 of 2 op 0'",
    body(f"{NEGATE} items [2] of 2 op 0"): "[2] are not positions of 1 of 2 items",
    body(f"{NEGATE} items [0, 1] of 2 op 0"): "[0, 1] are not positions of 1 of 2 items",
    body(f"{NEGATE} items [0] in 2"): "expected 'of', found 'in 2'",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=[message[:50] for message in REFUSED.values()])
def test_refused(text: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse(text)
    message = str(caught.value)
    assert REFUSED[text] in message
    assert message.startswith("line ")


def test_a_refusal_shows_the_line_and_points_at_the_place() -> None:
    with pytest.raises(GraphError) as caught:
        parse(SMALL.replace("int64[4]", "integer[4]"))
    lines = str(caught.value).split("\n")
    assert lines[0] == "line 3: expected a dtype, found 'integer'"
    assert lines[1].strip().startswith("%3, %4 = aten.max.dim")
    assert lines[1][len(lines[2]) - 1 :].startswith("integer[4]")


def test_types_that_contradict_a_known_node_are_refused() -> None:
    graph = parse(body(NEGATE).replace("return", "return %1"))
    with pytest.raises(GraphError, match=r"output 0 of this node is known to be float32\[4,8\]"):
        parse(body(NEGATE.replace(": float32[4,8]", ": float32[8,4]")))
    with pytest.raises(GraphError, match="this node is known to have 1 outputs"):
        parse(body("%1, %2 = aten.neg.default(%0) : float32[4,8] @lazy:0, none"))
    assert graph.outputs[0].type is MATRIX


def test_ops_are_found_by_the_caller() -> None:
    """The IR knows no ops: whoever parses says what a name means."""
    kind = TABLE.kind("test.op.name")
    calls = []

    def make(name: str, args: list[object], keywords: dict[str, object], types: Types) -> Node:
        calls.append((name, args, keywords))
        return intern(kind, (len(calls),), lambda: (tuple(args), types))

    graph = parse_graph("graph() {\n  %0 = a.b(1, [2], c=None) : none\n  return\n}", make)
    assert calls == [("a.b", [1, (2,)], {"c": None})]
    assert graph.nodes[0].op is kind


PIECES = [
    "graph", "(", ")", "{", "}", "return", "%0", "%1", "=", ",", ":", "leaf", "0", "-", "1.5",
    "float32[4]", "@cpu", "none", "[", "]", "aten.neg.default", '"', "#", "\n", " ", "torch.int8",
    "complex", "alpha", "é", "\x00",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join) | st.text())
@settings(deadline=None)
def test_any_text_is_a_graph_or_a_graph_error(text: str) -> None:
    assert refusal(text).startswith("line ")


@given(st.data())
@settings(deadline=None)
def test_a_damaged_graph_is_a_graph_or_a_graph_error(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(SMALL)))
    length = data.draw(st.integers(0, 12))
    piece = data.draw(st.sampled_from(PIECES))
    text = SMALL[:start] + piece + SMALL[start + length :]
    assert refusal(text).startswith("line ")
