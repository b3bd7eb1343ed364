"""Entries that differ from eager today, each with the modes in which it does, what differs and why.

Not exclusions: every entry here runs in full and must go on failing; one that starts to pass has
to leave this list.
"""

KNOWN: dict[str, tuple[tuple[str, ...], str]] = {}
