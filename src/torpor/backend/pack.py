"""Packing named byte strings into one: for use in a backend's `dump` and `load`."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

_LENGTH = struct.Struct("<I")


def pack(parts: Mapping[str, bytes]) -> bytes:
    """All of `parts`, with their names, in one byte string."""
    index = json.dumps([[name, len(blob)] for name, blob in parts.items()]).encode()
    return b"".join((_LENGTH.pack(len(index)), index, *parts.values()))


def unpack(data: bytes) -> dict[str, bytes]:
    """The inverse of `pack`; `ValueError` if `data` is not packed."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        index = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        place = _LENGTH.size + length
        parts: dict[str, bytes] = {}
        for name, size in index:
            parts[name] = data[place : place + size]
            place += size
    except (struct.error, TypeError) as error:
        raise ValueError("these are no packed bytes") from error
    if place != len(data):
        raise ValueError(f"packed bytes of length {place}, not {len(data)}")
    return parts
