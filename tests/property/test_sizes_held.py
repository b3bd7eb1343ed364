"""Tensors that live on while sizes change: random programs, step after step, eager against lazy.

A program is a list of instructions drawn once and run in every step, each time with other sizes, so
that sizes become symbols; now and then one is left out. Its tensors are those of the step and those
that were kept from steps before: views, written through, resized, read late.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torpor
from tests.comparison import Put, plain
from torpor.backends.equality import same_bits
from torpor.execute.sync import PLANS
from torpor.symbols.leaves import SIZES

pytestmark = [
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
    pytest.mark.filterwarnings("ignore:The number of elements in the out tensor"),
]

KEPT = 8
LARGEST = 600
REFUSED = (RuntimeError, IndexError, TypeError, ValueError)


class World:
    """The tensors of a program, all eager or all lazy."""

    def __init__(self, put: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.put, self.device = put, device
        self.held: list[Tensor] = []
        self.made: list[Tensor] = []
        draw = torch.Generator().manual_seed(3)
        self.tables = [put(torch.randn(s, generator=draw)) for s in ((40,), (9, 8), (24, 3))]
        self.weight = put(torch.randn(8, 5, generator=draw)).requires_grad_()
        self.losses: list[Tensor] = []
        self.read: list[Any] = []

    def begin(self, sizes: Sizes) -> None:
        """A step: new tensors come in."""
        n, m = sizes
        draw = torch.Generator().manual_seed(100 * n + m)
        shapes = ((n,), (n, m), (m, n, 2))
        self.made = [self.put(torch.randn(s, generator=draw)) for s in shapes]

    def end(self) -> None:
        """The step is over; nobody holds what was not kept."""
        del self.held[:-KEPT]
        self.made = []

    def all(self) -> list[Tensor]:
        """Every tensor that lives on."""
        grads = [] if self.weight.grad is None else [self.weight.grad]
        return [*self.held, *self.tables, self.weight.detach(), *grads, *self.losses]


Sizes = tuple[int, int]
Pick = Callable[[World], Tensor]
Line = Callable[[World, Sizes], Any]


@dataclass
class Instruction:
    """One line of a program; what it gives joins the tensors of the step."""

    text: str
    run: Line


class Author:
    """Draws instructions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def tensor(self, *kinds: str) -> tuple[str, Pick]:
        """Some tensor of the step, or one that was kept, or a table."""
        kind = self.random.choice(kinds or ("made", "made", "made", "held", "held", "tables"))
        place = self.random.randrange(6)

        def pick(world: World) -> Tensor:
            found = getattr(world, kind) or world.tables
            return found[-1 - place % len(found)]

        return f"{kind}[-{place + 1}]", pick

    def size(self) -> tuple[str, Callable[[Tensor, Sizes], int]]:
        """A number that depends on the sizes of the step, or of a tensor, or is always the same."""
        return self.random.choice(SIZES_OF_STEP)

    def dim(self) -> int:
        return self.random.choice((0, 0, -1))

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


SIZES_OF_STEP: list[tuple[str, Callable[[Tensor, Sizes], int]]] = [
    ("n", lambda t, s: s[0]),
    ("m", lambda t, s: s[1]),
    ("n-1", lambda t, s: s[0] - 1),
    ("n//2", lambda t, s: s[0] // 2),
    ("n+m", lambda t, s: s[0] + s[1]),
    ("2", lambda t, s: 2),
    ("3", lambda t, s: 3),
    ("half", lambda t, s: (t.shape[0] // 2) if t.dim() else 1),
    ("last", lambda t, s: t.shape[-1] if t.dim() else 1),
]


def _side(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if tensor.dim() else 0


def _flat(tensor: Tensor, count: int) -> Tensor:
    return tensor.reshape(-1)[:count].to(torch.float32)


# --- views -----------------------------------------------------------------------------------


def _one(kind: Callable[[Author], tuple[str, Callable[[Tensor, Sizes], Any]]]) -> Any:
    def write(author: Author) -> Instruction:
        name, pick = author.tensor()
        text, apply = kind(author)
        return Instruction(f"{text} of {name}", lambda w, s: apply(pick(w), s))

    return write


def _slice(author: Author) -> Any:
    (a, start), (b, stop), dim = author.size(), author.size(), author.dim()
    step = author.number(1, 2)

    def apply(t: Tensor, s: Sizes) -> Tensor:
        low, high = start(t, s) // 2, stop(t, s)
        index = slice(low, max(low, high), step)
        return t[index] if dim == 0 else t[..., index]

    return f"[{a}//2:{b}:{step}] at {dim}", apply


def _narrow(author: Author) -> Any:
    (a, length), dim = author.size(), author.dim()
    return f"narrow({a}, {dim})", lambda t, s: t.narrow(dim, 0, min(length(t, s), _side(t, dim)))


def _end(author: Author) -> Any:
    a, length = author.size()
    return f"[-{a}:]", lambda t, s: t[-max(length(t, s), 1) :]


def _as_strided(author: Author) -> Any:
    (a, rows), (b, step), offset = author.size(), author.size(), author.number(0, 2)

    def apply(t: Tensor, s: Sizes) -> Tensor:
        return t.as_strided((max(rows(t, s), 1), 2), (max(step(t, s) // 2, 1), 1), offset)

    return f"as_strided(({a}, 2), ({b}//2, 1), {offset})", apply


def _expand(author: Author) -> Any:
    a, count = author.size()
    return f"expand({a}, ...)", lambda t, s: t.unsqueeze(0).expand(count(t, s), *t.shape)


def _unfold(author: Author) -> Any:
    (a, size), step = author.size(), author.number(1, 3)
    return f"unfold(0, {a}, {step})", lambda t, s: t.unfold(0, size(t, s), step)


def _select(author: Author) -> Any:
    (a, place), dim = author.size(), author.dim()
    return f"select({dim}, {a}-1)", lambda t, s: t.select(dim, place(t, s) - 1)


def _split(author: Author) -> Any:
    (a, size), which = author.size(), author.number(0, 1)
    return f"split({a})[{which}]", lambda t, s: t.split(max(size(t, s), 1))[which]


def _parts(author: Author) -> Any:
    (a, size), which = author.size(), author.number(0, 1)

    def apply(t: Tensor, s: Sizes) -> Tensor:
        first = min(size(t, s), t.shape[0])
        return t.split([first, t.shape[0] - first])[which]

    return f"split([{a}, ...])[{which}]", apply


def _chunk(author: Author) -> Any:
    count, which = author.number(2, 3), author.number(0, 1)
    return f"chunk({count})[{which}]", lambda t, s: t.chunk(count)[which]


def _view(author: Author) -> Any:
    a, size = author.size()
    return f"view({a}, -1)", lambda t, s: t.view(size(t, s), -1)


def _plain_view(author: Author) -> Any:
    return author.random.choice(
        [
            ("t()", lambda t, s: t.transpose(0, -1)),
            ("[None][0]", lambda t, s: t[None][0]),
            ("[None].t()[..., 0]", lambda t, s: t[None].transpose(0, -1)[..., 0]),
            ("columns", lambda t, s: t.transpose(0, -1).contiguous().transpose(0, -1)),
            ("columns[None][0]", lambda t, s: t.transpose(0, -1).clone().transpose(0, -1)[None][0]),
            ("permute", lambda t, s: t.permute(*reversed(range(t.dim())))),
            ("view_as", lambda t, s: t.view_as(t)),
            ("flatten()", lambda t, s: t.flatten()),
            ("detach()", lambda t, s: t.detach()),
            ("unsqueeze(1)", lambda t, s: t.unsqueeze(1)),
            ("diagonal()", lambda t, s: t.diagonal()),
            ("squeeze()", lambda t, s: t.squeeze()),
            ("view(int32)", lambda t, s: t.view(torch.int32)),
            ("view(int16)", lambda t, s: t.view(torch.int16)),
            ("view(float64)", lambda t, s: t.view(torch.float64)),
            ("view(float32)", lambda t, s: t.view(torch.float32)),
            ("complex", lambda t, s: torch.view_as_complex(t[..., :2])),
            ("real", lambda t, s: torch.view_as_real(t)),
            ("imag", lambda t, s: t.imag),
            ("conj", lambda t, s: t.conj()),
            ("unbind[-1]", lambda t, s: t.unbind()[-1]),
        ]
    )


# --- writes ----------------------------------------------------------------------------------


def _write(kind: Callable[[Author], tuple[str, Callable[[Tensor, Tensor, Sizes], Any]]]) -> Any:
    def write(author: Author) -> Instruction:
        (name, pick), (other_name, other) = author.tensor(), author.tensor()
        text, apply = kind(author)

        def run(world: World, sizes: Sizes) -> None:
            apply(pick(world), other(world), sizes)

        return Instruction(f"{text} of {name}, {other_name}", run)

    return write


def _in_place(author: Author) -> Any:
    return author.random.choice(
        [
            ("mul_(2)", lambda t, o, s: t.mul_(2)),
            ("add_(n)", lambda t, o, s: t.add_(s[0])),
            ("zero_()", lambda t, o, s: t.zero_()),
            ("fill_(m)", lambda t, o, s: t.fill_(s[1])),
            ("copy_(o[:len])", lambda t, o, s: t.copy_(o[: len(t)].clone())),
            ("copy_(plain)", lambda t, o, s: t.copy_(torch.full(t.shape, float(s[0])))),
            ("copy_(expanded)", lambda t, o, s: t.copy_(_flat(o, 1).clone())),
            ("copy_(o)", lambda t, o, s: t.copy_(o.clone())),
            ("relu_()", lambda t, o, s: t.relu_()),
            ("masked_fill_", lambda t, o, s: t.masked_fill_(t > 0, 0.5)),
            ("cumsum_", lambda t, o, s: t.cumsum_(0)),
            ("bernoulli_", lambda t, o, s: t.bernoulli_(0.5)),
            ("normal_", lambda t, o, s: t.normal_()),
            ("t_()", lambda t, o, s: t.t_()),
            ("squeeze_()", lambda t, o, s: t.squeeze_()),
            ("unsqueeze_(0)", lambda t, o, s: t.unsqueeze_(0)),
        ]
    )


def _assign(author: Author) -> Any:
    (a, start), (b, stop) = author.size(), author.size()

    def apply(t: Tensor, o: Tensor, s: Sizes) -> None:
        low, high = start(t, s) // 2, stop(t, s)
        part = t[low:high]
        t[low:high] = _flat(o, part.numel()).clone().view(part.shape)

    return f"[{a}//2:{b}] =", apply


def _out(author: Author) -> Any:
    text, apply = author.random.choice(
        [
            ("add(out=)", lambda t, o, s: torch.add(o, 1, out=t)),
            ("cumsum(out=)", lambda t, o, s: torch.cumsum(o, 0, out=t)),
            ("sum(out=)", lambda t, o, s: torch.sum(o, 0, out=t)),
            ("arange(out=)", lambda t, o, s: torch.arange(s[0] + 0.0, out=t)),
        ]
    )
    return text, lambda t, o, s: apply(t, o.to(t.dtype, copy=True), s)


def _resize(author: Author) -> Any:
    a, size = author.size()

    def apply(t: Tensor, o: Tensor, s: Sizes) -> None:
        t.resize_(max(size(t, s), 1), 2)
        t.fill_(3.0)

    return f"resize_({a}, 2)", apply


def _set(author: Author) -> Any:
    return author.random.choice(
        [
            ("set_", lambda t, o, s: t.set_(o) if t.dtype is o.dtype else None),
            ("data =", lambda t, o, s: setattr(t, "data", o) if t.dtype is o.dtype else None),
        ]
    )


# --- what is computed ---------------------------------------------------------------------------


def _compute(author: Author) -> Instruction:
    (name, one), (other_name, other) = author.tensor(), author.tensor()
    a, size = author.size()
    text, apply = author.random.choice(
        [
            ("relu", lambda t, o, s, k: t.relu()),
            ("+1", lambda t, o, s, k: t + 1),
            ("* len", lambda t, o, s, k: t * len(t)),
            ("t + o", lambda t, o, s, k: t + o),
            ("clone", lambda t, o, s, k: t.clone()),
            ("deepcopy", lambda t, o, s, k: copy.deepcopy(t)),
            ("contiguous", lambda t, o, s, k: t.contiguous()),
            ("cat", lambda t, o, s, k: torch.cat([t, o])),
            ("cat flat", lambda t, o, s, k: torch.cat([_flat(t, k), _flat(o, k)])),
            ("outer", lambda t, o, s, k: torch.outer(_flat(t, k), _flat(o, 4))),
            ("flat sum", lambda t, o, s, k: _flat(t, k) + _flat(o, k)),
            ("sum(0)", lambda t, o, s, k: t.sum(0)),
            ("mean(-1)", lambda t, o, s, k: t.mean(-1, keepdim=True)),
            ("softmax", lambda t, o, s, k: t.softmax(-1)),
            ("sort", lambda t, o, s, k: t.sort(0)[0]),
            ("cumsum", lambda t, o, s, k: t.cumsum(0)),
            ("roll", lambda t, o, s, k: t.roll(1, 0)),
            ("flip", lambda t, o, s, k: t.flip(0)),
            ("pad", lambda t, o, s, k: F.pad(t, (1, k))),
            ("arange", lambda t, o, s, k: torch.arange(k, device=t.device) * 2),
            ("zeros", lambda t, o, s, k: torch.zeros(k, s[1], device=t.device)),
            ("full", lambda t, o, s, k: torch.full((k,), 0.5, device=t.device)),
            ("ones_like", lambda t, o, s, k: torch.ones_like(t)),
            ("new_zeros", lambda t, o, s, k: t.new_zeros(k, 3)),
            ("filled", lambda t, o, s, k: torch.empty_like(t).bernoulli_(0.5)),
            ("tril", lambda t, o, s, k: torch.ones(k, k, device=t.device).tril()),
            ("dropout", lambda t, o, s, k: F.dropout(t, 0.5)),
            ("randperm", lambda t, o, s, k: torch.randperm(k, device=t.device)),
            ("rand", lambda t, o, s, k: torch.rand(k, device=t.device)),
            ("rows", lambda t, o, s, k: t[torch.arange(k, device=t.device) % len(t)]),
            ("nonzero", lambda t, o, s, k: (t > 0).nonzero().flatten()),
            ("where", lambda t, o, s, k: torch.where(t > 0, t, 0.0)),
            ("masked", lambda t, o, s, k: t[t > 0]),
            ("matmul", lambda t, o, s, k: _flat(t, 5 * k).view(-1, 5) @ _flat(o, 15).view(5, 3)),
            ("repeat", lambda t, o, s, k: t.repeat(2, *[1] * (t.dim() - 1))),
            ("stack", lambda t, o, s, k: torch.stack([t, t])),
            ("topk", lambda t, o, s, k: t.topk(min(k, _side(t, -1)))[0]),
            ("reshape", lambda t, o, s, k: t.reshape(-1, 2)),
            ("scatter", lambda t, o, s, k: t.slice_scatter(t[: k // 2] * 3, 0, 0, k // 2)),
            ("interpolate", lambda t, o, s, k: F.interpolate(_flat(t, k)[None, None], size=s[0])),
        ]
    )
    return Instruction(
        f"{text} of {name}, {other_name}, {a}",
        lambda w, s: apply(one(w), other(w), s, size(one(w), s)),
    )


# --- reads, and what ends traces -------------------------------------------------------------


def _read(author: Author) -> Instruction:
    name, pick = author.tensor()
    text, apply = author.random.choice(
        [
            ("item", lambda t: t.float().sum().item()),
            ("cpu", lambda t: plain(t).clone()),
            ("tolist", lambda t: t.tolist()),
            ("first", lambda t: bool(t.reshape(-1)[0] > 0)),
        ]
    )
    return Instruction(f"{text} of {name}", lambda w, s: w.read.append(apply(pick(w))))


def _sync(author: Author) -> Instruction:
    name, pick = author.tensor()
    some = author.random.random() < 0.6

    def run(world: World, sizes: Sizes) -> None:
        if torpor.is_lazy(world.weight):
            torpor.sync(*[pick(world)] * some)

    return Instruction(f"sync({name * some})", run)


def _keep(author: Author) -> Instruction:
    name, pick = author.tensor("made")
    return Instruction(f"keep {name}", lambda w, s: w.held.append(pick(w)))


def _replace(author: Author) -> Instruction:
    """A cache that grows by what is new, and starts again when it is large."""
    name, pick = author.tensor("made", "held")

    def run(world: World, sizes: Sizes) -> None:
        cache, new = world.tables[0], _flat(pick(world), sizes[0])
        world.tables[0] = torch.cat([cache if len(cache) < 150 else cache[-40:], new])

    return Instruction(f"cache = cat(cache, {name})", run)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size = size
        return x.view(-1)[:size] * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return F.pad(grad * 2, (0, x.numel() - ctx.size)).view_as(x), None


def _gradient(author: Author) -> Instruction:
    name, pick = author.tensor()
    form = author.random.choice(("linear", "later", "custom", "twice", "cleared"))
    a, size = author.size()

    @torch.enable_grad()
    def run(world: World, sizes: Sizes) -> None:
        count = max(size(pick(world), sizes), 1)
        rows = _flat(pick(world).detach(), 8 * count)
        x = rows[: len(rows) // 8 * 8].reshape(-1, 8)
        weight = world.weight
        if form == "custom":
            loss = Doubled.apply(weight, min(count, 40)).square().sum()
        else:
            loss = (x @ weight).tanh().sum(0).square().mean()
        if form == "later":
            if world.losses:
                world.losses.pop().backward()
            world.losses.append(loss)
            return
        if form == "cleared" and weight.grad is not None:
            weight.grad.zero_()
        loss.backward(retain_graph=form == "twice")
        if form == "twice":
            loss.backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad

    return Instruction(f"gradient {form} of {name}, {a}", run)


VIEWS = (
    _slice, _slice, _narrow, _end, _as_strided, _expand, _unfold, _select, _split, _parts, _chunk,
    _view, _plain_view, _plain_view, _plain_view,
)  # fmt: skip
WRITES = (_in_place, _in_place, _in_place, _assign, _assign, _set)
GROWING = [_write(kind) for kind in (_out, _resize)]
KINDS: list[tuple[int, Callable[[Author], Instruction]]] = [
    *[(2, _one(kind)) for kind in VIEWS],
    *[(2, _write(kind)) for kind in WRITES],
    *[(2, kind) for kind in GROWING],
    (14, _compute), (2, _read), (3, _sync), (9, _keep), (1, _replace), (3, _gradient),
]  # fmt: skip


class Program:
    """Instructions, and the sizes of the steps they are run in."""

    def __init__(self, seed: int) -> None:
        author = Author(seed)
        low = author.random.choice((0, 1, 2, 2, 2))
        # memory of no size does not grow here: how it does is the same for all sizes
        few = [(0 if not low and kind in GROWING else weight, kind) for weight, kind in KINDS]
        weights, kinds = zip(*few, strict=True)
        length = author.number(4, 14)
        chosen = author.random.choices(kinds, weights, k=length)
        self.lines = [kind(author) for kind in chosen]
        self.lines.insert(author.number(0, length), _keep(author))
        self.steps = [(author.number(low, 12), author.number(low, 7)) for _ in range(8)]
        if author.random.random() < 0.3:
            self.steps = [(n, 4) for n, _ in self.steps]
        elif author.random.random() < 0.4:  # two sizes change places, or are the same number
            (a, b), (c, d) = self.steps[:2]
            self.steps = [(a, b), (c, d), (b, a), (d, c), (a, a), (d, d), (b, a), (c, d)]
        self.left_out = {
            (author.number(2, 7), author.number(0, length)) for _ in range(author.number(0, 3))
        }
        self.cuts = author.random.random() < 0.8
        self.marks = author.random.random() < 0.15
        self.reads_late = author.random.random() < 0.3

    def __repr__(self) -> str:
        lines = [f"  {i} {line.text}" for i, line in enumerate(self.lines)]
        reported = (
            f"sizes {self.steps}, left out {self.left_out}, cuts {self.cuts}, marks {self.marks}, "
            f"reads late {self.reads_late}"
        )
        return "\n".join([reported, *lines])


def _run_line(line: Instruction, world: World, sizes: Sizes) -> Any:
    """What a line gives, or how it is refused."""
    torch.manual_seed(7)
    try:
        with torch.no_grad():
            found = line.run(world, sizes)
    except REFUSED as error:
        return error
    if isinstance(found, Tensor) and found.numel() <= LARGEST:
        world.made.append(found)
    return None


def _looks(tensor: Tensor) -> Any:
    stride = tensor.stride() if tensor.numel() > 1 else ()
    stride = tuple(s for s, n in zip(stride, tensor.shape, strict=False) if n > 1)
    return tuple(tensor.shape), stride, tensor.dtype, tensor.is_conj()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return _looks(one) == _looks(other) and same_bits(one, plain(other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def play(program: Program, put: Put) -> None:
    """Run a program in both worlds, line by line."""
    worlds = World(torch.clone, torch.device("cpu")), World(put.tensor, put.device)
    eager, lazy = worlds
    for step, sizes in enumerate(program.steps):
        for world in worlds:
            world.begin(sizes)
        if program.marks:
            torpor.mark_dynamic(lazy.made[1], 0, 1)
        for place, line in enumerate(program.lines):
            if (step, place) in program.left_out:
                continue
            where = f"step {step} {sizes}, line {place}: {line.text}"
            one, other = (_run_line(line, world, sizes) for world in worlds)
            assert type(one) is type(other), f"{where}: {other!r} instead of {one!r}"
            for mine, its in zip(eager.made, lazy.made, strict=True):
                assert _looks(mine) == _looks(its), f"{where}: {_looks(its)} not {_looks(mine)}"
        for world in worlds:
            world.end()
        if program.cuts:
            torpor.sync()
        if not program.reads_late:
            check(eager, lazy, f"after step {step} {sizes}")
    check(eager, lazy, "at the end")


def check(eager: World, lazy: World, where: str) -> None:
    """All that lives is what it is in eager, and all that was read was."""
    for place, (one, other) in enumerate(zip(eager.all(), lazy.all(), strict=True)):
        assert _looks(one) == _looks(other), f"{where}: {place} looks {_looks(other)}"
        assert _same(one, other), f"{where}: {place} is {plain(other)} instead of {one}"
    for one, other in zip(eager.read, lazy.read, strict=True):
        assert _same(one, other), f"{where}: read {other} instead of {one}"


@pytest.fixture(autouse=True)
def fresh(on_the_reference_backend: None) -> Iterator[None]:
    torpor.sync(wait=True)
    PLANS.clear()
    SIZES.clear()
    yield
    torpor.sync(wait=True)


@pytest.mark.parametrize("seed", range(24))
def test_tensors_that_outlive_their_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 4 == 3:
        monkeypatch.setattr(torpor.config, "dynamic", "on")
        SIZES.clear()
    program = Program(seed)
    play(program, Put("lazy" if seed % 2 else "concrete"))
