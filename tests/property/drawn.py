"""Drawn programs: Python text, put together line by line from a seed.

A program runs the same lines in every step. Leaves are made before the first step, or anew in each
step with sizes of its own (`n`, `m`); what a line gives is held until the next step gives it again.
Each line that fails notes the type of its error and the program goes on.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

from tests.property.drawn_lines import (
    CUTS,
    FIXED_SHAPES,
    GUARDED,
    LEAF_DTYPES,
    MAPS,
    PAIRS,
    READS,
    RESHAPES,
    SIZED_MAPS,
    SIZED_SHAPES,
    SIZED_VIEWS,
    UNSTABLE,
    VIEWS,
    WRITES,
    Line,
)

STEPS = 4
SIZES = ((3, 2), (5, 4), (4, 7), (6, 3))


@dataclass(frozen=True)
class Drawn:
    """One line of a program, with the names of tensors in it."""

    text: str
    gives: str = ""  # the name of its result
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    by_element: bool = False  # each element is read before it alone is written

    def source(self) -> str:
        return f"{self.gives} = {self.text}" if self.gives else self.text


@dataclass(frozen=True)
class Program:
    """Lines before the first step, and lines of every step; `sized`: sizes change."""

    seed: int
    before: tuple[Drawn, ...]
    lines: tuple[Drawn, ...]
    sized: bool
    place: str  # "lazy": the device; "concrete": torpor.lazy
    reads_late: bool  # compare after the last step alone

    def names(self) -> list[str]:
        """All tensors there may be, in the order of their making."""
        return list(dict.fromkeys(d.gives for d in (*self.before, *self.lines) if d.gives))

    def __len__(self) -> int:
        return len(self.before) + len(self.lines)

    def without(self, place: int) -> Program:
        """The program without its line number `place`, those before the first step counted too."""
        if place < len(self.before):
            return replace(self, before=self.before[:place] + self.before[place + 1 :])
        place -= len(self.before)
        return replace(self, lines=self.lines[:place] + self.lines[place + 1 :])

    def text(self) -> str:
        """As a Python function; `torpor.testing` is not needed to read it."""
        head = (
            "def run(L, S, out):" + "" if not self.sized else "def run(L, S, out):  # sizes change"
        )
        lines = [head, *(f"    {d.source()}" for d in self.before)]
        lines.append(f"    for step, (n, m) in enumerate({self.sizes()}):")
        for d in self.lines:
            lines.append(f"        try: {d.source()}")
            lines.append("        except ERRORS as error: out(type(error).__name__)")
        if not self.reads_late:
            lines.append(f"        out({', '.join(self.names())})")
        else:
            lines.append(f"    out({', '.join(self.names())})")
        return "\n".join(lines)

    def sizes(self) -> tuple[tuple[int, int], ...]:
        return SIZES if self.sized else SIZES[:1] * STEPS


_BY_ELEMENT = re.compile(r"\{a\}\.(copy|add|sub|mul|addcmul|lerp|logical_and|bitwise_xor)_\(\{b\}")


class Author:
    """Draws a program from a seed."""

    def __init__(self, seed: int, stable: bool) -> None:
        self.seed, self.random, self.stable = seed, random.Random(seed), stable
        self.names: list[str] = []
        self.made = 0

    def program(self) -> Program:
        pick = self.random
        sized = pick.random() < 0.5
        before = [self._leaf(False) for _ in range(pick.randint(1, 3))]
        lines = [self._leaf(True) for _ in range(pick.randint(1, 2) if sized else 0)]
        kinds = self._kinds(sized)
        weights = [weight for weight, _ in kinds]
        for _ in range(pick.randint(3, 14)):
            _, family = pick.choices(kinds, weights)[0]
            lines.append(self._line(pick.choice(family)))
        place = pick.choice(("lazy", "concrete"))
        return Program(self.seed, tuple(before), tuple(lines), sized, place, pick.random() < 0.3)

    def _kinds(self, sized: bool) -> list[tuple[int, tuple[Line, ...]]]:
        kinds = [
            (7, VIEWS), (7, WRITES), (2, RESHAPES), (6, MAPS), (4, PAIRS), (2, READS), (3, CUTS),
        ]  # fmt: skip
        if not self.stable:
            kinds.append((3, UNSTABLE))
        return [*kinds, (4, SIZED_VIEWS), (3, SIZED_MAPS)] if sized else kinds

    def _leaf(self, in_step: bool) -> Drawn:
        pick = self.random
        shape = pick.choice(SIZED_SHAPES if in_step else FIXED_SHAPES)
        kind = pick.choice(LEAF_DTYPES)
        form = pick.choice(("", "", "", ".t().contiguous().t()" if shape.count(",") == 1 else ""))
        if ",)" in shape:
            form = ""
        name = f"{'x' if in_step else 's'}{self.made}"
        self.made += 1
        self.names.append(name)
        return Drawn(f"L(leaf({shape}, torch.{kind}){form})", name)

    def _tensor(self) -> str:
        """One of the tensors, those of late more often."""
        late = self.names[-5:]
        return self.random.choice(late if self.random.random() < 0.7 else self.names)

    def _line(self, line: Line) -> Drawn:
        letters = {letter: self._tensor() for letter in "abc"}
        text = line.text.format_map(letters)
        if self.stable and ".view(torch." in text:  # bits tell zeros of one sign from the other
            text = "{a}.view({a}.dtype)".format_map(letters)
        plain = line.writes and not text.startswith("if ") and not self.stable
        if plain and self.random.random() < 0.06:
            text = GUARDED.format(a=self._tensor()) + text
        name = ""
        if line.makes:
            name = f"t{self.made}"
            self.made += 1
            self.names.append(name)
        writes = tuple(letters[letter] for letter in line.writes)
        reads = tuple(
            v for k, v in letters.items() if f"{{{k}}}" in line.text and k not in line.writes
        )
        return Drawn(text, name, writes, reads, bool(_BY_ELEMENT.match(line.text)))


def draw(seed: int, stable: bool = False) -> Program:
    """The program of a seed; `stable`: without lines in which a rounding error decides."""
    return Author(seed, stable).program()


def used(program: Program) -> set[str]:
    """The names that some line speaks of."""
    text = "\n".join(d.text for d in (*program.before, *program.lines))
    return set(re.findall(r"\b[stx]\d+\b", text))
