"""Untrusted text for terminals: unprintable characters are escaped, so that none take effect."""

from __future__ import annotations


def one_line(text: str) -> str:
    """`text` with control characters, including line breaks, escaped like in Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def printable(text: str) -> str:
    """`text` with control characters, except line breaks, escaped like in Python."""
    return "\n".join(map(one_line, text.replace("\t", "    ").split("\n")))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
