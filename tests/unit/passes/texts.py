"""Text in, text out: how passes are tested.

Graphs are written without types: every value is a `float32[4,4] @cpu`, unless its line says so.
"""

from __future__ import annotations

import re
import textwrap

from torpor.ir.graph import Graph
from torpor.passes import Pass, run_passes
from torpor.text.printer import print_graph
from torpor.text.torch_parser import parse
from torpor.text.verify import verify

TYPE = "float32[4,4] @cpu"
STATEMENT = re.compile(
    r"(?P<made>%\w+(?:, %\w+)*) = (?P<call>(?:aten|torpor)[^:]*\))(?P<rest>(?: items .*)?)"
)


def graph_of(body: str, inputs: int = 1) -> Graph:
    """The graph with that body, on so many leaves %0, %1, ..."""
    head = ", ".join(f"%{i} = leaf {i} : {TYPE}" for i in range(inputs))
    lines = [_typed(line) for line in textwrap.dedent(body).strip().splitlines()]
    return parse("\n".join([f"graph({head}) {{", *lines, "}"]))


def _typed(line: str) -> str:
    found = STATEMENT.fullmatch(line.strip())
    if found is None:
        return line
    types = ", ".join(TYPE for _ in found["made"].split(","))
    return f"{found['made']} = {found['call']} : {types}{found['rest']}"


def body_of(graph: Graph) -> str:
    """The text of a graph without its inputs and without the usual types."""
    text = print_graph(graph)
    assert print_graph(parse(text)) == text, "what a pass makes is read back as it was"
    (_, *lines, _) = text[text.index("{\n") :].splitlines()
    return "\n".join(re.sub(rf" : {re.escape(TYPE)}(, {re.escape(TYPE)})*", "", x) for x in lines)


def check(one: Pass, before: str, after: str | None, inputs: int = 1) -> Graph:
    """The pass makes that of it; None: it leaves the very graph as it is."""
    graph = graph_of(before, inputs)
    verify(graph)
    made = run_passes([one], graph)
    if after is None:
        assert made is graph
    else:
        assert textwrap.dedent(body_of(made)) == textwrap.dedent(after).strip()
    return made
