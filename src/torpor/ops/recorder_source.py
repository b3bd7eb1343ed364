"""Recorders as text: the Python function that turns calls of one op into nodes.

The text depends on the op's schema alone, and much of it is alike: `relu` and `exp` have the same.
`ops/_generated/recorders/` holds the text of every ATen op that is recorded, one function for all
ops of a shape; `trace.recorder` gives each op a copy of its own, with its own defaults and names.
Other ops (custom ones, those of another torch) have theirs written when they are met.

`python -m torpor.ops.recorder_source aten.add.Tensor` shows one.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

from torpor.ops.recorders import ALIASES, Recordable, kept_arguments, may_repeat
from torpor.ops.spec import ArgKind, ReturnKind

_READ = """\
        if type({a}) is LazyTensor:
            s{i} = {a}._lazy_storage
            {k} = s{i}.value
            w{i} = {a}._lazy_view
            if w{i} is None:
                if {k} is None:
                    {k} = leaf_value(s{i})
            elif w{i}.base is {k}:
                {k} = w{i}.value
            else:
                {k} = view_value(w{i}, s{i}, {a})
        else:
            {k} = other_value({a})
"""


def _parameters(op: Recordable) -> tuple[str, list[str]]:
    """The recorder's parameter list and the names in schema order.

    A default is written as None: ops of one shape have defaults of their own.
    """
    names: list[str] = []
    parts: list[str] = []
    starred = False
    for position, argument in enumerate(op.arguments):
        name = argument.name if argument.keyword_only else f"a{position}"
        if argument.keyword_only and not starred:
            parts.append("*")
            starred = True
        names.append(name)
        parts.append(f"{name}=None" if argument.has_default else name)
    return ", ".join(parts), names


def _key_lines(op: Recordable, names: list[str]) -> tuple[list[str], list[str]]:
    """Lines that read each argument, and the expression that stands for it in the key.

    `n2` is the key of the default `d2` of a number: `alpha` is 1 nearly always.
    """
    lines: list[str] = []
    keys: list[str] = []
    for i, (argument, name) in enumerate(zip(op.arguments, names, strict=True)):
        k = f"k{i}"
        if argument.kind is ArgKind.TENSOR:
            lines.append(_READ.format(a=name, k=k, i=i))
        elif argument.kind is ArgKind.TENSORS:
            lines.append(f"        {k} = None if {name} is None else list_values({name})\n")
        elif argument.kind in (ArgKind.FLOAT, ArgKind.SCALAR):
            known = f"n{i} if {name} is d{i} else " if argument.has_default else ""
            test = f"type({name}) is float and {name} == {name} and {name} != 0.0"
            lines.append(f"        {k} = {known}{name} if {test} else number_key({name})\n")
        elif argument.kind is ArgKind.PLAINS:
            lines.append(f"        {k} = tuple({name}) if type({name}) is list else {name}\n")
        elif argument.kind in (ArgKind.FLOATS, ArgKind.SCALARS):
            lines.append(
                f"        {k} = None if {name} is None else tuple(map(number_key, {name}))\n"
            )
        elif argument.kind is ArgKind.OPAQUE:
            lines.append(f"        if {name} is not None:\n            raise opaque\n")
            k = "None"
        else:
            if name == "device":
                tensor = names[0] if op.arguments[0].kind is ArgKind.TENSOR else "None"
                lines.append(
                    "        if device is not None:\n"
                    f"            device = numbered(device, {tensor})\n"
                )
            k = name
        keys.append(k)
    return lines, keys


_FRESH = """\
        v = {value}
        t = v.type
        s = LazyStorage(t, v, None)
        s.listed = True
        listed[ref(s, forget)] = None
        r{n} = make_wrapper(LazyTensor, *t.wrapper)
        r{n}._lazy_storage = s
        r{n}._lazy_view = None
"""

_VIEW = """\
        v = node.outputs[0]
        t = v.type
        r = wrap_like({tensor}, t) if inference() else make_wrapper(LazyTensor, *t.wrapper)
        r._lazy_storage = s0
        r._lazy_view = {view}
        if t.conj or t.neg:
            set_bits(r, t)
        return r
"""

# An interrupt may come between any two of these lines: a storage holds all of the old contents
# then, or all of the new ones.
_WRITE = """\
        v = node.outputs[0]
        if w0 is None:
            if not s0.listed:
                enlist(s0)
            s0.data = None
            s0.value = v
        else:
            write({tensor}, v)
        return {result}
"""

_WRITE_LIST = """\
        for x, v in zip({tensors}, node.outputs):
            if x._lazy_view is None:
                s = x._lazy_storage
                if not s.listed:
                    enlist(s)
                s.data = None
                s.value = v
            else:
                write(x, v)
        return {result}
"""


def _result_lines(op: Recordable, names: list[str]) -> str:
    """Lines that make the results of a hit; one form for each common kind of op."""
    kinds = [(r.kind, r.is_list) for r in op.returns]
    only = kinds[0] if len(kinds) == 1 else None
    if _makes_fresh(op):
        return _fresh_lines(len(kinds))
    if only == (ReturnKind.FRESH, True) and not op.mutated:
        return "        return [wrap_value(v) for v in node.outputs]\n"
    if only == (ReturnKind.VIEW, False) and op.returns[0].argument == 0:
        alias = op.name in ALIASES
        view = "w0" if alias else "View(w0, node, 0, s0.value, v)"
        return _VIEW.format(tensor=names[0], view=view)
    if op.mutated == (0,) and not _resizes(op):
        is_list = op.arguments[0].kind is ArgKind.TENSORS
        if is_list and not kinds:
            return _WRITE_LIST.format(tensors=names[0], result="None")
        if not is_list and only == (ReturnKind.ARGUMENT, False):
            return _WRITE.format(tensor=names[0], result=names[0])
    tuple_ = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    return f"        return finish(spec, node, {tuple_})\n"


_CUT_WHEN_LONG = """\
    if len(listed) > config.max_trace_nodes:
        cut()
    return {results}
"""
"""Follows when the lock is released: nobody waits for a queue under it."""


def _fresh_lines(number: int) -> str:
    if number == 1:
        return _FRESH.format(value="node.outputs[0]", n=0)
    lines = "        outputs = node.outputs\n"
    for n in range(number):
        made = "    ".join(_FRESH.format(value=f"outputs[{n}]", n=n).splitlines(keepends=True))
        lines += f"        if outputs[{n}].type is None:\n            r{n} = None\n"
        lines += f"        else:\n    {made}"
    return lines


def _last_lines(op: Recordable) -> str:
    """What is done when the lock is released."""
    if not _makes_fresh(op):
        return ""
    results = ", ".join(f"r{n}" for n in range(len(op.returns)))
    return _CUT_WHEN_LONG.format(results=results if len(op.returns) == 1 else f"({results})")


def _makes_fresh(op: Recordable) -> bool:
    kinds = [(r.kind, r.is_list) for r in op.returns]
    return not op.mutated and bool(kinds) and all(k == (ReturnKind.FRESH, False) for k in kinds)


def _resizes(op: Recordable) -> bool:
    return any(op.arguments[i].keyword_only for i in op.mutated)


def _check_line(op: Recordable, names: list[str], position: int) -> str:
    name = names[position]
    if op.arguments[position].kind is ArgKind.TENSORS:
        return f"        all_lazy({name})\n"
    return (
        f"        if type({name}) is not LazyTensor and {name} is not None:\n"
        "            raise WritesPlain\n"
    )


def _overlap_line(op: Recordable, names: list[str]) -> str:
    """A line that notices when a written tensor shares its storage with another argument."""
    tensors = [i for i, a in enumerate(op.arguments) if a.kind is ArgKind.TENSOR]
    pairs = [(i, j) for i in op.mutated if i in tensors for j in tensors if i != j]
    tests = []
    for i, j in pairs:
        if j in op.mutated and j < i:
            continue
        test = f"type({names[j]}) is LazyTensor and {names[i]} is not None and s{j} is s{i}"
        if may_repeat(op, i):
            test += f" and {names[j]} is not {names[i]}"
        tests.append(test)
    lists = [i for i, a in enumerate(op.arguments) if a.kind is ArgKind.TENSORS]
    tests += [
        f"{names[i]} is not None and shares(s{i}, {names[j]})"
        for i in op.mutated
        if i in tensors
        for j in lists
    ]
    if op.name.startswith("aten._foreach_"):
        return "".join(
            f"        apart({names[i]}, {names[j]})\n"
            for i in op.mutated
            for j in lists
            if i in lists and j not in op.mutated
        )
    if not tests or op.name == "aten.copy_.default":
        return ""
    condition = " or ".join(f"({test})" for test in tests)
    raw = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    return f"        if {condition}:\n            check_overlap(spec, {raw})\n"


_NOTE_LINE = "        node.site = site()\n"


def source(op: Recordable, also: str = "", name: str = "record") -> str:
    """The recorder of an op, as Python source; `also` is a further part of its key."""
    parameters, names = _parameters(op)
    key_lines, keys = _key_lines(op, names)
    if also:
        keys.append(also)
    checks = "".join(_check_line(op, names, i) for i in kept_arguments(op))
    key = f"({', '.join(keys)}{',' if len(keys) == 1 else ''})"
    raw = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    return (
        f"def {name}({parameters}):\n"
        "    cell[0] += 1\n"
        "    -lock\n"
        "    try:\n"
        f"{checks}"
        f"{''.join(key_lines)}"
        f"{_overlap_line(op, names)}"
        f"        key = {key}\n"
        "        node = nodes.get(key)\n"
        "        if node is None:\n"
        f"            node = miss(key, {raw})\n"
        f"{_NOTE_LINE if op.may_fail else ''}"
        f"{_result_lines(op, names)}"
        "    finally:\n"
        "        release()\n"
        f"{_last_lines(op)}"
    )


def compiled(op: Recordable, also: str = "") -> CodeType:
    """The code of a recorder that is not among the generated ones."""
    made: dict[str, Any] = {}
    exec(compile(source(op, also), f"<torpor recorder {op.name}>", "exec"), made)
    code: CodeType = made["record"].__code__
    return code


if __name__ == "__main__":
    import sys

    from torpor.ops.spec import spec_of
    from torpor.ops.text import find_op

    print(source(spec_of(find_op(sys.argv[1]))))  # noqa: T201  # run as a command
