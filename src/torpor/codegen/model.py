"""The generator's model of ops: frozen data whose text parses back to an equal object.

    >>> schema = LazyIrSchema.parse("aten::relu_(Tensor(a!) self) -> Tensor(a!) [tags=pointwise]")
    >>> schema.name, schema.form, schema.arguments[0].kind
    ('aten.relu_.default', <Form.INPLACE: 'inplace'>, <ArgKind.TENSOR: 'tensor'>)
    >>> str(schema)
    'aten::relu_(Tensor(a!) self) -> Tensor(a!) [tags=pointwise]'

Principles:

- A schema is data: two that print alike are equal, and `parse` needs neither torch nor torchgen's
  tables. What torch knows of an op besides its schema is in brackets after it.
- Everything that can be derived from the fields (form, view, kinds of arguments) is derived, by the
  rules that `ops.spec` applies to the schemas of the running torch. A test compares both for every
  overload.
- `schemas` reads what the installed torch has. An op that this torch lacks is absent.
"""

from __future__ import annotations

import ast
import enum
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torpor.ops import rules
from torpor.ops.spec import ArgKind, Return, ReturnKind
from torpor.ops.typed_node import class_name

# -- types ---------------------------------------------------------------------------------------

_TYPE = re.compile(r"^(?P<base>[\w.]+)(?P<suffix>(\?|\[\d*\])*)$")
_SCALAR_KINDS: Final = {
    "Tensor": ArgKind.TENSOR,
    "Scalar": ArgKind.SCALAR,
    "float": ArgKind.FLOAT,
    "Generator": ArgKind.OPAQUE,
    "Storage": ArgKind.OPAQUE,
    "Stream": ArgKind.OPAQUE,
    "Any": ArgKind.OPAQUE,
}
_LIST_KINDS: Final = {
    ArgKind.TENSOR: ArgKind.TENSORS,
    ArgKind.FLOAT: ArgKind.FLOATS,
    ArgKind.SCALAR: ArgKind.SCALARS,
    ArgKind.PLAIN: ArgKind.PLAINS,
}


@dataclass(frozen=True, slots=True)
class LazyType:
    """The type of an argument or return: `Tensor`, `SymInt[2]?`, `Tensor?[]`.

    `base` is the innermost type; `suffix` are its modifiers, from the inside out.
    """

    base: str
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> LazyType:
        found = _TYPE.match(text)
        if found is None:
            raise SchemaError(f"{text!r} is not a type")
        return cls(found["base"], found["suffix"])

    def __str__(self) -> str:
        return self.base + self.suffix

    @property
    def is_optional(self) -> bool:
        """Whether None is a value of it."""
        return self.suffix.endswith("?")

    @property
    def is_list(self) -> bool:
        """Whether it is a list, possibly optional."""
        return self.suffix.rstrip("?").endswith("]")

    @property
    def holds_none(self) -> bool:
        """Whether it is a list whose items may be None: `Tensor?[]`."""
        return self.is_list and self.suffix.startswith("?")

    @property
    def length(self) -> int | None:
        """How often a single value is repeated if given instead of a list: 2 for `int[2]`."""
        found = re.search(r"\[(\d+)\]", self.suffix)
        return int(found[1]) if found else None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor or a list of tensors."""
        return self.base == "Tensor"

    @property
    def kind(self) -> ArgKind:
        """How an argument of this type enters a key."""
        one = _SCALAR_KINDS.get(self.base, ArgKind.PLAIN)
        return _LIST_KINDS.get(one, ArgKind.OPAQUE) if self.is_list else one

    @property
    def annotation(self) -> str:
        """The Python type, for stubs, of its values in a node."""
        item = _ANNOTATIONS.get(self.base, "Any")
        if not self.is_list:
            return f"{item} | None" if self.is_optional and item != "Any" else item
        item = f"{item} | None" if self.holds_none else item
        return f"Sequence[{item}]" + (" | None" if self.is_optional else "")


_ANNOTATIONS: Final = {
    "Tensor": "Value",
    "Scalar": "Number",
    "SymInt": "int",
    "SymBool": "bool",
    "int": "int",
    "DeviceIndex": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "ScalarType": "torch.dtype",
    "Layout": "torch.layout",
    "Device": "torch.device",
    "MemoryFormat": "torch.memory_format",
    "QScheme": "torch.qscheme",
    "Generator": "torch.Generator",
}


# -- arguments and returns ----------------------------------------------------------------------

NO_DEFAULT: Final = object()
"""Marks an argument without a default."""


@dataclass(frozen=True, slots=True)
class LazyAlias:
    """An alias annotation of an argument or return: `a`, `a!` (written to), `a -> *`."""

    before: str
    is_write: bool = False
    after: str = ""  # the wildcard, for a list of views

    @classmethod
    def parse(cls, text: str) -> LazyAlias:
        before, _, after = (part.strip() for part in text.partition("->"))
        return cls(before.rstrip("!"), before.endswith("!"), after)

    def __str__(self) -> str:
        mark = "!" if self.is_write else ""
        return f"{self.before}{mark}" + (f" -> {self.after}" if self.after else "")


@dataclass(frozen=True, slots=True)
class LazyArgument:
    """One argument of a schema."""

    name: str
    type: LazyType
    alias: LazyAlias | None = None
    default: Any = NO_DEFAULT  # the Python value that the running torch reports; lists are tuples
    keyword_only: bool = False
    hidden_write: bool = False  # written to, contrary to the schema (`ops.rules`)

    @property
    def kind(self) -> ArgKind:
        """How it enters a key."""
        return self.type.kind

    @property
    def has_default(self) -> bool:
        return self.default is not NO_DEFAULT

    @property
    def mutated(self) -> bool:
        """Whether the op writes to it."""
        return self.hidden_write or (self.alias is not None and self.alias.is_write)

    @property
    def is_out(self) -> bool:
        """Whether it is an output tensor of an `out=` overload."""
        return self.keyword_only and self.alias is not None and self.alias.is_write

    def __str__(self) -> str:
        default = f"={_default_text(self.default)}" if self.has_default else ""
        return f"{_typed(self.type, self.alias)} {self.name}{default}"


@dataclass(frozen=True, slots=True)
class LazyReturn:
    """One return of a schema."""

    type: LazyType
    alias: LazyAlias | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"{_typed(self.type, self.alias)} {self.name}".rstrip()


def _typed(type_: LazyType, alias: LazyAlias | None) -> str:
    return str(type_) if alias is None else f"{type_.base}({alias}){type_.suffix}"


# -- schemas -----------------------------------------------------------------------------------


class Form(enum.Enum):
    """How an overload returns its results."""

    FUNCTIONAL = "functional"  # new tensors, or views
    INPLACE = "inplace"  # `add_`: writes to its first argument
    OUT = "out"  # `add.out`: writes to keyword arguments
    MUTABLE = "mutable"  # writes to some other argument


class Composite(enum.Enum):
    """Whether torch implements the op by other ops, on every device."""

    NO = "no"
    IMPLICIT = "implicit"  # decomposed above autograd: never reaches a backend
    EXPLICIT = "explicit"  # one kernel for all devices, with its own derivative
    NON_FUNCTIONAL = "non_functional"  # the same, for devices that have memory


_INPLACE = re.compile(r"__i\w+__$|\w*[^_]_$")  # `__iadd__`, `add_`; not `__and__`


class SchemaError(ValueError):
    """A text is not a valid schema."""


@dataclass(frozen=True, slots=True)
class LazyIrSchema:
    """One overload of an op: its schema, and other facts that torch knows of it.

    Derived facts are computed once, and excluded from comparisons.
    """

    namespace: str
    base: str  # `add`, `add_`
    overload: str  # `Tensor`; empty if it has none
    arguments: tuple[LazyArgument, ...]
    returns_: tuple[LazyReturn, ...]
    structured: str = ""  # the `out=` overload whose structured kernel computes sizes: `add.out`
    inherits: str = ""  # that kernel's base class: `TensorIteratorBase` if elementwise
    composite: Composite = Composite.NO
    tags: tuple[str, ...] = ()  # sorted

    name: str = field(init=False, compare=False)  # in the IR: `aten.add.Tensor`
    returns: tuple[Return, ...] = field(init=False, compare=False)  # where each comes from
    mutated: tuple[int, ...] = field(init=False, compare=False)  # arguments written to

    def __post_init__(self) -> None:
        put = object.__setattr__  # the class is frozen
        put(self, "name", f"{self.namespace}.{self.base}.{self.overload or 'default'}")
        hidden = rules.HIDDEN_MUTATIONS.get(self.name, ())
        put(self, "arguments", tuple(_marked(a, a.name in hidden) for a in self.arguments))
        put(self, "mutated", tuple(i for i, a in enumerate(self.arguments) if a.mutated))
        put(self, "returns", tuple(_returned(self, r) for r in self.returns_))

    # -- text --

    @classmethod
    def parse(cls, text: str) -> LazyIrSchema:
        """Parse a schema; the default namespace is ATen's.

        Also accepts schemas as torch prints them, and those in `native_functions.yaml`.
        """
        return _SchemaParser(text).schema()

    @property
    def signature(self) -> str:
        """The schema alone: `aten::add.Tensor(Tensor self, ...) -> Tensor`."""
        return f"{self.namespace}::{self.qualified}({_arguments_text(self)}) -> {_returns(self)}"

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts in brackets after the schema."""
        shown = {
            "structured": self.structured,
            "inherits": self.inherits,
            "composite": "" if self.composite is Composite.NO else self.composite.value,
            "tags": ",".join(self.tags),
        }
        return tuple(f"{key}={value}" for key, value in shown.items() if value)

    def __str__(self) -> str:
        return self.signature + (f" [{'; '.join(self.facts)}]" if self.facts else "")

    # -- names --

    @property
    def qualified(self) -> str:
        """`add.Tensor`, or `relu` if there is no overload: as in `native_functions.yaml`."""
        return f"{self.base}.{self.overload}" if self.overload else self.base

    @property
    def identifier(self) -> str:
        """A Python identifier: `add_Tensor`, `relu`, `add__Tensor` for `add_.Tensor`."""
        return f"{self.base}_{self.overload}" if self.overload else self.base

    @property
    def class_name(self) -> str:
        """The name of its node class: `AddTensor`."""
        return class_name(self.base, self.overload)

    # -- what it does --

    @property
    def form(self) -> Form:
        if any(a.is_out for a in self.arguments):
            return Form.OUT
        written = [i for i, a in enumerate(self.arguments) if a.alias and a.alias.is_write]
        if written and _INPLACE.match(self.base):
            return Form.INPLACE
        return Form.MUTABLE if written else Form.FUNCTIONAL

    @property
    def is_view(self) -> bool:
        """Whether a result aliases an argument, by its schema or in fact (`ops.rules`)."""
        return any(r.kind is ReturnKind.VIEW for r in self.returns)

    @property
    def is_foreach(self) -> bool:
        """Whether it does the same to each item of its lists."""
        return self.base.startswith("_foreach_")

    @property
    def is_elementwise(self) -> bool:
        """Whether sizes, dtype and strides come from torch's elementwise iterator."""
        return self.inherits == "TensorIteratorBase"

    @property
    def is_core(self) -> bool:
        """Whether it is in core ATen, the set that every backend should cover."""
        return "core" in self.tags

    @property
    def is_generated(self) -> bool:
        """Whether torchgen generated it from another overload (functional and `out=` forms)."""
        return "generated" in self.tags

    @property
    def may_fail(self) -> bool:
        """Whether its kernel may raise for data that was unknown when it was recorded."""
        return self.namespace != "aten" or self.base in rules.MAY_FAIL

    @property
    def tensors(self) -> tuple[LazyArgument, ...]:
        """Arguments that are tensors, or lists of tensors."""
        return tuple(a for a in self.arguments if a.type.is_tensor)

    @property
    def attributes(self) -> tuple[LazyArgument, ...]:
        """The other arguments, which a node stores besides its operands."""
        return tuple(a for a in self.arguments if not a.type.is_tensor)


def _marked(argument: LazyArgument, hidden: bool) -> LazyArgument:
    if argument.hidden_write == hidden:
        return argument
    return LazyArgument(
        argument.name, argument.type, argument.alias, argument.default, argument.keyword_only,
        hidden,
    )  # fmt: skip


def _returned(schema: LazyIrSchema, returned: LazyReturn) -> Return:
    """Where a return value comes from."""
    is_list = returned.type.is_list
    if not returned.type.is_tensor:
        return Return(ReturnKind.OTHER, is_list, -1)
    if schema.name in rules.HIDDEN_VIEWS:
        return Return(ReturnKind.VIEW, is_list, 0)
    for position, argument in enumerate(schema.arguments):
        if returned.alias and argument.alias and returned.alias.before == argument.alias.before:
            kind = ReturnKind.ARGUMENT if argument.mutated else ReturnKind.VIEW
            return Return(kind, is_list, position)
    return Return(ReturnKind.FRESH, is_list, -1)


def _arguments_text(schema: LazyIrSchema) -> str:
    parts = []
    starred = False
    for argument in schema.arguments:
        if argument.keyword_only and not starred:
            starred = True
            parts.append("*")
        parts.append(str(argument))
    return ", ".join(parts)


def _returns(schema: LazyIrSchema) -> str:
    if len(schema.returns_) == 1 and not schema.returns_[0].name:
        return str(schema.returns_[0])
    return f"({', '.join(map(str, schema.returns_))})"


# -- defaults ----------------------------------------------------------------------------------

_NAMED_DEFAULTS: Final[Mapping[str, int]] = {
    # names in `native_functions.yaml` for values that the running torch reports as numbers
    "Mean": 1,
    "contiguous_format": 0,
    "long": 4,
}


def _default_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_default_text, value))}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _default_value(text: str, type_: LazyType) -> Any:
    if text in _NAMED_DEFAULTS:
        return _NAMED_DEFAULTS[text]
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise SchemaError(f"{text!r} is no default") from None
    return _coerced(value, type_)


def _coerced(value: Any, type_: LazyType) -> Any:
    """The default as a value of its type: `0` is `(0, 0)` for an `int[2]`, `0.0` for a float."""
    if isinstance(value, list):
        return tuple(_coerced(item, LazyType(type_.base)) for item in value)
    if value is not None and type_.is_list:
        return (_coerced(value, LazyType(type_.base)),) * (type_.length or 1)
    return float(value) if type_.base == "float" and value is not None else value


# -- parsing -----------------------------------------------------------------------------------

_NAME = re.compile(r"^(?:(?P<namespace>\w+)::)?(?P<base>\w+)(?:\.(?P<overload>\w+))?$")
_ARGUMENT = re.compile(r"^(?P<base>[\w.]+)(?:\((?P<alias>[^)]*)\))?(?P<suffix>(?:\?|\[\d*\])*)")
_FACTS: Final = ("structured", "inherits", "composite", "tags")
_COMPOSITES: Final = frozenset(kind.value for kind in Composite)


class _SchemaParser:
    """Parses one schema."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()

    def schema(self) -> LazyIrSchema:
        head, facts = self._split_facts()
        opening, closing = head.find("("), _closing(head)
        arrow, _, returns = head[closing + 1 :].partition("->")
        name = _NAME.match(head[: max(opening, 0)].strip())
        if opening < 0 or closing < 0 or arrow.strip() or not returns or name is None:
            raise SchemaError(f"{self.text!r} is not `name(arguments) -> returns`")
        return LazyIrSchema(
            name["namespace"] or "aten",
            name["base"],
            (name["overload"] or "").removeprefix("default"),
            tuple(_arguments(head[opening + 1 : closing])),
            tuple(map(_return, _returns_in(returns.strip()))),
            **facts,
        )

    def _split_facts(self) -> tuple[str, dict[str, Any]]:
        head, bracket, rest = self.text.rpartition(" [")
        if not bracket or not rest.endswith("]") or "=" not in rest:
            return self.text, {}
        facts: dict[str, Any] = {}
        for item in rest[:-1].split(";"):
            key, _, value = item.strip().partition("=")
            if key not in _FACTS or (key == "composite" and value not in _COMPOSITES):
                raise SchemaError(f"{item.strip()!r} is no fact of an op")
            facts[key] = value
        if "tags" in facts:
            facts["tags"] = tuple(sorted(facts["tags"].split(",")))
        if "composite" in facts:
            facts["composite"] = Composite(facts["composite"])
        return head, facts


def _closing(text: str) -> int:
    """The position of the bracket that closes the first one."""
    depth = 0
    for position, character in _outside_quotes(text):
        depth += (character == "(") - (character == ")")
        if character == ")" and depth == 0:
            return position
    return -1


def _outside_quotes(text: str) -> Iterator[tuple[int, str]]:
    quote = ""
    escaped = False
    for position, character in enumerate(text):
        if not quote:
            yield position, character
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = bool(quote)
        elif character in "\"'" and quote in ("", character):
            quote = "" if quote else character


def _parts(text: str) -> list[str]:
    """`text` split at commas outside brackets and quotes."""
    parts, depth, start = [], 0, 0
    for position, character in _outside_quotes(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _type_and_rest(text: str) -> tuple[LazyType, LazyAlias | None, str]:
    found = _ARGUMENT.match(text)
    if found is None:
        raise SchemaError(f"{text!r} does not begin with a type")
    alias = LazyAlias.parse(found["alias"]) if found["alias"] is not None else None
    return LazyType(found["base"], found["suffix"]), alias, text[found.end() :].strip()


def _arguments(text: str) -> Iterator[LazyArgument]:
    keyword_only = False
    for part in _parts(text):
        if part == "*":
            keyword_only = True
            continue
        type_, alias, rest = _type_and_rest(part)
        name, equals, default = rest.partition("=")
        if not name.strip().isidentifier():
            raise SchemaError(f"argument {part!r} has no name")
        value = _default_value(default.strip(), type_) if equals else NO_DEFAULT
        yield LazyArgument(name.strip(), type_, alias, value, keyword_only)


def _returns_in(text: str) -> list[str]:
    is_tuple = text.startswith("(") and text.endswith(")")
    return _parts(text[1:-1]) if is_tuple else [text]


def _return(text: str) -> LazyReturn:
    type_, alias, name = _type_and_rest(text)
    return LazyReturn(type_, alias, name)
