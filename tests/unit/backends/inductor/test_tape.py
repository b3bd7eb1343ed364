"""Functions that Inductor wrote, read as tapes: what is understood, and what is not."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

from torpor.backends.inductor.tape import NotUnderstood, Tape, read

NAMES: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "inf": float("inf")}


def tape(body: str, arguments: int = 2, **names: Any) -> Tape:
    """The tape of a function with that body."""
    given = ", ".join(f"arg{i}_1" for i in range(arguments))
    head = f"{given}, = args\nargs.clear()\n"
    source = "class Runner:\n    def call(self, args):\n"
    return read(source + textwrap.indent(head + textwrap.dedent(body), " " * 8), NAMES | names)


def words(made: Tape) -> list[str]:
    return [action[0] for action in made.actions]


def test_allocating_reshaping_and_returning() -> None:
    made = tape("""
        assert_size_stride(arg0_1, (4, ), (1, ), 'input')
        buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
        buf1 = reinterpret_tensor(buf0, (4, ), (1, ), 0); del buf0  # reuse
        return (buf1, arg1_1, reinterpret_tensor(arg0_1, (2, 2), (2, 1), 0), )
    """)
    assert made.actions == [
        ("shaped", 0, (4,), (1,), "input"),
        ("empty", 2, (2, 2), (2, 1), torch.float32),
        ("part", 3, 2, (4,), (1,), 0),
        ("free", [2]),
        ("part", 4, 0, (2, 2), (2, 1), 0),
    ]
    assert (made.inputs, made.slots, made.results) == (2, 5, [3, 1, 4])


def test_sizes_that_are_checked_together() -> None:
    made = tape("""
        assert_size_stride_grouped((arg0_1, arg1_1), ((4, ), (2, 3)), ((1, ), (3, 1)), 'input')
        return (arg0_1, )
    """)
    assert made.actions == [
        ("shaped", 0, (4,), (1,), "input"),
        ("shaped", 1, (2, 3), (3, 1), "input"),
    ]


def test_dtypes_that_are_checked() -> None:
    made = tape("""
        assert_tensor_metadata(arg0_1, (4, ), (1, ), torch.float32, 'torch.ops.aten.mm.out')
        return (arg0_1, )
    """)
    assert made.actions == [("shaped", 0, (4,), (1,), "torch.ops.aten.mm.out", torch.float32)]


def test_a_second_name_keeps_a_tensor() -> None:
    made = tape("""
        buf0 = empty_strided_cpu((2, ), (1, ), torch.float32)
        buf1 = buf0; del buf0
        buf2 = empty_strided_cpu((2, ), (1, ), torch.float32)
        del buf1
        return (buf2, )
    """)
    assert words(made) == ["empty", "empty", "free"]
    assert made.actions[-1] == ("free", [2])


def test_ops_are_called_by_their_schema() -> None:
    made = tape("""
        buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
        extern_kernels.addmm(
            arg0_1, arg1_1, reinterpret_tensor(arg0_1, (2, 2), (1, 2), 0), alpha=1, beta=2, out=buf0
        )
        buf1 = torch.ops.aten.max.dim(buf0, -1, True)
        del buf0
        buf2 = buf1[0]
        buf3 = buf1[1]
        del buf1
        buf4 = aten.cat.default([buf2, arg0_1], 1)
        return (buf3, buf4, )
    """)  # fmt: skip
    calls = [action[1:] for action in made.actions if action[0] == "call"]
    assert calls[0] == (
        "aten::addmm", "out", {3: 2, 4: 1}, [(0, 0), (1, 1), (2, 3), (5, 2)], [], [],
    )  # fmt: skip
    assert calls[1] == ("aten::max", "dim", {1: -1, 2: True}, [(0, 2)], [], [4, 5])
    assert calls[2][:3] == ("aten::cat", "", {1: 1})
    assert calls[2][4:] == ([(0, [(True, 4), (True, 0)])], [6])
    assert ("free", [3]) in made.actions  # a reshaped argument lives as long as the call
    assert made.results == [5, 6]


def test_constants_of_the_module_come_first() -> None:
    made = tape("return (_constant0, arg0_1, )", _constant0=torch.ones(2))
    assert words(made) == ["constant"]
    assert made.results == [2, 0]


def test_a_missing_tensor_in_a_list() -> None:
    made = tape("""
        buf0 = aten.index.Tensor(arg0_1, [None, arg1_1])
        return (buf0, )
    """)
    assert made.actions[0][5] == [(1, [(False, 0), (True, 1)])]


def test_other_slots() -> None:
    made = tape("""
        buf0 = aten.cat.default([arg1_1, arg0_1])
        buf1 = reinterpret_tensor(buf0, (4, ), (1, ), 0)
        del buf0
        return (buf1, arg0_1, )
    """)
    actions, results = made.placed([7, 9], 20)
    assert actions[0][5] == [(0, [(True, 9), (True, 7)])]
    assert actions[1:] == [("part", 21, 20, (4,), (1,), 0), ("free", [20])]
    assert results == [21, 7]


@pytest.mark.parametrize(
    "body",
    [
        "return arg0_1",
        "return (arg0_1 + 1, )",
        "return (5, )",
        "if True:\n    pass\nreturn (arg0_1, )",
        "u0 = arg0_1.item()\nreturn (arg1_1, )",
        "buf0 = empty_strided_cpu((arg0_1, ), (1, ), torch.float32)\nreturn (buf0, )",
        "buf0 = torch.neg(arg0_1)\nreturn (buf0, )",
        "buf0 = nowhere.op(arg0_1)\nreturn (buf0, )",
        "cpp_fused_0(arg0_1)\nreturn (arg0_1, )",
        "buf0 = aten.split.Tensor(arg0_1, 2)\nreturn (buf0[0], )",
        "buf0 = aten.max.dim(arg0_1, 0)\nreturn (buf0, )",
        "buf0 = aten.item.default(arg0_1)\nreturn (buf0, )",
        "buf0 = aten.neg.default(arg0_1, out=arg1_1)\nreturn (buf0, )",
        "del buf7\nreturn (arg0_1, )",
    ],
)
def test_what_is_not_understood(body: str) -> None:
    with pytest.raises(NotUnderstood):
        tape(body)


def test_a_module_with_several_functions() -> None:
    with pytest.raises(NotUnderstood, match="several"):
        read("def call(args):\n    return ()\n" * 2, {})
