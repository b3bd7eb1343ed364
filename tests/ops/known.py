"""Entries that differ from eager today, each with what differs and why.

Not exclusions: every entry here runs in full and must go on failing; one that starts to pass has
to leave this list. The issue asks for an empty list.
"""

KNOWN: dict[str, tuple[tuple[str, ...], str]] = {}
