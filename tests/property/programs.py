"""Random tensor programs: written down once, run eagerly and lazily.

A program is a list of instructions over a growing pool of tensors. It is decided while it runs
eagerly (an instruction only asks for what the shapes at hand allow), then replayed on lazy tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import torpor

MAX_POOL = 12
MAX_ELEMENTS = 256


@dataclass(frozen=True)
class Instruction:
    """One line of a program: applied to pool entries `inputs`, results join the pool."""

    text: str
    inputs: tuple[int, ...]
    apply: Callable[..., Any]
    adds: bool = True


class Program:
    """Leaves, a seed and lines; it prints as what it does."""

    def __init__(self, leaves: list[Tensor], seed: int) -> None:
        self.leaves, self.seed = leaves, seed
        self.lines: list[Instruction] = []

    def __repr__(self) -> str:
        leaves = [f"t{i} = leaf {tuple(t.shape)} {t.dtype}" for i, t in enumerate(self.leaves)]
        return "\n".join([f"seed {self.seed}", *leaves, *(line.text for line in self.lines)])


def run(program: Program, pool: list[Tensor]) -> list[Any]:
    """Runs every line on `pool`, which grows; gives what the reading lines read."""
    reads = []
    for line in program.lines:
        result = line.apply(*(pool[i] for i in line.inputs))
        if line.adds:
            pool.append(result)
        elif result is not None:
            reads.append(result)
    return reads


class Author:
    """Draws the next instruction and runs it eagerly, so that every line is a legal one."""

    def __init__(self, draw: st.DrawFn, pool: list[Tensor], program: Program) -> None:
        self.draw, self.pool, self.program = draw, pool, program

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def pick(self, wanted: Callable[[Tensor], bool] = lambda t: True) -> int | None:
        matching = [i for i, t in enumerate(self.pool) if wanted(t)]
        return matching[self.number(0, len(matching) - 1)] if matching else None

    def write(self, text: str, inputs: tuple[int, ...], apply: Callable, adds: bool = True) -> None:
        """Appends the line if eager can run it; a line eager refuses is left out."""
        if adds and len(self.pool) >= MAX_POOL:
            return
        name = f"t{len(self.pool)} = " if adds else ""
        arguments = ", ".join(f"t{i}" for i in inputs)
        line = Instruction(f"{name}{text}({arguments})", inputs, apply, adds)
        try:
            result = apply(*(self.pool[i] for i in inputs))
        except (RuntimeError, IndexError, TypeError):
            return
        if adds and (not isinstance(result, Tensor) or result.numel() > MAX_ELEMENTS):
            return
        self.program.lines.append(line)
        if adds:
            self.pool.append(result)


# --- kinds of lines --------------------------------------------------------------------------


def _view(author: Author) -> None:
    index = author.pick()
    tensor = author.pool[index]
    kind = author.draw(st.sampled_from(VIEW_KINDS))
    text, apply = VIEWS[kind](author, tensor)
    author.write(text, (index,), apply)


def _dim(author: Author, tensor: Tensor) -> int:
    return author.number(0, max(tensor.dim() - 1, 0))


def _slice(author: Author, tensor: Tensor) -> tuple[str, Callable]:
    dim = _dim(author, tensor)
    size = tensor.shape[dim] if tensor.dim() else 1
    start, step = author.number(0, max(size - 1, 0)), author.number(1, 3)
    stop = author.number(start, size)
    index = (slice(None),) * dim + (slice(start, stop, step),)
    return f"slice[dim={dim}, {start}:{stop}:{step}]", lambda t: t[index]


def _select(author: Author, tensor: Tensor) -> tuple[str, Callable]:
    dim = _dim(author, tensor)
    position = author.number(0, max((tensor.shape[dim] if tensor.dim() else 1) - 1, 0))
    return f"select[{dim}, {position}]", lambda t: t.select(dim, position)


def _permute(author: Author, tensor: Tensor) -> tuple[str, Callable]:
    order = author.draw(st.permutations(range(tensor.dim())))
    return f"permute{order}", lambda t: t.permute(order)


def _reshape(author: Author, tensor: Tensor) -> tuple[str, Callable]:
    count = tensor.numel()
    divisors = [d for d in range(1, count + 1) if count % d == 0] or [1]
    rows = author.draw(st.sampled_from(divisors))
    method = author.draw(st.sampled_from(["view", "reshape"]))
    return f"{method}[{rows}, -1]", lambda t: getattr(t, method)(rows, max(count // rows, 0))


def _split(author: Author, tensor: Tensor) -> tuple[str, Callable]:
    dim, size = _dim(author, tensor), author.number(1, 3)
    method = author.draw(st.sampled_from(["split", "chunk", "tensor_split"]))
    part = author.number(0, 1)
    return f"{method}[{size}, dim={dim}][{part}]", lambda t: getattr(t, method)(size, dim=dim)[part]


def _unbind(author: Author, tensor: Tensor) -> tuple[str, Callable]:
    dim = _dim(author, tensor)
    return f"unbind[{dim}][-1]", lambda t: t.unbind(dim)[-1]


def _expand(author: Author, tensor: Tensor) -> tuple[str, Callable]:
    count = author.number(1, 2)
    return f"expand[{count}, ...]", lambda t: t.expand(count, *t.shape)


def _unfold(author: Author, tensor: Tensor) -> tuple[str, Callable]:
    dim, size, step = _dim(author, tensor), author.number(1, 2), author.number(1, 3)
    return f"unfold[{dim}, {size}, {step}]", lambda t: t.unfold(dim, size, step)


def _strided(author: Author, tensor: Tensor) -> tuple[str, Callable]:
    size = author.number(1, 3)
    stride, offset = author.number(1, 3), author.number(0, 2)
    return (
        f"as_strided[({size},), ({stride},), {offset}]",
        lambda t: t.as_strided((size,), (stride,), offset),
    )


VIEWS: dict[str, Callable[[Author, Tensor], tuple[str, Callable]]] = {
    "slice": _slice,
    "select": _select,
    "permute": _permute,
    "reshape": _reshape,
    "split": _split,
    "unbind": _unbind,
    "expand": _expand,
    "unfold": _unfold,
    "as_strided": _strided,
    "t": lambda a, t: ("transpose[0, -1]", lambda x: x.transpose(0, -1)),
    "unsqueeze": lambda a, t: ("unsqueeze[-1]", lambda x: x.unsqueeze(-1)),
    "squeeze": lambda a, t: ("squeeze", lambda x: x.squeeze()),
    "diagonal": lambda a, t: ("diagonal", lambda x: x.diagonal()),
    "detach": lambda a, t: ("detach", lambda x: x.detach()),
    "data": lambda a, t: ("data", lambda x: x.data),
    "flatten": lambda a, t: ("flatten", lambda x: x.flatten()),
    "movedim": lambda a, t: ("movedim[0, -1]", lambda x: x.movedim(0, -1)),
    "view_int32": lambda a, t: ("view[int32]", lambda x: x.view(torch.int32)),
    "as_real": lambda a, t: ("view_as_real", lambda x: torch.view_as_real(x)),
    "imag": lambda a, t: ("imag", lambda x: x.imag),
    "conj": lambda a, t: ("conj", lambda x: x.conj()),
}
VIEW_KINDS = sorted(VIEWS)


def _writable(tensor: Tensor) -> bool:
    """No two elements on one place of memory: eager's result would depend on its loop order."""
    if tensor.numel() == 0 or tensor.is_conj():
        return False
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride()):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return len(places.unique()) == len(places)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "add_[1]": lambda t: t.add_(1),
    "mul_[2]": lambda t: t.mul_(2),
    "sub_[self]": lambda t: t.sub_(t.clone() * 2),
    "fill_[3]": lambda t: t.fill_(3),
    "zero_": lambda t: t.zero_(),
    "neg_": lambda t: t.neg_(),
    "clamp_": lambda t: t.clamp_(-2, 5),
    "setitem_first": lambda t: t.__setitem__(0, 7),
    "setitem_even": lambda t: t.__setitem__(slice(None, None, 2), -1),
    "setitem_mask": lambda t: t.__setitem__(t > 2, 0),
    "flip_copy": lambda t: t.copy_(t.flip(0)),
    "cumsum_": lambda t: t.cumsum_(0),
    "remainder_": lambda t: t.remainder_(3),
    "out_mul": lambda t: torch.mul(t.clone(), 3, out=t),
    "masked_fill_": lambda t: t.masked_fill_(t < 0, 9),
}
DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "uniform_": lambda t: t.uniform_(),
    "normal_": lambda t: t.normal_(),
    "random_": lambda t: t.random_(0, 9),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
}
MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "add[1]": lambda t: t + 1,
    "mul[0.5]": lambda t: t * 0.5,
    "mul[2]": lambda t: t * 2,
    "rsub": lambda t: 1 - t,
    "neg": lambda t: -t,
    "abs": lambda t: t.abs(),
    "sin": lambda t: t.sin(),
    "exp": lambda t: (t * 0.1).exp(),
    "relu": lambda t: t.relu(),
    "softmax": lambda t: t.softmax(0),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "double": lambda t: t.double(),
    "int": lambda t: t.int(),
    "to_complex": lambda t: t.to(torch.complex64),
    "gt": lambda t: t > 1,
    "where": lambda t: torch.where(t > 1, t, -t),
    "cumsum": lambda t: t.cumsum(-1),
    "flip": lambda t: t.flip(0),
    "roll": lambda t: t.roll(1, 0),
    "sort": lambda t: t.sort(-1).values,
    "index": lambda t: t[[0, -1]],
    "gather": lambda t: t.gather(0, torch.zeros_like(t, dtype=torch.int64)),
    "repeat": lambda t: t.repeat(2, *([1] * (t.dim() - 1))),
    "zeros_like": torch.zeros_like,
    "triu": lambda t: t.triu(),
    "pad": lambda t: torch.nn.functional.pad(t, (1, 0)),
    "layer_norm": lambda t: torch.nn.functional.layer_norm(t, t.shape[-1:]),
    "sum": lambda t: t.sum(),
    "sum[0]": lambda t: t.sum(0),
    "sum[-1, keepdim]": lambda t: t.sum(-1, keepdim=True),
    "mean": lambda t: t.mean(-1),
    "amax": lambda t: t.amax(0),
    "argmax": lambda t: t.argmax(-1),
    "var": lambda t: t.var(correction=0),
    "prod": lambda t: t.prod(0),
    "norm": lambda t: t.norm(),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "dropout": lambda t: torch.nn.functional.dropout(t, 0.5),
    "bernoulli": lambda t: torch.bernoulli(t.sigmoid()),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 1],
}
PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "matmul": torch.matmul,
    "matmul_t": lambda a, b: a @ b.transpose(-1, -2),
    "outer": lambda a, b: torch.outer(a.flatten()[:4], b.flatten()[:4]),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "eq": torch.eq,
    "where": lambda a, b: torch.where(a > b, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda a, b: a.copy_(b),
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b),
    "setitem": lambda a, b: a.__setitem__(slice(0, 1), b),
    "out_add": lambda a, b: torch.add(a, b, out=a),
    "lerp_": lambda a, b: a.lerp_(b, 0.25),
    "foreach_add_": lambda a, b: torch._foreach_add_([a], [b]),
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool((t == t).all()),
    "shape": lambda t: (tuple(t.shape), t.stride(), t.storage_offset(), str(t.dtype)),
}


def _map(author: Author) -> None:
    name = author.draw(st.sampled_from(sorted(MAPS)))
    author.write(name, (author.pick(),), MAPS[name])


def _pair(author: Author) -> None:
    name = author.draw(st.sampled_from(sorted(PAIRS)))
    author.write(name, (author.pick(), author.pick()), PAIRS[name])


def _in_place(author: Author) -> None:
    index = author.pick(_writable)
    if index is not None:
        name = author.draw(st.sampled_from(sorted(IN_PLACE)))
        author.write(name, (index,), _silent(IN_PLACE[name]), adds=False)


def _draw_in_place(author: Author) -> None:
    index = author.pick(_writable)
    if index is not None:
        name = author.draw(st.sampled_from(sorted(DRAWS)))
        author.write(name, (index,), _silent(DRAWS[name]), adds=False)


def _write(author: Author) -> None:
    target = author.pick(_writable)
    if target is None:
        return
    source = author.pick(lambda t: _may_be_written_from(author.pool[target], t))
    if source is not None:
        name = author.draw(st.sampled_from(sorted(WRITES)))
        author.write(name, (target, source), _silent(WRITES[name]), adds=False)


def _may_be_written_from(target: Tensor, source: Tensor) -> bool:
    """Eager leaves a write between overlapping tensors undefined, unless they are the same."""
    if target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        return True
    return target.dtype == source.dtype and target.is_set_to(source)


def _silent(write: Callable[..., Any]) -> Callable[..., None]:
    def apply(*tensors: Tensor) -> None:
        write(*tensors)

    return apply


def _read(author: Author) -> None:
    name = author.draw(st.sampled_from(sorted(READS)))
    author.write(name, (author.pick(),), READS[name], adds=False)


def _sync(author: Author) -> None:
    kind = author.draw(st.sampled_from(["all", "wait", "one"]))
    if kind == "one":
        author.write("sync", (author.pick(),), _silent(torpor.sync), adds=False)
    else:
        wait = kind == "wait"
        author.write(f"sync[{wait=}]", (), lambda: torpor.sync(wait=wait), adds=False)


EVERYTHING = [_view, _view, _map, _map, _pair, _in_place, _draw_in_place, _write, _read, _sync]
ALIASING = [_view, _view, _view, _in_place, _in_place, _write, _read, _sync]

LEAVES = (
    lambda: torch.arange(24.0).view(4, 6) - 8,
    lambda: torch.arange(6.0),
    lambda: torch.arange(12.0).view(3, 2, 2) / 4,
    lambda: torch.arange(12, dtype=torch.int32).view(4, 3),
    lambda: torch.complex(torch.arange(4.0), torch.ones(4)).view(2, 2),
    lambda: torch.arange(24.0).view(4, 6).t(),
    lambda: torch.tensor(2.5),
)


@st.composite
def programs(draw: st.DrawFn, kinds: list[Callable[[Author], None]], most: int = 14) -> Program:
    """A program over one to three leaves."""
    chosen = draw(st.lists(st.integers(0, len(LEAVES) - 1), min_size=1, max_size=3))
    leaves = [LEAVES[i]() for i in chosen]
    program = Program(leaves, seed=draw(st.integers(0, 9)))
    torch.manual_seed(program.seed)
    author = Author(draw, [leaf.clone() for leaf in leaves], program)
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most)):
        kind(author)
    return program
