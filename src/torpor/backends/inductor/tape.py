"""Converts the functions of Inductor's CPU modules to tapes, by reading their source.

Such a function allocates, calls kernels and ops, and frees; its control flow depends on no values.
The native library runs all pieces of a step as one tape, without Python and without the GIL
(`native/tape.h`). What is not understood runs as Python code.
"""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, ModuleType
from typing import Any, Final

import torch

from torpor._torch import OpOverload

Action = tuple[Any, ...]
"""The kind of action and its operands; slots are numbers (see `action_of` in C++)."""

MOST_ARGUMENTS: Final = 2048
"""The most arguments of a kernel: `kMostArguments` in C++."""


class NotUnderstood(Exception):
    """A function contains something that no action represents."""


@dataclass(slots=True)
class Tape:
    """The actions of a function on tensors; slots are numbered from 0, inputs first."""

    actions: list[Action] = field(default_factory=list)
    slots: int = 0
    inputs: int = 0
    results: list[int] = field(default_factory=list)

    def placed(self, inputs: Sequence[int], first: int) -> tuple[list[Action], list[int]]:
        """Its actions and results, renumbered: inputs to `inputs`, other slots from `first` on."""
        places = [*inputs, *range(first, first + self.slots - self.inputs)]
        moved = [_moved(action, places) for action in self.actions]
        return moved, [places[slot] for slot in self.results]


def _moved(action: Action, places: list[int]) -> Action:
    match action:
        case ("empty" | "shaped" | "constant" | "aligned" as word, slot, *rest):
            return (word, places[slot], *rest)
        case ("part", to, source, *rest):
            return ("part", places[to], places[source], *rest)
        case ("kernel", function, arguments):
            return ("kernel", function, [(s, places[a] if s else a) for s, a in arguments])
        case ("free", slots):
            return ("free", [places[slot] for slot in slots])
        case ("call", name, overload, constants, tensors, lists, results):
            return (
                "call", name, overload, constants,
                [(at, places[slot]) for at, slot in tensors],
                [(at, [(s, places[slot] if s else 0) for s, slot in one]) for at, one in lists],
                [places[slot] for slot in results],
            )  # fmt: skip
    raise AssertionError(f"no action {action[0]}")


def read(source: str, names: dict[str, Any]) -> Tape:
    """The tape of a module's function `call`; `names` are the module's globals after execution."""
    return _FunctionReader(names).read(_function(ast.parse(source)))


def _function(module: ast.Module) -> ast.FunctionDef:
    found = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if len(found) != 1:
        raise NotUnderstood("a module with several functions")
    return found[0]


class _FunctionReader:
    """Interprets a function statement by statement."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names  # of the module
        self.tape = Tape()
        self.slots: dict[str, int | tuple[int, ...]] = {}  # by local name; a tuple for several
        self.holders: dict[int, int] = {}  # how many names refer to a slot
        self.constants: dict[str, int] = {}
        self.items: dict[str, int] = {}  # how many items of a name's list are used
        self.taken = 0  # the same, for the current assignment

    def read(self, function: ast.FunctionDef) -> Tape:
        for node in ast.walk(function):
            match node:
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(place))):
                    self.items[name] = max(self.items.get(name, 0), place + 1)
        *body, last = function.body
        for statement in body:
            self.statement(statement)
        match last:
            case ast.Return(value=ast.Tuple(elts=elements)):
                self.tape.results = [self.tensor(element) for element in elements]
            case _:
                raise NotUnderstood(ast.unparse(last))
        return self.tape

    # -- statements --------------------------------------------------------------------------------

    def statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Name(id="args")):
                self.inputs(elements)
            case ast.Assign(targets=[ast.List(elts=elements)], value=ast.Name(id="args")):
                self.inputs(elements)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.taken = self.items.get(name, 0)
                self.bind(name, self.value(value))
            case ast.Delete(targets=targets):
                for target in targets:
                    self.delete(target)
            case ast.Expr(value=ast.Call() as call):
                self.free_now(self.called(call, wanted=False))
            case ast.Expr(value=ast.Constant()):
                return
            case _:
                raise NotUnderstood(ast.unparse(statement))

    def inputs(self, elements: list[ast.expr]) -> None:
        if self.tape.slots:
            raise NotUnderstood("arguments after the first statement")
        for element in elements:
            if not isinstance(element, ast.Name):
                raise NotUnderstood(ast.unparse(element))
            self.bind(element.id, self.new_slot())
        self.tape.inputs = self.tape.slots

    def new_slot(self) -> int:
        self.tape.slots += 1
        return self.tape.slots - 1

    def bind(self, name: str, slots: int | tuple[int, ...]) -> None:
        for slot in _all(slots):
            self.holders[slot] = self.holders.get(slot, 0) + 1
        if name in self.slots:
            self.unbind(name)
        self.slots[name] = slots

    def delete(self, target: ast.expr) -> None:
        if not isinstance(target, ast.Name) or target.id not in self.slots:
            raise NotUnderstood(f"del {ast.unparse(target)}")
        self.unbind(target.id)

    def unbind(self, name: str) -> None:
        slots = _all(self.slots.pop(name))
        for slot in slots:
            self.holders[slot] -= 1
        self.free_now(slots)

    def free_now(self, slots: int | tuple[int, ...]) -> None:
        """Free slots that no name refers to, except inputs, which the caller frees."""
        dead = [s for s in _all(slots) if s >= self.tape.inputs and not self.holders.get(s)]
        if dead:
            self.act("free", dead)

    def act(self, *action: Any) -> None:
        self.tape.actions.append(action)

    # -- expressions -------------------------------------------------------------------------------

    def value(self, value: ast.expr) -> int | tuple[int, ...]:
        match value:
            case ast.Name(id=name) if name in self.slots:
                return self.slots[name]
            case ast.Name(id=name) if isinstance(self.names.get(name), torch.Tensor):
                return self.constant(name)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(place))):
                slots = self.slots.get(name)
                if isinstance(slots, tuple) and 0 <= place < len(slots):
                    return slots[place]
            case ast.Call():
                return self.called(value, wanted=True)
        raise NotUnderstood(ast.unparse(value))

    def tensor(self, value: ast.expr) -> int:
        slot = self.value(value)
        if isinstance(slot, tuple):
            raise NotUnderstood(f"{ast.unparse(value)} is several tensors")
        return slot

    def constant(self, name: str) -> int:
        if name not in self.constants:
            slot = self.constants[name] = self.new_slot()
            self.holders[slot] = 1  # the module's global
            self.tape.actions.insert(0, ("constant", slot, self.names[name]))
        return self.constants[name]

    def known(self, value: ast.expr) -> Any:
        """Evaluate an expression that involves no tensor of the function."""
        if any(n.id in self.slots for n in ast.walk(value) if isinstance(n, ast.Name)):
            raise NotUnderstood(ast.unparse(value))
        try:
            return eval(compile(ast.Expression(value), "<inductor>", "eval"), self.names)
        except Exception as error:
            raise NotUnderstood(f"{ast.unparse(value)}: {error!r}") from None

    def called(self, call: ast.Call, *, wanted: bool) -> int | tuple[int, ...]:
        match call.func:
            case ast.Name(id=name) if name not in self.slots:
                return self.called_by_name(name, call)
            case ast.Attribute(value=ast.Name(id="args"), attr="clear"):
                return ()
            case ast.Attribute(value=ast.Name(id="extern_kernels"), attr=attribute):
                overloads = getattr(torch.ops.aten, attribute, None)
                keywords = {keyword.arg for keyword in call.keywords}
                op = getattr(overloads, "out" if "out" in keywords else "default", None)
            case ast.Attribute():
                op = self.known(call.func)
            case _:
                op = None
        if not isinstance(op, OpOverload):
            raise NotUnderstood(ast.unparse(call.func))
        return self.op(op, call, wanted=wanted)

    def called_by_name(self, name: str, call: ast.Call) -> int | tuple[int, ...]:
        match name, call.args:
            case "empty_strided_cpu", [sizes, strides, dtype]:
                slot = self.new_slot()
                self.act("empty", slot, *map(self.known, (sizes, strides, dtype)))
                return slot
            case "reinterpret_tensor", [tensor, sizes, strides, offset]:
                source, slot = self.tensor(tensor), self.new_slot()
                self.act("part", slot, source, *map(self.known, (sizes, strides, offset)))
                self.free_now(source)
                return slot
            case "assert_size_stride", [tensor, sizes, strides, *said]:
                self.shaped(tensor, self.known(sizes), self.known(strides), said)
                return ()
            case "assert_size_stride_grouped", [ast.Tuple(elts=tensors), sizes, strides, *said]:
                for one, size, stride in zip(tensors, self.known(sizes), self.known(strides)):
                    self.shaped(one, size, stride, said)
                return ()
            case "assert_tensor_metadata", [tensor, sizes, strides, dtype, *said]:
                self.shaped(tensor, self.known(sizes), self.known(strides), said, self.known(dtype))
                return ()
            case "assert_alignment", [tensor, count, *_]:
                self.act("aligned", self.tensor(tensor), self.known(count))
                return ()
        address = kernel_address(self.names.get(name))
        if address is None or call.keywords or len(call.args) > MOST_ARGUMENTS:
            raise NotUnderstood(ast.unparse(call.func))
        arguments = [self.kernel_argument(argument) for argument in call.args]
        self.act("kernel", address, arguments)
        self.free_now(tuple(slot for is_slot, slot in arguments if is_slot))
        return ()

    def shaped(
        self, tensor: ast.expr, sizes: Any, strides: Any, said: list[ast.expr], *dtype: torch.dtype
    ) -> None:
        words = " ".join(str(self.known(word)) for word in said) or "a tensor"
        self.act("shaped", self.tensor(tensor), sizes, strides, words, *dtype)

    def kernel_argument(self, argument: ast.expr) -> tuple[bool, int]:
        if isinstance(argument, ast.Constant) and type(argument.value) is int:
            return (False, argument.value)
        return (True, self.tensor(argument))

    def op(self, op: Any, call: ast.Call, *, wanted: bool) -> int | tuple[int, ...]:
        """A call of an op, its arguments matched by its schema."""
        places = {argument.name: at for at, argument in enumerate(op._schema.arguments)}
        given = dict(enumerate(call.args))
        for keyword in call.keywords:
            if keyword.arg not in places:
                raise NotUnderstood(ast.unparse(call))
            given[places[keyword.arg]] = keyword.value
        constants: dict[int, Any] = {}
        tensors: list[tuple[int, int]] = []
        lists: list[tuple[int, list[tuple[bool, int]]]] = []
        for at, argument in given.items():
            if not _takes_tensors(op, at) or _is_none(argument):
                constants[at] = self.known(argument)
            elif isinstance(argument, ast.List | ast.Tuple):
                lists.append((at, [self.listed(one) for one in argument.elts]))
            else:
                tensors.append((at, self.tensor(argument)))
        schema = op._schema
        returned = [str(r.type) for r in schema.returns]
        returns_list = returned == ["List[Tensor]"] and schema.returns[0].alias_info is None
        if returns_list:  # items that are not used are freed with the list
            returned = ["Tensor"] * (self.taken if wanted else 0)
        if any(kind != "Tensor" for kind in returned):
            raise NotUnderstood(f"{op} returns {returned}")
        results = tuple(self.new_slot() for _ in returned if wanted)
        self.act(
            "call", schema.name, schema.overload_name, constants, tensors, lists, list(results)
        )
        used = [slot for _, slot in tensors] + [s for _, one in lists for there, s in one if there]
        self.free_now(tuple(used))
        return results[0] if len(results) == 1 and not returns_list else results

    def listed(self, element: ast.expr) -> tuple[bool, int]:
        return (False, 0) if _is_none(element) else (True, self.tensor(element))


def _all(slots: int | tuple[int, ...]) -> tuple[int, ...]:
    return slots if isinstance(slots, tuple) else (slots,)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _takes_tensors(op: Any, at: int) -> bool:
    if at >= len(op._schema.arguments):
        raise NotUnderstood(f"{op} with too many arguments")
    return "Tensor" in str(op._schema.arguments[at].type)


# -- kernels ---------------------------------------------------------------------------------------


_LIBRARY: Final = "__library__"  # module attribute: the library, in case its file is deleted


def keep_library(module: ModuleType) -> None:
    """Keep a kernel's library reachable after its file is deleted."""
    setattr(module, _LIBRARY, ctypes.PyDLL(str(module.__file__)))


def kernel_address(kernel: Any) -> int | None:
    """The address of a kernel's machine code, if Inductor compiled it; else None."""
    module = kernel.__self__ if isinstance(kernel, BuiltinFunctionType) else None
    path = getattr(module, "__file__", None)
    if path is None:
        return None
    try:
        library = getattr(module, _LIBRARY, None) or ctypes.PyDLL(path)
        function = getattr(library, kernel.__name__)
    except (AttributeError, OSError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
