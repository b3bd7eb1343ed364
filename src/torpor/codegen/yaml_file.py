"""Reads the YAML file in which a backend declares what it covers, using LTC's keys.

    backend: acme
    full_codegen:        # ops with a lowering method
      - add.Tensor
    non_native:          # ops of the backend's own
      - func: cast(Tensor input, ScalarType dtype) -> Tensor

`read` checks everything against the installed torch, and raises one `YamlErrors` with all mistakes
and their lines, so that they can be fixed at once.
"""

from __future__ import annotations

import functools
import importlib
import keyword
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torpor import _torch
from torpor.codegen.model import LazyIrSchema, SchemaError
from torpor.codegen.torch_schemas import schemas
from torpor.errors import TorporError, did_you_mean
from torpor.ops.typed_node import attribute_name

OP_LISTS: Final = ("full_codegen", "ir_gen", "supported", "autograd")
"""Lists of ops. An op may be in at most one of them."""

LISTS: Final = (*OP_LISTS, "symint", "non_native")
TEXTS: Final = ("backend", "class_name", "cpp_namespace")
FLAGS: Final = ("use_out_as_primary", "device_guard")
KEYS: Final = (*TEXTS, "extra_headers", *FLAGS, *LISTS)
IGNORED: Final = ("cpp_namespace", "extra_headers", *FLAGS)
"""Keys for C++, which torpor ignores."""

RESERVED: Final = ("dynamo", "inductor", "pytest", "reference", "torchscript")
"""Names that a backend cannot have: those of torpor's own backends and packages."""

DEEPEST: Final = 20
"""The deepest nesting of lists and mappings; a file needs four."""

TAKEN_ARGUMENTS: Final = ("cls", "node", "op", "signature")
"""Names that an argument of an own op cannot have, as node classes use them."""

NON_NATIVE_KEYS: Final = ("func", "opkind", "properties")
PROPERTIES: Final = (
    "ShapePrecompute", "ShapeCompute", "ShapeCache", "Lower", "LowerDeclOnly", "CanBeReused",
    "CanBeReusedDeclOnly", "CreateFn", "CreateFnDeclOnly", "TreatScalarsAsConstants",
)  # fmt: skip


class PyYamlMissing(TorporError):
    """PyYAML is not installed."""


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake: its line (counted from 1), a description, and what was probably meant."""

    line: int
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}" if self.hint else self.what


class YamlErrors(TorporError):
    """All mistakes in a file."""

    def __init__(self, path: str, problems: Iterable[Problem], lines: list[str]) -> None:
        self.path = path
        self.problems = tuple(sorted(problems))
        self.lines = lines
        super().__init__("\n".join(map(self._message, self.problems)))

    def _message(self, problem: Problem) -> str:
        given = f"{self.path}:{problem.line}: {problem}"
        if not 0 < problem.line <= len(self.lines):
            return given
        return f"{given}\n{problem.line:>6} | {self.lines[problem.line - 1].rstrip()}"

    def to_json(self) -> list[dict[str, Any]]:
        return [vars(problem) for problem in self.problems]


@dataclass(frozen=True)
class DeclaredOp:
    """One op in a list."""

    schema: LazyIrSchema
    line: int

    @property
    def name(self) -> str:
        """The name in the IR: `aten.add.Tensor`."""
        return self.schema.name


@dataclass(frozen=True)
class OwnOp:
    """An op of the backend's own (`non_native`)."""

    schema: LazyIrSchema
    line: int
    opkind: str = ""
    properties: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name in the IR: `torpor_acme.cast.default`."""
        return self.schema.name


@dataclass(frozen=True)
class BackendFile:
    """A backend's declaration."""

    path: str
    backend: str  # as written
    class_name: str = ""
    full_codegen: tuple[DeclaredOp, ...] = ()  # a lowering method and a node class
    ir_gen: tuple[DeclaredOp, ...] = ()  # the same; for LTC, without a kernel
    supported: tuple[DeclaredOp, ...] = ()  # only a lowering method
    autograd: tuple[DeclaredOp, ...] = ()  # with the backend's own derivatives
    symint: tuple[DeclaredOp, ...] = ()  # whose sizes may be symbolic
    non_native: tuple[OwnOp, ...] = ()
    ignored: tuple[str, ...] = field(default=(), compare=False)  # keys that torpor ignores

    @property
    def name(self) -> str:
        """The name of the backend: `torpor.use(name)`."""
        return self.backend.lower()

    @property
    def package(self) -> str:
        """The name of its Python package, and the namespace of its own ops."""
        return f"torpor_{self.name}"

    @property
    def camel(self) -> str:
        """Its name as part of a class name."""
        if self.class_name:
            return self.class_name
        words = self.backend.split("_")
        return "".join(word[:1].upper() + word[1:] for word in words)

    @property
    def lowered(self) -> tuple[DeclaredOp, ...]:
        """The ops that have a lowering method, sorted by name."""
        found = (*self.full_codegen, *self.ir_gen, *self.supported)
        return tuple(sorted(found, key=lambda op: op.name))


def read(path: Path | str) -> BackendFile:
    """Read and check the file at `path`; raises `YamlErrors`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise YamlErrors(str(path), [Problem(line, "not UTF-8 text")], []) from None
    return _FileReader(str(path), text).read()


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise PyYamlMissing(
            "torpor codegen reads YAML and needs PyYAML: pip install 'torpor[codegen]'"
        ) from None


class _FileReader:
    """Reads one file."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.yaml = _yaml()
        self.problems: list[Problem] = []
        self.seen: dict[str, tuple[str, int]] = {}  # op -> its list and line

    def read(self) -> BackendFile:
        values = self._values(self._root())
        backend = self._backend(values)
        lists = {key: self._ops(key, values.get(key)) for key in OP_LISTS}
        symint = self._symint(values.get("symint"))
        made = BackendFile(
            self.path,
            backend,
            self._identifier("class_name", values.get("class_name")),
            **lists,
            symint=symint,
            non_native=self._non_native(values.get("non_native"), f"torpor_{backend.lower()}"),
            ignored=tuple(key for key in IGNORED if key in values),
        )
        self._check_rest(values)
        if self.problems:
            raise YamlErrors(self.path, self.problems, self.text.splitlines())
        return made

    def _problem(self, node: Any, what: str, hint: str = "") -> None:
        line = node if isinstance(node, int) else node.start_mark.line + 1
        self.problems.append(Problem(line, what, hint))

    # -- the document ------------------------------------------------------------------------------

    def _root(self) -> Any:
        try:
            self._check_depth()
            root = self.yaml.compose(self.text, Loader=self.yaml.SafeLoader)
        except self.yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            line = 1 if mark is None else mark.line + 1
            given = getattr(error, "problem", None) or str(error).splitlines()[0]
            self._problem(line, f"not YAML: {given}")
            root = None
        if root is None and not self.problems:
            self._problem(1, "the file is empty", "it needs at least `backend: NAME`")
        if root is not None and not isinstance(root, self.yaml.MappingNode):
            self._problem(root, f"expected keys and values, not {self._kind(root)}")
            root = None
        if root is None:
            raise YamlErrors(self.path, self.problems, self.text.splitlines())
        return root

    def _check_depth(self) -> None:
        """Reject nesting that recursive functions could not handle."""
        depth = 0
        for event in self.yaml.parse(self.text, Loader=self.yaml.SafeLoader):
            depth += isinstance(event, self.yaml.CollectionStartEvent)
            depth -= isinstance(event, self.yaml.CollectionEndEvent)
            if depth > DEEPEST:
                self._problem(event, f"lists and mappings nested more than {DEEPEST} deep")
                raise YamlErrors(self.path, self.problems, self.text.splitlines())

    def _values(self, root: Any) -> dict[str, Any]:
        """The nodes of known keys."""
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value in root.value:
            key = str(key_node.value)
            if key in lines:
                self._problem(key_node, f"key {key!r} is there twice: see line {lines[key]}")
                continue
            lines[key] = key_node.start_mark.line + 1
            if key in KEYS:
                values[key] = value
            else:
                self._problem(
                    key_node,
                    f"unknown key {key!r}",
                    _near(key, KEYS) or f"the keys are {', '.join(KEYS)}",
                )
        return values

    def _check_rest(self, values: Mapping[str, Any]) -> None:
        """Check the types of values that torpor ignores."""
        if "cpp_namespace" in values:
            self._text("cpp_namespace", values["cpp_namespace"], may_be_empty=True)
        for key in FLAGS:
            if key in values and values[key].tag != "tag:yaml.org,2002:bool":
                self._problem(values[key], f"{key} is true or false, not {self._kind(values[key])}")
        headers = values.get("extra_headers")
        if headers is not None and isinstance(headers, self.yaml.MappingNode):
            self._problem(headers, "extra_headers is a text or a list of texts, not a mapping")

    # -- texts -------------------------------------------------------------------------------------

    def _kind(self, node: Any) -> str:
        """A node's type, for messages."""
        if isinstance(node, self.yaml.SequenceNode):
            return "a list"
        if isinstance(node, self.yaml.MappingNode):
            return "keys and values"
        kind = node.tag.rpartition(":")[2]
        names = {"str": "a text", "null": "nothing", "bool": "a truth value"}
        return names.get(kind, f"a number ({kind})" if kind in ("int", "float") else kind)

    def _text(self, key: str, node: Any, may_be_empty: bool = False) -> str:
        """The text of a node; reports a problem if it is none."""
        if isinstance(node, self.yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
            text = str(node.value).strip()
            if not text and not may_be_empty:
                self._problem(node, f"{key} is empty")
            return text
        hint = ""
        if isinstance(node, self.yaml.ScalarNode) and node.value:
            hint = f"put it in quotes: '{node.value}'"
        self._problem(node, f"{key} is a text, not {self._kind(node)}", hint)
        return ""

    def _identifier(self, key: str, node: Any) -> str:
        if node is None:
            return ""
        text = self._text(key, node)
        if text and (not text.isidentifier() or not text.isascii() or keyword.iskeyword(text)):
            self._problem(node, f"{key} is part of Python names, which {text!r} cannot be")
            return ""
        return text

    def _backend(self, values: Mapping[str, Any]) -> str:
        node = values.get("backend")
        if node is None:
            self._problem(1, "key 'backend' is missing", "it names the backend")
            return ""
        name = self._identifier("backend", node)
        if name.lower() in RESERVED:
            self._problem(node, f"{name!r} is taken", "choose another name for the backend")
        return name

    # -- ops ---------------------------------------------------------------------------------------

    def _items(self, key: str, node: Any) -> list[Any]:
        """The items of a list; null is an empty one."""
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return []
        if isinstance(node, self.yaml.SequenceNode):
            return list(node.value)
        self._problem(node, f"{key} is a list, not {self._kind(node)}", "begin each item with '- '")
        return []

    def _ops(self, key: str, node: Any) -> tuple[DeclaredOp, ...]:
        found = []
        for item in self._items(key, node):
            op = self._op(key, item)
            if op is not None and self._is_first(key, op):
                found.append(op)
        return tuple(found)

    def _op(self, key: str, item: Any) -> DeclaredOp | None:
        text = self._text(f"an op in {key}", item)
        if not text:
            return None
        line = item.start_mark.line + 1
        if "(" in text:
            return self._by_schema(text, line)
        schema = _known().get(text)
        if schema is None:
            self._problem(line, *_unknown(text))
            return None
        return DeclaredOp(schema, line)

    def _by_schema(self, text: str, line: int) -> DeclaredOp | None:
        """An op given by its full schema, which must match this torch's."""
        try:
            given = LazyIrSchema.parse(text)
        except SchemaError as error:
            self._problem(line, f"not a schema: {error}")
            return None
        schema = _known().get(given.qualified)
        if schema is None:
            self._problem(line, *_unknown(given.qualified))
            return None
        if given.signature != schema.signature:
            what = f"this torch has no such schema of {given.qualified!r}"
            self._problem(line, what, f"its schema is '{schema.signature}'")
            return None
        return DeclaredOp(schema, line)

    def _is_first(self, key: str, op: DeclaredOp) -> bool:
        """Whether the op is in no list yet; reports a problem otherwise."""
        text = op.schema.qualified
        if op.name not in self.seen:
            self.seen[op.name] = (key, op.line)
            return True
        before, line = self.seen[op.name]
        if before == key:
            self._problem(op.line, f"{text!r} is in {key} twice: see line {line}")
        else:
            what = f"{text!r} is in {before} (line {line}) and in {key}"
            self._problem(op.line, what, "an op is in one list")
        return False

    def _symint(self, node: Any) -> tuple[DeclaredOp, ...]:
        found: dict[str, DeclaredOp] = {}
        for item in self._items("symint", node):
            op = self._op("symint", item)
            if op is None:
                continue
            text = op.schema.qualified
            if op.name in found:
                first = found[op.name].line
                self._problem(op.line, f"{text!r} is in symint twice: see line {first}")
            elif op.name not in self.seen:
                what = f"{text!r} is in symint and in no list of ops"
                self._problem(op.line, what, f"put it in one of {', '.join(OP_LISTS)} too")
            else:
                found[op.name] = op
        return tuple(found.values())

    # -- ops of the backend's own ------------------------------------------------------------------

    def _non_native(self, node: Any, namespace: str) -> tuple[OwnOp, ...]:
        found: list[OwnOp] = []
        for item in self._items("non_native", node):
            op = self._own_op(item, namespace)
            if op is not None and self._is_distinct(op, found):
                found.append(op)
        return tuple(found)

    def _is_distinct(self, op: OwnOp, found: list[OwnOp]) -> bool:
        """Whether its name, in the file and in Python, is unique; reports a problem otherwise."""
        new = op.schema
        for other in found:
            old = other.schema
            if old.name == new.name:
                what = f"{new.qualified!r} is in non_native twice: see line {other.line}"
                self._problem(op.line, what)
                return False
            if old.identifier == new.identifier or old.class_name == new.class_name:
                what = f"{old.qualified!r} (line {other.line}) and {new.qualified!r}"
                hint = f"its node class would be Own{new.class_name} too: rename one"
                self._problem(op.line, f"{what} have one name in Python", hint)
                return False
        return True

    def _own_op(self, item: Any, namespace: str) -> OwnOp | None:
        if not isinstance(item, self.yaml.MappingNode):
            what = f"an op in non_native has a key 'func', this is {self._kind(item)}"
            self._problem(item, what, "write `- func: name(arguments) -> returns`")
            return None
        values = self._own_values(item)
        if "func" not in values:
            self._problem(item, "an op in non_native needs the key 'func'")
            return None
        func = self._text("func", values["func"])
        line = values["func"].start_mark.line + 1
        opkind = self._text("opkind", values["opkind"], True) if "opkind" in values else ""
        properties = tuple(self._property(p) for p in self._items_of(values, "properties"))
        schema = self._own_schema(func, line, namespace) if func else None
        return None if schema is None else OwnOp(schema, line, opkind, properties)

    def _own_values(self, item: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value in item.value:
            key = str(key_node.value)
            if key not in NON_NATIVE_KEYS:
                hint = _near(key, NON_NATIVE_KEYS) or f"there are {', '.join(NON_NATIVE_KEYS)}"
                self._problem(key_node, f"unknown key {key!r} of an op in non_native", hint)
            elif key in values:
                self._problem(key_node, f"key {key!r} is there twice")
            else:
                values[key] = value
        return values

    def _items_of(self, values: Mapping[str, Any], key: str) -> list[Any]:
        return self._items(key, values.get(key))

    def _property(self, node: Any) -> str:
        text = self._text("a property", node)
        if text and text not in PROPERTIES:
            hint = _near(text, PROPERTIES) or f"there are {', '.join(PROPERTIES)}"
            self._problem(node, f"unknown property {text!r}", hint)
        return text

    def _own_schema(self, func: str, line: int, namespace: str) -> LazyIrSchema | None:
        try:
            schema = LazyIrSchema.parse(f"{namespace}::{func}")
            _torch.parse_schema(schema.signature)
        except (SchemaError, RuntimeError) as error:
            given = str(error).strip().splitlines()[0].partition(". Common")[0].rstrip(":")
            self._problem(line, f"not a schema: {given}", _TYPES_HINT)
            return None
        what = _unusable(schema)
        if what:
            self._problem(line, what, "choose another name")
            return None
        return schema


def _unusable(schema: LazyIrSchema) -> str:
    """Why an own op with these names cannot be defined or called; empty if it can."""
    names = [argument.name for argument in schema.arguments]
    if any(map(keyword.iskeyword, (schema.base, *names))):
        return "a Python keyword cannot be the name of an op or of an argument"
    if _is_dunder(schema.base) or _torch.is_taken_op_name(schema.base, schema.overload):
        return f"an op cannot be called {schema.qualified!r}: torch.ops uses that name itself"
    for name in names:
        if name in TAKEN_ARGUMENTS or _is_dunder(name):
            return f"an argument cannot be called {name!r}: node classes use that name themselves"
    for spell in (parameter_name, attribute_name):
        spelled: dict[str, str] = {}
        for name in names:
            first = spelled.setdefault(spell(name), name)
            if names.count(name) > 1:
                return f"two arguments are called {name!r}"
            if first != name:
                return f"arguments {first!r} and {name!r} are both called {spell(name)!r} in Python"
    return ""


def _is_dunder(name: str) -> bool:
    """Whether Python reserves the name."""
    return len(name) > 4 and name.startswith("__") and name.endswith("__")


def parameter_name(argument: str) -> str:
    """The parameter of a lowering method for an argument: `self_`, `from_`."""
    taken = argument in ("self", "node") or keyword.iskeyword(argument)
    return f"{argument}_" if taken else argument


_TYPES_HINT: Final = "write it as in native_functions.yaml: `name(Tensor x, int[] dims) -> Tensor`"


# -- names -------------------------------------------------------------------------------------


@functools.cache
def _known() -> Mapping[str, LazyIrSchema]:
    """Every overload of this torch, by its name in YAML files."""
    return {schema.qualified: schema for schema in schemas().values()}


def _unknown(text: str) -> tuple[str, str]:
    """The problem of an unknown op name, and a suggestion."""
    known = _known()
    plain = text.removeprefix("aten::").removeprefix("aten.").removesuffix(".default")
    base, _, overload = plain.partition(".")
    if plain in known and plain != text:
        return f"unknown op {text!r}", f"did you mean {plain!r}?"
    overloads = [name for name in known if name.partition(".")[0] == base]
    if overloads and overload:
        what = f"{base!r} has no overload {overload!r} in this torch"
        return what, _near(plain, overloads) or f"there are {', '.join(overloads)}"
    if overloads:
        what = f"{base!r} has no overload without a name in this torch"
        return what, f"there are {', '.join(overloads)}"
    return f"unknown op {text!r}", _near(plain, known)


def _near(text: str, known: Iterable[str]) -> str:
    return did_you_mean(text, known).removeprefix("; ")
