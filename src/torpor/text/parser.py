"""Parses the text that `torpor.text.printer` writes.

    graph     = "graph" "(" [ input { "," input } [","] ] ")" "{" body "return" results "}"
    body      = { statement } | { block }
    block     = ( "compiled" | "eager" | "commit" ) integer [ "repeat" integer ] ":"
                { statement } [ "leave" results ]
    input     = name "=" ( "leaf" | "computed" ) integer ":" type
              | name "=" "scalar" integer ":" ( "bool" | "int" | "float" | "complex" )
    statement = [ target { "," target } "=" ] op "(" [ argument { "," argument } ] ")"
                [ ":" output { "," output } ]
                [ "items" integers "of" integer "op" integer ]
    target    = name | "_"
    argument  = [ word "=" ] ( name | constant | "[" [ argument { "," argument } ] "]" )
    output    = type | "none"
    type      = dtype "[" sizes "]" [ "stride" "[" strides "]" ] [ "offset" integer ]
                [ "conj" ] [ "neg" ] device
    constant  = number | string | "True" | "False" | "None" | "complex" "(" number "," number ")"
              | "torch." word | device
    device    = "@" word [ ":" integer ]
    results   = [ result { "," result } ]
    result    = name [ "over" name ]
    integers  = "[" integer { "," integer } "]"

A name is `%` and a word. Comments run from `#` to the end of the line; line breaks are whitespace.
Identical statements are one node, by interning.

Leaves, scalars and nodes are interned, so a printed graph whose inputs are leaves and scalars
parses to the same nodes (unless they have been evicted from the bounded table since). An input
`computed k` has lost the nodes behind it: it parses to an opaque value (op `torpor.computed`), the
same one for the same k and type. Sites are not parsed. A node that occurs in several blocks becomes
a copy (`Derived`) in all but the first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

import torch

from torpor.errors import GraphError
from torpor.ir.graph import Block, Graph
from torpor.ir.node import Derived, Items, Node, Value, intern, leaf, scalar
from torpor.ir.types import TensorType, Types, contiguous_strides
from torpor.text.printer import COMPUTED

Intern = Callable[[str, list[Any], dict[str, Any], Types], Node]
"""Finds or makes the node of an op, by name, from positional and named arguments and types."""

_BLANK: Final = re.compile(r"(?:\s+|#[^\n]*)*")
_NAME: Final = re.compile(r"%\w+")
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_KEYWORD: Final = re.compile(r"([A-Za-z_]\w*)\s*=")
_OP: Final = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_INTEGER: Final = re.compile(r"\d+")
_INTEGERS: Final = re.compile(r"\[[\d,\s]*\]")
_LABEL: Final = re.compile(r"(compiled|eager|commit)\s+(\d+)(?:\s+repeat\s+(\d+))?\s*:")
_BLOCK_END: Final = re.compile(rf"{_LABEL.pattern}|leave\b|return\b")
_NUMBER: Final = re.compile(r"-?(?:inf|nan|\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?![\w.])")
_STRING: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_DEVICE: Final = re.compile(r"@(\w+(?::\d+)?)")
_TORCH: Final = re.compile(r"torch\.\w+")
_TYPE: Final = re.compile(
    r"(\w+)\[([\d,\s]*)\](?:\s*stride\s*\[([\d,\s]*)\])?(?:\s*offset\s+(\d+))?"
    r"(\s*conj\b)?(\s*neg\b)?\s*@(\w+(?::\d+)?)"
)
_SCALAR_KINDS: Final = {kind.__name__: kind for kind in (bool, int, float, complex)}
_WORD_CONSTANTS: Final = {"True": True, "False": False, "None": None}
_TORCH_CONSTANTS: Final = {
    str(constant): constant
    for constant in vars(torch).values()
    if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format, torch.qscheme))
}
_DEEPEST_LIST: Final = 8


def parse_graph(text: str, intern: Intern) -> Graph:
    """Parse `text`; nodes are made by `intern`."""
    return _GraphParser(text, intern).graph()


class _TextReader:
    """A position in a text, and what can be read there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.move(0)

    def move(self, position: int) -> None:
        """Move to `position`, and past whitespace and comments."""
        self.end = position  # end of the last token
        blank = _BLANK.match(self.text, position)
        self.position = position if blank is None else blank.end()

    def accept(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match `pattern` here, and move past it."""
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.move(match.end())
        return match

    def accept_mark(self, mark: str) -> bool:
        """Whether `mark`, a piece of punctuation, is next; moves past it."""
        found = self.text.startswith(mark, self.position)
        if found:
            self.move(self.position + len(mark))
        return found

    def accept_word(self, word: str) -> bool:
        """Whether `word` is next; moves past it."""
        match = _WORD.match(self.text, self.position)
        return match is not None and match[0] == word and self.accept_mark(word)

    def expect(self, pattern: re.Pattern[str], what: str, on_new_line: bool = False) -> str:
        match = self.accept(pattern)
        if match is None:
            self.fail_expecting(what, on_new_line)
        return match[0]

    def expect_mark(self, mark: str) -> None:
        if not self.accept_mark(mark):
            self.fail_expecting(repr(mark))

    def fail_expecting(self, what: str, on_new_line: bool = False) -> NoReturn:
        """Raise GraphError: something other than `what` is next."""
        found = repr(self.text[self.position : self.position + 24].split("\n")[0].rstrip())
        position = self.position
        if position == len(self.text):
            found = "the end of the text"
        elif not on_new_line and "\n" in self.text[self.end : position]:
            found, position = "the end of the line", self.end
        self.fail(f"expected {what}, found {found}", position)

    def fail(self, problem: str, position: int) -> NoReturn:
        """Raise GraphError with the line, and a marker below the position."""
        number = self.text.count("\n", 0, position) + 1
        start = self.text.rfind("\n", 0, position) + 1
        line = self.text[start:].split("\n", 1)[0]
        pointer = " " * (position - start) + "^"
        raise GraphError(f"line {number}: {problem}\n  {line}\n  {pointer}") from None


class _GraphParser(_TextReader):
    """Parses one graph."""

    def __init__(self, text: str, intern: Intern) -> None:
        super().__init__(text)
        self.intern = intern
        self.values: dict[str, Value] = {}
        self.types: dict[str, TensorType] = {}  # by text, as most are repeated
        self.nodes: dict[Node, None] = {}

    def graph(self) -> Graph:
        if not self.accept_word("graph"):
            self.fail_expecting("'graph'")
        inputs = self.inputs()
        self.expect_mark("{")
        blocks = list(self.blocks())
        while not self.accept_word("return"):
            if blocks:
                self.fail_expecting("a block or 'return'", on_new_line=True)
            self.nodes[self.statement()] = None
        outputs, donated = self.results()
        self.expect_mark("}")
        if self.position < len(self.text):
            self.fail_expecting("the end of the text")
        return Graph(inputs, tuple(self.nodes), outputs, blocks, donated)

    # Blocks

    def blocks(self) -> Iterator[Block]:
        while label := self.accept(_LABEL):
            kind, stage, repeat = label.groups()
            first = len(self.nodes)
            while not _BLOCK_END.match(self.text, self.position):
                self.nodes[self.statement(copied=True)] = None
            nodes = tuple(self.nodes)[first:]
            outputs, donated = self.results() if self.accept_word("leave") else (None, {})
            copy = None if repeat is None else self.number(repeat)
            left = None if outputs is None else tuple(outputs)
            yield Block(kind, self.number(stage), nodes, copy, left, donated)

    # Inputs and results

    def inputs(self) -> tuple[Value, ...]:
        self.expect_mark("(")
        inputs: dict[Value, None] = {}
        while not self.accept_mark(")"):
            start = self.position
            name = self.expect(_NAME, "an input or ')'", on_new_line=True)
            self.expect_mark("=")
            value = self.graph_input()
            if value in inputs:
                self.fail("this input was given before", start)
            inputs[value] = None
            self.define(name, value, start)
            if not self.accept_mark(","):
                self.expect_mark(")")
                break
        return tuple(inputs)

    def graph_input(self) -> Value:
        start = self.position
        word = self.expect(_WORD, "'leaf', 'scalar' or 'computed'")
        if word not in ("leaf", "scalar", "computed"):
            self.fail(f"expected 'leaf', 'scalar' or 'computed', found {word!r}", start)
        place = self.number(self.expect(_INTEGER, "a number"))
        self.expect_mark(":")
        if word == "scalar":
            return scalar(place, self.scalar_kind())
        type_ = self.tensor_type()
        return leaf(place, type_) if word == "leaf" else _computed(place, type_)

    def scalar_kind(self) -> type:
        start = self.position
        word = self.expect(_WORD, "bool, int, float or complex")
        kind = _SCALAR_KINDS.get(word)
        if kind is None:
            self.fail(f"expected bool, int, float or complex, found {word!r}", start)
        return kind

    def results(self) -> tuple[list[Value], dict[Value, Value]]:
        results: list[Value] = []
        donated: dict[Value, Value] = {}
        more = self.text.startswith("%", self.position)
        while more:
            results.append(self.value())
            if self.accept_word("over"):
                donated[self.value()] = results[-1]
            more = self.accept_mark(",")
        return results, donated

    def define(self, name: str, value: Value, start: int) -> None:
        if name in self.values:
            self.fail(f"{name} is defined a second time", start)
        self.values[name] = value

    def value(self) -> Value:
        start = self.position
        name = self.expect(_NAME, "the name of a value, such as %0")
        value = self.values.get(name)
        if value is None:
            self.fail(f"{name} is used before it is defined", start)
        return value

    # Statements

    def statement(self, copied: bool = False) -> Node:
        """Parse one node; if `copied`, a repeated one becomes a copy."""
        start = self.position
        targets = self.targets()
        wanted = "an op such as aten.add.Tensor" if targets else "a node or 'return'"
        op = self.expect(_OP, wanted, on_new_line=not targets)
        args, keywords = self.call()
        types = self.output_types()
        if len(types) != len(targets):
            self.fail(f"{len(targets)} names for {len(types)} outputs", start)
        try:
            node = self.intern(op, args, keywords, types)
        except GraphError as error:
            self.fail(str(error), start)
        self.check_types(node, types, start)
        if self.accept_word("items"):
            node = Derived(node, node.args, self.list_items(len(node.outputs)))
        elif copied and node in self.nodes:
            node = Derived(node, node.args)
        for name, output in zip(targets, node.outputs, strict=True):
            if name != "_":
                self.define(name, output, start)
        return node

    def list_items(self, outputs: int) -> Items:
        start = self.position
        listed = self.expect(_INTEGERS, "positions, such as [0, 1]")
        positions = self.integers(listed[1:-1], start)
        length = self.number_after("of")
        if len(positions) != outputs or not all(place < length for place in positions):
            self.fail(f"{listed} are not positions of {outputs} of {length} items", start)
        return Items(positions, length, self.number_after("op"))

    def number_after(self, word: str) -> int:
        if not self.accept_word(word):
            self.fail_expecting(repr(word))
        return int(self.number(self.expect(_INTEGER, "a number")))

    def targets(self) -> list[str]:
        targets: list[str] = []
        while self.text.startswith(("%", "_"), self.position):
            match = self.accept(_NAME)
            if match is None and not self.accept_word("_"):
                break
            targets.append("_" if match is None else match[0])
            if not self.accept_mark(","):
                break
        if targets:
            self.expect_mark("=")
        return targets

    def check_types(self, node: Node, types: Types, start: int) -> None:
        for position, (output, type_) in enumerate(zip(node.outputs, types, strict=False)):
            if output.type is not type_:
                known = "none" if output.type is None else repr(output.type)
                self.fail(f"output {position} of this node is known to be {known}", start)
        if len(node.outputs) != len(types):
            self.fail(f"this node is known to have {len(node.outputs)} outputs", start)

    def call(self) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        self.expect_mark("(")
        while not self.accept_mark(")"):
            start = self.position
            keyword = self.accept(_KEYWORD)
            if keyword is None:
                if keywords:
                    self.fail("an argument without a name follows one with a name", start)
                args.append(self.argument())
            elif keyword[1] in keywords:
                self.fail(f"argument {keyword[1]!r} is given twice", start)
            else:
                keywords[keyword[1]] = self.argument()
            if not self.accept_mark(","):
                self.expect_mark(")")
                break
        return args, keywords

    def argument(self, depth: int = 0) -> Any:
        first = self.text[self.position : self.position + 1]
        if first == "%":
            return self.value()
        if first == "[":
            return self.items(depth + 1)
        return self.constant(first)

    def items(self, depth: int) -> tuple[Any, ...]:
        if depth > _DEEPEST_LIST:
            self.fail(f"lists are nested more than {_DEEPEST_LIST} deep", self.position)
        items = []
        self.expect_mark("[")
        while not self.accept_mark("]"):
            items.append(self.argument(depth))
            if not self.accept_mark(","):
                self.expect_mark("]")
                break
        return tuple(items)

    # Constants

    def constant(self, first: str) -> Any:
        start = self.position
        if first == '"':
            return self.string()
        if first == "@":
            return self.device(self.expect(_DEVICE, "a device: @cpu"), start)
        number = self.accept(_NUMBER)
        if number is not None:
            return self.number(number[0])
        named = self.accept(_TORCH) or self.accept(_WORD)
        if named is None:
            self.fail_expecting("an argument")
        return self.named_constant(named[0], start)

    def named_constant(self, word: str, start: int) -> Any:
        if word in _WORD_CONSTANTS:
            return _WORD_CONSTANTS[word]
        if word in _TORCH_CONSTANTS:
            return _TORCH_CONSTANTS[word]
        if word == "complex":
            return self.complex_number()
        self.fail(f"expected an argument, found {word!r}", start)

    def complex_number(self) -> complex:
        self.expect_mark("(")
        real = float(self.expect(_NUMBER, "a number"))
        self.expect_mark(",")
        imaginary = float(self.expect(_NUMBER, "a number"))
        self.expect_mark(")")
        return complex(real, imaginary)

    def number(self, text: str) -> Any:
        is_integer = text.lstrip("-").isdecimal()
        if is_integer and len(text) > 4000:  # beyond Python's limit for int(), and never valid
            self.fail("this integer is too long", self.end - len(text))
        return int(text) if is_integer else float(text)

    def string(self) -> str:
        start = self.position
        literal = self.expect(_STRING, 'a closing "')
        try:
            return str(json.loads(literal, strict=False))
        except ValueError:
            self.fail("this string has an unknown escape", start)

    # Types

    def output_types(self) -> Types:
        if not self.accept_mark(":"):
            return ()
        types = [self.output_type()]
        while self.accept_mark(","):
            types.append(self.output_type())
        return tuple(types)

    def output_type(self) -> TensorType | None:
        return None if self.accept_word("none") else self.tensor_type()

    def tensor_type(self) -> TensorType:
        start = self.position
        match = self.accept(_TYPE)
        if match is None:
            self.fail_expecting("a type such as float32[4,8] @cpu")
        known = self.types.get(match[0])
        if known is None:
            known = self.types[match[0]] = self.new_type(match, start)
        return known

    def new_type(self, match: re.Match[str], start: int) -> TensorType:
        name, sizes, strides, offset, conj, neg, device = match.groups()
        dtype = _TORCH_CONSTANTS.get(f"torch.{name}")
        if not isinstance(dtype, torch.dtype):
            self.fail(f"expected a dtype, found {name!r}", start)
        shape = self.integers(sizes, start)
        stride = contiguous_strides(shape) if strides is None else self.integers(strides, start)
        if len(stride) != len(shape):
            self.fail(f"{len(stride)} strides for {len(shape)} sizes", start)
        where = self.device(f"@{device}", start)
        place = self.number(offset or "0")
        return TensorType.of(shape, stride, dtype, where, place, bool(conj), bool(neg))

    def integers(self, text: str, start: int) -> tuple[int, ...]:
        words: Iterable[str] = [word.strip() for word in text.split(",")] if text.strip() else ()
        if not all(word.isdecimal() for word in words):
            self.fail(f"expected integers with commas between them, found {text!r}", start)
        return tuple(self.number(word) for word in words)

    def device(self, text: str, start: int) -> torch.device:
        try:
            return torch.device(text[1:])
        except RuntimeError:
            self.fail(f"torch knows no device {text[1:]!r}", start)


def _computed(place: int, type_: TensorType) -> Value:
    """The opaque value for the input `computed place`."""
    return intern(COMPUTED, (place, type_), lambda: ((place,), (type_,))).outputs[0]
