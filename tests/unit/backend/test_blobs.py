"""Named bytes in one: what goes in comes out, and nothing else does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.backend.blobs import pack, unpack

BLOBS = st.dictionaries(st.text(max_size=8), st.binary(max_size=40), max_size=5)


@settings(deadline=None)
@given(BLOBS)
def test_what_was_packed_is_unpacked(blobs: dict[str, bytes]) -> None:
    assert unpack(pack(blobs)) == blobs
    assert list(unpack(pack(blobs))) == list(blobs)


@settings(deadline=None)
@given(BLOBS, st.data())
def test_what_is_cut_short_is_refused(blobs: dict[str, bytes], data: st.DataObject) -> None:
    packed = pack(blobs)
    length = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ValueError):
        unpack(packed[:length])


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="packed bytes of length"):
        unpack(pack({"a": b"b"}) + b"c")


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_other_bytes_are_refused_or_are_packed(data: bytes) -> None:
    try:
        blobs = unpack(data)
    except ValueError:
        return
    assert sum(map(len, blobs.values())) < len(data)
