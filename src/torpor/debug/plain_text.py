"""Text of strangers on a terminal: what is not printable is shown as an escape, never obeyed."""

from __future__ import annotations


def one_line(text: str) -> str:
    """`text` with every control character, line ends too, as Python would write it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def printable(text: str) -> str:
    """`text` with every control character but ends of lines as Python would write it."""
    return "\n".join(map(one_line, text.replace("\t", "    ").split("\n")))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
