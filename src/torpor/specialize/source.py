"""Recorders as text: the record path of `trace.recorder.record`, specialised to one signature.

No argument list is walked at run time, and most calls end after one look into a dictionary. The
text is made in memory when an op is called often; that of `relu` is that of `exp`.

`torpor info --op aten.add.Tensor` shows one.
"""

from __future__ import annotations

import functools
from types import CodeType
from typing import Any

from torpor.ops.signature import Make, Signature
from torpor.ops.spec import Argument

_READ = """\
        if type({a}) is LazyTensor:
            s{i} = {a}._lazy_storage
            k{i} = s{i}.value
            w{i} = {a}._lazy_view
            if w{i} is None:
                if k{i} is None:
                    k{i} = value_of({a})
            elif w{i}.base is k{i}:
                k{i} = w{i}.value
            else:
                k{i} = value_of({a})
        else:
            k{i} = other_value({a})
"""

_FRESH = """\
        v = {value}
        t = v.type
        s = LazyStorage(t, v, None)
        s.listed = True
        pending[ref(s, forget)] = None
        r{n} = make_wrapper(LazyTensor, *t.wrapper)
        r{n}._lazy_storage = s
        r{n}._lazy_view = None
"""

_VIEW = """\
        v = node.outputs[0]
        t = v.type
        r = wrap_like({a}, t) if inference() else make_wrapper(LazyTensor, *t.wrapper)
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
            write({a}, v)
        return {a}
"""

_WRITE_LIST = """\
        for x, v in zip({a}, node.outputs):
            if x._lazy_view is None:
                s = x._lazy_storage
                if not s.listed:
                    enlist(s)
                s.data = None
                s.value = v
            else:
                write(x, v)
        return None
"""

_CUT_WHEN_LONG = """\
    if len(pending) > config.max_trace_nodes:
        cut()
    return {results}
"""
"""Follows when the lock is released: nobody waits for a queue under it."""


def source(signature: Signature) -> str:
    """The recorder of an op, as Python source."""
    return _Source(signature).text()


class _Source:
    """Writes the recorder of one signature."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.arguments = signature.spec.arguments
        self.names = [a.name if a.keyword_only else f"a{i}" for i, a in enumerate(self.arguments)]
        self.all = f"({', '.join(self.names)}{',' if len(self.names) == 1 else ''})"

    def text(self) -> str:
        keys = [self._key(i) for i in range(len(self.names))] + self._extra()
        return (
            f"def record({self._parameters()}):\n"
            "    calls[0] += 1\n"
            "    -lock\n"
            "    try:\n"
            f"{''.join(map(self._check, self.signature.kept))}"
            f"{''.join(self._read(i, a) for i, a in enumerate(self.arguments))}"
            f"{self._overlap()}"
            f"        key = ({', '.join(keys)}{',' if len(keys) == 1 else ''})\n"
            "        node = nodes.get(key)\n"
            "        if node is None:\n"
            f"            node = make(key, {self.all})\n"
            f"{self._site()}"
            f"{self._results()}"
            "    finally:\n"
            "        release()\n"
            f"{self._last()}"
        )

    def _parameters(self) -> str:
        """A default is written as None: ops of one shape have defaults of their own."""
        parts: list[str] = []
        for name, argument in zip(self.names, self.arguments, strict=True):
            if argument.keyword_only and "*" not in parts:
                parts.append("*")
            parts.append(f"{name}=None" if argument.has_default else name)
        return ", ".join(parts)

    # -- from arguments to the key --

    def _check(self, position: int) -> str:
        """Lines that refuse a plain tensor which the results would share memory with."""
        name = self.names[position]
        if self.signature.kinds[position] == "T":
            return f"        all_lazy({name})\n"
        return (
            f"        if type({name}) is not LazyTensor and {name} is not None:\n"
            "            raise WritesPlain\n"
        )

    def _read(self, i: int, argument: Argument) -> str:
        """Lines that read an argument into its part of the key, `k2`.

        `n2` is the key of the default `d2` of a number: `alpha` is 1 nearly always.
        """
        name, kind = self.names[i], self.signature.kinds[i]
        if kind == "t":
            return _READ.format(a=name, i=i)
        if kind == "T":
            return f"        k{i} = None if {name} is None else list_values({name})\n"
        if kind == "n":
            known = f"n{i} if {name} is d{i} else " if argument.has_default else ""
            test = f"type({name}) is float and {name} == {name} and {name} != 0.0"
            return f"        k{i} = {known}{name} if {test} else number_key({name})\n"
        if kind == "P":
            return f"        k{i} = tuple({name}) if type({name}) is list else {name}\n"
        if kind == "N":
            return f"        k{i} = None if {name} is None else tuple(map(number_key, {name}))\n"
        if kind == "o":
            return f"        if {name} is not None:\n            raise opaque\n"
        if i == self.signature.device:
            tensor = self.names[0] if self.signature.kinds[0] == "t" else "None"
            return (
                f"        if {name} is not None:\n            {name} = numbered({name}, {tensor})\n"
            )
        return ""

    def _key(self, i: int) -> str:
        kind = self.signature.kinds[i]
        return "None" if kind == "o" else self.names[i] if kind == "p" else f"k{i}"

    def _extra(self) -> list[str]:
        extra = self.signature.extra
        flags = ["grad_mode()"] * extra.grad_mode
        flags += [f"{self.names[i]}.requires_grad" for i in extra.requires_grad]
        grads = [f"({', '.join(flags)}{',' if len(flags) == 1 else ''})"] if flags else []
        return grads + ["draw()"] * extra.draw

    def _overlap(self) -> str:
        """Lines that notice when a written tensor shares its storage with another argument."""
        signature, names = self.signature, self.names
        lines = [f"        apart({names[i]}, {names[j]})\n" for i, j in signature.apart]
        tests = []
        repeats = {w.argument for w in signature.written if w.may_repeat}
        for i, j in signature.overlaps:
            if signature.kinds[j] == "T":
                tests.append(f"({names[i]} is not None and shares(s{i}, {names[j]}))")
                continue
            test = f"type({names[j]}) is LazyTensor and {names[i]} is not None and s{j} is s{i}"
            test += f" and {names[j]} is not {names[i]}" if i in repeats else ""
            tests.append(f"({test})")
        if tests:
            lines.append(f"        if {' or '.join(tests)}:\n")
            lines.append(f"            check_overlap(spec, {self.all})\n")
        return "".join(lines)

    def _site(self) -> str:
        return "        node.site = site()\n" if self.signature.spec.may_fail else ""

    # -- from the node to the results: one form for each common kind of op --

    def _results(self) -> str:
        signature = self.signature
        results, written = signature.results, signature.written
        if signature.makes_fresh:
            return self._fresh()
        only = results[0] if len(results) == 1 else None
        if only and not written and only.make is Make.FRESH:
            return "        return [wrap_value(v) for v in node.outputs]\n"
        if only and not only.is_list and only.argument == 0:
            if only.make is Make.ALIAS:
                return _VIEW.format(a=self.names[0], view="w0")
            if only.make is Make.VIEW:
                return _VIEW.format(a=self.names[0], view="View(w0, node, 0, s0.value, v)")
        if len(written) == 1 and written[0].argument == 0 and not written[0].is_out:
            if written[0].is_list and not results:
                return _WRITE_LIST.format(a=self.names[0])
            if not written[0].is_list and only and only.make is Make.ARGUMENT and not only.is_list:
                return _WRITE.format(a=self.names[0])
        return f"        return finish(signature, node, {self.all})\n"

    def _fresh(self) -> str:
        number = len(self.signature.results)
        if number == 1:
            return _FRESH.format(value="node.outputs[0]", n=0)
        lines = "        outputs = node.outputs\n"
        for n in range(number):
            made = "    ".join(_FRESH.format(value=f"outputs[{n}]", n=n).splitlines(keepends=True))
            lines += f"        if outputs[{n}].type is None:\n            r{n} = None\n"
            lines += f"        else:\n    {made}"
        return lines

    def _last(self) -> str:
        """What is done when the lock is released."""
        if not self.signature.makes_fresh:
            return ""
        results = ", ".join(f"r{n}" for n in range(len(self.signature.results)))
        several = len(self.signature.results) > 1
        return _CUT_WHEN_LONG.format(results=f"({results})" if several else results)


@functools.cache
def _compiled(text: str) -> CodeType:
    made: dict[str, Any] = {}
    exec(compile(text, "<torpor recorder>", "exec"), made)
    code: CodeType = made["record"].__code__
    return code


def recorder_code(signature: Signature) -> CodeType:
    """The code of the recorder of a signature, for this op alone.

    A copy for each op: Python's interpreter adapts code to the names it is run with.
    """
    code = _compiled(source(signature))
    return code.replace(co_name="record", co_qualname=f"record {signature.spec.name}")
